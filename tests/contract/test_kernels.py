"""A store with compiled kernels has the bits of one without, on any number of ranks."""

from importlib.util import find_spec

import numpy as np
import pytest

import mpikv
from mpikv.compute import numba
from mpikv.optimizers.recording import rule_of

if find_spec("numba") is None:
    pytest.skip("numba is not installed: pip install 'mpikv[numba]'", allow_module_level=True)

OPTIMIZERS = {
    "sgd": {"momentum": 0.9, "wd": 0.01, "clip_gradient": 1.5},
    "adam": {"rescale_grad": 0.3},
    "adamw": {"wd": 0.1, "lr_mult": {"small": 2.0}},
    "rmsprop": {"centered": True},
    "ftrl": {},
    "lamb": {"wd": 0.1},
}
CASES = [
    *(("shm", name, more) for name in OPTIMIZERS for more in ({}, {"placement": "root", "bucket_bytes": 4096})),
    *(("mpi", name, {"bucket_bytes": 4096}) for name in ("sgd", "lamb")),
    *(("mpi", name, {"placement": "replicated"}) for name in ("sgd", "lamb")),
    *(("hierarchical", name, {"bucket_bytes": 1 << 16}) for name in ("sgd", "adam", "lamb")),
    ("shm", "adam", {"deterministic": True}),
]
VALUES = {
    "large": ((333, 331), np.float32),
    "small": ((7,), np.float32),
    "wide": ((70_001,), np.float64),
    "half": ((100,), np.float16),
    "empty": ((0, 3), np.float32),
}


def training(random, **options):
    """Yield the values and what is pushed, in a training that changes its options."""
    name = options.pop("name")
    with mpikv.create(timeout=30, **options) as kv:
        shapes = {key: shape for key, (shape, _) in VALUES.items()}
        kv.init({key: random.standard_normal(shape).astype(dtype) for key, (shape, dtype) in VALUES.items()})
        kv.set_optimizer(name, **OPTIMIZERS[name])
        buffers = dict(zip(VALUES, kv.buffer(list(VALUES)), strict=True))
        for count in range(6):
            if count == 2:
                kv.set_learning_rate(0.03)
            if count == 4:
                kv.optimizer.clip_gradient = 0.5
                if name == "sgd":
                    kv.optimizer.nesterov = True
            # Every rank draws for all.
            drawn = [{key: random.standard_normal(shape) for key, shape in shapes.items()} for _ in range(kv.size)]
            mine = {key: drawn[kv.rank][key].astype(dtype) for key, (_, dtype) in VALUES.items()}
            if count % 2:
                for key, buffer in buffers.items():
                    buffer[...] = mine[key]
                result = dict(zip(VALUES, kv.pushpull(list(VALUES)), strict=True))
            else:
                result = kv.pushpull(mine, out={key: np.empty_like(array) for key, array in mine.items()})
            yield {key: array.tobytes() for key, array in result.items()}


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.deadline(120)
@pytest.mark.parametrize(("transport", "name", "options"), CASES)
def test_same_bits_as_a_store_with_numpy(transport, name, options, comm):
    options = {"name": name, "comm": comm, "transport": transport, **options}
    results = [list(training(np.random.default_rng(5), kernels=kernels, **options)) for kernels in ("numpy", "numba")]
    assert results[0] == results[1]
    assert len({result["large"] for result in results[0]}) == 6


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.deadline(120)
@pytest.mark.parametrize("bucket_bytes", [4096, 1 << 20])
def test_lists_of_many_keys(comm, bucket_bytes):
    """Loops look at them and copy them, as far as these can tell that arrays fit."""
    random = np.random.default_rng(3)
    shapes = [tuple(random.integers(0, 9, random.integers(0, 4))) for _ in range(60)] + [(3000,)]
    keys = [f"k{number}" for number in range(len(shapes))]
    pushed = [[random.integers(-9, 9, shape).astype(np.float32) for shape in shapes] for _ in range(2)]
    with mpikv.create(comm=comm, kernels="numba", timeout=30, bucket_bytes=bucket_bytes) as kv:
        kv.init(keys, pushed[0])
        kv.set_optimizer("sgd", learning_rate=1.0)
        expected = [array.copy() for array in pushed[0]]
        for mine in (arrays for arrays in layouts(pushed[1]) for _ in range(2)):
            for old, array in zip(expected, pushed[1], strict=True):
                old -= kv.size * array
            outs = [np.empty_like(array) for array in pushed[1]]
            for given in (mine, dict(zip(keys, mine, strict=True))):
                if isinstance(given, dict):
                    assert kv.pull(dict(zip(keys, outs, strict=True)))
                elif kv.rank % 2:
                    kv.pushpull(keys, given, out=outs)
                else:
                    assert kv.pushpull(dict(zip(keys, given, strict=True)), out=dict(zip(keys, outs, strict=True)))
                for out, old in zip(outs, expected, strict=True):
                    np.testing.assert_array_equal(out, old)


def layouts(arrays):
    """Yield the same numbers in arrays that loops can copy, and in lists with one that they cannot."""
    yield [array.copy() for array in arrays]
    for number, array in ((0, arrays[0][...]), (-1, np.repeat(arrays[-1], 2)[::2]), (-1, arrays[-1].astype(float))):
        others = [array.copy() for array in arrays]
        others[number] = array
        yield others
    yield [array.view(type("Named", (np.ndarray,), {})) for array in arrays]


@pytest.mark.ranks(1, 2)
@pytest.mark.deadline(120)
def test_a_list_that_has_changed(comm):
    with mpikv.create(comm=comm, kernels="numba", timeout=30) as kv:
        keys, arrays = list(range(40)), [np.zeros((2, 3)) for _ in range(40)]
        kv.init(keys, arrays)
        for _ in range(2):
            kv.pushpull(keys, arrays)
        odd = kv.rank == kv.size - 1
        for change, kind, text in (
            (lambda array: setattr(array, "shape", (3, 2)), mpikv.ValueMismatch, "key 39 has shape .3, 2."),
            (lambda array: setattr(array, "dtype", np.int64), mpikv.ValueMismatch, "key 39 has dtype int64"),
            (lambda array: array.setflags(write=False), TypeError, "read-only"),
        ):
            kv.push(keys, arrays)
            if odd:
                change(arrays[-1])
            with pytest.raises(kind if odd else mpikv.PeerFailed, match=text):
                kv.pull(keys, arrays)
            arrays[-1] = np.zeros((2, 3))
        arrays[0][...] = 1.0
        assert kv.pushpull(keys, arrays) is arrays
        assert (arrays[0] == kv.size).all()


@pytest.mark.ranks(2, 3)
@pytest.mark.deadline(120)
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_last_addition_is_made_with_the_update(comm, deterministic):
    from mpikv.compute.numba import rules as compiled

    with mpikv.create(comm=comm, kernels="numba", transport="shm", deterministic=deterministic) as kv:
        kv.init("w", np.zeros(300_000))
        kv.set_optimizer("adam")
        kv.push("w", np.ones(300_000))
        # Of two terms nothing is written; of three, the sum of the first two; in pairs, that of all.
        assert set(kv._exchange.values.planner.scratch[:8].view(np.float64)) == {
            0.0 if kv.size == 2 else 3.0 if deterministic else 2.0
        }
        together = kv.size == 2 or not deterministic
        # Nothing more was compiled than was prepared.
        loop = compiled.loop_of(rule_of(kv.optimizer), np.dtype(np.float64), together)
        assert len(loop.signatures) == 1


@pytest.mark.ranks(2, 4)
@pytest.mark.deadline(120)
def test_numba_is_missing_on_one_rank(comm, monkeypatch, hide):
    if comm.rank == 1:
        hide("mpikv.compute.numba.rules")
        monkeypatch.delattr(numba, "rules", raising=False)
    with pytest.raises((mpikv.TransportUnavailable, mpikv.PeerFailed), match="numba") as caught:
        mpikv.create(comm=comm, kernels="numba")
    assert isinstance(caught.value, mpikv.TransportUnavailable if comm.rank == 1 else mpikv.PeerFailed)


@pytest.mark.ranks(2, 4)
@pytest.mark.deadline(120)
def test_kernels_are_the_same_on_every_rank(comm):
    with pytest.raises(mpikv.RankMismatch, match="kernels 'numba' on rank 0, 'numpy' on rank 1"):
        mpikv.create(comm=comm, kernels="numpy" if comm.rank else "numba")
