"""Sums of a fixed order have the same bits, however they are made. The oracle adds in one process."""

import numpy as np
import pytest

import mpikv
from mpikv.testing import cluster

SHAPES = {"small": (7,), "cut": (5000,), "matrix": (30, 11), "scalar": ()}
SHARDS, STEPS = 4, 3
OPTIMIZER = {"learning_rate": 0.1, "momentum": 0.9}


def gradient(shard, step, key, dtype=np.float32):
    """Return numbers of very different sizes, whose sum depends on its order."""
    random = np.random.default_rng([shard, step, list(SHAPES).index(key)])
    wide = random.standard_normal(SHAPES[key]) * 10.0 ** random.integers(-4, 5, SHAPES[key])
    return np.asarray(wide).astype(dtype)


def paired(arrays):
    """The order, written down once more."""
    half = len(arrays) // 2
    return paired(arrays[:half]) + paired(arrays[half:]) if half else arrays[0]


def trained(terms, dtype):
    """Return the weights after some steps of momentum descent on sums of so many terms."""
    weights = {key: np.ones(shape, dtype) for key, shape in SHAPES.items()}
    velocity = {key: np.zeros(shape, dtype) for key, shape in SHAPES.items()}
    rate, share = dtype(OPTIMIZER["learning_rate"]), dtype(OPTIMIZER["momentum"])
    for step in range(STEPS):
        for key in SHAPES:
            total = paired([gradient(shard, step, key, dtype) for shard in range(terms)])
            velocity[key] = velocity[key] * share - total * rate
            weights[key] = weights[key] + velocity[key]
    return weights


def same_bits(results, expected):
    return all(np.asarray(results[key]).tobytes() == value.tobytes() for key, value in expected.items())


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("transport", ["shm", "mpi"])
@pytest.mark.parametrize("placement", ["root", "sharded", "replicated"])
@pytest.mark.feature("sums-reproducible")
def test_bits_do_not_depend_on_how_a_sum_is_made(transport, placement, ranks):
    for dtype in (np.float32, np.float64):
        expected = trained(ranks, dtype)
        for bucket_bytes, together in ((4096, True), (1 << 20, True), (1 << 16, False)):
            options = {"transport": transport, "placement": placement, "bucket_bytes": bucket_bytes}
            with mpikv.create(**options, deterministic=True) as kv:
                kv.init({key: np.ones(shape, dtype) for key, shape in SHAPES.items()})
                kv.set_optimizer("sgd", **OPTIMIZER)
                for step in range(STEPS):
                    mine = {key: gradient(kv.rank, step, key, dtype) for key in SHAPES}
                    if together:
                        kv.push(mine)
                    else:
                        for key, value in reversed(mine.items()):
                            kv.push(key, value)
                assert same_bits({key: kv.pull(key) for key in SHAPES}, expected), (dtype, bucket_bytes, together)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("transport", ["shm", "mpi"])
def test_bits_do_not_depend_on_the_number_of_ranks(transport):
    """Four arrays, brought by one rank, by two or by four."""
    expected = trained(SHARDS, np.float32)
    with mpikv.create(transport=transport, deterministic=True, bucket_bytes=8192) as kv:
        kv.init({key: np.ones(shape, np.float32) for key, shape in SHAPES.items()})
        kv.set_optimizer("sgd", **OPTIMIZER)
        share = SHARDS // kv.size
        for step in range(STEPS):
            mine = range(kv.rank * share, (kv.rank + 1) * share)
            kv.push(list(SHAPES), [[gradient(shard, step, key) for shard in mine] for key in SHAPES])
        assert same_bits({key: kv.pull(key) for key in SHAPES}, expected)


def test_sums_that_a_codec_of_whole_values_asks_for_have_that_order_too():
    """On four ranks, the fewest on which that is not the order of the ranks. The codec leaves a vector as it is."""

    def program(comm):
        with mpikv.create(comm=comm, deterministic=True, compression={"type": "lowrank", "rank": 2}) as kv:
            kv.init("cut", np.zeros(SHAPES["cut"], np.float32))
            kv.push("cut", gradient(kv.rank, 0, "cut"))
            return kv.pull("cut").tobytes()

    expected = paired([gradient(rank, 0, "cut") for rank in range(4)])
    assert cluster(4).run(program) == [expected.tobytes()] * 4


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("transport", ["shm", "mpi"])
def test_half_precision_and_buffers(transport, ranks):
    """Halves are summed in float32 and rounded once; a buffer is as good as an array."""
    with mpikv.create(transport=transport, deterministic=True, bucket_bytes=4096) as kv:
        kv.init({key: np.ones(shape, np.float16) for key, shape in SHAPES.items()})
        buffers = dict(zip(SHAPES, kv.buffer(list(SHAPES)), strict=True))
        for key in SHAPES:
            buffers[key][...] = gradient(kv.rank, 0, key) / 1e4
        results = dict(zip(SHAPES, kv.pushpull(list(SHAPES)), strict=True))
        for key, result in results.items():
            terms = [(gradient(rank, 0, key) / 1e4).astype(np.float16).astype(np.float32) for rank in range(ranks)]
            assert result.tobytes() == paired(terms).astype(np.float16).tobytes()


@pytest.mark.ranks(2, 4)
def test_ranks_that_want_different_orders(comm):
    with pytest.raises(mpikv.RankMismatch, match="disagree: deterministic "):
        mpikv.create(deterministic=comm.rank == 0)
