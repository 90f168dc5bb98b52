"""The contract of stores, as tests: KVStore's contract as users of MXNet know it.

Subclass :class:`StoreContract` in a test module and give the factory::

    @pytest.mark.ranks(1, 2, 4)
    class TestSharded(StoreContract):
        def create(self, **options):
            return mpikv.create(placement="sharded", **options)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from ..errors import Closed, KeyAlreadyInitialized, KeyNotInitialized, Unsupported, ValueMismatch
from ..optimizers import SGD, Test
from ..protocols import Array
from ..store.kvstore import KVStore

__all__ = ["StoreContract"]

SHAPE = (2, 3)


class StoreContract:
    """The promises of :class:`mpikv.KVStore`."""

    callables = True
    """Whether the store runs Python updaters."""
    sparse = True
    """Whether it takes row-sparse values."""

    def create(self, **options: Any) -> KVStore:
        """Return a new store of all ranks. Collective."""
        raise AssertionError("a subclass of StoreContract defines create()")

    @pytest.fixture
    def kv(self) -> Iterator[KVStore]:
        """Return a store for this test alone."""
        store = self.create()
        yield store
        store.close()

    @pytest.fixture
    def updating(self, kv: KVStore) -> KVStore:
        """Return a store that runs Python updaters."""
        if not self.callables:
            pytest.skip("runs no Python updaters")
        return kv

    # --- Facts

    def test_facts(self, kv: KVStore) -> None:
        assert 0 <= kv.rank < kv.size == kv.num_workers
        assert 0 <= kv.local_rank <= kv.rank
        assert kv.is_root is (kv.rank == kv.root)
        assert (kv.comm is None) is (kv.size == 1)
        assert f"rank {kv.rank}/{kv.size}" in repr(kv)
        assert kv.is_capable("optimizer")
        assert kv.is_capable("sparse") is self.sparse

    def test_keys_are_in_the_order_of_their_init(self, kv: KVStore) -> None:
        kv.init(["b", "a"], [ones(), ones()])
        kv.init("c", ones())
        assert (kv.keys(), list(kv), len(kv)) == (("b", "a", "c"), ["b", "a", "c"], 3)
        assert "a" in kv
        assert "d" not in kv
        kv.delete("a")
        assert kv.keys() == ("b", "c")

    # --- Forms of keys and values

    def test_one_key(self, kv: KVStore) -> None:
        kv.init(3, full(2))
        kv.push(3, full(8))
        out = np.zeros(SHAPE)
        assert kv.pull(3, out) is out
        same(out, full(8 * kv.size))

    def test_several_arrays_of_one_rank_are_summed_first(self, kv: KVStore) -> None:
        kv.init(3, full(0))
        kv.push(3, [full(1), full(2), full(3)])
        outs = [np.zeros(SHAPE), np.zeros(SHAPE)]
        kv.pull(3, out=outs)
        for out in outs:
            same(out, full(6 * kv.size))

    def test_a_list_of_keys(self, kv: KVStore) -> None:
        keys = [5, 7, 9]
        kv.init(keys, [full(0)] * 3)
        kv.push(keys, [full(1), full(2), full(3)])
        same_totals(kv, kv.pull(keys), (1, 2, 3))

    def test_a_list_of_keys_with_a_list_of_arrays_each(self, kv: KVStore) -> None:
        keys = ("5", "7")
        kv.init(keys, (full(0), full(0)))
        kv.push(keys, [[full(1), full(2)], [full(3), full(4)]])
        outs = [[np.zeros(SHAPE)] * 2, [np.zeros(SHAPE), np.zeros(SHAPE)]]
        kv.pull(keys, out=outs)
        for group, number in zip(outs, (3, 7), strict=True):
            for out in group:
                same(out, full(number * kv.size))

    def test_repeated_keys_mean_a_list_of_arrays(self, kv: KVStore) -> None:
        kv.init(["3", "4"], [full(0), full(0)])
        kv.push(["3", "4", "3"], [full(1), full(5), full(2)])
        outs = [np.zeros(SHAPE) for _ in range(3)]
        kv.pull(["3", "4", "3"], out=outs)
        same_totals(kv, outs, (3, 5, 3))
        same_totals(kv, kv.pull(["3", "4", "3"]), (3, 5, 3))

    def test_a_dict(self, kv: KVStore) -> None:
        kv.init({"w": full(0), "layer": {"b": full(0)}})
        assert kv.keys() == ("w", "layer/b")
        kv.push({"layer": {"b": full(2)}, "w": full(1)})
        outs = {"w": np.zeros(SHAPE), "layer": {"b": np.zeros(SHAPE)}}
        assert kv.pull(outs) is outs
        same(outs["w"], full(kv.size))
        same(outs["layer"]["b"], full(2 * kv.size))

    def test_numpy_integers_are_ints(self, kv: KVStore) -> None:
        kv.init(np.int32(3), ones())
        kv.push(3, ones())
        assert kv.keys() == (3,)
        assert type(kv.keys()[0]) is int
        same(kv.pull(np.uint8(3)), full(kv.size))

    def test_lists_of_nothing(self, kv: KVStore) -> None:
        kv.init([], [])
        kv.push([], [])
        assert kv.pull([]) == []
        assert kv.pushpull({}) == {}

    def test_keys_of_one_type(self, kv: KVStore) -> None:
        kv.init(3, ones())
        for key in ("3", [3, "3"], 3.0, True, None, b"3", ("a", 3)):
            with pytest.raises(TypeError, match="key"):
                kv.pull(key)
        same(kv.pull(3), ones())

    # --- init, push, pull

    def test_init_stores_the_values_of_the_root(self) -> None:
        with self.create() as first:
            size = first.size
        for root in {0, size - 1}:
            with self.create(root=root) as kv:
                kv.init("w", full(kv.rank + 1))
                same(kv.pull("w"), full(root + 1))

    def test_init_copies(self, kv: KVStore) -> None:
        value = full(1)
        kv.init("w", value)
        value[:] = 9
        same(kv.pull("w"), full(1))

    def test_a_value_that_memory_cannot_hold(self, kv: KVStore) -> None:
        kv.init("w", ones())
        with pytest.raises(MemoryError):
            kv.init("huge", np.broadcast_to(np.float64(0), 2**50))
        kv.push("w", full(2))
        same(kv.pull("w"), full(2 * kv.size))
        assert kv.keys() == ("w",)

    def test_init_twice(self, kv: KVStore) -> None:
        kv.init("w", full(1))
        with pytest.raises(KeyAlreadyInitialized, match="'w'"):
            kv.init(["v", "w"], [full(2), full(2)])
        assert kv.keys() == ("w",)
        kv.init("w", np.arange(4), overwrite=True)
        same(kv.pull("w"), np.arange(4))

    def test_push_replaces_the_value_by_the_sum(self, kv: KVStore) -> None:
        kv.init("w", full(2))
        for number in (1, 5):
            kv.push("w", full(number * (kv.rank + 1)))
            same(kv.pull("w"), full(number * triangle(kv.size)))

    def test_a_pushed_array_is_neither_changed_nor_kept(self, kv: KVStore) -> None:
        kv.init("w", full(0))
        value = full(1)
        kv.push("w", value)
        same(value, full(1))
        value[:] = 9
        same(kv.pull("w"), full(kv.size))

    def test_a_pulled_array_is_a_copy(self, kv: KVStore) -> None:
        kv.init("w", full(1))
        kv.pull("w")[:] = 9
        same(kv.pull("w"), full(1))

    def test_an_unknown_key(self, kv: KVStore) -> None:
        kv.init("weight", full(1))
        for call in (
            lambda: kv.push("weihgt", ones()),
            lambda: kv.pull(["weight", "weihgt"]),
            lambda: kv.pushpull("weihgt", ones()),
            lambda: kv.set("weihgt", ones()),
            lambda: kv.delete("weihgt"),
        ):
            with pytest.raises(KeyNotInitialized, match=r"'weihgt' was never initialized .*'weight'"):
                call()
        same(kv.pull("weight"), full(1))

    def test_what_does_not_fit(self, kv: KVStore) -> None:
        kv.init("w", full(1))
        for call in (
            lambda: kv.push("w", np.ones((3, 2))),
            lambda: kv.push("w", np.ones(SHAPE, np.int64)),
            lambda: kv.pull("w", np.ones(6)),
            lambda: kv.pull("w", np.ones(SHAPE, np.complex128)),
            lambda: kv.push(["w"], [ones(), ones()]),
            lambda: kv.push("w", []),
            lambda: kv.set("w", [ones(), ones()]),
        ):
            with pytest.raises(ValueMismatch):
                call()
        same(kv.pull("w"), full(1))

    def test_a_dtype_of_the_same_kind_is_cast(self, kv: KVStore) -> None:
        kv.init(["f", "i"], [np.zeros(3, np.float32), np.zeros(3, np.int32)])
        kv.push(["f", "i"], [np.full(3, 2.5), np.full(3, 7, np.int8)])
        outs = [np.zeros(3), np.zeros(3, np.int64)]
        kv.pull(["f", "i"], out=outs)
        same(outs[0], np.full(3, 2.5 * kv.size))
        same(outs[1], np.full(3, 7 * kv.size))

    def test_any_layout(self, kv: KVStore) -> None:
        expected = np.arange(12.0).reshape(3, 4)
        kv.init("w", expected)
        for value in (np.asfortranarray(expected), strided(expected), expected[::-1, ::-1].copy()[::-1, ::-1]):
            kv.push("w", value)
            same(kv.pull("w"), expected * kv.size)
        for out in (np.zeros((3, 4), order="F"), strided(np.zeros((3, 4))), np.zeros((3, 4))[::-1]):
            kv.pull("w", out)
            same(out, expected * kv.size)
        kv.push("w", np.broadcast_to(np.float64(2), (3, 4)))
        same(kv.pull("w"), np.full((3, 4), 2.0 * kv.size))

    def test_values_of_one_and_of_no_elements(self, kv: KVStore) -> None:
        kv.init(["scalar", "none", "w"], [np.array(1.0), np.zeros((0, 3)), full(1)])
        kv.push(["scalar", "none", "w"], [np.float64(2), np.zeros((0, 3)), full(3)])
        scalar, none, value = kv.pull(["scalar", "none", "w"])
        same(scalar, np.array(2.0 * kv.size))
        same(none, np.zeros((0, 3)))
        same(value, full(3 * kv.size))

    def test_sums_by_dtype(self, kv: KVStore) -> None:
        kv.init(["bool", "int8"], [np.zeros(4, bool), np.zeros(2, np.int8)])
        kv.push(["bool", "int8"], [np.array([False, True, kv.rank == 0, False]), np.array([127, 1], np.int8)])
        flags, wrapped = kv.pull(["bool", "int8"])
        same(flags, np.array([False, True, True, False]))
        same(wrapped, np.full(2, [127, 1]).astype(np.int8) * np.int8(kv.size))

    def test_half_precision_is_summed_in_single(self, kv: KVStore) -> None:
        kv.init("w", np.zeros(2, np.float16))
        # Summed one by one in half precision, 2048 + 1 would stay 2048.
        kv.push("w", np.array([2048 if kv.rank == 0 else 1, 1], np.float16))
        same(kv.pull("w"), np.array([2048 + kv.size - 1, kv.size], np.float16))

    def test_priority_changes_nothing(self, kv: KVStore) -> None:
        kv.init(["a", "b"], [full(0), full(0)])
        kv.push(["a", "b"], [full(1), full(2)], priority=[-1, -2])
        kv.push("a", full(3), priority=5)
        same_totals(kv, kv.pull(["a", "b"], priority=1), (3, 2))

    def test_calls_that_nobody_waits_for(self, kv: KVStore) -> None:
        kv.init(["a", "b"], [full(0), full(0)])
        out = np.zeros(SHAPE)
        works = [kv.push(["a", "b"], [full(1), full(2)], wait=False) for _ in range(3)]
        works += [kv.pull("b", wait=False), kv.pushpull("a", full(5), out, priority=1, wait=False)]
        same(works[3].wait(), full(2 * kv.size))
        assert works[4].wait() is out
        assert works[4].done
        assert out[0, 0] in (kv.size, 5 * kv.size)  # a more urgent call may come first
        assert works[0].wait() is None
        bad = kv.push("a", np.ones(7), wait=False)
        with pytest.raises(ValueMismatch, match="shape"):
            bad.wait()
        kv.pull("a", out=out)
        assert kv.version("b") == 3

    # --- pushpull, broadcast, set, delete

    def test_pushpull(self, kv: KVStore) -> None:
        kv.init(["a", "b"], [full(0), full(0)])
        outs = [np.zeros(SHAPE), [np.zeros(SHAPE), np.zeros(SHAPE)]]
        assert kv.pushpull(["a", "b"], [full(1), [full(1), full(1)]], outs) is outs
        for out, number in ((outs[0], 1), (outs[1][0], 2), (outs[1][1], 2)):
            same(out, full(number * kv.size))
        same(kv.pull("b"), full(2 * kv.size))

    def test_pushpull_into_the_values(self, kv: KVStore) -> None:
        kv.init("g", full(0))
        values = [full(1), full(2)]
        assert kv.pushpull("g", values) is values
        for value in values:
            same(value, full(3 * kv.size))
        one = full(kv.rank)
        kv.pushpull("g", one, out=one)
        same(one, full(triangle(kv.size - 1)))

    def test_broadcast(self, kv: KVStore) -> None:
        same(kv.broadcast("w", full(kv.rank + 1)), full(kv.root + 1))
        value = full(kv.rank + 5)
        assert kv.broadcast("w", value, out=value) is value
        same(value, full(kv.root + 5))
        both = kv.broadcast(["w", "v"], [full(7), np.arange(3)])
        same(both[1], np.arange(3))
        assert kv.keys() == ("w", "v")

    def test_set(self, kv: KVStore) -> None:
        kv.init("w", full(0))
        kv.set("w", full(kv.rank + 3))
        same(kv.pull("w"), full(kv.root + 3))

    def test_delete(self, kv: KVStore) -> None:
        kv.init(["a", "b"], [full(1), full(2)])
        kv.delete("a")
        with pytest.raises(KeyNotInitialized):
            kv.pull("a")
        kv.init("a", np.arange(3))
        same(kv.pull("a"), np.arange(3))
        same(kv.pull("b"), full(2))

    def test_a_key_takes_the_place_of_a_deleted_one_without_its_state(self, kv: KVStore) -> None:
        kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        for _ in range(2):
            kv.init("w", full(0))
            kv.push("w", full(1))
            same(kv.pull("w"), full(-kv.size))
            kv.delete("w")

    def test_barrier(self, kv: KVStore) -> None:
        kv.barrier()
        kv._barrier()

    def test_close(self) -> None:
        kv = self.create()
        kv.init("w", ones())
        kv.close()
        kv.close()
        for call in (lambda: kv.push("w", ones()), lambda: kv.pull("w"), kv.barrier):
            with pytest.raises(Closed, match="closed"):
                call()

    # --- Buffers and views

    def test_buffers(self, kv: KVStore) -> None:
        keys = ["w", "scalar", "none", "flags"]
        kv.init(keys, [full(1), np.array(1.0), np.zeros((0, 3)), np.ones(4, np.bool_)])
        buffers = kv.buffer(keys)
        for buffer, value in zip(buffers, kv.pull(keys), strict=True):
            same(buffer, np.zeros(value.shape, value.dtype))
        for number in (1, 2):
            buffers[0].fill(number + kv.rank)
            np.multiply(2.0, number, out=buffers[1])
            kv.push(keys)
            weight, scalar, none, flags = kv.pull(keys)
            same(weight, full(number * kv.size + triangle(kv.size - 1)))
            same(scalar, np.array(2.0 * number * kv.size))
            same(none, np.zeros((0, 3)))
            same(flags, np.zeros(4, np.bool_))
            same(buffers[0], full(number + kv.rank))
        kv.push("scalar")
        same(kv.pull("w"), on_host(weight))
        assert [kv.version(key) for key in keys] == [2, 3, 2, 2]

    def test_pushpull_of_buffers(self, kv: KVStore) -> None:
        kv.init(["a", "b"], [full(0), full(0)])
        first, second = kv.buffer(["a", "b"])
        first.fill(1)
        second.fill(2)
        same_totals(kv, kv.pushpull(["b", "a"]), (2, 1))
        outs = [np.zeros(SHAPE, np.float32), [kv.view("b"), np.zeros(SHAPE)]]
        assert kv.pushpull(["a", "b"], out=outs) is outs
        same(outs[0], np.full(SHAPE, kv.size, np.float32))
        same(outs[1][1], full(2 * kv.size))

    def test_the_same_buffer_at_every_call(self, kv: KVStore) -> None:
        kv.init(["a", "b"], [full(0), full(0)])
        kv.buffer("b").fill(3)
        kv.set_optimizer("sgd", learning_rate=1.0)
        same(kv.buffer(["a", "b"])[1], full(3))
        same(kv.pushpull("b"), full(-3 * kv.size))
        kv.push("b", full(1))
        same(kv.buffer(("b",))[0], full(3))

    def test_a_view_holds_the_newest_value(self, kv: KVStore) -> None:
        kv.init("w", full(1))
        view = kv.view("w")
        assert not getattr(view.flags, "writeable", False), "arrays of GPUs have no such flag"
        same(view, full(1))
        kv.push("w", full(2))
        assert kv.pull("w", out=view) is view
        same(view, full(2 * kv.size))
        kv.pushpull("w", full(3))
        same(view, full(3 * kv.size))
        kv.pushpull({"w": full(4)}, out={"w": view})
        same(view, full(4 * kv.size))
        kv.set("w", full(5))
        same(view, full(5))
        kv.broadcast("w", full(6))
        same(view, full(6))
        assert kv.view("w") is kv.view(["w"])[0] is view

    def test_forms_of_buffers_and_views(self, kv: KVStore) -> None:
        kv.init([1, 2], [np.zeros(1), np.zeros(2)])
        for method in (kv.buffer, kv.view, kv.pushpull):
            assert method(2).shape == method(np.int8(2)).shape == (2,)
            for keys in ([2, 1, 2], (2, 1, np.int64(2))):
                assert [array.shape for array in method(keys)] == [(2,), (1,), (2,)]
            assert method([]) == []

    def test_a_key_without_a_buffer(self, kv: KVStore) -> None:
        kv.init(["a", "b"], [full(1), full(1)])
        kv.buffer("a")
        with pytest.raises(ValueMismatch, match="no value for key 'b' and no buffer"):
            kv.push(["a", "b"])
        kv.buffer("b")
        kv.init("a", full(2), overwrite=True)
        with pytest.raises(ValueMismatch, match="no value for key 'a' and no buffer"):
            kv.pushpull("a")
        with pytest.raises(TypeError, match="a dict"):
            kv.buffer({"a": full(1)})
        for method in (kv.buffer, kv.view, kv.push, kv.pushpull):
            with pytest.raises(KeyNotInitialized, match="'c'"):
                method("c")
        same(kv.view("a"), full(2))
        same(kv.view("b"), full(1))

    def test_an_updater_of_buffers(self, updating: KVStore) -> None:
        kv, calls = updating, record_updates(updating)
        kv.init(["a", "b"], [full(1), full(2)])
        for number, buffer in enumerate(kv.buffer(["a", "b"])):
            buffer.fill(number + 1)
        for value, number in zip(kv.pushpull(["b", "a"]), (2, 1), strict=True):
            same(value, full(number + number * kv.size))
        assert calls == (["b", "a"] if kv.is_root else [])
        same(kv.buffer("b"), full(2))

    # --- Updaters

    def test_an_updater_runs_once_per_key_and_push(self, updating: KVStore) -> None:
        kv, calls = updating, record_updates(updating, 2)
        kv.init([5, 7, 9], [full(1)] * 3)
        kv.push([9, 5, 7], [full(1)] * 3)
        kv.push(5, [full(1), full(1)])
        for value, number in zip(kv.pull([5, 7, 9]), (6, 2, 2), strict=True):
            same(value, full(1 + number * kv.size))
        assert calls == ([9, 5, 7, 5] if kv.is_root else [])

    def test_an_updater_may_return_the_value(self, updating: KVStore) -> None:
        updating.init(["w", "scalar"], [full(1), np.array(1.0)])
        updating._set_updater(lambda key, given, stored: stored * 2 + given)
        updating.push(["w", "scalar"], [full(1), np.array(1.0)])
        same(updating.pull("w"), full(2 + updating.size))
        same(updating.pull("scalar"), np.array(2.0 + updating.size))

    def test_an_updater_of_values_without_elements(self, updating: KVStore) -> None:
        """They have no owner that a sum could reach. Other ranks must not update the neighbouring values for them."""
        kv, calls = updating, record_updates(updating)
        kv.init(["none", "w"], [np.zeros(0), full(1)])
        for _ in range(3):
            kv.push(["none", "w"], [np.zeros(0), full(1)])
        assert calls == (["none", "w"] * 3 if kv.is_root else [])
        same(kv.pull("w"), full(1 + 3 * kv.size))

    def test_no_updater_again(self, updating: KVStore) -> None:
        updating.init("w", full(1))
        updating.set_updater(lambda key, given, stored: stored + given)
        updating.push("w", full(1))
        updating.set_updater(None)
        same(updating.pull("w"), full(1 + updating.size))
        updating.push("w", full(1))
        same(updating.pull("w"), full(updating.size))

    def test_an_updater_is_refused_where_values_are_divided(self, kv: KVStore) -> None:
        if self.callables:
            pytest.skip("runs Python updaters")
        kv.init("w", full(1))
        with pytest.raises(Unsupported, match="Python updater"):
            kv.set_updater(lambda key, given, stored: None)
        kv.push("w", full(2))
        same(kv.pull("w"), full(2 * kv.size))

    # --- Optimizers

    def test_an_optimizer(self, kv: KVStore) -> None:
        kv.init("w", full(1))
        kv.set_optimizer("sgd", learning_rate=0.5, momentum=0.5)
        assert isinstance(kv.optimizer, SGD)
        velocity, expected = 0.0, 1.0
        for _ in range(3):
            kv.push("w", full(1))
            velocity = 0.5 * velocity - 0.5 * kv.size
            expected += velocity
        same(kv.pull("w"), full(expected))

    def test_settings_of_an_optimizer_count_from_the_next_push(self, kv: KVStore) -> None:
        optimizer = Test(learning_rate=1.0)
        kv.init("w", full(0))
        kv.set_optimizer(optimizer)
        kv.push("w", full(1))
        kv.set_learning_rate(0.25)
        kv.push("w", full(1))
        optimizer.rescale_grad = 0.5
        kv.pushpull("w", full(1))
        same(kv.pull("w"), full(-1.375 * kv.size))

    def test_an_optimizer_starts_anew(self, kv: KVStore) -> None:
        kv.init("w", full(0))
        for _ in range(2):
            kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
            kv.push("w", full(1))
        same(kv.pull("w"), full(-2 * kv.size))

    def test_each_key_has_its_own_count_and_factor(self, kv: KVStore) -> None:
        kv.init(["a", "b", "frozen"], [full(0)] * 3)
        kv.set_optimizer("test", lr_scheduler=lambda count: float(count), lr_mult={"frozen": 0.0})
        kv.push("a", full(1))
        kv.push(["a", "b", "frozen"], [full(1)] * 3)
        same_totals(kv, kv.pull(["a", "b", "frozen"]), (-3, -1, 0))

    def test_an_optimizer_of_whole_values(self, kv: KVStore) -> None:
        kv.init(["none", "w", "scalar"], [np.zeros(0), full(3), np.array(2.0)])
        kv.set_optimizer("lamb", learning_rate=0.5)
        for _ in range(2):
            kv.push(["none", "w", "scalar"], [np.zeros(0), full(1), np.array(1.0)])
        # All elements have the same direction; its norm becomes the weight's norm.
        value, scalar = kv.pull(["w", "scalar"])
        np.testing.assert_allclose(on_host(value), full(0.75), rtol=1e-6)
        np.testing.assert_allclose(on_host(scalar), 0.5, rtol=1e-6)

    def test_an_optimizer_keeps_a_master_of_half_precision(self, kv: KVStore) -> None:
        kv.init("w", np.full(600, 1, np.float16))
        kv.set_optimizer("test", learning_rate=2.0**-13, multi_precision=True)
        for _ in range(8):
            kv.push("w", np.full(600, 1 / kv.size if kv.size in (1, 2, 4) else 0, np.float16))
        expected = 1 - 2.0**-10 if kv.size in (1, 2, 4) else 1
        same(kv.pull("w"), np.full(600, expected, np.float16))
        kv.set("w", np.full(600, 4, np.float16))
        kv.push("w", np.zeros(600, np.float16))
        same(kv.pull("w"), np.full(600, 4, np.float16))

    def test_an_optimizer_refuses_integers(self, kv: KVStore) -> None:
        kv.init("i", np.arange(3))
        with pytest.raises(Unsupported, match="int64"):
            kv.set_optimizer("sgd")
        kv.delete("i")
        kv.set_optimizer("sgd")
        with pytest.raises(Unsupported, match="int64"):
            kv.init("i", np.arange(3))
        kv.init("w", full(1))
        kv.push("w", full(0))
        same(kv.pull("w"), full(1))


def ones() -> Array:
    return np.ones(SHAPE)


def full(number: float) -> Array:
    return np.full(SHAPE, float(number))


def same_totals(kv: KVStore, results: Any, numbers: Sequence[float]) -> None:
    """Compare values with sums; every rank has added each of ``numbers``."""
    for result, number in zip(results, numbers, strict=True):
        same(result, full(number * kv.size))


def record_updates(kv: KVStore, factor: int = 1) -> list[Any]:
    """Set an updater that adds its input times a factor; return the growing list of keys it was called for."""
    calls: list[Any] = []

    @kv.updater
    def update(key: Any, given: Array, stored: Array) -> None:
        calls.append(key)
        stored += factor * given
        given.fill(9)

    return calls


def triangle(number: int) -> int:
    """Return 1 + 2 + ... + number."""
    return number * (number + 1) // 2


def strided(array: Array) -> Array:
    """Return a copy that occupies every second element of its memory."""
    copy = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)[..., ::2]
    copy[...] = array
    return copy


def same(result: Any, expected: Array) -> None:
    """Compare dtype, shape and elements of an array on the host or on a GPU."""
    result = on_host(result)
    assert isinstance(result, np.ndarray)
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(result, expected)


def on_host(array: Any) -> Any:
    """Return an array of a GPU as one of the host, and others as they are."""
    return array.get() if hasattr(array, "get") else array
