"""A store on a GPU that is none: the contract of a store, with the order of its work checked."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from support.gpus import store_on

import mpikv
from mpikv.cluster.waiting import Waiting
from mpikv.errors import PeerFailed, TransportUnavailable, Unsupported
from mpikv.store.kvstore import KVStore
from mpikv.testing import StoreContract
from mpikv.testing.fakegpu import FakeGpu, FakeTensor
from mpikv.testing.fakenccl import FakeNccl
from mpikv.testing.store import on_host


@pytest.mark.ranks(1, 2, 3, 4)
class TestOnAGpu(StoreContract):
    options: Mapping[str, Any] = MappingProxyType({})

    @pytest.fixture(autouse=True)
    def on_gpu(self, comm: Any) -> Iterator[None]:
        self.gpu, self.comm = FakeGpu(comm.rank if comm else 0), comm
        yield
        self.gpu.checker.assert_clean()

    def create(self, **options: Any) -> KVStore:
        return store_on(self.gpu, self.comm, **{**self.options, **options})


class TestInAFixedOrder(TestOnAGpu):
    options = MappingProxyType({"deterministic": True})


class TestReplicas(TestOnAGpu):
    options = MappingProxyType({"placement": "replicated"})
    callables = False


class TestAtTheRoot(TestOnAGpu):
    options = MappingProxyType({"placement": "root"})


KEYS = {"w": ((3, 4), np.float32), "b": ((5,), np.float64), "big": ((6000,), np.float32), "h": ((7, 3), np.float16)}


@pytest.mark.ranks(1, 2)
def test_the_stores_gpu_need_not_be_the_present_one(gpu: FakeGpu, comm: Any) -> None:
    """As in a thread that a program has made, where the first of a host is."""

    def full(number: float, size: int = 6000) -> Any:
        return gpu.upload(np.full(size, number, np.float32))

    with store_on(gpu, comm) as kv:
        FakeGpu(gpu.ordinal + 1).use()
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
                kv.set("a", kv.view("b"))
                kv.push("a", gpu.upload(np.ones((6000, 2), np.float32))[:, 0])
                kv.pull("a", out=gpu.upload(np.ones((6000, 2), np.float32))[:, 0])
                kv.broadcast("c", full(1, 3), out=full(0, 3))
                kv.delete("c")
                kv.buffer("a")
                kv.pushpull("a")
                with kv.join():
                    kv.push("a", full(1))
        kv.set_gradient_compression(None)
        kv.set_optimizer("sgd")
        kv.push(["a", "b"], [kv.view("b"), kv.view("a")], wait=False).wait()
        step = kv.capture(["a", "b"], [full(1), full(2)], out=[full(0), full(0)])
        for _ in range(3):
            step()
        kv.init("r", mpikv.RowSparse([0], np.ones((1, 3), np.float32), (9, 3)))
        kv.push("r", [mpikv.RowSparse([1, 2], gpu.upload(np.ones((2, 3), np.float32)), (9, 3))] * 2)
        kv.row_sparse_pull("r", row_ids=[0, 1])


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
def test_the_weights_gpu_need_not_be_the_present_one(known: FakeGpu, comm: Any, optimizer: str) -> None:
    FakeGpu(known.ordinal + 1).use()
    results = []
    for upload in (known.upload, np.copy):
        weights = {name: upload(np.ones(shape, dtype)) for name, (shape, dtype) in KEYS.items()}
        with mpikv.create(comm=comm, timeout=5) as kv:
            trainer = mpikv.Trainer(weights, optimizer, kvstore=kv, update_on_kvstore=False)
            trainer.start()
            for step in range(1, 3):
                for name, (shape, dtype) in KEYS.items():
                    trainer.params[name].set_sum([upload(np.full(shape, step / one, dtype)) for one in (1, 2)])
                trainer.step(2)
        results.append({name: on_host(weight) for name, weight in weights.items()})
    for name in KEYS:
        np.testing.assert_array_equal(*(result[name] for result in results), err_msg=name)


@pytest.mark.ranks(1, 2, 3)
def test_another_librarys_views_of_values_are_read_before_these_change(comm: Any) -> None:
    """In a push of several messages one value changes before the next one is sent."""
    with store_on(FakeGpu(comm.rank if comm else 0), comm) as kv:
        kv.init(["a", "b"], [np.full(6000, number, np.float32) for number in (1, 10)])
        kv.push(["a", "b"], [FakeTensor(kv.view(key)) for key in ("b", "a")])
        for key, old in (("a", 10), ("b", 1)):
            np.testing.assert_array_equal(on_host(kv.pull(key)), np.full(6000, kv.size * old))


@pytest.mark.ranks(1, 2, 3)
def test_a_lack_of_memory_is_told_with_the_call(gpu, comm):
    with store_on(gpu, comm, timeout=5) as kv:
        where = rf" \[rank {kv.rank}/{kv.size}\]$" if kv.size > 1 else "$"
        kv.init("w", np.ones(3))
        gpu.spare = 0
        with pytest.raises(MemoryError, match=rf"^push\('w'\): fake:{kv.rank} has no .*{where}"):
            kv.push("w", np.ones(3))
        value = gpu.upload(np.ones(1 << 20))
        gpu.spare = 0
        with pytest.raises(MemoryError, match=rf"^init\('x'\): .*fake:0 has no .*{where}"):
            kv.init("x", value)


@pytest.mark.ranks(1, 2)
def test_arrays_of_a_call_are_let_go_of_without_another_call(gpu, comm):
    with store_on(gpu, comm) as kv:
        kv.init("w", np.ones(3))
        gradient = gpu.upload(np.ones(3))
        memory = weakref.ref(gradient._block)
        kv.push("w", gradient)
        del gradient
        Waiting(10.0).until(lambda: memory() is None, tuple)


@pytest.mark.ranks(2, 3)
def test_a_lack_of_memory_for_messages_names_their_size(gpu, comm):
    """On every rank, though one alone lacks it."""
    gpu.spare = 3 if comm.rank == 0 else None
    said = r"\d+ bytes for messages \(bucket_bytes is 16384\) are needed and ranks \[0\] have too little"
    with pytest.raises(MemoryError, match=said):
        store_on(gpu, comm, timeout=5)


def test_an_array_that_must_not_be_written_is_no_out() -> None:
    class Immutable:
        __module__ = "jaxlib.xla"
        __dlpack__ = None

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

    with store_on(FakeGpu(), None) as kv:
        kv.init("w", np.ones(3))
        with pytest.raises(TypeError, match=r"jaxlib\.xla array cannot be written to"):
            kv.pull("w", out=Immutable())


@pytest.fixture
def gpus(comm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that gives this rank a GPU, which is not there yet, by its number."""
    lacks = TransportUnavailable("there is none here")
    nccl = comm.Dup() if comm else None

    def give(number: int | None) -> None:
        gpu = None if number is None else FakeGpu(number)

        def find(*place: Any, **options: Any) -> FakeGpu:
            if gpu is None:
                raise lacks
            return gpu

        monkeypatch.setattr("mpikv.creation.find_gpu", find)
        monkeypatch.setattr("mpikv.creation.find_nccl", lambda: FakeNccl(gpu, nccl))

    give(None)
    return give


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", ["nccl", "dist_device_sync", "Dist_Sync_Device", "device", "local_allreduce_device"])
def test_stores_by_name(comm: Any, name: str, gpus: Any) -> None:
    gpus(comm.rank if comm else 0)
    with mpikv.create(name, comm=comm) as kv:
        assert (kv.type, kv.is_capable("gpu")) == (name.lower(), True)
        assert kv.transport == ("local" if kv.size == 1 else "nccl")
        kv.init("w", np.zeros(3))
        kv.set_optimizer("sgd", learning_rate=1.0)
        np.testing.assert_array_equal(on_host(kv.pushpull("w", np.ones(3), np.empty(3))), np.full(3, -kv.size))
        assert kv._config.bucket_bytes == (128 if kv.size == 1 else 64) << 20


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("lacking", ["one rank", "two ranks of one"])
def test_a_store_is_on_gpus_of_all_ranks_or_of_none(comm: Any, lacking: str, gpus: Any) -> None:
    first = comm.rank == 0
    gpus((None if first else comm.rank) if lacking == "one rank" else max(comm.rank, 1))
    error = TransportUnavailable if first or lacking != "one rank" else PeerFailed
    with pytest.raises(error, match="there is none here" if lacking == "one rank" else "ranks 0 and 1"):
        mpikv.create("nccl", comm=comm)
    with mpikv.create("device", comm=comm) as kv:
        assert (kv.transport, kv.is_capable("gpu")) == ("shm", False)
        kv.init("w", np.zeros(3))
        np.testing.assert_array_equal(kv.pushpull("w", np.ones(3)), np.full(3, kv.size))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("why", ["no CuPy", "CuPy without a GPU", "a GPU of one rank"])
def test_who_expects_a_gpu_is_told_that_there_is_none(comm: Any, why: str, gpus: Any, monkeypatch, caplog) -> None:
    rank, size = (comm.rank, comm.size) if comm else (0, 1)
    if why == "a GPU of one rank" and rank:
        gpus(rank)
    monkeypatch.setattr("mpikv.creation.has_cupy", lambda: why == "CuPy without a GPU" and rank == size - 1)
    with caplog.at_level("INFO", logger="mpikv"), mpikv.create("device", comm=comm) as kv:
        assert not kv.is_capable("gpu")
    (said,) = [record for record in caplog.records if "store 'device'" in record.getMessage()]
    assert said.getMessage() == "store 'device' is on the host, because a rank reports: there is none here"
    warns = rank == 0 and (why == "CuPy without a GPU" or (why == "a GPU of one rank" and size > 1))
    assert said.levelname == ("WARNING" if warns else "INFO")


@pytest.mark.ranks(1, 2, 3)
def test_no_gpu_has_kernels_of_numba(comm: Any, gpus: Any, monkeypatch) -> None:
    gpus(comm.rank if comm else 0)
    with pytest.raises(Unsupported, match=r"create: kernels='numba' is for stores on the host"):
        mpikv.create("nccl", comm=comm, kernels="numba")
    with mpikv.create("nccl", comm=comm, kernels="numpy"):
        pass
    monkeypatch.setenv("MPIKV_KERNELS", "numba")
    with pytest.raises(Unsupported, match="create: MPIKV_KERNELS=numba is for"):
        mpikv.create("nccl", comm=comm)


def test_what_an_updater_returns(comm: Any) -> None:
    with store_on(FakeGpu(), comm) as kv:
        kv.init("w", np.ones(3))
        kv.set_updater(lambda key, given, stored: stored + given)
        kv.push("w", np.ones(3))
        kv.set_updater(lambda key, given, stored: np.zeros(3))
        with pytest.raises(TypeError, match=r"returned a numpy\.ndarray for key 'w', whose value is a .*FakeArray; "):
            kv.push("w", np.ones(3))
        np.testing.assert_array_equal(on_host(kv.pull("w")), np.full(3, 2))
