"""Which stores are on GPUs, and what they do on one that is not the thread's present one."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv.errors import PeerFailed, TransportUnavailable, Unsupported

from ..real.test_sums import Lent

pytestmark = [pytest.mark.gpu, pytest.mark.deadline(60)]


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what takes this rank's GPU away."""

    def find(*_: Any, **__: Any) -> None:
        raise TransportUnavailable("there is none here")

    return lambda: monkeypatch.setattr("mpikv.creation.find_gpu", find)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", ["nccl", "dist_device_sync", "Dist_Sync_Device", "device", "local_allreduce_device"])
def test_stores_by_name(cupy: Any, name: str) -> None:
    with mpikv.create(name) as kv:
        assert (kv.type, kv.is_capable("gpu")) == (name.lower(), True)
        assert kv.transport == ("local" if kv.size == 1 else "nccl")
        kv.init("w", np.zeros(3))
        kv.set_optimizer("sgd", learning_rate=1.0)
        np.testing.assert_array_equal(kv.pushpull("w", np.ones(3), np.empty(3)), np.full(3, -kv.size))
        assert kv._config.bucket_bytes == (128 if kv.size == 1 else 64) << 20


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("lacks", ["one rank", "two ranks of one"])
def test_a_store_is_on_gpus_of_all_ranks_or_of_none(
    cupy: Any, comm: Any, lacks: str, lacking: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, same = comm.rank == 0, lacks != "one rank"
    if same:
        monkeypatch.setattr("mpikv.compute.cuda.gpu.choose_gpu", lambda *_: max(0, comm.rank - 1))
    elif first:
        lacking()
    error = TransportUnavailable if first or same else PeerFailed
    with pytest.raises(error, match="ranks 0 and 1" if same else "there is none here"):
        mpikv.create("nccl")
    with mpikv.create("device") as kv:
        assert (kv.transport, kv.is_capable("gpu")) == ("shm", False)
        kv.init("w", np.zeros(3))
        np.testing.assert_array_equal(kv.pushpull("w", np.ones(3)), np.full(3, kv.size))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("why", ["no CuPy", "CuPy without a GPU", "a GPU of one rank"])
def test_who_expects_a_gpu_is_told_that_there_is_none(
    comm: Any, why: str, lacking: Callable[[], None], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    rank, size = (comm.rank, comm.size) if comm else (0, 1)
    if why != "a GPU of one rank" or not rank:
        lacking()
    monkeypatch.setattr("mpikv.creation.has_cupy", lambda: why == "CuPy without a GPU" and rank == size - 1)
    with caplog.at_level(logging.INFO, logger="mpikv"), mpikv.create("device") as kv:
        assert not kv.is_capable("gpu")
    (said,) = [record for record in caplog.records if "store 'device'" in record.getMessage()]
    assert said.getMessage() == "store 'device' is on the host, because a rank reports: there is none here"
    warns = rank == 0 and (why == "CuPy without a GPU" or (why == "a GPU of one rank" and size > 1))
    assert said.levelname == ("WARNING" if warns else "INFO")


def test_no_gpu_has_kernels_of_numba(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match=r"create: kernels='numba' is for stores on the host"):
        mpikv.create("nccl", kernels="numba")
    mpikv.create("nccl", kernels="numpy").close()
    monkeypatch.setenv("MPIKV_KERNELS", "numba")
    with pytest.raises(Unsupported, match="create: MPIKV_KERNELS=numba is for"):
        mpikv.create("nccl")


def test_what_does_not_fit_a_store_on_a_gpu(cupy: Any) -> None:
    immutable = type("Array", (), {"__module__": "jaxlib.xla", "__dlpack__": None})()
    type(immutable).__dlpack_device__ = lambda self: (2, 0)
    with mpikv.create("nccl") as kv:
        kv.init("w", np.ones(3))
        with pytest.raises(TypeError, match=r"jaxlib\.xla array cannot be written to"):
            kv.pull("w", out=immutable)
        kv.set_updater(lambda key, given, stored: stored + given)
        kv.push("w", np.ones(3))
        kv.set_updater(lambda key, given, stored: np.zeros(3))
        with pytest.raises(TypeError, match=r"returned a numpy\.ndarray for key 'w', whose value is a .*ndarray; "):
            kv.push("w", np.ones(3))
        assert kv.pull("w").tolist() == [2] * 3


@pytest.mark.ranks(1, 2)
def test_another_librarys_views_of_values_are_read_before_these_change(cupy: Any) -> None:
    """In a push of several messages one value changes before the next one is sent."""
    with mpikv.create("nccl", bucket_bytes=1 << 14) as kv:
        kv.init(["first", "a", "b"], [np.full(6000, number, np.float32) for number in (0, 1, 10)])
        kv.push(["a", "b"], [Lent(kv.view(key)) for key in ("b", "a")])
        for key, old in (("a", 10), ("b", 1)):
            assert (kv.pull(key).get() == kv.size * old).all()


# --- Beside the present GPU


@pytest.fixture
def elsewhere(cupy: Any, gpu: Any) -> Any:
    """Return what makes another GPU than this rank's the present one, as it may be in a thread of a program."""
    if (count := cupy.cuda.runtime.getDeviceCount()) < 2:
        pytest.skip("there is one GPU")
    yield cupy.cuda.Device((gpu.ordinal + 1) % count).use
    gpu.use()


@pytest.mark.ranks(1, 2)
def test_the_stores_gpu_need_not_be_the_present_one(cupy: Any, gpu: Any, elsewhere: Any) -> None:
    with mpikv.create("nccl", bucket_bytes=1 << 14) as kv, mpikv.create("dist_sync", bucket_bytes=1 << 14) as host:
        elsewhere()
        results = [calls(*each) for each in ((kv, gpu.upload), (host, np.copy))]
        for found, expected in zip(*results, strict=True):
            with gpu.present():
                assert cupy.asnumpy(found).tobytes() == expected.tobytes()
        assert cupy.cuda.runtime.getDevice() != gpu.ordinal


def calls(kv: Any, place: Callable[[Any], Any]) -> list[Any]:
    """Make calls of all kinds; return the values after each of several."""

    def full(number: float, *shape: int) -> Any:
        return place(np.full(shape or (6000,), number, np.float32))

    found = []
    for compression in (None, "2bit", "topk"):
        for optimizer in ("sgd", "lamb", None):
            kv.init(["a", "b"], [full(1), full(2)], overwrite=True)
            kv.set_gradient_compression(compression)
            if optimizer is None:
                kv.set_updater(lambda key, given, stored: np.add(stored, given, out=stored))
            else:
                kv.set_optimizer(optimizer, learning_rate=0.5)
            kv.push(["a", "b"], [[full(1), full(1)], [full(2), full(1)]])
            kv.pushpull(["a", "b"], [full(1), full(2)], out=[full(0), full(0)])
            kv.push(["a", "b"], [kv.view("b"), kv.view("a")])
            kv.set("a", kv.pull("b", out=kv.view("b")))
            kv.push("a", full(1, 6000, 2)[:, 0])
            kv.pull("a", out=full(1, 6000, 2)[:, 0])
            kv.broadcast("c", full(1, 3), out=full(0, 3))
            kv.delete("c")
            kv.buffer("a")
            kv.pushpull("a")
            with kv.join():
                kv.push("a", full(1))
            found += kv.pull(["a", "b"])
    kv.set_gradient_compression(None)
    kv.set_optimizer("sgd")
    kv.pull(["a", "b"], out=kv.view(["a", "b"]))
    kv.push(["a", "b"], [kv.view("b"), kv.view("a")], wait=False).wait()
    step = kv.capture(["a", "b"], [full(1), full(2)], out=[full(0), full(0)])
    for _ in range(3):
        step()
    kv.init("r", mpikv.RowSparse([0], np.ones((1, 3), np.float32), (9, 3)), overwrite=True)
    kv.push("r", [mpikv.RowSparse([1, 2], full(1, 2, 3), (9, 3))] * 2)
    return [*found, *kv.pull(["a", "b"]), kv.row_sparse_pull("r", row_ids=[0, 1]).values]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
def test_the_weights_gpu_need_not_be_the_present_one(cupy: Any, gpu: Any, elsewhere: Any, optimizer: str) -> None:
    keys = {"w": ((3, 4), np.float32), "b": ((5,), np.float64), "big": ((6000,), np.float32), "h": ((7, 3), np.float16)}
    results = []
    elsewhere()
    for place in (gpu.upload, np.copy):
        weights = {name: place(np.ones(shape, dtype)) for name, (shape, dtype) in keys.items()}
        with mpikv.create("dist_sync", timeout=5) as kv:
            trainer = mpikv.Trainer(weights, optimizer, kvstore=kv, update_on_kvstore=False)
            trainer.start()
            for step in range(1, 3):
                for name, (shape, dtype) in keys.items():
                    trainer.params[name].set_sum([place(np.full(shape, step / one, dtype)) for one in (1, 2)])
                trainer.step(2)
        with gpu.present():
            results.append({name: cupy.asnumpy(weight) for name, weight in weights.items()})
    for name in keys:
        np.testing.assert_array_equal(*(result[name] for result in results), err_msg=name)
