"""A fake ``cupy.cuda.nccl`` over a :class:`~mpikv.testing.fakegpu.FakeGpu` and MPI.

Like NCCL it receives addresses and stream handles, and moves the bytes there, as work of streams that the GPU's checker
knows. It fails, or never ends, by plan. It raises :class:`MisuseError` where ranks call different things. The rules of
NCCL's arguments are those of the emulated NCCL, on which ``tests/gpu/real`` runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ..arrays.arrays import bfloat16
from ..protocols import Array
from .fakegpu import FakeGpu
from .fakestreams import Blocker, FakeStream, MisuseError

__all__ = ["FakeCommunicator", "FakeNccl", "MisuseError", "NcclError"]

_STATUS = {
    1: "NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error",
    2: "NCCL_ERROR_SYSTEM_ERROR: unhandled system error",
    3: "NCCL_ERROR_INTERNAL_ERROR: internal error",
    4: "NCCL_ERROR_INVALID_ARGUMENT: invalid argument",
    5: "NCCL_ERROR_INVALID_USAGE: invalid usage",
    6: "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error",
}
_DTYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16")
_COMBINE = (np.add, np.multiply, np.maximum, np.minimum)
_TAG = 5
# Messages to ranks that did not come: MPI may still read their memory.
_unfinished: list[Any] = []

Message = tuple[str, tuple[int, ...], bytes]
"""What a rank calls: the name, the facts that are alike on the ranks, and the bytes that it sends."""


class NcclError(RuntimeError):
    """The error of the real module."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"{_STATUS[status]} (run with NCCL_DEBUG=WARN for details)")


class Part(NamedTuple):
    """The memory of an operation."""

    content: Array
    use: tuple[Any, int, int, bool]
    """The argument for :meth:`~mpikv.testing.fakestreams.Checker.work`."""


class Operation(NamedTuple):
    """One call, until it runs."""

    name: str
    facts: tuple[int, ...]
    """Dtype, count, op and root: they must be the same on all ranks, or on both sides of a message."""
    peer: int
    """The other side of a message; -1 in a collective operation."""
    send: Part | None
    recv: Part | None
    stream: FakeStream

    @property
    def uses(self) -> list[tuple[Any, int, int, bool]]:
        """The memory it reads and writes."""
        return [part.use for part in (self.send, self.recv) if part is not None]

    @property
    def message(self) -> Message:
        return self.name, self.facts, b"" if self.send is None else self.send.content.tobytes()


class FakeNccl:
    """A fake of the module ``cupy.cuda.nccl``, for one rank.

    With ``comm``, an mpi4py communicator of its own, the ranks exchange messages. A rank waits ``patience`` seconds for
    a message. After that the operation never ends, as on a GPU.
    """

    NcclError = NcclError
    NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = range(6)
    NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = range(6, 10)
    NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = range(4)

    def __init__(self, gpu: FakeGpu, comm: Any = None, patience: float = 20.0, version: int = 23203) -> None:
        self.gpu, self.comm, self.patience, self.version = gpu, comm, patience, version
        self.calls: list[str] = []
        """The names of all communicator calls so far."""
        self.fail_at: dict[int, int] = {}
        """The status of each planned failure, by the number of the call from 1. 7 and 8 raise KeyError, as the real
        module does."""
        self.stick_at: set[int] = set()
        """The calls that never end."""
        self.hold_at: set[int] = set()
        """The calls that end, but return only after :attr:`released`, as NCCL's while it connects."""
        self.asynchronous = 0
        """The status that a check for asynchronous errors finds."""
        self.init_returns = self.abort_returns = True
        """Whether the init and the abort of a communicator return before :attr:`released`."""
        self.released = threading.Event()
        """Set at the end of a test: it ends every endless wait."""
        self.communicators: list[FakeCommunicator] = []
        self.depth = 0
        self._group: list[tuple[FakeCommunicator, Operation]] = []
        self._group_failed = 0
        self._group_sticks = False

    def get_version(self) -> int:
        return self.version

    def get_unique_id(self) -> bytes:
        return np.random.default_rng().bytes(128)

    def NcclCommunicator(self, ndev: int, commId: bytes, rank: int) -> FakeCommunicator:  # noqa: N802, N803, real names
        """Return a new communicator. Collective."""
        if not self.init_returns:
            self.wait_for_ever()
        self.gpu.check_used("a communicator is made")
        self.gpu.check_present("a communicator is made")
        self.count("init")
        made = FakeCommunicator(self, ndev, rank)
        self.communicators.append(made)
        self.hold()
        return made

    def groupStart(self) -> None:  # noqa: N802
        if self.depth:
            raise MisuseError("a group is begun inside of a group")
        self.depth, self._group, self._group_failed, self._group_sticks = 1, [], 0, False

    def groupEnd(self) -> None:  # noqa: N802
        self.depth = 0
        operations, self._group = self._group, []
        if self._group_failed:
            raise_status(self._group_failed)
        if operations:
            operations[0][0].carry_out([operation for _, operation in operations], self._group_sticks)

    def count(self, call: str) -> bool:
        """Count a call, and fail it by plan; return whether it is planned to stick."""
        self.calls.append(call)
        status = self.fail_at.get(len(self.calls))
        if status is not None:
            self._group_failed = status
            raise_status(status)
        return len(self.calls) in self.stick_at

    def hold(self) -> None:
        """Wait if the current call is planned to be held."""
        if len(self.calls) in self.hold_at:
            self.released.wait()

    def wait_for_ever(self) -> NoReturn:
        """Wait as NCCL waits for a missing rank."""
        self.released.wait()
        raise_status(2)

    def queue(self, communicator: FakeCommunicator, operation: Operation, sticks: bool) -> None:
        """Run an operation, or keep it until the end of the group."""
        if self.depth:
            self._group.append((communicator, operation))
            self._group_sticks |= sticks
        else:
            communicator.carry_out([operation], sticks)
        self.hold()


def raise_status(status: int) -> NoReturn:
    """Raise the real module's error; that module does not know all statuses, and raises KeyError for others."""
    if status not in _STATUS:
        raise KeyError(status)
    raise NcclError(status)


class FakeCommunicator:
    """A fake of ``NcclCommunicator``."""

    def __init__(self, nccl: FakeNccl, ndev: int, rank: int) -> None:
        self._nccl, self._gpu, self._comm = nccl, nccl.gpu, nccl.comm
        self._size, self._rank, self.state = ndev, rank, "in use"
        self._stuck = Blocker()
        self._stuck.blocked = False
        others = {other for other in range(ndev) if other != rank}
        if self._exchange({other: [("init", (), b"")] for other in others}, others) is None:
            nccl.wait_for_ever()

    def check_async_error(self) -> None:
        if self._nccl.asynchronous:
            raise_status(self._nccl.asynchronous)

    def destroy(self) -> None:
        self._check_in_use("destroy")
        if self._stuck.blocked:
            self._misuse("destroy with work that never comes to its end waits for ever")
        self.state = "destroyed"

    def abort(self) -> None:
        self._gpu.check_used("a communicator is aborted")
        if not self._nccl.abort_returns:
            self._nccl.released.wait()
        self.state, self._stuck.blocked = "aborted", False

    def allReduce(  # noqa: N802
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int
    ) -> None:
        self._call("allReduce", stream, (datatype, count, op), (sendbuf, count), (recvbuf, count))

    def reduceScatter(  # noqa: N802
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None:
        send = sendbuf, recvcount * self._size
        self._call("reduceScatter", stream, (datatype, recvcount, op), send, (recvbuf, recvcount))

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        recv = (recvbuf, count) if root == self._rank else None
        self._call("reduce", stream, (datatype, count, op, root), (sendbuf, count), recv)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        send = (sendbuff, count) if root == self._rank else None
        self._call("broadcast", stream, (datatype, count, root), send, (recvbuff, count))

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:  # noqa: N802, CuPy's name
        self._call("allGather", stream, (datatype, count), (sendbuf, count), (recvbuf, count * self._size))

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._call("send", stream, (datatype, count), (sendbuf, count), None, peer)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._call("recv", stream, (datatype, count), None, (recvbuf, count), peer)

    def _check_in_use(self, call: str) -> None:
        if self.state != "in use":
            self._misuse(f"{call} of a communicator that was {self.state}")

    def _misuse(self, text: str) -> NoReturn:
        self._gpu.checker.faults.append(text)  # nobody may see an exception in this thread
        raise MisuseError(text)

    def _call(
        self,
        name: str,
        handle: int,
        facts: tuple[int, ...],
        send: tuple[int, int] | None,
        recv: tuple[int, int] | None,
        peer: int = -1,
    ) -> None:
        """Count a call, and queue it; what is sent and received is an address and how many elements are there."""
        self._check_in_use(name)
        sticks = self._nccl.count(name)
        stream = self._gpu.find_stream(handle)
        if not handle or stream is None:
            self._misuse(f"{name} on {handle}, which is the default stream or none")
        parts = (send and self._part(*send, facts[0], False), recv and self._part(*recv, facts[0], True))
        self._nccl.queue(self, Operation(name, facts, peer, *parts, stream), sticks)

    def _part(self, address: int, count: int, datatype: int, writes: bool) -> Part:
        dtype = bfloat16() if _DTYPES[datatype] == "bfloat16" else np.dtype(_DTYPES[datatype])
        nbytes = count * dtype.itemsize
        found = self._gpu.find(address, nbytes)
        if found is None:
            self._misuse(f"{nbytes} bytes at {address:#x} are not memory of {self._gpu.name}")
        block, start = found
        return Part(block.memory[start : start + nbytes].view(dtype), (block, start, start + nbytes, writes))

    def carry_out(self, operations: Sequence[Operation], sticks: bool) -> None:
        """Run one call, or all calls of a group."""
        stream = operations[0].stream
        name, uses = " + ".join(op.name for op in operations), [use for op in operations for use in op.uses]
        self._gpu.checker.work(stream, name, uses)
        self._check_in_use(operations[0].name)
        received = None
        if not sticks and not self._stuck.blocked:
            wanted = {op.peer for op in operations} - {-1, self._rank}
            if any(op.peer < 0 for op in operations):
                wanted = set(range(self._size)) - {self._rank}
            sent = {peer: [op.message for op in operations if op.name != "recv" and op.peer in (-1, peer)]
                    for peer in (*wanted, self._rank)}  # fmt: skip
            own = sent.pop(self._rank)
            received = self._exchange(sent, wanted)
        if received is None:
            self._stuck.blocked = True
            stream.blockers.append(self._stuck)
            return
        received[self._rank] = own
        results = [self._result(operation, received) for operation in operations]
        for operation, result in zip(operations, results, strict=True):
            if operation.recv is not None:
                operation.recv.content[:] = result
        if any(received.values()):
            self._misuse(f"other ranks call more than rank {self._rank}: {received}")

    def _result(self, operation: Operation, received: dict[int, list[Message]]) -> Any:
        """Return what an operation leaves in this rank's memory; take its messages from those that came."""
        if operation.name == "send":
            return None
        peers = range(self._size) if operation.peer < 0 else [operation.peer]
        sent = "send" if operation.name == "recv" else operation.name
        contents = []
        for peer in peers:
            name, facts, content = received[peer].pop(0) if received[peer] else ("nothing", (), b"")
            if (name, facts) != (sent, operation.facts):
                text = f"rank {self._rank} calls {operation.name}{operation.facts} and rank {peer} {name}{facts}"
                self._misuse(text)
            contents.append(content)
        if operation.recv is None:
            return None
        dtype = operation.recv.content.dtype
        parts = [np.frombuffer(content, np.uint8).view(dtype) for content in contents]
        if operation.name in ("recv", "broadcast"):
            return parts[operation.facts[2] if operation.name == "broadcast" else 0]
        if operation.name == "allGather":
            return np.concatenate(parts)
        with np.errstate(all="ignore"):
            total = _COMBINE[operation.facts[2]].reduce(parts, dtype=dtype)
        return np.split(total, self._size)[self._rank] if operation.name == "reduceScatter" else total

    def _exchange(self, outgoing: dict[int, list[Message]], wanted: Collection[int]) -> dict[int, list[Message]] | None:
        """Send messages to ranks and return theirs; None if some did not come in time."""
        requests = [self._comm.isend(messages, peer, _TAG) for peer, messages in outgoing.items()]
        received: dict[int, list[Message]] = {}
        limit = time.monotonic() + self._nccl.patience
        while len(received) < len(wanted) or not all(request.test()[0] for request in requests):
            for peer in wanted - received.keys():
                # Several threads may ask; each takes its message as a whole.
                if (found := self._comm.improbe(peer, _TAG)) is not None:
                    received[peer] = found.recv()
            if time.monotonic() > limit or self.state == "aborted":
                _unfinished.extend(requests)
                return None
            time.sleep(0)
        return received
