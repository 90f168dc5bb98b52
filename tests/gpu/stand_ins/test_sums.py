"""Sums of arrays of GPUs by stores that keep no values, on a GPU that is none: in place, with the host's results."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv.errors import (
    Closed,
    PeerFailed,
    RankMismatch,
    TransportError,
    TransportUnavailable,
    Unsupported,
    ValueMismatch,
)
from mpikv.testing.fakegpu import FakeGpu, FakeTensor
from mpikv.testing.fakenccl import FakeNccl
from mpikv.testing.fakestreams import RaceError
from mpikv.testing.store import on_host

pytestmark = pytest.mark.ranks(1, 2, 3)
SEVERAL = pytest.mark.ranks(2, 3)
DTYPES = ("float32", "float64", "float16", "int16", "int64", "uint8", "bool", "complex64")
SHAPES = ((), (3,), (0, 2), (4, 5), (3000,))


class Rank:
    """This rank's GPU, and the NCCL that stores are given, which are noted."""

    def __init__(self, comm: Any) -> None:
        self.gpu, self.made = FakeGpu(comm.rank if comm else 0), list[FakeNccl]()
        self._comms = [comm.Dup() for _ in range(2)] if comm else []
        self.lack = ""

    def gpu_of(self, value: Any) -> FakeGpu:
        assert value.__dlpack_device__() == (2, self.gpu.ordinal)
        return self.gpu

    def find_nccl(self) -> FakeNccl:
        if self.lack:
            raise TransportUnavailable(self.lack)
        self.made.append(FakeNccl(self.gpu, self._comms.pop()))
        return self.made[-1]

    @property
    def calls(self) -> list[str]:
        """NCCL's calls, after those of its beginning."""
        return self.made[0].calls[4:]


@pytest.fixture
def here(comm: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    rank = Rank(comm)
    for name in ("gpu_of", "find_nccl"):
        monkeypatch.setattr(f"mpikv.creation.{name}", getattr(rank, name))
    monkeypatch.setattr("mpikv.creation.has_cupy", lambda: True)
    monkeypatch.setattr("mpikv.train.array_location.gpu_of", rank.gpu_of)
    yield rank
    gc.collect()
    rank.gpu.checker.assert_clean()


@pytest.fixture
def kv(here: Rank, comm: Any) -> Iterator[Any]:
    with mpikv.create("allreduce", comm=comm, timeout=20) as store:
        yield store


def ranks_of(kv: Any) -> range:
    return range(1, kv.size + 1)


# --- What comes of it


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"bucket_bytes": 4096}], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_the_same_as_with_arrays_of_the_host(here: Rank, comm: Any, options: Any, seed: int) -> None:
    """Random calls, from several streams, in all forms."""
    gpu, draw = here.gpu, np.random.default_rng(seed)
    own = np.random.default_rng([seed, comm.rank if comm else 0])
    there, plain = (mpikv.create("horovod", comm=comm, **options) for _ in range(2))
    streams = [gpu.current(), gpu.stream(), gpu.stream()]
    for _ in range(25):
        names = [f"k{number}" for number in draw.permutation(6)[: draw.integers(1, 4)]]
        kinds = [(SHAPES[draw.integers(len(SHAPES))], DTYPES[draw.integers(len(DTYPES))]) for _ in names]
        verb = str(draw.choice(["pushpull", "in place", "dict", "lists", "several outs", "cast", "gaps", "broadcast"]))
        values = [own.integers(0, 9, shape).astype(dtype) for shape, dtype in kinds]
        with streams[own.integers(3)]:
            found = call(there, verb, names, [gpu.upload(value) for value in values], gpu)
            expected = call(plain, verb, names, [value.copy() for value in values], None)
            for one, other in zip(found, expected, strict=True):
                assert one.dtype == other.dtype
                np.testing.assert_array_equal(on_host(one), other)
    assert bool(here.made) is (comm is not None)
    for store in (there, plain):
        store.close()


def call(kv: Any, verb: str, names: list[str], arrays: list[Any], gpu: FakeGpu | None) -> list[Any]:
    """Make a call; return what it has filled."""

    def new(shape: tuple[int, ...], dtype: Any) -> Any:
        array = np.full(shape, 7, dtype)
        return array if gpu is None else gpu.upload(array)

    outs = [new(array.shape, array.dtype) for array in arrays]
    if verb == "in place":
        assert kv.pushpull(names, arrays) is arrays
        return arrays
    if verb == "dict":
        given = dict(zip(names, arrays, strict=True))
        assert kv.pushpull(given) is given
        return arrays
    if verb == "lists":
        more = [[array, new(array.shape, array.dtype)] for array in arrays]
        kv.pushpull(names, more, out=outs)
    elif verb == "several outs":
        others = [new(array.shape, array.dtype) for array in arrays]
        kv.pushpull(names, arrays, out=[list(pair) for pair in zip(outs, others, strict=True)])
        outs += others
    elif verb == "cast":
        outs = [new(array.shape, "float64" if array.dtype.kind == "f" else array.dtype) for array in arrays]
        kv.pushpull(names, arrays, out=outs)
    elif verb == "gaps":
        arrays = [new((*array.shape, 2), array.dtype)[..., 0] for array in arrays]
        outs = [new((*array.shape, 2), array.dtype)[..., 1] for array in arrays]
        kv.pushpull(names, arrays, out=outs)
    elif verb == "broadcast":
        kv.broadcast(names, arrays, out=outs)
        kv.broadcast(names, arrays)
        return [*outs, *arrays]
    else:
        assert kv.pushpull(names, arrays, out=outs) is outs
    return [*outs, *arrays]


def test_sums_are_made_where_arrays_lie(here: Rank, kv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied, and no memory is taken: one call of NCCL's sums all."""
    gpu, launched = here.gpu, list[str]()
    arrays = [gpu.upload(np.full(size, kv.rank + 1.0, np.float32)) for size in (5, 3000, 40000)]
    outs = [gpu.empty(array.shape, array.dtype) for array in arrays]
    names = ["a", "b", "c"]
    kv.pushpull(names, arrays, out=outs)
    launch, before = FakeGpu.launch, gpu.allocations

    def noted(self: FakeGpu, work: str, *arguments: Any) -> None:
        launched.append(work)
        launch(self, work, *arguments)

    monkeypatch.setattr(FakeGpu, "launch", noted)
    made = len(here.calls) if here.made else 0
    kv.pushpull(names, arrays, out=outs)
    kv.pushpull(names, arrays)
    monkeypatch.undo()
    assert gpu.allocations == before
    if here.made:
        assert (here.calls[made:], launched) == (["allReduce"] * 6, [])
    total = float(sum(ranks_of(kv)))
    for array in (*arrays, *outs):
        assert (on_host(array) == total).all()


@SEVERAL
def test_half_precision_is_summed_in_place_where_it_may_be_rounded(here: Rank, comm: Any) -> None:
    array = here.gpu.upload(np.full(3000, 0.1, np.float16))
    with mpikv.create("horovod", comm=comm, native_halves=True) as kv:
        kv.pushpull("g", array)
        made, before = len(here.calls), here.gpu.allocations
        array.fill(0.1)
        kv.pushpull("g", array)
        assert here.calls[made:] == ["allReduce"]
        assert here.gpu.allocations == before
        total = np.float16(0.1)
        for _ in range(1, kv.size):
            total += np.float16(0.1)
        assert (on_host(array) == total).all()


@pytest.mark.parametrize("lent", [lambda array: array, FakeTensor], ids=["CuPy's", "another library's"])
def test_arrays_that_are_filled_may_be_those_of_other_names(here: Rank, kv: Any, lent: Any) -> None:
    first, second = (here.gpu.upload(np.full(7, number + kv.rank, np.float32)) for number in (0, 10))
    for _ in range(2):
        kv.pushpull(["a", "b"], list(map(lent, (first, second))), out=list(map(lent, (second, first))))
        first, second = second, first
    kv.pushpull(["a", "b"], list(map(lent, (first, second))), out=list(map(lent, (second, first))))
    ranks = sum(range(kv.size))
    for array, one in ((second, ranks), (first, 10 * kv.size + ranks)):
        assert (on_host(array) == one * kv.size**2).all()


def test_arrays_of_the_host_need_no_gpu(here: Rank, kv: Any) -> None:
    for _ in range(2):
        assert kv.pushpull("g", np.ones(3))[0] == kv.size
        np.testing.assert_array_equal(kv.broadcast("g", np.full(3, kv.rank)), np.zeros(3))
    assert not here.made
    assert not kv._on_gpus


@SEVERAL
def test_names_of_some_ranks_hosts_are_summed_on_the_host(here: Rank, kv: Any) -> None:
    """Whichever of the ranks' arrays lie there."""
    for _ in range(3):
        array = np.full(4, kv.rank + 1.0)
        given = array if kv.rank == 1 else here.gpu.upload(array)
        np.testing.assert_array_equal(on_host(kv.pushpull("g", given)), np.full(4, sum(ranks_of(kv))))
    assert not here.made
    kv.pushpull("other", here.gpu.upload(np.ones(3)))
    assert here.made


def test_where_a_name_lies_may_change_on_all_ranks(here: Rank, kv: Any) -> None:
    def check(names: list[str], *places: bool) -> None:
        arrays = [np.ones(2) for _ in names]
        given = [here.gpu.upload(array) if there else array for array, there in zip(arrays, places, strict=True)]
        for array in kv.pushpull(names, given):
            assert (on_host(array) == kv.size).all()

    check(["a"], True)
    check(["b"], False)
    check(["a", "b"], True, False)  # all on the host, then
    check(["a"], True)
    check(["a", "b"], True, True)
    check(["b"], False)
    check(["a"], True)
    kv.delete(["a", "b"])
    with pytest.raises(mpikv.KeyNotInitialized):
        kv.delete("a")
    check(["a", "b"], True, True)


def test_a_trainer_on_it_updates_weights_on_the_gpu(here: Rank, kv: Any, comm: Any) -> None:
    shapes, random = {"w": (3, 4), "b": (5,)}, np.random.default_rng(kv.rank)
    plain = mpikv.create("horovod", comm=comm)
    first = {name: np.full(shape, kv.rank, np.float32) for name, shape in shapes.items()}
    there = {name: here.gpu.upload(array) for name, array in first.items()}
    trainers = [
        mpikv.Trainer(params, "adam", {"learning_rate": 0.5}, kvstore=store)
        for params, store in ((there, kv), (first, plain))
    ]
    for _ in range(3):
        gradients = {name: random.integers(-4, 5, shape).astype(np.float32) for name, shape in shapes.items()}
        trainers[0].set_grads({name: here.gpu.upload(gradient) for name, gradient in gradients.items()})
        trainers[1].set_grads(gradients)
        for trainer in trainers:
            trainer.step(2)
    for name in shapes:
        np.testing.assert_array_equal(on_host(there[name]), first[name])
    assert kv._on_gpus
    plain.close()


def test_ranks_that_share_a_gpu_tell_nccl_before_it_is_used(
    here: Rank, comm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr("mpikv.creation.share_gpus", told.append)
    for sharing in (False, True):
        monkeypatch.setenv("MPIKV_GPU_SHARING", str(int(sharing)))
        with mpikv.create("horovod", comm=comm) as kv:
            kv.pushpull("g", here.gpu.upload(np.ones(3)))
            assert told == [kv.rank] * sharing


# --- Streams and memory


@SEVERAL
def test_calls_are_in_the_order_of_streams(here: Rank, kv: Any) -> None:
    gpu, caller, other = here.gpu, here.gpu.stream(), here.gpu.stream()
    with caller:
        array = gpu.upload(np.ones(50, np.float32))
        for _ in range(3):
            kv.pushpull("g", array)
            array /= np.float32(kv.size)
        assert (on_host(array) == 1).all()
        kv.pushpull("g", array)
    with other, pytest.raises(RaceError, match="nothing orders them"):
        array += 1
    gpu.checker.faults.clear()
    with other:
        late = gpu.upload(np.ones(50, np.float32))
    with pytest.raises(RaceError, match="nothing orders them"):
        kv.pushpull("late", late)
    gpu.checker.faults.clear()


def test_arrays_of_a_call_live_until_the_gpu_is_done(here: Rank, kv: Any) -> None:
    gpu = here.gpu
    with gpu.stream():
        array = gpu.upload(np.ones((4, 6), np.float16))
        kv.pushpull("g", [array, array], out=array[:, ::2].copy() if kv.size < 0 else array)
        memory = weakref.ref(array._block)
        del array
        gpu.checker.assert_clean()
    for _ in range(4):
        kv.pushpull("h", gpu.upload(np.ones(3)))
    gc.collect()
    limit = time.monotonic() + 10
    while memory() is not None and time.monotonic() < limit:
        time.sleep(1e-3)
    assert memory() is None


@SEVERAL
def test_a_gpu_without_memory_refuses_a_call_that_needs_some(here: Rank, kv: Any) -> None:
    gpu = here.gpu
    array = gpu.upload(np.ones((4, 6), np.float32))
    kv.pushpull("g", array)
    if kv.rank == 0:
        gpu.spare = 0
    with pytest.raises(MemoryError if kv.rank == 0 else PeerFailed, match="has no"):
        kv.pushpull("g", array, out=gpu_strided(gpu, kv))
    assert (on_host(kv.pushpull("g", array)) == kv.size**2).all()


def gpu_strided(gpu: FakeGpu, kv: Any) -> Any:
    spare, gpu.spare = gpu.spare, None
    out = gpu.empty((4, 12), np.dtype(np.float32))[:, ::2]
    gpu.spare = spare
    return out


# --- Mistakes


@SEVERAL
def test_ranks_that_bring_something_else(here: Rank, kv: Any) -> None:
    gpu = here.gpu
    ones = gpu.upload(np.ones(3))
    kv.pushpull("g", ones)
    with pytest.raises(RankMismatch, match=r"\(item 0: 'g' on the host, unlike before against 'g' float64\[3\]\)"):
        kv.pushpull("g", np.ones(3) if kv.rank == 0 else ones)
    with pytest.raises(RankMismatch, match=r"\(item 0: 'g' float64\[2\] against 'g' float64\[3\]\)"):
        kv.pushpull("g", gpu.upload(np.ones(2)) if kv.rank == 0 else ones)
    with pytest.raises(RankMismatch, match="broadcast"):
        (kv.broadcast if kv.rank else kv.pushpull)("g", ones)
    others = PeerFailed if kv.rank else ValueMismatch
    with pytest.raises(others, match="the array to fill of key 'g' has shape"):
        kv.pushpull("g", ones, out=gpu.upload(np.ones(3 if kv.rank else 4)))
    with pytest.raises(others, match="those of one list are alike"):
        kv.pushpull("g", [ones, ones if kv.rank else gpu.upload(np.ones(3, np.float32))], out=ones)
    with pytest.raises(PeerFailed if kv.rank else TypeError):
        kv.pushpull("g", ones if kv.rank else [1.0, 2.0])
    assert (on_host(kv.pushpull("g", gpu.upload(np.ones(3)))) == kv.size).all()


@SEVERAL
def test_a_stream_that_is_captured(here: Rank, kv: Any) -> None:
    array, stream = here.gpu.upload(np.ones(3)), here.gpu.stream()
    kv.pushpull("g", array)
    stream.wait(here.gpu.current().record())
    if kv.rank == 0:
        stream.begin_capture()
    with stream, pytest.raises(PeerFailed if kv.rank else Unsupported, match="the current stream is being captured"):
        kv.pushpull("g", array)
    if kv.rank == 0:
        stream.end_capture()
    kv.pushpull("g", array)


# --- Where NCCL cannot be had, fails, and ends


@SEVERAL
def test_without_nccl_arrays_are_copied(here: Rank, kv: Any, caplog: pytest.LogCaptureFixture) -> None:
    """On all ranks, though one may lack it; and nobody asks again."""
    here.lack = "no library" if kv.rank == kv.size - 1 else ""
    with caplog.at_level(logging.WARNING, "mpikv"):
        for name in ("a", "b", "a"):
            array = here.gpu.upload(np.ones(3))
            assert (on_host(kv.pushpull(name, array)) == kv.size).all()
    said = [record.getMessage() for record in caplog.records if "because a rank reports: no library" in record.message]
    assert len(said) == (kv.rank == 0)
    assert len(here.made) <= 1


@SEVERAL
@pytest.mark.parametrize(("transport", "status"), [("shm", 1), ("mpi", 1), ("shm", None)])
def test_a_sum_that_fails_or_never_ends_on_one_rank_is_over_everywhere(
    here: Rank, comm: Any, transport: str, status: int | None
) -> None:
    kv = mpikv.create("horovod", comm=comm, timeout=20 if status else 0.8, transport=transport)
    array = here.gpu.upload(np.ones(3))
    kv.pushpull("g", array)
    (nccl,) = here.made
    nccl.patience = 0.3
    began, following = time.monotonic(), range(len(nccl.calls) + 1, len(nccl.calls) + 9)
    if kv.rank == 0:
        nccl.fail_at |= dict.fromkeys(following[:1], status) if status else {}
        nccl.stick_at |= set() if status else set(following)
    with pytest.raises((TransportError, Closed), match="a CUDA call failed" if status else None):
        again(lambda: kv.pushpull("g", array), *[kv.barrier] * (status is None))
    assert time.monotonic() - began < 15
    with pytest.raises((Closed, TransportError)):
        kv.pushpull("g", np.ones(3))
    assert nccl.communicators[0].state == "aborted"


def again(*calls: Callable[[], Any]) -> None:
    """Make calls until one fails."""
    for _ in range(1000):
        for each in calls:
            each()


@SEVERAL
@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_the_end_of_a_store_ends_its_sums(here: Rank, comm: Any, error: type[Exception] | None) -> None:
    with pytest.raises(error) if error else nullcontext(), mpikv.create("horovod", comm=comm, timeout=20) as kv:
        kv.pushpull("g", here.gpu.upload(np.ones(3)))
        if error:
            raise error
    assert here.made[0].communicators[0].state == ("aborted" if error else "destroyed")
    with pytest.raises(Closed):
        kv.pushpull("g", here.gpu.upload(np.ones(3)))
