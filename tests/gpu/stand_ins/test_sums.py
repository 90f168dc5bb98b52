"""Sums of arrays of GPUs by stores that keep no values, on a GPU that is none: without copies, without NCCL, or where
it fails. Their results are shown on real GPUs, in ``tests/gpu/real/test_sums.py``.
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


class Rank:
    """This rank's GPU, and the NCCL that stores are given, which are noted."""

    def __init__(self, comm: Any) -> None:
        self.gpu, self.made = FakeGpu(comm.rank if comm else 0), list[FakeNccl]()
        self._comms = [comm.Dup() for _ in range(2)] if comm else []
        self.lack = ""
        self.has_cupy = lambda: True

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
    for name in ("gpu_of", "find_nccl", "has_cupy"):
        monkeypatch.setattr(f"mpikv.creation.{name}", getattr(rank, name))
    yield rank
    gc.collect()
    rank.gpu.checker.assert_clean()


@pytest.fixture
def kv(here: Rank, comm: Any) -> Iterator[Any]:
    with mpikv.create("allreduce", comm=comm, timeout=20) as store:
        yield store


def ranks_of(kv: Any) -> range:
    return range(1, kv.size + 1)


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
