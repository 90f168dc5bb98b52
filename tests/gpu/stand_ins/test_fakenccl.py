"""The stand-in for NCCL finds what NCCL would hang in, crash of, or pass over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest

from mpikv.testing.fakegpu import FakeArray, FakeGpu
from mpikv.testing.fakenccl import FakeCommunicator, FakeNccl, MisuseError, NcclError
from mpikv.testing.fakestreams import FakeStream, RaceError

FLOAT, SUM = FakeNccl.NCCL_FLOAT32, FakeNccl.NCCL_SUM


class Rank:
    """What a rank needs to call NCCL: a communicator, a stream, and memory of eight floats for each rank."""

    def __init__(self, comm: Any) -> None:
        self.rank, self.size = (comm.rank, comm.size) if comm else (0, 1)
        self.gpu = FakeGpu(self.rank)
        self.nccl = FakeNccl(self.gpu, comm and comm.Dup(), patience=20.0)
        identity = self.nccl.get_unique_id()
        self.comm: FakeCommunicator = self.nccl.NcclCommunicator(
            self.size, comm.bcast(identity) if comm else identity, self.rank
        )
        self.stream: FakeStream = self.gpu.stream()
        with self.stream:
            self.array: FakeArray = self.gpu.upload(np.full(8 * self.size, self.rank + 1, np.float32))
        self.address = self.gpu.address(self.array)

    def read(self) -> Any:
        found = np.empty(self.array.shape, np.float32)
        with self.stream:
            self.gpu.download(self.array, found)
        return found

    def allreduce(self, start: int = 0, to: int = 0, count: int = 4, stream: Any = None) -> None:
        """Sum floats at a byte into those at another byte of the memory."""
        handle = self.stream.handle if stream is None else stream
        self.comm.allReduce(self.address + start, self.address + to, count, FLOAT, SUM, handle)


@pytest.fixture
def one(comm: Any) -> Iterator[Rank]:
    rank = Rank(comm)
    yield rank
    if rank.nccl.depth:
        with suppress(NcclError, MisuseError):
            rank.nccl.groupEnd()


@pytest.mark.ranks(1, 2, 3)
def test_sums(one):
    one.allreduce()
    assert (one.read()[:4] == sum(range(1, one.size + 1))).all()
    assert (one.read()[4:] == one.rank + 1).all()
    one.gpu.checker.assert_clean()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("order", ["none", "events", "implicit"])
def test_kernels_of_two_communicators(one, order, monkeypatch):
    """NCCL's guide: without an order on each GPU, "deadlocks could ensue"."""
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", str(int(order == "implicit")))
    others = [one.nccl.NcclCommunicator(one.size, bytes(128), one.rank) for _ in range(2)]
    streams = [one.gpu.stream() for _ in others]
    for number, (other, stream) in enumerate(zip(others, streams, strict=True)):
        if order == "events":
            stream.wait((streams[0] if number else one.stream).record())
        stream.wait(one.stream.record())
        refused = order == "none" and number > 0
        with pytest.raises(MisuseError, match="have no order") if refused else nullcontext():
            place = one.address + 4 * number
            other.allReduce(place, place, 1, FLOAT, SUM, stream.handle)


@pytest.mark.ranks(1, 2, 3)
def test_messages(one):
    right, left = (one.rank + 1) % one.size, (one.rank - 1) % one.size
    one.nccl.groupStart()
    one.comm.send(one.address, 4, FLOAT, right, one.stream.handle)
    one.comm.recv(one.address + 16, 4, FLOAT, left, one.stream.handle)
    one.nccl.groupEnd()
    assert (one.read()[4:8] == left + 1).all()


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda one: one.allreduce(to=1 << 20), "are not memory of fake:0"),
        (lambda one: one.allreduce(count=9), "36 bytes at .* are not memory"),
        (lambda one: one.allreduce(start=2, to=2), "not aligned for float32"),
        (lambda one: one.allreduce(stream=0), "on the default stream"),
        (lambda one: one.allreduce(stream=5), "which is no stream"),
        (lambda one: one.allreduce(to=4), "overlap, and not as in place"),
        (lambda one: (one.comm.destroy(), one.allreduce()), "of a communicator that was destroyed"),
        (lambda one: (one.comm.abort(), one.allreduce()), "of a communicator that was aborted"),
        (lambda one: (one.nccl.groupStart(), one.nccl.groupStart()), "inside of a group"),
        (lambda one: one.nccl.groupEnd(), "that was not begun"),
        (lambda one: grouped(one, {}, {"stream": one.gpu.stream().handle}), "a group uses several streams"),
        (lambda one: grouped(one, {}, {"start": 16}), "calls of one group use the same memory"),
    ],
)
def test_misuse(one, call, complaint):
    with pytest.raises(MisuseError, match=complaint):
        call(one)


def grouped(one: Rank, *calls: dict[str, int]) -> None:
    one.nccl.groupStart()
    for options in calls:
        one.allreduce(**options)
    one.nccl.groupEnd()


@pytest.mark.ranks(1)
def test_memory_that_was_freed_is_not_found(one):
    del one.array
    with pytest.raises(MisuseError, match="are not memory"):
        one.allreduce()


@pytest.mark.ranks(1)
def test_a_thread_chooses_its_gpu(one):
    found = list[str]()

    def make(*chosen: FakeGpu) -> None:
        for gpu in chosen:
            gpu.use()
        with pytest.raises(MisuseError) as refused:
            one.nccl.NcclCommunicator(1, b"", 0)
        found.append(str(refused.value))

    for chosen in ((), (FakeGpu(1),)):
        thread = threading.Thread(target=make, args=chosen)
        thread.start()
        thread.join()
    assert "has not chosen its GPU" in found[0]
    assert "on fake:0, which is not the present GPU" in found[1]


@pytest.mark.ranks(1)
def test_calls_are_work_of_their_stream(one):
    one.allreduce()
    with pytest.raises(RaceError, match="add on stream 0 reads what allReduce on stream 1 writes"):
        one.array[:4] += 1


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("differ", ["operation", "count", "dtype", "root"])
def test_ranks_make_the_same_calls(one, differ):
    odd = one.rank == one.size - 1
    count, dtype, root = 4, FLOAT, 0
    if differ == "count":
        count += odd
    elif differ == "dtype":
        dtype = FLOAT + odd
    elif differ == "root":
        root = int(odd)
    verb, roots = ("allReduce", []) if differ == "operation" and odd else ("reduce", [root])
    call = getattr(one.comm, verb)
    with pytest.raises(MisuseError, match=r"rank \d calls .* and rank \d"):
        call(one.address, one.address, count, dtype, SUM, *roots, one.stream.handle)


@pytest.mark.ranks(1)
def test_work_that_never_ends(one):
    one.nccl.stick_at = {len(one.nccl.calls) + 1}
    one.allreduce()
    event, other = one.stream.record(), one.gpu.stream()
    assert [event.done for _ in range(5)] == [False] * 5
    other.wait(event)
    after = other.record()
    assert [after.done for _ in range(5)] == [False] * 5
    with pytest.raises(MisuseError, match="waits for ever"):
        one.comm.destroy()
    one.comm.abort()
    assert [event.done, event.done, after.done, after.done] == [False, True, False, True]
    one.stream.synchronize()
