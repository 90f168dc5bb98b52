"""A fake ``cupy.cuda.nccl`` over a :class:`~mpikv.testing.fakegpu.FakeGpu` and MPI.

Like NCCL it receives addresses and stream handles, and moves the bytes there. It raises :class:`MisuseError` where NCCL
would hang, crash, or ignore a mistake. It fails by plan if a test asks for it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn
from weakref import WeakSet

import numpy as np

from ..arrays.arrays import bfloat16
from ..cluster.environment import nccl_settings
from ..protocols import Array
from .fakegpu import FakeGpu
from .fakestreams import Blocker, FakeGraph, FakeStream, MisuseError

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
_SUM, _PROD, _MAX, _MIN = range(4)
_COMBINE = {_SUM: np.add, _PROD: np.multiply, _MAX: np.maximum, _MIN: np.minimum}
_TAG = 5
# Messages to ranks that did not come: MPI may still read their memory.
_unfinished: list[Any] = []


class NcclError(RuntimeError):
    """The error of the real module."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"{_STATUS[status]} (run with NCCL_DEBUG=WARN for details)")


class Part(NamedTuple):
    """The memory of an operation."""

    address: int
    content: Array
    use: tuple[Any, int, int, bool]
    """The argument for :meth:`~mpikv.testing.fakestreams.Checker.work`."""


class Operation(NamedTuple):
    """One call, until it runs."""

    name: str
    signature: tuple[int, ...]
    """Count, dtype, op and root: they must be the same on all ranks, or on both sides of a message."""
    peer: int
    """The other side of a message; -1 in a collective operation."""
    send: Part | None
    recv: Part | None
    stream: FakeStream
    capture: int = 0
    """The number of the communicator's capture that recorded it. All ranks must launch the same one."""

    def recorded(self, capture: int) -> Operation:
        """Return the copy for a graph; it refers to no memory."""
        send, recv = (part and part._replace(use=(None, 0, 0, False)) for part in (self.send, self.recv))
        return self._replace(send=send, recv=recv, capture=capture)

    @property
    def uses(self) -> list[tuple[Any, int, int, bool]]:
        """The memory it reads and writes."""
        return [part.use for part in (self.send, self.recv) if part is not None]


class FakeNccl:
    """A fake of the module ``cupy.cuda.nccl``, for one rank.

    With ``comm``, an mpi4py communicator of its own, the ranks exchange messages. A rank waits ``patience`` seconds for
    a message. After that the operation never ends, as on a GPU.
    """

    NcclError = NcclError
    available = True
    NCCL_INT8 = NCCL_CHAR = 0
    NCCL_UINT8 = 1
    NCCL_INT32 = NCCL_INT = 2
    NCCL_UINT32 = 3
    NCCL_INT64 = 4
    NCCL_UINT64 = 5
    NCCL_FLOAT16 = NCCL_HALF = 6
    NCCL_FLOAT32 = NCCL_FLOAT = 7
    NCCL_FLOAT64 = NCCL_DOUBLE = 8
    NCCL_BFLOAT16 = 9
    NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = range(5)

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

    def get_build_version(self) -> int:
        return self.version

    def get_unique_id(self) -> bytes:
        return np.random.default_rng().bytes(128)

    def NcclCommunicator(  # noqa: N802, the real name
        self,
        ndev: int,
        commId: bytes,  # noqa: N803
        rank: int,
        config: Any = None,
    ) -> FakeCommunicator:
        """Return a new communicator. Collective."""
        if not self.init_returns:
            self.wait_for_ever()
        self.gpu.check_used("a communicator is made")
        self.gpu.check_present("a communicator is made")
        self.count("init")
        made = FakeCommunicator(self, ndev, commId, rank)
        self.communicators.append(made)
        self.hold()
        return made

    def groupStart(self) -> None:  # noqa: N802
        if self.depth:
            raise MisuseError("a group is begun inside of a group")
        self.depth, self._group, self._group_failed, self._group_sticks = 1, [], 0, False

    def groupEnd(self) -> None:  # noqa: N802
        if not self.depth:
            raise MisuseError("a group ends that was not begun")
        self.depth = 0
        operations, self._group = self._group, []
        if self._group_failed:
            raise_status(self._group_failed)
        if operations:
            communicator = operations[0][0]
            if any(other is not communicator for other, _ in operations):
                raise MisuseError("a group has calls of several communicators")
            communicator.carry_out([operation for _, operation in operations], self._group_sticks)

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

    def __init__(self, nccl: FakeNccl, ndev: int, identity: bytes, rank: int) -> None:
        self._nccl, self._gpu, self._comm = nccl, nccl.gpu, nccl.comm
        self._size, self._rank, self.state = ndev, rank, "in use"
        self._stuck = Blocker()
        self._stuck.blocked = False
        self._graphs: WeakSet[FakeGraph] = WeakSet()
        self._captures = 0
        self._ordered = nccl_settings().get("NCCL_LAUNCH_ORDER_IMPLICIT") == "1"
        if (rank, ndev) != ((self._comm.rank, self._comm.size) if self._comm else (0, 1)):
            raise MisuseError(f"rank {rank} of {ndev} is not what the group of ranks has")
        others = [other for other in range(ndev) if other != rank]
        announced = self._exchange({other: (["init", identity.hex()], b"") for other in others}, others)
        if announced is None:
            nccl.wait_for_ever()
        if any(signature != ["init", identity.hex()] for signature, _ in announced.values()):
            raise MisuseError("ranks were given different ids")

    def size(self) -> int:
        return self._size

    def rank_id(self) -> int:
        return self._rank

    def device_id(self) -> int:
        return self._gpu.ordinal

    @property
    def comm(self) -> int:
        return 0 if self.state != "in use" else id(self)

    def check_async_error(self) -> None:
        if self._nccl.asynchronous:
            raise_status(self._nccl.asynchronous)

    def destroy(self) -> None:
        self._check_in_use("destroy")
        if self._stuck.blocked:
            raise MisuseError("destroy with work that never comes to its end waits for ever")
        self._check_graphs("destroy")
        self.state = "destroyed"

    def _check_graphs(self, call: str) -> None:
        """Record a graph that still uses this communicator: the real call would wait for ever. Nobody sees an exception
        from an abort.
        """
        if any(not graph.closed for graph in self._graphs):
            self._gpu.checker.faults.append(f"{call} with a graph that uses the communicator waits for ever")

    def abort(self) -> None:
        self._gpu.check_used("a communicator is aborted")
        if not self._nccl.abort_returns:
            self._nccl.released.wait()
        self._check_graphs("abort")
        self.state, self._stuck.blocked = "aborted", False

    def allReduce(  # noqa: N802
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int
    ) -> None:
        queue, sticks = self._begin("allReduce", stream)
        send, recv = self._part(sendbuf, count, datatype, False), self._part(recvbuf, count, datatype, True)
        in_place("allReduce", send, recv, sendbuf)
        self._nccl.queue(self, Operation("allReduce", (count, datatype, op), -1, send, recv, queue), sticks)

    def reduceScatter(  # noqa: N802
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None:
        queue, sticks = self._begin("reduceScatter", stream)
        send = self._part(sendbuf, recvcount * self._size, datatype, False)
        recv = self._part(recvbuf, recvcount, datatype, True)
        in_place("reduceScatter", send, recv, sendbuf + self._rank * recv.content.nbytes)
        self._nccl.queue(self, Operation("reduceScatter", (recvcount, datatype, op), -1, send, recv, queue), sticks)

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        queue, sticks = self._begin("reduce", stream)
        send, recv = self._part(sendbuf, count, datatype, False), None
        if root == self._rank:
            recv = self._part(recvbuf, count, datatype, True)
            in_place("reduce", send, recv, sendbuf)
        self._nccl.queue(self, Operation("reduce", (count, datatype, op, root), -1, send, recv, queue), sticks)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        queue, sticks = self._begin("broadcast", stream)
        recv, send = self._part(recvbuff, count, datatype, True), None
        if root == self._rank:
            send = self._part(sendbuff, count, datatype, False)
            in_place("broadcast", send, recv, sendbuff)
        self._nccl.queue(self, Operation("broadcast", (count, datatype, -1, root), -1, send, recv, queue), sticks)

    def bcast(self, buff: int, count: int, datatype: int, root: int, stream: int) -> None:
        self.broadcast(buff, buff, count, datatype, root, stream)

    def allGather(  # noqa: N802
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int
    ) -> None:
        queue, sticks = self._begin("allGather", stream)
        send = self._part(sendbuf, count, datatype, False)
        recv = self._part(recvbuf, count * self._size, datatype, True)
        in_place("allGather", send, recv, recvbuf + self._rank * send.content.nbytes, sendbuf)
        self._nccl.queue(self, Operation("allGather", (count, datatype), -1, send, recv, queue), sticks)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        queue, sticks = self._begin("send", stream)
        part = self._part(sendbuf, count, datatype, False)
        self._nccl.queue(self, Operation("send", (count, datatype), peer, part, None, queue), sticks)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        queue, sticks = self._begin("recv", stream)
        part = self._part(recvbuf, count, datatype, True)
        self._nccl.queue(self, Operation("recv", (count, datatype), peer, None, part, queue), sticks)

    def _check_in_use(self, call: str) -> None:
        if self.state != "in use":
            self._misuse(f"{call} of a communicator that was {self.state}")

    def _misuse(self, text: str) -> NoReturn:
        self._gpu.checker.faults.append(text)  # nobody may see an exception in this thread
        raise MisuseError(text)

    def _begin(self, call: str, handle: int) -> tuple[FakeStream, bool]:
        """Count a call and return its stream."""
        self._check_in_use(call)
        sticks = self._nccl.count(call)
        stream = self._gpu.find_stream(handle)
        if stream is None:
            raise MisuseError(f"{call} on {handle}, which is no stream")
        if not handle:
            raise MisuseError(f"{call} on the default stream, which waits for all others")
        return stream, sticks

    def _part(self, address: int, count: int, datatype: int, writes: bool) -> Part:
        dtype = _dtype(datatype)
        nbytes = count * dtype.itemsize
        found = self._gpu.find(address, nbytes)
        if found is None:
            raise MisuseError(f"{nbytes} bytes at {address:#x} are not memory of {self._gpu.name}")
        block, start = found
        if start % dtype.itemsize:
            raise MisuseError(f"{address:#x} is not aligned for {dtype}")
        content = block.memory[start : start + nbytes].view(dtype)
        return Part(address, content, (block, start, start + nbytes, writes))

    def carry_out(self, operations: Sequence[Operation], sticks: bool) -> None:
        """Run one call, or all calls of a group; or record them if the stream is captured."""
        stream = operations[0].stream
        if any(operation.stream is not stream for operation in operations):
            raise MisuseError("a group uses several streams")
        check_apart(operations)
        name, uses = " + ".join(op.name for op in operations), [use for op in operations for use in op.uses]
        if (graph := stream.capture) is not None:
            if graph not in self._graphs:
                self._captures += 1
                self._graphs.add(graph)
            operations = [operation.recorded(self._captures) for operation in operations]
        self._gpu.queue(stream, name, uses, partial(self._run, operations, sticks))

    def _run(self, operations: Sequence[Operation], sticks: bool) -> None:
        self._check_in_use(operations[0].name)
        received, stream = None, self._gpu.current()
        if not operations[0].capture:
            stream = operations[0].stream
        self._check_order(operations[0].name, stream)
        if not sticks and not self._stuck.blocked:
            wanted = {peer for peer in range(self._size) if peer != self._rank and concerns(operations, peer)}
            received = self._exchange({peer: message(operations, peer) for peer in wanted}, wanted)
        if received is None:
            self._stuck.blocked = True
            stream.blockers.append(self._stuck)
            return
        received[self._rank] = message(operations, self._rank)
        collective = [operation for operation in operations if operation.peer < 0]
        streams = {peer: Incoming(self._rank, peer, *announced) for peer, announced in received.items()}
        results = [self._result(operation, [streams[peer] for peer in range(self._size)]) for operation in collective]
        for operation, result in zip(collective, results, strict=True):
            if operation.recv is not None:
                operation.recv.content[:] = result
        for operation in operations:
            if operation.name == "recv":
                assert operation.recv is not None
                if operation.peer not in streams:
                    raise MisuseError("a rank receives from itself what it does not send")
                signature = (*operation.signature, operation.capture)
                operation.recv.content[:] = streams[operation.peer].take("send", signature, operation.recv)
        for incoming in streams.values():
            incoming.check_empty()

    def _check_order(self, name: str, stream: FakeStream) -> None:
        """Record a kernel. Raise if nothing orders it after the last kernel of another communicator: another rank may
        run the two the other way round, and each would wait for resources of the other.
        """
        with self._gpu.checker.lock:
            for other, (number, count) in () if self._ordered else self._gpu.last_kernels.items():
                if other is not self and other.state == "in use" and stream.clock.get(number, 0) < count:
                    self._misuse(f"{name} on stream {stream.number} and another communicator's work have no order")
            self._gpu.last_kernels[self] = stream.number, stream.time

    def _result(self, operation: Operation, incoming: Sequence[Incoming]) -> Array:
        """Return this rank's result of a collective operation, and consume every rank's part of it."""
        dtype = _dtype(operation.signature[1])
        signature = (*operation.signature, operation.capture)
        parts = [announced.take(operation.name, signature).view(dtype) for announced in incoming]
        if operation.name == "broadcast":
            return parts[operation.signature[3]]
        if operation.name == "allGather":
            return np.concatenate(parts)
        with np.errstate(all="ignore"):
            total = _COMBINE[operation.signature[2]].reduce(parts, dtype=dtype)
        if operation.name == "reduceScatter":
            return np.asarray(np.split(total, self._size)[self._rank])
        return np.asarray(total)

    def _exchange(self, outgoing: dict[int, tuple[Any, bytes]], wanted: Any) -> dict[int, tuple[Any, bytes]] | None:
        """Send messages to ranks and return theirs; None if some did not come in time."""
        requests = []
        for peer, (signature, content) in outgoing.items():
            head = json.dumps(signature).encode()
            text = len(head).to_bytes(8, "little") + head + content
            requests.append(self._comm.Isend(len(text).to_bytes(8, "little"), peer, _TAG))
            requests.append(self._comm.Isend(text, peer, _TAG + 1))
        received: dict[int, tuple[Any, bytes]] = {}
        limit = time.monotonic() + self._nccl.patience
        while len(received) < len(wanted) or not all(request.Test() for request in requests):
            for peer in set(wanted) - received.keys():
                if (announced := self._arrived(peer)) is not None:
                    end = 8 + int.from_bytes(announced[:8], "little")
                    received[peer] = json.loads(announced[8:end]), announced[end:]
            if time.monotonic() > limit or self.state == "aborted":
                _unfinished.extend(requests)
                return None
            time.sleep(0)
        return received

    def _arrived(self, peer: int) -> bytes | None:
        """Return a rank's next message, if it has arrived. Several threads may call this."""
        found = self._comm.Improbe(peer, _TAG)
        if found is None:
            return None
        found.Recv(length := bytearray(8))
        text = bytearray(int.from_bytes(length, "little"))
        self._comm.Recv(text, peer, _TAG + 1)
        return bytes(text)


class Incoming:
    """The operations announced by one rank, in order."""

    def __init__(self, rank: int, peer: int, signature: Any, content: bytes) -> None:
        self._rank, self._peer, self._content = rank, peer, content
        self._announced: list[tuple[str, Sequence[int], int]] = list(signature)

    def take(self, name: str, signature: Sequence[int], recv: Part | None = None) -> Array:
        """Return the bytes of the next operation; it must be this one."""
        what, details, length = self._announced.pop(0) if self._announced else ("nothing", (), 0)
        if (what, list(details)) != (name, list(signature)):
            raise MisuseError(
                f"rank {self._rank} calls {name}{tuple(signature)} and rank {self._peer} {what}{tuple(details)}"
            )
        content, self._content = self._content[:length], self._content[length:]
        found = np.frombuffer(content, np.uint8)
        return found if recv is None else found.view(recv.content.dtype)

    def check_empty(self) -> None:
        """Raise if the rank has announced more."""
        if self._announced:
            raise MisuseError(f"rank {self._peer} calls {self._announced} and rank {self._rank} does not")


def _dtype(number: int) -> np.dtype[Any]:
    if _DTYPES[number] == "bfloat16":
        return bfloat16()
    return np.dtype(_DTYPES[number])


def in_place(name: str, send: Part, recv: Part, expected: int, given: int | None = None) -> None:
    """Raise if send and receive memory overlap, but not at the in-place offset that NCCL requires."""
    overlap = np.may_share_memory(send.content, recv.content) and send.content.size
    if overlap and (recv.address if given is None else given) != expected:
        raise MisuseError(f"{name}: what is sent and what is received overlap, and not as in place")


def check_apart(operations: Sequence[Operation]) -> None:
    """Raise if an operation writes memory of another in its group: nothing orders them."""
    uses = [(number, *use) for number, operation in enumerate(operations) for use in operation.uses]
    for number, block, low, high, writes in uses:
        for other, other_block, other_low, other_high, other_writes in uses:
            meet = number != other and block is other_block and low < other_high and other_low < high
            if meet and (writes or other_writes):
                raise MisuseError("calls of one group use the same memory, and one of them writes to it")


def concerns(operations: Sequence[Operation], peer: int) -> bool:
    """Return whether a rank takes part in the operations."""
    return any(operation.peer in (-1, peer) for operation in operations)


def message(operations: Sequence[Operation], peer: int) -> tuple[Any, bytes]:
    """Return the message for a rank: all collective operations, and sends to it."""
    announced = [operation for operation in operations if operation.peer < 0]
    announced += [operation for operation in operations if operation.peer == peer and operation.name == "send"]
    contents = [b"" if operation.send is None else operation.send.content.tobytes() for operation in announced]
    signature = [
        [operation.name, [*operation.signature, operation.capture], len(content)]
        for operation, content in zip(announced, contents, strict=True)
    ]
    return signature, b"".join(contents)
