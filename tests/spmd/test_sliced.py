"""The store p3: the sums of any store, made slice by slice, the urgent ones first."""

from __future__ import annotations

import threading

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

import mpikv
from mpikv import (
    Closed,
    ConfigError,
    KeyAlreadyInitialized,
    KeyNotInitialized,
    PeerFailed,
    RankMismatch,
    Unsupported,
    ValueMismatch,
)

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setenv("MXNET_KVSTORE_SLICE_THRESHOLD", "4")


@pytest.fixture
def store(comm):
    with mpikv.create("P3", comm=comm, timeout=5) as store:
        yield store


def of_rank(rank, shape, step=0):
    return np.asarray(np.random.default_rng([rank, step, *shape]).integers(-8, 9, shape) / 4)


def sum_of(store, shape, step=0):
    return sum(of_rank(rank, shape, step) for rank in range(store.size))


def test_facts(store):
    assert isinstance(store, mpikv.Sliced)
    assert (store.type, store.keys(), len(store), store.assigns) == ("p3", (), 0, True)
    assert not store.is_capable(store.OPTIMIZER)
    store.init({"a": np.zeros(9), "n": {"b": np.zeros(())}})
    assert (store.keys(), "a" in store, "b" in store) == (("a", "n/b"), True, False)
    assert store._store.keys() == ("'a'[0:4]", "'a'[4:8]", "'a'[8:9]", "'n/b'[0:1]")
    with pytest.raises(Unsupported, match="sums only and has no set_optimizer"):
        store.set_optimizer("sgd")
    store.delete("a")
    assert store.keys() == ("n/b",)
    store.init("a", np.zeros(2))


@pytest.mark.parametrize("wait", [True, False])
@hypothesis.given(data=strategies.data())
@hypothesis.settings(max_examples=15)
def test_sums_are_those_of_any_store(comm, wait, data):
    shapes = data.draw(
        strategies.dictionaries(
            strategies.sampled_from("abcdef"), strategies.sampled_from([(), (0,), (3,), (4,), (9,), (3, 7)]), min_size=1
        )
    )
    with mpikv.create("p3", comm=comm, timeout=5) as store:
        store.init({name: np.zeros(shape) for name, shape in shapes.items()})
        stored = {name: np.zeros(shape) for name, shape in shapes.items()}
        for step in range(data.draw(strategies.integers(1, 4))):
            names = data.draw(strategies.permutations(sorted(shapes)).map(lambda names: names[: 1 + len(names) // 2]))
            wishes = data.draw(strategies.lists(strategies.integers(-1, 2), min_size=len(names), max_size=len(names)))
            verb = data.draw(strategies.sampled_from(["push", "pull", "pushpull", "in place", "crossed"]))
            values = [of_rank(store.rank, shapes[name], step) for name in names]
            given = [value.copy() for value in values]
            if verb != "pull":
                stored.update({name: sum_of(store, shapes[name], step) for name in names})
            outs = [np.full((*shapes[name], 2), np.nan)[..., 1] for name in names]  # not contiguous
            if verb == "push":
                result = store.push(names, values, wishes, wait=wait)
            elif verb == "pull":
                result = store.pull(names, outs, wishes, wait=wait)
            elif verb == "pushpull":
                result = store.pushpull(names, values, outs, wishes, wait=wait)
            elif verb == "crossed" and len(names) > 1 and shapes[names[0]] == shapes[names[1]]:
                outs = [values[1], values[0], *outs[2:]]
                result = store.pushpull(names, values, outs, wishes, wait=wait)
            else:
                outs = values
                result = store.pushpull(names, values, priority=wishes, wait=wait)
            result = result if wait else result.wait()
            if verb == "push":
                assert result is None
                np.testing.assert_equal(values, given)
            else:
                assert result is outs
                for name, out in zip(names, outs, strict=True):
                    np.testing.assert_array_equal(out, stored[name])


def test_every_form_of_a_call(store):
    store.init(["w", "b"], [np.full(9, float(store.rank)), np.zeros(2, np.float32)])
    np.testing.assert_array_equal(store.pull("w"), np.zeros(9))
    store.push("w", [np.ones(9), np.ones(9)])
    assert [array[0] for array in store.pull(["w", "b", "w"])] == [2 * store.size, 0, 2 * store.size]
    store.push(["w", "w"], [np.ones(9), np.ones(9)])
    outs = [np.zeros(9, np.float32), np.zeros(9)]
    assert store.pull("w", out=outs) is outs
    np.testing.assert_array_equal(outs[0], np.full(9, 2 * store.size))
    tree = {"w": np.ones(9), "b": np.ones(2)}
    assert store.pushpull(tree) is tree
    np.testing.assert_array_equal(tree["b"], np.full(2, store.size))
    assert store.pull(tree) is tree
    store.set({"w": np.full(9, 5.0 + store.rank)})
    np.testing.assert_array_equal(store.pull("w"), np.full(9, 5.0))
    new = store.broadcast({"w": np.full(9, 7.0 + store.rank), "net": {"c": np.full(6, float(store.rank))}})
    np.testing.assert_array_equal(new["w"], np.full(9, 7.0))
    np.testing.assert_array_equal(new["net/c"], np.zeros(6))
    assert store.keys() == ("w", "b", "net/c")


def test_an_urgent_call_overtakes_the_slices_of_another(store, monkeypatch):
    store.init(["large", "small"], [np.zeros(20), np.zeros(2)])
    moved, both_issued = [], threading.Event()
    move = mpikv.Sliced._move

    def watch(self, verb, cuts, part, values, outs):
        assert both_issued.wait(10)
        moved.append([cuts[at].names[number] for at, number in part.slices])
        move(self, verb, cuts, part, values, outs)

    monkeypatch.setattr(mpikv.Sliced, "_move", watch)
    works = [store.pushpull("large", np.ones(20), wait=False), store.pushpull("small", np.ones(2), None, 1, wait=False)]
    both_issued.set()
    for work in works:
        np.testing.assert_array_equal(work.wait(), np.full(work.wait().shape, float(store.size)))
    # When the second is issued a slice of the first may be on its way.
    at = moved.index(["'small'[0:2]"])
    assert at <= 1
    assert moved[:at] + moved[at + 1 :] == [[f"'large'[{low}:{low + 4}]"] for low in range(0, 20, 4)]


def test_the_order_inside_a_call(store, monkeypatch):
    moved = []
    move = mpikv.Sliced._move

    def watch(self, verb, cuts, part, values, outs):
        moved.append((part.priority, [cuts[at].names[number] for at, number in part.slices]))
        move(self, verb, cuts, part, values, outs)

    monkeypatch.setattr(mpikv.Sliced, "_move", watch)
    names = ["a", "b", "c", "d"]
    store.init(names, [np.zeros(5), np.zeros(2), np.zeros(2), np.zeros(1)])
    store.push(names, [np.ones(5), np.ones(2), np.ones(2), np.ones(1)], priority=[-1, 3, 3, 3])
    assert moved == [
        (3, ["'b'[0:2]", "'c'[0:2]"]),
        (3, ["'d'[0:1]"]),
        (-1, ["'a'[0:4]"]),
        (-1, ["'a'[4:5]"]),
    ]


def test_mistakes_on_one_rank(store):
    store.init("w", np.zeros(9))
    good = np.ones(9)
    mistakes = [
        (KeyNotInitialized, lambda: store.push("v", good)),
        (ValueMismatch, lambda: store.push("w", np.ones(8))),
        (ValueMismatch, lambda: store.push("w", None)),
        (ValueMismatch, lambda: store.push("w", np.ones(9, int))),
        (ValueMismatch, lambda: store.push("w", good, priority="high")),
        (TypeError, lambda: store.push("w", [1.0] * 9)),
        (Unsupported, lambda: store.set_optimizer("sgd")),
        (KeyAlreadyInitialized, lambda: store.init("w", good)),
        (KeyNotInitialized, lambda: store.set("v", good)),
        (KeyNotInitialized, lambda: store.delete("v")),
    ]
    for error, mistake in mistakes:
        with pytest.raises(error if store.is_root else PeerFailed):
            mistake() if store.is_root else store.push("w", good)
        with pytest.raises(error if store.is_root else PeerFailed):
            mistake() if store.is_root else store.push("w", good, wait=False).wait()
    with pytest.raises((TypeError, ValueMismatch) if store.is_root else PeerFailed):
        store.pull("w", out=np.broadcast_to(1.0, 9) if store.is_root else np.zeros(9))
    np.testing.assert_array_equal(store.pull("w"), np.zeros(9))


@pytest.mark.ranks(2, 3)
def test_ranks_that_call_otherwise(store):
    store.init(["v", "w"], [np.zeros(9), np.zeros(9)])
    with pytest.raises(RankMismatch, match="agree"):
        store.push("v" if store.is_root else "w", np.ones(9))
    with pytest.raises(RankMismatch, match="priorities"):
        store.push(["v", "w"], [np.ones(9), np.ones(9)], priority=[store.rank, 1])
    with pytest.raises(RankMismatch):
        store.pull("w") if store.is_root else store.push("w", np.ones(9))
    store.push("w", np.ones(9))
    np.testing.assert_array_equal(store.pull("w"), np.full(9, float(store.size)))


def test_a_failure_that_nobody_saw_comes_with_the_next_call(store):
    store.init("w", np.zeros(9))
    store.push("v", np.ones(9), wait=False)
    with pytest.raises(KeyNotInitialized):
        store.barrier()
    store.barrier()
    store.close()
    with pytest.raises(Closed):
        store.push("w", np.ones(9))


def test_a_trainer_trains_as_on_another_store(comm, store):
    shapes = {"a": (9,), "b": (), "c": (3, 5)}
    params = [{name: of_rank(5, shape) for name, shape in shapes.items()} for _ in range(2)]
    with mpikv.create("dist_sync", comm=comm, timeout=5) as other:
        trainers = [mpikv.Trainer(p, "adam", kvstore=kv) for p, kv in zip(params, (store, other), strict=True)]
        for step in range(4):
            for trainer in trainers:
                trainer.set_grads({name: of_rank(store.rank, shape, step) for name, shape in shapes.items()})
                trainer.step(8)
    assert trainers[0].update_on_kvstore is False
    for name in shapes:
        np.testing.assert_array_equal(params[0][name], params[1][name])


def test_the_variables_of_mxnet(comm, monkeypatch):
    monkeypatch.setenv("DMLC_PS_VAN_TYPE", "p3")
    with mpikv.create("dist_sync", comm=comm) as store, mpikv.create("local", comm=comm) as local:
        assert isinstance(store, mpikv.Sliced)
        assert store.type == "dist_sync"
        assert isinstance(local, mpikv.KVStore)
    monkeypatch.delenv("DMLC_PS_VAN_TYPE")
    rank = 0 if comm is None else comm.rank
    for bad in ("0", "many", "-3"):
        monkeypatch.setenv("MXNET_KVSTORE_SLICE_THRESHOLD", bad if rank == 0 else "4")
        with pytest.raises(ConfigError if rank == 0 else PeerFailed, match="MXNET_KVSTORE_SLICE_THRESHOLD"):
            mpikv.create("p3", comm=comm)
    if comm is not None:
        monkeypatch.setenv("MXNET_KVSTORE_SLICE_THRESHOLD", str(4 + rank))
        with pytest.raises(RankMismatch, match="slices 4 on rank 0, 5 on rank 1"):
            mpikv.create("p3", comm=comm)
