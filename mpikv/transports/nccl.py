"""Ranks with a GPU each: NCCL adds and carries, on the store's stream or on a second one.

A call returns when its work is queued. Ranks agree through ``control``, a transport of host memory; its waits have
deadlines. Work on a GPU has no deadline of its own, so a :class:`~.watchdog.Watchdog` watches it, and aborts the
communicator when the deadline passes.

``nccl`` is the module ``cupy.cuda.nccl``, with its constants.

Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/ (in-place operations, group calls, fault tolerance).
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

from ..arrays.arrays import accumulator, bfloat16
from ..cluster.environment import order_launches
from ..cluster.printing import log
from ..cluster.process_group import ProcessGroup
from ..cluster.waiting import Waiting
from ..config import Config
from ..errors import MPIKVError, PeerFailed, Stalled, TransportError
from ..memory.device import DeviceMemory
from ..protocols import Array, Memory, Transport
from .allocation import allocate_collectively
from .preflight import preflight, shown
from .unshared import Unshared
from .watchdog import Watchdog, Work

# Seconds for an abort, which may itself wait for ever; the process then ends without it.
_PATIENCE = 2.0
# The watchdog's looks at work in flight per look for a notice of another rank, which takes longer.
_LISTEN_EVERY = 16
# Bytes that a GPU moves at once, if they are aligned.
_ALIGNMENT = 16
_USAGE, _REMOTE, _IN_PROGRESS = 5, 6, 7
_JOINING = "making the communicator"
_ADVICE = "NCCL_DEBUG=INFO logs NCCL's steps, NCCL_SOCKET_IFNAME selects its network"
# NCCL reads the name of its host once per process, at its first use.
_USED_BEFORE = "; where ranks share a GPU, create the first store on GPUs before any other use of NCCL"
# Memory and streams of communicators that were abandoned while they were made: the GPU may use them for ever.
_kept: list[Any] = []


class Wire(NamedTuple):
    """The type in which NCCL sums elements of a dtype."""

    dtype: str
    """The type's name, as numpy's."""
    operation: str = "NCCL_SUM"
    each: int = 1
    """Numbers of this type per element."""

    @property
    def kind(self) -> np.dtype[Any]:
        """The type as numpy's dtype."""
        return bfloat16() if self.dtype == "bfloat16" else np.dtype(self.dtype)


_INTEGERS, _HALVES = ("int8", "int32", "int64", "uint8", "uint32", "uint64"), ("float16", "bfloat16")
_OWN = {name: Wire(name) for name in (*_INTEGERS, *_HALVES, "float32", "float64")}
ALL_WIRES = {
    **_OWN,
    # Of zeros and ones the logical or is the maximum.
    "bool": _OWN["uint8"]._replace(operation="NCCL_MAX"),
    "int16": _OWN["int32"],
    "uint16": _OWN["uint32"],
    "complex64": _OWN["float32"]._replace(each=2),
    "complex128": _OWN["float64"]._replace(each=2),
}
"""The type of each dtype, by the dtype's name, with half precision as it is: NCCL rounds at each addition."""
# NCCL would round half precision at every hop.
WIRES = ALL_WIRES | dict.fromkeys(_HALVES, _OWN["float32"])
"""The same, with sums of half precision in float32."""


class NcclTransport(Unshared):
    """The transport for ranks with a GPU each. All its calls that move data are made on the stream of ``memory``."""

    name = "nccl"

    def __init__(
        self, group: ProcessGroup, config: Config, control: Transport, memory: DeviceMemory, nccl: Any, waiting: Waiting
    ) -> None:
        """Register at ``memory.order``, compare all ranks' GPUs and NCCL, allocate memory for messages, and connect the
        GPUs; or raise. Collective.

        ``control`` is closed with this transport.

        With ``deterministic`` settings NCCL only carries: sums return every rank's elements, as those of
        :class:`~mpikv.transports.mpi.MpiTransport`. With ``native_halves`` it sums half precision as it is, and rounds
        at each addition.

        Raises:
            TransportUnavailable: on every rank, where two use one GPU, or their libraries or settings differ.
            MemoryError: on every rank, if the GPU of one has too little memory.
            Stalled: NCCL did not find the other ranks before the deadline.
            TransportError: NCCL failed.
        """
        self.rank, self.size, self.limit = group.rank, group.size, config.bucket_bytes
        self.control = control
        self.memory: Memory = memory
        self._group, self._nccl, self._gpu = group, nccl, memory.gpu
        self._order, self._stream = memory.order, memory.order.stream
        self._gathers = config.deterministic
        self._wires = ALL_WIRES if config.native_halves else WIRES
        # A forked child must leave its parent's communicator alone.
        self._process = os.getpid()
        self._comm: Any = None
        self._failure: MPIKVError | None = None
        # Held while the communicator is used: its end frees what that uses.
        self._queueing = threading.Lock()
        self._looks = itertools.count(1)
        self._watchdog = Watchdog(waiting, memory, self._check_flight, self._fail, self.rank)
        self._order.check, self._order.abandon = self._check, self.abandon
        self._order.queue = self._queue
        order_launches()
        preflight(group, self._gpu, nccl.get_version())
        # A message is prepared while the one ahead of it is summed.
        self.send_buffers: tuple[Array, ...] = self._for_messages(self.limit), self._for_messages(self.limit)
        self.slot = 0
        # Sums of short integers and of half precision are twice as wide, and so are their terms.
        self._gathered = self._for_messages(group.size * _aligned(2 * self.limit) if self._gathers else 0)
        self._wide = self._for_messages(2 * self.limit), self._for_messages(2 * self.limit)
        self._join(waiting)

    def _join(self, waiting: Waiting) -> None:
        """Make the communicator in a thread, and wait for it; if a rank fails, raise on every rank. Collective."""
        trial = self.allocate(_ALIGNMENT)
        identity, errors = self._identity(), list[BaseException]()

        def create() -> None:
            """Make the communicator, and keep an error in ``errors``. The thread's function."""
            try:
                self._create(identity, trial)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=create, name="mpikv-nccl", daemon=True)
        thread.start()
        try:
            waiting.warning(self._warn_of_joining).until(lambda: not thread.is_alive(), tuple)
            if errors:
                raise errors[0]
        except Stalled as error:
            # All ranks have come: each has the id.
            late = (
                f"{error}: NCCL has not connected the {self.size} ranks, although all of them called create; {_ADVICE}"
            )
            self._fail(Stalled(late), _JOINING)
        except (MPIKVError, self._nccl.NcclError, KeyError) as error:
            self._fail(error if isinstance(error, MPIKVError) else self._translate(error, _JOINING), _JOINING)
        # A rank that failed tells the others, and raises its own error even if they come too late to hear it.
        try:
            if not self.control.agree(int(self._failure is None)):
                self._fail(TransportError(f"another rank failed in {_JOINING}"), "")
        except Stalled as error:
            late = f"{error}: NCCL has connected this rank, but not those; {_ADVICE}"
            self._fail(Stalled(late, error.missing), _JOINING)
        except MPIKVError as error:
            self._fail(error, _JOINING)
        if self._failure is not None:
            _kept.append((trial, self._stream))
        self._check()

    def _warn_of_joining(self, waited: float, _: Sequence[int]) -> None:
        """Log that this rank still waits for NCCL to connect the ranks. Local."""
        log("create: rank %d has waited %.1f s for NCCL to connect %d ranks; %s", self.rank, waited, self.size, _ADVICE)

    def _identity(self) -> bytes:
        """Return a new communicator's id as bytes, made by rank 0; if that fails, raise on every rank. Collective."""
        made = ""
        if self.rank == 0:
            try:
                made = json.dumps([self._nccl.get_unique_id().hex(), ""])
            except (self._nccl.NcclError, KeyError) as error:
                made = json.dumps(["", str(self._translate(error, "making an id"))])
        identity, problem = json.loads(self._group.gather(made)[0])
        if problem:
            raise TransportError(f"rank 0: {problem}")
        return bytes.fromhex(identity)

    def _create(self, identity: bytes, trial: Array) -> None:
        """Make the communicator, and connect by using each algorithm once; abort it if this rank has given up
        meanwhile. May wait for ever. Collective.
        """
        self._gpu.use()
        comm = self._nccl.NcclCommunicator(self.size, identity, self.rank)
        # Collecting it as garbage would wait for the other ranks. It is destroyed, or aborted, or left alone.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(comm))
        self._comm = comm
        if self._failure is not None:
            self._fail(self._failure, "")
            return
        nccl, address = self._nccl, self._gpu.address(trial)
        several, kind = (address, address, 4), nccl.NCCL_FLOAT32
        # NCCL connects at the first use of an algorithm, and then waits on the host, too.
        for call, arguments in (
            (comm.allReduce, (*several, kind, nccl.NCCL_SUM)),
            (comm.reduce, (*several, kind, nccl.NCCL_SUM, 0)),
            (comm.broadcast, (*several, kind, 0)),
        ):
            with self._queueing:
                # A rank that gives up notes its failure first, and takes this lock to abort after that.
                self._check()
                call(*arguments, self._stream.handle)
        self._stream.synchronize()

    def allocate(self, nbytes: int) -> Array:
        """Return zeros of this rank's GPU; MemoryError on all ranks if one has too little memory. Collective."""
        return allocate_collectively(self._group, self.control.agree, self.memory.zeros, nbytes)

    def _for_messages(self, nbytes: int) -> Array:
        """Return zeros of the GPU for messages; MemoryError on every rank if one has too little. Collective."""
        what = f"messages (bucket_bytes is {self.limit})"
        return allocate_collectively(self._group, self.control.agree, self.memory.zeros, nbytes, what=what)

    # --- Sums

    def reduce(self, send: Array, recv: Array, root: int) -> Sequence[Array]:
        """Queue a sum of ranks' ``send`` at the root; return (recv,), or in deterministic stores terms to add;
        elsewhere empty arrays. Collective.
        """
        counts = [send.size if rank == root else 0 for rank in range(self.size)]
        return self.reduce_scatter(send, recv[: counts[self.rank]], counts, name="reduce")

    def allreduce(self, send: Array, recv: Array, op: str = "") -> Sequence[Array]:
        """Queue a sum of every rank's ``send``, or NCCL's operation of the name ``op``; return (recv,). In
        deterministic stores ignore ``op``, and return all terms to add. Collective.
        """
        if self._gathers:
            return self._terms(send, None)

        def start(comm: Any, wire: Wire, source: int, into: int, count: int) -> None:
            """Queue NCCL's allReduce of ``count`` numbers between two addresses."""
            self._call(comm.allReduce, source, into, count, *self._constants_of(wire, op))

        return self._sum("allreduce", send, recv, start)

    def adds(self, dtype: np.dtype[Any]) -> bool:
        """Return whether :meth:`allreduce_each` sums a dtype, uncast; False in deterministic stores. Local."""
        return not self._gathers and _as_wire(np.empty(0, dtype), self._wires[dtype.name]) is not None

    def allreduce_each(self, pairs: Sequence[tuple[Array, Array]]) -> None:
        """Queue one call that sums each pair's first array over ranks into the second, maybe the same array. It
        :meth:`adds` their dtypes. Collective.

        The arrays may have any sizes. No filled array may overlap another array.
        """

        def run(comm: Any) -> None:
            """Queue NCCL's allReduce of each pair, all as one group."""
            with self._grouped():
                for send, recv in pairs:
                    wire, addresses = self._wires[send.dtype.name], (self._gpu.address(send), self._gpu.address(recv))
                    self._call(comm.allReduce, *addresses, send.size * wire.each, *self._constants_of(wire))

        self._queue(f"allreduce of {len(pairs)} arrays, {sum(send.nbytes for send, _ in pairs)} bytes", run)

    def reduce_scatter(
        self, send: Array, recv: Array, counts: Sequence[int], op: str = "", name: str = "reduce_scatter"
    ) -> Sequence[Array]:
        """Queue a sum of ranks' parts for this one, or NCCL's operation of the name ``op``; return (recv,). In
        deterministic stores ignore ``op``, and return all terms to add. Collective.

        ``name`` is the call's, for messages.
        """
        if self._gathers:
            return self._terms(send, counts)

        def start(comm: Any, wire: Wire, source: int, into: int, _: int) -> None:
            """Queue NCCL's reduceScatter between two addresses, or a group of reduces if parts are unequal."""
            if len(set(counts)) == 1:
                self._call(comm.reduceScatter, source, into, counts[0] * wire.each, *self._constants_of(wire, op))
                return
            # NCCL's own reduceScatter needs equal parts; reduces to several roots in one group run side by side.
            with self._grouped():
                for rank, count in enumerate(counts):
                    if count:
                        mine = into if rank == self.rank else 0
                        self._call(comm.reduce, source, mine, count * wire.each, *self._constants_of(wire, op), rank)
                    source += count * wire.each * wire.kind.itemsize

        return self._sum(name, send, recv, start)

    def _terms(self, send: Array, counts: Sequence[int] | None) -> Sequence[Array]:
        """Queue an exchange; return every rank's elements for this one, in the sum's dtype, to be added. Collective."""
        wide = accumulator(send.dtype)
        if wide != send.dtype:
            narrow, send = send, self._wide[0].view(wide)[: send.size]
            self.memory.copy((send,), (narrow,))
        return self.all_to_all(send, counts)

    def _sum(
        self, name: str, send: Array, recv: Array, start: Callable[[Any, Wire, int, int, int], None]
    ) -> Sequence[Array]:
        """Queue a sum by ``start``, with casts around it where NCCL needs another dtype; advance the slot; return
        (recv,). Collective.

        ``start`` gets the addresses of arrays of that type, and the size of the first.
        """
        wire = self._wires[send.dtype.name]

        def run(comm: Any) -> None:
            """Queue a cast of ``send`` if needed, the sum, and a cast to ``recv`` if needed."""
            source, into = _as_wire(send, wire), _as_wire(recv, wire)
            if source is None:
                source = self._wide[0].view(wire.kind)[: send.size]
                self.memory.copy((source,), (send,))
            wide = self._wide[1].view(wire.kind)[: recv.size] if into is None else into
            start(comm, wire, self._gpu.address(source), self._gpu.address(wide), source.size)
            if into is None:
                self.memory.copy((recv,), (wide,))

        self._queue(f"{name} of {send.size} {send.dtype}", run)
        self.slot = 1 - self.slot
        return (recv,)

    def _constants_of(self, wire: Wire, op: str = "") -> tuple[int, int]:
        """Return the values of NCCL's constants for a type and its operation, or for that of the name ``op``. Local."""
        return getattr(self._nccl, f"NCCL_{wire.dtype.upper()}"), getattr(self._nccl, op or wire.operation)

    # --- Bytes

    def all_to_all(self, send: Array, counts: Sequence[int] | None) -> Sequence[Array]:
        """Queue an exchange, of ``counts[r]`` elements from each rank to rank r, or with ``counts`` None of everything;
        return arrays of every rank's part for this one, valid until the next. All ranks pass the same ``counts``. The
        first may allocate, and raise MemoryError on all ranks. Collective.
        """
        elements = counts or [send.size] * self.size
        starts = [0 if counts is None else sum(elements[:rank]) for rank in range(self.size)]
        nbytes = elements[self.rank] * send.itemsize
        stride = _aligned(nbytes)
        if self._gathered.size < self.size * _aligned(max(elements) * send.itemsize):
            # Where NCCL adds, few stores ever need it, and it is large. All ranks come here together.
            self._gathered = self._for_messages(self.size * _aligned(2 * self.limit))
        received = self._gathered
        parts = [received[rank * stride : rank * stride + nbytes].view(send.dtype) for rank in range(self.size)]
        sends = [send[start : start + count] for start, count in zip(starts, elements, strict=True)]
        parts[self.rank] = sends[self.rank]  # NCCL need not send to itself
        self.exchange(sends, parts)
        self.slot = 1 - self.slot
        return parts

    def exchange(self, sends: Sequence[Array], receives: Sequence[Array]) -> None:
        """Queue sends of the r-th array to rank r, and receives into the r-th of ``receives``. Collective.

        Both have as many bytes. Nothing is done where both are one object.
        """

        def run(comm: Any) -> None:
            """Queue the sends to and receives from all other ranks, as one group."""
            with self._grouped():
                for peer in (rank for rank in range(self.size) if sends[rank] is not receives[rank]):
                    for call, array in ((comm.send, sends[peer]), (comm.recv, receives[peer])):
                        if array.size:
                            self._call(call, self._gpu.address(array), array.nbytes, self._nccl.NCCL_UINT8, peer)

        self._queue(f"exchange of {sum(send.nbytes for send in sends)} bytes", run)

    def all_gather(self, buffer: Array, counts: Sequence[int]) -> None:
        """Queue to fill each rank's part of ``buffer`` on every rank, in place. Collective."""
        nbytes = [count * buffer.itemsize for count in counts]
        address, byte = self._gpu.address(buffer), self._nccl.NCCL_UINT8

        def run(comm: Any) -> None:
            """Queue NCCL's allGather, or a group of broadcasts if parts are unequal."""
            if len(set(nbytes)) == 1:
                self._call(comm.allGather, address + self.rank * nbytes[0], address, nbytes[0], byte)
                return
            place = address
            with self._grouped():
                for rank, length in enumerate(nbytes):
                    if length:
                        self._call(comm.broadcast, place, place, length, byte, rank)
                    place += length

        self._queue(f"all_gather of {buffer.size} {buffer.dtype}", run)

    def broadcast(self, buffer: Array, root: int) -> None:
        """Queue a copy of the root's ``buffer`` to every rank's, in place. Collective."""
        address, byte = self._gpu.address(buffer), self._nccl.NCCL_UINT8

        def run(comm: Any) -> None:
            """Queue NCCL's broadcast."""
            self._call(comm.broadcast, address, address, buffer.nbytes, byte, root)

        self._queue(f"broadcast of {buffer.size} {buffer.dtype}", run)

    # --- Agreement and ends

    def agree(self, token: int, send_ready: bool = False) -> bool:
        """Return whether all ranks passed the same token, by ``control``; raise a failure of this transport. An error
        ends it. Collective.
        """
        self._check()
        try:
            agreed = self.control.agree(token)
        except MPIKVError as error:
            self._fail(error, "")
            raise
        self._check()
        return agreed

    def abandon(self, why: str = "") -> None:
        """Make the transport unusable, and abort queued work; with ``why``, tell other ranks. Local, idempotent.

        It does nothing in a forked child, as neither NCCL nor CUDA survives a fork.
        """
        self._fail(TransportError(why or "the store ended before this was done"), "", tell=bool(why))

    def close(self) -> None:
        """Wait for the GPU; destroy the communicator, or after a failure abort it and log that; close ``control``.
        Collective.

        Later calls, and those of a forked child, do nothing.
        """
        if self._process != os.getpid() or not self.send_buffers[0].size:
            return
        try:
            self._order.wait()
            self._order.drop_graphs()
            self._check()
            self.agree(0)
            with self._queueing:
                self._check()
                comm, self._comm = self._comm, None
                self._call(comm.destroy, on_stream=False)
        except MPIKVError as error:
            self._fail(error, "")
            log("NCCL's communicator was aborted instead of closed: %s", error)
        self._watchdog.stop()
        self._failure = self._failure or TransportError("the transport was closed")
        nothing = self.memory.zeros(0)
        self.send_buffers, self._gathered, self._wide = (nothing, nothing), nothing, (nothing, nothing)
        self.control.close()
        self._gpu.release(self._stream)

    def _check(self) -> None:
        """Raise a new error with the text of this transport's failure, if it has failed. Local."""
        if self._failure is not None:
            # A new error each time: raised again, one object would collect the tracebacks of all calls and threads.
            raise type(self._failure)(str(self._failure)) from (self._failure.__cause__ or self._failure)

    def _fail(self, error: Exception, call: str, tell: bool = True) -> None:
        """Make the transport unusable, abort work in flight, and with ``tell`` tell the other ranks. May take some
        seconds; raises nothing. Local.

        They may wait for this one. They are not told of a deadline, since it is theirs, too.
        """
        if self._process != os.getpid():
            return
        # The first failure is the cause: an abort makes all other work fail, too.
        if self._failure is None:
            self._failure = _failure(error, call)
        self._watchdog.stop()
        if tell and not isinstance(self._failure, Stalled):
            with suppress(MPIKVError):  # the abort comes whether or not the others can be told
                self._group.announce_end(str(self._failure))
        with ExitStack() as ending:
            # Not for ever: a thread may be in a call that comes to its end by the abort only.
            if self._queueing.acquire(timeout=_PATIENCE):
                ending.callback(self._queueing.release)
            comm, self._comm = self._comm, None
            if comm is not None:
                ending.callback(_abort, comm, self._gpu.use)
            # The end of a communicator waits for that of all graphs that use it.
            self._order.drop_graphs()

    # --- The door of every call of NCCL

    def _queue(self, call: str, run: Callable[[Any], Any]) -> Any:
        """Call ``run(communicator)`` to queue work, have the work watched, and return its result. Raises an earlier
        failure; an error ends the transport.

        Work that a graph records is not watched.
        """
        work = Work(call)
        try:
            with self._queueing:
                if self._failure is not None:
                    self._check()
                recording = self._order.recording
                if not recording:
                    self._watchdog.look_after(work)
                lane = self._order.lane
                if lane is self._stream:  # without a context that does nothing: a captured step has few calls
                    result = run(self._comm)
                else:
                    with self._order.begin_transfer():
                        result = run(self._comm)
                if not recording:
                    work.event = lane.record()
                return result
        except BaseException as error:
            work.failed = True
            known = error if isinstance(error, MPIKVError) else TransportError(f"{call} was interrupted by {error!r}")
            self._fail(known, call)
            raise

    @contextmanager
    def _grouped(self) -> Iterator[None]:
        """In a with block, let NCCL gather the calls, and begin them as one at its end. Local."""
        # A group must be ended whatever happens in it: later calls would be added to it, and never begin.
        self._call(self._nccl.groupStart, on_stream=False)
        try:
            yield
        except BaseException:
            with suppress(self._nccl.NcclError, KeyError):  # it reports the same error again
                self._nccl.groupEnd()
            raise
        self._call(self._nccl.groupEnd, on_stream=False)

    def _call(self, function: Callable[..., Any], *arguments: int, on_stream: bool = True) -> None:
        """Call a function of NCCL, with the stream unless told otherwise; TransportError or PeerFailed if it fails."""
        try:
            function(*arguments, self._order.lane.handle) if on_stream else function(*arguments)
        except (self._nccl.NcclError, KeyError) as error:
            raise self._translate(error, function.__name__) from error

    def _check_flight(self) -> None:
        """Raise if NCCL reports an error, or, at every 16th call, if a rank has left. Skips NCCL while another thread
        uses it; aborts nothing. Local.
        """
        if self._queueing.acquire(blocking=False):  # while another thread uses NCCL it is not asked
            try:
                if self._comm is not None:
                    self._comm.check_async_error()
            except (self._nccl.NcclError, KeyError) as error:
                if _status(error) != _IN_PROGRESS:
                    raise self._translate(error, "work in flight") from error
            finally:
                self._queueing.release()
        if next(self._looks) % _LISTEN_EVERY == 0 and (why := self._group.find_end()):
            raise TransportError(why)

    def _translate(self, error: Exception, doing: str) -> MPIKVError:
        """Return a TransportError for an error of NCCL, or PeerFailed if it is another rank's failure. Local."""
        status, detail = _status(error), last_error()
        what = f"status {status}; NCCL_DEBUG=WARN logs details" if isinstance(error, KeyError) else error
        text = f"NCCL {shown(self._nccl.get_version())} failed in {doing}: {what}{detail and f' ({detail})'}"
        text += _USED_BEFORE if status == _USAGE and doing == _JOINING else ""
        return (PeerFailed if status == _REMOTE else TransportError)(text)


def _as_wire(array: Array, wire: Wire) -> Array | None:
    """Return a view of the array in NCCL's type, or None if its elements have another size, so need a cast. Local."""
    return array.view(wire.kind) if array.itemsize == wire.each * wire.kind.itemsize else None


def _aligned(nbytes: int) -> int:
    """Return a number of bytes, rounded up to a multiple of 16. Local."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _status(error: Exception) -> int:
    """Return NCCL's status number from CuPy's error; a KeyError stands for an unknown one. Raises other KeyErrors."""
    if isinstance(error, KeyError):
        if not error.args or not isinstance(error.args[0], int):
            raise error
        return error.args[0]
    return int(getattr(error, "status", 0))


def _failure(error: Exception, call: str) -> MPIKVError:
    """Return a new Stalled, PeerFailed or TransportError for later calls: the text, with the call in flight. Local."""
    about = f", with {call} in flight" if call else ""
    if isinstance(error, Stalled):
        failure: MPIKVError = Stalled(f"{error}{about}", error.missing)
    else:
        failure = (PeerFailed if isinstance(error, PeerFailed) else TransportError)(f"{error}{about}")
    failure.__cause__ = error.__cause__ or error
    return failure


def _abort(comm: Any, prepare: Callable[[], None]) -> None:
    """Run ``prepare`` and abort a communicator, in a new thread; wait for that two seconds at most. Local."""

    def abort() -> None:
        """Run ``prepare`` and abort. The thread's function."""
        prepare()
        comm.abort()

    # NCCL's abort may wait for ever itself.
    thread = threading.Thread(target=abort, name="mpikv-nccl-abort", daemon=True)
    with suppress(RuntimeError):  # the interpreter ends, and starts no thread any more
        thread.start()
        thread.join(_PATIENCE)


def last_error() -> str:
    """Return NCCL's text about the last error of this process; "" before NCCL 2.13, or if it is not loaded. Local."""
    try:
        describe = ctypes.CDLL("libnccl.so.2", os.RTLD_NOLOAD | os.RTLD_NOW).ncclGetLastError
    except (OSError, AttributeError):
        return ""
    describe.restype, describe.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    return (describe(None) or b"").decode(errors="replace").strip()
