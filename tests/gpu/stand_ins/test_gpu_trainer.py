"""A Trainer, clip_global_norm and LossScaler over arrays of a GPU, which is none here: as they are over the host's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv import LossScaler, Parameter, PeerFailed, Trainer, Unsupported, ValueMismatch, clip_global_norm
from mpikv.cluster.connecting import connect
from mpikv.cluster.status_board import StatusBoard
from mpikv.config import Config
from mpikv.memory.device import DeviceMemory
from mpikv.store.kvstore import KVStore
from mpikv.testing.fakegpu import FakeGpu
from mpikv.testing.fakekernels import FakeKernels
from mpikv.testing.fakenccl import FakeNccl
from mpikv.train.array_location import writable
from mpikv.transports import open_gpu_transport

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

SHAPES = {"b": ((5,), np.float32), "h": ((7, 3), np.float16), "w": ((30, 40), np.float32), "x": ((2, 3), np.float64)}
WHERE = pytest.mark.parametrize("on_gpus", [True, False], ids=["gpu store", "host store"])
BOTH = pytest.mark.parametrize("on_store", [True, False])


@pytest.fixture
def gpu(comm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = FakeGpu(comm.rank if comm else 0)
    for module in ("creation", "train.array_location"):
        monkeypatch.setattr(f"mpikv.{module}.gpu_of", lambda value: made)
    yield made
    made.checker.assert_clean()


@pytest.fixture
def store(comm: Any, gpu: FakeGpu) -> Callable[[bool], Any]:
    """Return what makes a store, on GPUs or on the host."""

    def make(on_gpus: bool) -> Any:
        if not on_gpus:
            return mpikv.create(comm=comm, timeout=5)
        config = Config.read(bucket_bytes=1 << 14, timeout=5)
        group = connect(comm, config)
        mover = open_gpu_transport(group, config, DeviceMemory(gpu), FakeNccl(gpu, comm.Dup()) if comm else None)
        return KVStore(group, StatusBoard(group), mover, config, kernels=FakeKernels(gpu))

    return make


def of_rank(rank: int, step: int, name: str) -> np.ndarray[Any, Any]:
    """Return the gradient that a rank brings, in quarters, whose sums are exact."""
    shape, dtype = SHAPES[name]
    return (np.random.default_rng([rank, step, len(name), *shape]).integers(-8, 9, shape) / 4).astype(dtype)


def weights(upload: Callable[[Any], Any] = np.copy) -> dict[str, Any]:
    return {name: upload(of_rank(99, 0, name)) for name in SHAPES}


def steps(trainer: Trainer, rank: int, upload: Callable[[Any], Any], count: int, clips: bool, first: int = 0) -> None:
    for step in range(first, first + count):
        trainer.set_grads({name: upload(of_rank(rank, step, name)) for name in SHAPES})
        if clips:
            trainer.allreduce_grads()
            clip_global_norm([one.grad for one in trainer.params.values()], 20.0)
            trainer.update(batch_size=2)
        else:
            trainer.step(batch_size=2)


@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
def test_the_weights_gpu_need_not_be_the_present_one(comm: Any, gpu: FakeGpu, optimizer: str) -> None:
    """As in a thread that a program has made, where the first of a host is."""
    FakeGpu(gpu.ordinal + 1).use()
    results = []
    for upload in (gpu.upload, np.copy):
        params = weights(upload)
        with mpikv.create(comm=comm, timeout=5) as kv:
            trainer = Trainer(params, optimizer, kvstore=kv, update_on_kvstore=False)
            trainer.start()
            for step in range(2):
                for name, parameter in trainer.params.items():
                    one = of_rank(kv.rank, step, name)
                    parameter.set_sum([upload(one), upload(one * 2)])
                clip_global_norm([one.grad for one in trainer.params.values()], 20.0)
                trainer.step(2)
        results.append({name: on_host(array) for name, array in params.items()})
    for name in SHAPES:
        np.testing.assert_array_equal(*(result[name] for result in results), err_msg=name)


def on_host(array: Any) -> Any:
    return array.get() if hasattr(array, "get") else array.copy()


@WHERE
@BOTH
def test_an_overflow_on_one_rank_skips_the_update_on_all(
    comm: Any, gpu: FakeGpu, store: Any, on_gpus: bool, on_store: bool
) -> None:
    params, scaler = weights(gpu.upload), LossScaler(8.0)
    before = {name: on_host(array) for name, array in params.items()}
    with store(on_gpus) as kv:
        trainer = Trainer(params, "sgd", kvstore=kv, update_on_kvstore=on_store, loss_scaler=scaler)
        trainer.start()
        for step, bad in enumerate((np.inf, np.nan, 70000.0)):
            gradients = {name: of_rank(kv.rank, step, name) for name in SHAPES}
            if kv.rank == kv.size - 1:
                # The last one is an inf in the dtype of its weight only.
                gradients["h"] = gradients["h"].astype(np.float32)
                gradients["h"][3, 1] = bad
            trainer.set_grads({name: gpu.upload(array) for name, array in gradients.items()})
            trainer.step(1)
            assert scaler.loss_scale == 8.0 / 2 ** (step + 1)
    for name, array in params.items():
        np.testing.assert_array_equal(on_host(array), before[name])


@WHERE
def test_the_divisor_of_gradients_on_a_gpu(comm: Any, gpu: FakeGpu, store: Any, on_gpus: bool) -> None:
    with store(on_gpus) as kv:
        scaler = LossScaler(8.0)
        fine = {"a": gpu.upload(np.ones(3)), "b": [np.ones(2), gpu.upload(np.ones(2, np.int32))]}
        assert scaler.divisor(kv, fine) == 8.0
        bad = gpu.upload(np.array([1.0, np.nan if kv.rank == kv.size - 1 else 1.0], np.float16))
        assert scaler.divisor(kv, [fine, bad]) is None
        if kv.rank == 0:
            with pytest.raises(TypeError, match="expected an array"):
                scaler.divisor(kv, [fine, "no array"])
        else:
            with pytest.raises(PeerFailed):
                scaler.divisor(kv, fine)


@pytest.mark.ranks(1)
def test_arrays_without_elements_lie_nowhere(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy says 0, of which numpy before 2.4 makes no array."""
    empty, address = gpu.upload(np.empty((2, 0), np.float16)), gpu.address
    monkeypatch.setattr(gpu, "address", lambda array: address(array) if array.size else pytest.fail("it was asked for"))
    there = gpu.upload(np.array([3.0, 4.0]))
    assert clip_global_norm([empty, there, empty], 1.0) == 5
    np.testing.assert_allclose(on_host(there), [0.6, 0.8])
    outline = writable(empty).outline
    assert (outline.shape, outline.itemsize) == ((2, 0), 2)


@pytest.mark.ranks(1)
def test_what_cannot_be_clipped(gpu: FakeGpu) -> None:
    for bad in (np.inf, np.nan):
        array = gpu.upload(np.array([1.0, bad]))
        assert not np.isfinite(clip_global_norm([array], 1.0))
        assert array.get()[0] == 1
    with pytest.raises(Unsupported, match="cannot be measured"):
        clip_global_norm([gpu.upload(np.ones(3, np.int32))], 1.0)


@WHERE
@BOTH
def test_states_go_on(comm: Any, gpu: FakeGpu, store: Any, on_gpus: bool, on_store: bool, folder: Path) -> None:
    """From a Trainer over a GPU to one over the host, and to another over a GPU."""
    options = {"learning_rate": 0.1, "momentum": 0.5, "multi_precision": True}
    rank, results = comm.rank if comm else 0, []
    first = weights(gpu.upload)
    with store(on_gpus) as kv:
        trainer = Trainer(first, "sgd", options, kvstore=kv, update_on_kvstore=on_store)
        steps(trainer, rank, gpu.upload, 2, clips=False)
        trainer.save_states(folder / "states")
        saved = {name: on_host(array) for name, array in first.items()}
        steps(trainer, rank, gpu.upload, 2, clips=False, first=2)
        results.append(first)
    for make, upload in ((lambda: store(on_gpus), gpu.upload), (lambda: store(False), np.copy)):
        params = {name: upload(array) for name, array in saved.items()}
        with make() as kv:
            trainer = Trainer(params, "sgd", options, kvstore=kv, update_on_kvstore=on_store)
            trainer.load_states(folder / "states")
            steps(trainer, rank, upload, 2, clips=False, first=2)
            results.append(params)
    for name in SHAPES:
        for result in results[1:]:
            np.testing.assert_array_equal(on_host(result[name]), on_host(first[name]), err_msg=name)


@WHERE
def test_too_little_memory_for_states_on_one_rank(
    comm: Any, gpu: FakeGpu, store: Any, on_gpus: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank takes them, however much there was, and each goes on with what it had."""
    options = {"learning_rate": 0.1, "momentum": 0.5, "multi_precision": True}
    rank, size = (comm.rank, comm.size) if comm else (0, 1)
    results, upload = [], gpu.upload
    for fails in (True, False):
        params = weights(upload)
        with store(on_gpus) as kv:
            trainer = Trainer(params, "sgd", options, kvstore=kv, update_on_kvstore=False)
            steps(trainer, rank, upload, 1, clips=False)
            trainer.save_states(folder / "states")
            steps(trainer, rank, upload, 1, clips=False, first=1)
            for allowed in range(3) if fails else ():
                left = iter(range(allowed))

                def scarce(array: Any, out: Any = None, left: Any = left) -> Any:
                    if rank == size - 1 and next(left, None) is None:
                        raise MemoryError("out of memory")
                    return upload(array, out)

                with monkeypatch.context() as patch:
                    patch.setattr(gpu, "upload", scarce)
                    with pytest.raises(MemoryError if rank == size - 1 else PeerFailed, match="out of memory"):
                        trainer.load_states(folder / "states")
            steps(trainer, rank, upload, 2, clips=False, first=2)
            results.append({name: on_host(array) for name, array in params.items()})
    for name in SHAPES:
        np.testing.assert_array_equal(*(result[name] for result in results), err_msg=name)


@WHERE
@BOTH
def test_weights_and_gradients_of_all_kinds(comm: Any, gpu: FakeGpu, store: Any, on_gpus: bool, on_store: bool) -> None:
    """Shared, strided, added up, set by hand, and on the host beside those on a GPU."""
    wide = gpu.upload(np.ones((4, 6), np.float32))
    tied = gpu.upload(np.ones(3))
    params = {"even": wide[:, ::2], "odd": wide[:, 1::2], "one": tied, "other": tied, "host": np.ones(2)}
    added = Parameter(gpu.upload(np.zeros(2)), grad_req="add")
    with store(on_gpus) as kv:
        trainer = Trainer(
            {**params, "added": added}, "sgd", {"learning_rate": 1.0}, kvstore=kv, update_on_kvstore=on_store
        )
        trainer.start()
        trainer.set_data({"odd": np.full((4, 3), 5, np.float32)})
        gradients = {name: np.ones_like(on_host(array)) for name, array in params.items()}
        trainer.set_grads({name: array if name == "host" else gpu.upload(array) for name, array in gradients.items()})
        for _ in range(2):
            added.grad = gpu.upload(np.ones(2))
        trainer.step(kv.size)
    np.testing.assert_array_equal(wide.get(), np.tile([0.0, 4.0], (4, 3)))
    np.testing.assert_array_equal(tied.get(), np.full(3, -1.0))
    np.testing.assert_array_equal(params["host"], np.zeros(2))
    np.testing.assert_array_equal(added.data.get(), np.full(2, -2.0))


@pytest.mark.ranks(1)
def test_mistakes(gpu: FakeGpu) -> None:
    weight = Parameter(gpu.upload(np.ones(3)))
    with pytest.raises(
        ValueMismatch, match="the gradient is on the host and a parameter on fake:0; copy the gradient there first"
    ):
        weight.grad = np.ones(3)
    with pytest.raises(ValueMismatch, match=r"a gradient of shape \(2,\)"):
        weight.grad = gpu.upload(np.ones(2))
    mpikv.Trainer({"w": weight}, "sgd")
    with pytest.raises(ValueMismatch, match="and parameter 'w' on fake:0; copy"):
        weight.grad = np.ones(3)
    with pytest.raises(ValueMismatch, match=r"of shape \(2,\) does not fit parameter 'w' of shape \(3,\)"):
        weight.grad = gpu.upload(np.ones(2))
    with pytest.raises(ValueMismatch, match="the gradient is on fake:0 and a parameter on the host; copy"):
        Parameter(np.ones(3)).grad = gpu.upload(np.ones(3))
    whole = gpu.upload(np.ones(6))
    with pytest.raises(ValueMismatch, match="'a' and 'b' overlap in memory"):
        Trainer({"a": whole[:4], "b": whole[3:]}, "sgd")
    added = Parameter(gpu.upload(np.ones(3, np.float32)), grad_req="add")
    added.grad = gpu.upload(np.ones(3, np.float32))
    with pytest.raises(ValueMismatch, match="a gradient of int32 cannot be added to one of float32"):
        added.grad = gpu.upload(np.ones(3, np.int32))
    assert weight.gpu is gpu
    assert Parameter(np.ones(3)).gpu is None
