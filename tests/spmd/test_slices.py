"""The store p3: the sums of dist_sync, in slices between which what is more urgent goes first."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import mpikv
from mpikv import (
    ConfigError,
    KeyAlreadyInitialized,
    KeyNotInitialized,
    PeerFailed,
    RankMismatch,
    Unsupported,
    ValueMismatch,
)
from mpikv.exchange import Exchange

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

SHAPES = {"cut": (5, 9), "empty": (0, 2), "exact": (30,), "one": (), "small": (3, 2), "wide": (7, 13)}


@pytest.fixture(autouse=True)
def slices_of_ten(monkeypatch):
    monkeypatch.setenv("MXNET_KVSTORE_SLICE_THRESHOLD", "10")


def make(comm, **more):
    return mpikv.create("p3", comm=comm, timeout=10, **more)


def drawn(kv, name, step, dtype, exact):
    random = np.random.default_rng([kv.rank, step, len(name)])
    numbers = random.integers(-8, 9, SHAPES[name]) / 4 if exact else random.normal(size=SHAPES[name])
    return np.asarray(numbers).astype(dtype)


# --- The sums of dist_sync


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int32])
@pytest.mark.parametrize("transport", ["shm", "mpi", "hosts"])
@pytest.mark.feature("p3-sums")
def test_the_bits_of_dist_sync(comm, transport, dtype, wait):
    # MPI adds in an order of its own unless told otherwise; hosts cannot be told, and is given sums that are exact.
    options = {"comm": comm, "transport": transport, "deterministic": transport == "mpi"}
    exact = transport == "hosts"
    with mpikv.create("p3", **options) as kv, mpikv.create("dist_sync", **options) as whole:
        start = {name: np.zeros(shape, dtype) for name, shape in SHAPES.items()}
        kv.init(start)
        whole.init(start)
        for step in range(3):
            values = {name: drawn(kv, name, step, dtype, exact) for name in SHAPES}
            expected = whole.pushpull(list(values), list(values.values()), out=list(map(np.empty_like, start.values())))
            priority = [step % 2 * place for place in range(len(values))]
            works = [
                kv.push(list(values), list(values.values()), priority=priority, wait=wait),
                kv.pull(list(values), priority=priority, wait=wait),
            ]
            pulled = works[1] if wait else [work.wait() for work in works][1]
            both = kv.pushpull(values, out={name: np.empty_like(one) for name, one in start.items()}, wait=wait)
            both = both if wait else both.wait()
            for name, right, one in zip(values, expected, pulled, strict=True):
                assert one.tobytes() == right.tobytes() == both[name].tobytes()


def test_every_form_of_a_call(comm):
    with make(comm) as kv:
        kv.init([3, 5], [np.zeros((4, 5)), np.zeros(2)])
        assert kv.keys() == (3, 5)
        assert (3 in kv, 4 in kv, len(kv)) == (True, False, 2)
        kv.push(3, [np.ones((4, 5)), np.ones((4, 5))])
        np.testing.assert_array_equal(kv.pull(3), np.full((4, 5), 2 * kv.size))
        outs = [np.zeros((4, 5)), np.zeros((5, 4)).T, np.zeros((8, 10))[::2, ::2]]
        assert kv.pull(3, out=outs) is outs
        for out in outs:
            np.testing.assert_array_equal(out, np.full((4, 5), 2 * kv.size))
        value = np.ones((5, 4)).T
        assert kv.pushpull(3, value) is value
        np.testing.assert_array_equal(value, np.full((4, 5), kv.size))
        kv.push([3, 5, 3], [np.ones((4, 5)), np.ones(2), np.ones((4, 5))])
        np.testing.assert_array_equal(kv.pull([3, 5])[0], np.full((4, 5), 2 * kv.size))
        kv.set(3, np.full((4, 5), 7.0 + kv.rank))
        np.testing.assert_array_equal(kv.pull(3), np.full((4, 5), 7.0))
        kv.init(3, np.full(11, kv.rank + 1.0), overwrite=True)
        np.testing.assert_array_equal(kv.pull(3), np.ones(11))
        kv.delete(3)
        assert kv.keys() == (5,)


def test_broadcast_of_new_and_known_keys(comm):
    with make(comm) as kv:
        params = {"b": np.full((3, 5), kv.rank + 2.0), "a": np.full(2, kv.rank + 3.0)}
        for _ in range(2):
            assert kv.broadcast(params, out=params) is params
            np.testing.assert_array_equal(params["b"], np.full((3, 5), 2.0))
            np.testing.assert_array_equal(params["a"], np.full(2, 3.0))
        np.testing.assert_array_equal(kv.broadcast("c", np.full(12, kv.rank + 1.0)), np.ones(12))
        with pytest.raises(ValueMismatch, match="shape"):
            kv.broadcast("c", np.ones((3, 4)))


@pytest.mark.feature("p3-trainer")
def test_a_trainer_updates_on_each_rank(comm):
    results = []
    for name in ("p3", "dist_sync"):
        params = {"w": np.ones((6, 7)), "b": np.zeros(3)}
        with mpikv.create(name, comm=comm, deterministic=True) as kv:
            trainer = mpikv.Trainer(params, "adam", {"learning_rate": 0.1}, kvstore=kv, update_on_kvstore=None)
            for step in range(3):
                random = np.random.default_rng([kv.rank, step])
                trainer.set_grads({key: random.normal(size=value.shape) for key, value in params.items()})
                trainer.step(kv.size)
            assert trainer.update_on_kvstore is (name == "dist_sync")
        results.append(params)
    for key in results[0]:
        assert results[0][key].tobytes() == results[1][key].tobytes()


# --- The order


@pytest.mark.parametrize("transport", ["shm", "mpi"])
@pytest.mark.feature("p3-order")
def test_a_late_urgent_push_passes_the_slices_that_wait(comm, monkeypatch, transport):
    """A push of 4 slices is held in its second one until all ranks have issued an urgent push."""
    order, reached, released = [], threading.Event(), threading.Event()
    push = Exchange.push

    def held(exchange, plan, *arguments):
        if len(order) == 1:
            reached.set()
            assert released.wait(20)
        order.append(plan.keys[0])
        push(exchange, plan, *arguments)

    with mpikv.create("p3", comm=comm, transport=transport, timeout=20) as kv:
        kv.init(["large", "late"], [np.zeros(40), np.zeros(15)])
        kv.barrier()
        monkeypatch.setattr(Exchange, "push", held)
        large = kv.push("large", np.ones(40), priority=-1, wait=False)
        assert reached.wait(20)
        late = kv.push("late", np.full(15, 2.0), priority=0, wait=False)
        if comm:
            comm.Barrier()
        released.set()
        late.wait(20)
        large.wait(20)
        monkeypatch.undo()
        slices = [f"large[40][{low}:{low + 10}]" for low in range(0, 40, 10)]
        assert order == [*slices[:2], "late[15][0:10]", "late[15][10:15]", *slices[2:]]
        np.testing.assert_array_equal(kv.pull("large"), np.full(40, kv.size))
        np.testing.assert_array_equal(kv.pull("late"), np.full(15, 2.0 * kv.size))


@pytest.mark.feature("p3-order")
def test_calls_of_one_key_keep_their_order(comm):
    """However urgent the later ones are: a value is never half of one push and half of another."""
    with make(comm) as kv:
        kv.init(["w", "b"], [np.zeros(55), np.zeros(5)])
        works = []
        for step in range(12):
            both = {"w": np.full(55, float(step)), "b": np.full(5, float(step))}
            works.append(kv.push(both if step % 2 else {"w": both["w"]}, priority=step, wait=False))
            works.append(kv.pull("w", priority=2 * step, wait=False))
        for step in range(12):
            np.testing.assert_array_equal(works[2 * step + 1].wait(), np.full(55, float(step * kv.size)))


@pytest.mark.feature("p3-order")
def test_the_most_urgent_keys_of_a_call_go_first(comm, monkeypatch):
    order, push = [], Exchange.push

    def noted(exchange, plan, *arguments):
        order.append(plan.keys)
        push(exchange, plan, *arguments)

    with make(comm) as kv:
        kv.init(["a", "b", "c", "d"], [np.zeros(4), np.zeros(12), np.zeros(4), np.zeros(4)])
        monkeypatch.setattr(Exchange, "push", noted)
        values = [np.ones(4), np.ones(12), np.ones(4), np.ones(4)]
        kv.push(["a", "b", "c", "d"], values, priority=[0, 3, 1, 1], wait=False).wait()
        monkeypatch.undo()
        first, rest = ("b[12][0:10]",), ("b[12][10:12]", "c[4][0:4]", "d[4][0:4]")
        assert order == [first, rest, ("a[4][0:4]",)]


# --- How it is asked for


@pytest.mark.parametrize("name", ["dist", "dist_sync", "DIST_SYNC", "local"])
@pytest.mark.feature("p3-variables")
def test_the_variable_of_mxnet(comm, monkeypatch, name):
    monkeypatch.setenv("DMLC_PS_VAN_TYPE", "p3")
    with mpikv.create(name, comm=comm) as kv:
        assert isinstance(kv, mpikv.Sliced) is (name != "local")
        assert kv.type == name.lower()
    monkeypatch.setenv("DMLC_PS_VAN_TYPE", "zmq")
    with mpikv.create(name, comm=comm) as kv:
        assert isinstance(kv, mpikv.KVStore)


@pytest.mark.feature("p3-variables")
def test_the_size_of_slices(comm, monkeypatch):
    rank = 0 if comm is None else comm.rank
    monkeypatch.setenv("MXNET_KVSTORE_SLICE_THRESHOLD", "17")
    with make(comm) as kv:
        assert "slices of 17 elements" in repr(kv)
    monkeypatch.setenv("MXNET_KVSTORE_SLICE_THRESHOLD", "none" if rank == 0 else "17")
    with pytest.raises(ConfigError if rank == 0 else PeerFailed, match="MXNET_KVSTORE_SLICE_THRESHOLD='none'"):
        make(comm)
    if comm is not None:
        monkeypatch.setenv("MXNET_KVSTORE_SLICE_THRESHOLD", f"{20 + rank}")
        with pytest.raises(RankMismatch, match="slices 20 elements on rank 0, 21 elements on rank 1"):
            make(comm)


# --- What it refuses


@pytest.mark.feature("p3-only-sums")
def test_it_only_sums(comm):
    with make(comm) as kv:
        assert not kv.is_capable("optimizer")
        assert not kv.is_capable("compression")
        for call in (kv.set_optimizer, kv.set_gradient_compression, kv.set_updater, kv._set_updater):
            with pytest.raises(Unsupported, match="'p3' only sums"):
                call("sgd")
        kv.barrier()
    with pytest.raises(Unsupported, match="only sums"):
        make(comm, compression="fp16")


def test_mistakes_on_one_rank(comm):
    with make(comm) as kv:
        kv.init("w", np.zeros((3, 8)))
        last = kv.size - 1

        def raised(error, call):
            with pytest.raises(error if kv.rank == last else PeerFailed) as caught:
                call()
            return str(caught.value)

        for wait in (True, False):

            def push(key, value, wait=wait):
                work = kv.push(key, value, wait=wait)
                return work if wait else work.wait()

            mine = ("v", np.ones(2)) if kv.rank == last else ("w", np.ones((3, 8)))
            assert "'v' was never initialized (known keys: 'w')" in raised(KeyNotInitialized, lambda m=mine: push(*m))
            mine = np.ones((8, 3)) if kv.rank == last else np.ones((3, 8))
            assert "has shape (8, 3)" in raised(ValueMismatch, lambda m=mine: push("w", m))
            mine = np.ones((3, 8), complex) if kv.rank == last else np.ones((3, 8))
            assert "complex128" in raised(ValueMismatch, lambda m=mine: push("w", m))
            push("w", np.ones((3, 8)))
        np.testing.assert_array_equal(kv.pull("w"), np.full((3, 8), kv.size))
        with pytest.raises(KeyAlreadyInitialized, match=r"'w' was initialized before, with shape \(3, 8\)"):
            kv.init("w", np.zeros(2))
        with pytest.raises(TypeError, match="key 7 is no str"):
            kv.init(7, np.zeros(2))
        work = kv.pull("w", out=np.zeros((8, 3)).T, wait=False)
        with pytest.raises(ValueMismatch, match="gaps"):
            work.wait()


@pytest.mark.ranks(2, 3)
def test_ranks_that_differ(comm):
    with make(comm) as kv:
        shape = (3, 4) if kv.is_root else (4, 3)
        with pytest.raises(RankMismatch, match="init"):
            kv.init("w", np.zeros(shape))
        assert kv.keys() == ()
        kv.init(["v", "w"], [np.zeros(20), np.zeros(30)])
        work = kv.push("v" if kv.is_root else "w", np.ones(20 if kv.is_root else 30), wait=False)
        with pytest.raises(RankMismatch, match="push"):
            work.wait()
        assert kv.pushpull("v", np.ones(20), wait=False).wait()[19] == kv.size
