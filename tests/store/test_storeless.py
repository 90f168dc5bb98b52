"""Stores without values: sums over ranks under the names of Horovod's and BytePS's stores."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

import mpikv
from mpikv import ConfigError, PeerFailed, RankMismatch, Unsupported, ValueMismatch

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


@pytest.fixture(params=["horovod", "BytePS", "allreduce"])
def store(request, comm):
    with mpikv.create(request.param, comm=comm, timeout=5) as store:
        assert isinstance(store, mpikv.KVStoreBase)
        assert store.type == request.param.lower()
        yield store


@pytest.mark.feature("names-storeless")
def test_facts(store):
    assert store.rank < store.size == store.num_workers
    assert (store.is_root, store.local_rank, store.keys()) == (store.rank == 0, store.rank, ())
    assert not any(store.is_capable(word) for word in ("optimizer", "sparse", "compression"))
    store.barrier()


@pytest.mark.feature("names-storeless")
def test_a_sum_needs_no_init(store):
    gradient = np.full((2, 3), store.rank + 1.0)
    total = store.size * (store.size + 1) / 2
    out = np.zeros((2, 3))
    assert store.pushpull("g", gradient, out) is out
    np.testing.assert_array_equal(out, np.full((2, 3), total))
    np.testing.assert_array_equal(gradient, np.full((2, 3), store.rank + 1.0))
    for _ in range(2):
        gradient[...] = store.rank + 1
        assert store.pushpull("g", gradient) is gradient
        np.testing.assert_array_equal(gradient, np.full((2, 3), total))
    np.testing.assert_array_equal(store.pushpull(3 if store.keys() else "h", [np.ones(2), np.ones(2)], np.zeros(2)),
                                  np.full(2, 2.0 * store.size))  # fmt: skip


@hypothesis.given(
    calls=strategies.lists(
        strategies.tuples(
            strategies.sampled_from("abc"),
            strategies.sampled_from([(), (0,), (3,), (2, 3)]),
            strategies.sampled_from(["float32", "float64", "int64"]),
            strategies.booleans(),
        ),
        max_size=12,
    )
)
@hypothesis.settings(max_examples=15)
def test_a_key_may_change_its_shape_and_dtype(comm, calls):
    with mpikv.create("horovod", comm=comm, timeout=5) as store:
        for step, (key, shape, dtype, summing) in enumerate(calls):
            own, *others = (np.full(shape, (rank + 1) * (step + 1), dtype) for rank in [store.rank, *range(store.size)])
            out = np.empty(shape, dtype)
            (store.pushpull if summing else store.broadcast)(key, own, out=out)
            np.testing.assert_array_equal(out, sum(others) if summing else others[0])


@pytest.mark.feature("names-storeless-rebroadcast")
def test_broadcast_is_repeatable(store):
    for step in range(3):
        weights = {"w": np.full(2, 10.0 * step + store.rank), "b": np.full(3 + step, float(store.rank))}
        store.broadcast(weights, out=weights)
        np.testing.assert_array_equal(weights["w"], np.full(2, 10.0 * step))
        np.testing.assert_array_equal(weights["b"], np.zeros(3 + step))


def test_mistakes_on_one_rank(store):
    store.pushpull("g", np.ones(2))
    for bad in ([1.0, 2.0], None, np.array(["text"])):
        with pytest.raises((TypeError, ValueMismatch) if store.is_root else PeerFailed):
            store.pushpull("g", bad if store.is_root else np.ones(2))
    with pytest.raises(Unsupported, match="has no set_optimizer; 'dist_sync' has"):
        store.set_optimizer("sgd")
    if store.size > 1:
        with pytest.raises(RankMismatch, match=r"\(item 0: 'g' float64\[2\] against 'g' float64\[3\]\)"):
            store.pushpull("g", np.ones(2 + store.rank))
        with pytest.raises(RankMismatch):
            store.pushpull(f"g{store.rank}", np.ones(2))
    total = store.pushpull("g", np.ones(2))
    np.testing.assert_array_equal(total, np.full(2, float(store.size)))


def test_a_trainer_updates_on_each_rank(store):
    params = {"w": np.full(2, store.rank + 1.0)}
    trainer = mpikv.Trainer(params, "adam", {"learning_rate": 0.5}, kvstore=store)
    alone = {"w": np.ones(2)}
    with mpikv.create() if store.size == 1 else mpikv.create(comm=store._store.comm) as kv:
        reference = mpikv.Trainer(alone, "adam", {"learning_rate": 0.5}, kvstore=kv)
        for step in range(3):
            for each in (trainer, reference):
                each.set_grads({"w": np.full(2, step + store.rank + 1.0)})
                each.step(4)
    np.testing.assert_array_equal(params["w"], alone["w"])
    with pytest.raises(ConfigError, match="update_on_kvstore=True, and the store"):
        mpikv.Trainer(params, "sgd", kvstore=store, update_on_kvstore=True).start()


def test_calls_of_values(store):
    for call in (store.push, store.pull, store.init):
        with pytest.raises(Unsupported, match="keeps no values"):
            call("a", np.ones(1))
