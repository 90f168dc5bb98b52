"""Arrays of a real GPU in the calls of stores of the host."""

import numpy as np
import pytest

import mpikv
from mpikv.errors import KeyNotInitialized, PeerFailed, Unsupported, ValueMismatch

pytestmark = [pytest.mark.gpu, pytest.mark.deadline(60)]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("streamed", [False, True])
def test_arrays_come_and_go(cupy, streamed):
    """Larger than the pinned memory through which they travel, and used at once on either side."""
    size = (2 << 20) + 5
    with mpikv.create("dist_sync") as kv:
        cupy.cuda.Device(kv.local_rank % cupy.cuda.runtime.getDeviceCount()).use()
        with cupy.cuda.Stream(non_blocking=True) if streamed else cupy.cuda.Stream.null:
            kv.init("w", cupy.zeros(size, np.float32))
            for number in range(1, 4):
                gradient = cupy.arange(size, dtype=np.float32) * number
                half, strided = cupy.empty(size, np.float16), cupy.zeros((size, 2), np.float32)[:, 0]
                kv.push("w", gradient)
                gradient.fill(np.nan)
                kv.pull("w", out=[half, strided, gradient])
                expected = np.arange(size, dtype=np.float32) * number * kv.size
                for out in (strided, gradient):
                    assert (out.get() == expected).all()
                with np.errstate(over="ignore"):
                    assert (half.get() == expected.astype(np.float16)).all()


@pytest.fixture
def kv(cupy):
    with mpikv.create("dist_sync") as store:
        cupy.cuda.Device(store.local_rank % cupy.cuda.runtime.getDeviceCount()).use()
        yield store


def double(key, given, stored):
    assert type(given) is type(stored) is np.ndarray
    stored += 2 * given


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("updater", [None, "adam", double])
@pytest.mark.parametrize(
    "options", [{}, {"transport": "mpi"}, {"placement": "root"}, {"deterministic": True, "bucket_bytes": 4096}], ids=str
)
def test_the_same_as_with_arrays_of_the_host(cupy, comm, options, updater):
    """Every verb, with arrays of the GPU and of the host in one call, which are what they were if nobody fills them."""
    shapes = {"w": ((3, 4), "f4"), "b": ((5,), "f8"), "big": ((6000,), "f4"), "h": ((7, 3), "f2")}
    options = options if comm or "transport" not in options else {}
    with mpikv.create("dist_sync", **options) as mixed, mpikv.create("dist_sync", **options) as plain:
        cupy.cuda.Device(mixed.local_rank % cupy.cuda.runtime.getDeviceCount()).use()
        random = np.random.default_rng(mixed.rank)
        for kv in (mixed, plain):
            kv.init(list(shapes), [np.ones(*each) for each in shapes.values()])
            if updater:
                (kv.set_updater if updater is double else kv.set_optimizer)(updater)
        for verb in ("push", "pull", "pushpull", "in place", "set", "pull", "broadcast", "push", "pull"):
            values = [random.integers(-4, 5, shape).astype(dtype) for shape, dtype in shapes.values()]
            given = [cupy.asarray(value) if random.random() < 0.7 else value.copy() for value in values]
            found, expected = call(mixed, verb, list(shapes), given), call(plain, verb, list(shapes), values)
            for mine, wanted in zip((*found, *given), (*expected, *values), strict=True):
                assert cupy.asnumpy(mine).tobytes() == wanted.tobytes()


def call(kv, verb, keys, arrays):
    """Make a call; return what it has filled."""
    if verb == "pull":
        return kv.pull(keys)
    if verb == "in place":
        return list(kv.pushpull(dict(zip(keys, arrays, strict=True))).values())
    outs = [array.copy() for array in arrays]
    if verb in ("pushpull", "broadcast"):
        return getattr(kv, verb)(keys, arrays, out=outs)
    getattr(kv, verb)(keys, arrays)
    return []


@pytest.mark.ranks(1, 3)
def test_forms_and_casts(kv, cupy, caplog):
    kv.init("w", cupy.zeros((2, 3)))
    kv.push("w", [cupy.ones((2, 3), np.float32), np.ones((2, 3))])
    half, column = cupy.empty((2, 3), np.float16), cupy.zeros((2, 6))[:, ::2]
    kv.pull("w", out=[half, column, plain := np.empty((2, 3))])
    for out in (half, column, plain):
        assert (out == 2 * kv.size).all()
    with pytest.raises(ValueMismatch, match="the array to fill of key 'w' has shape"):
        kv.pull("w", out=cupy.empty((3, 2)))
    with pytest.raises(ValueMismatch, match="only dtypes of one kind are cast"):
        kv.push("w", cupy.ones((2, 3), np.int64))
    (said,) = [message for message in caplog.messages if "is used with a host store" in message]
    assert said.startswith("an array on cuda:")


@pytest.mark.ranks(1, 2, 3)
def test_a_call_that_is_not_made_fills_nothing(kv, cupy):
    """Neither then, nor by the next call; nor does a compiled call before it is made."""
    kv.init("w", np.ones(3))
    out, given = cupy.full(3, 7.0), cupy.ones(3)
    last = kv.rank == kv.size - 1
    # Prepared on all ranks but the last, which has another key.
    with pytest.raises(KeyNotInitialized if last else PeerFailed):
        kv.pull("v" if last else "w", out=out)
    kv.push("w", cupy.ones(3))
    into, alone = kv.capture("w", given, out=out), kv.capture("w", given)
    assert (out.tolist(), given.tolist()) == ([7.0] * 3, [1.0] * 3)
    kv.pull("w", out=out)
    assert out.tolist() == [kv.size] * 3
    into()
    alone()
    assert out.tolist() == given.tolist() == [kv.size] * 3


@pytest.mark.ranks(1, 2)
def test_calls_that_nobody_waits_for(kv, cupy):
    kv.init("w", np.ones(3))
    for work in (lambda: kv.push("w", cupy.ones(3), wait=False), lambda: kv.pull("w", out=cupy.ones(3), wait=False)):
        with pytest.raises(Unsupported, match="with wait=False a host store takes host arrays only"):
            work().wait()
    assert kv.pushpull("w", np.ones(3), wait=False).wait()[0] == kv.size


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", ["horovod", "dist_async"])
def test_other_stores(cupy, name):
    with mpikv.create(name) as kv:
        cupy.cuda.Device(kv.local_rank % cupy.cuda.runtime.getDeviceCount()).use()
        array = cupy.ones(1000, np.float32)
        if name == "dist_async":
            kv.init("w", cupy.zeros(1000, np.float32))
            kv.set_optimizer("sgd", learning_rate=1.0)
            kv.push("w", array)
            kv.barrier()
            kv.pull("w", out=array)
        else:
            kv.pushpull("w", array)
        assert (abs(array.get()) == kv.size).all()


def test_tensors_of_torch(cupy):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    with mpikv.create("dist_sync") as kv:
        weight = torch.ones(1000, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        kv.init("w", weight)
        kv.push("w", torch.full_like(weight, 3))
        out = torch.zeros_like(weight)
        kv.pull("w", out)
        assert (out == 3).all()
