"""Sums of arrays of GPUs by stores that keep no values, on a GPU that is none: in order, with the host's results, and
without NCCL or where it fails. More is shown on real GPUs, in ``tests/gpu/real/test_sums.py``.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv.errors import Closed, TransportError, TransportUnavailable
from mpikv.testing.fakegpu import FakeGpu
from mpikv.testing.fakenccl import FakeNccl
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


@pytest.fixture
def here(comm: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    rank = Rank(comm)
    for name in ("gpu_of", "find_nccl"):
        monkeypatch.setattr(f"mpikv.creation.{name}", getattr(rank, name))
    monkeypatch.setattr("mpikv.creation.has_cupy", lambda: True)
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
    made = len(here.made[0].calls) if here.made else 0
    kv.pushpull(names, arrays, out=outs)
    kv.pushpull(names, arrays)
    monkeypatch.undo()
    assert gpu.allocations == before
    if here.made:
        assert (here.made[0].calls[made:], launched) == (["allReduce"] * 6, [])
    total = float(sum(ranks_of(kv)))
    for array in (*arrays, *outs):
        assert (on_host(array) == total).all()


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
