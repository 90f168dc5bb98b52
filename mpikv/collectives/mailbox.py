"""Messages between two ranks: sends and receives with tags, beside the collectives.

As in MPI, messages from one rank to another with the same tag keep their order, and a receive gets the first message
that fits, of those that come for it; one without a source takes from any rank. A rank takes messages from another only
while a receive may want one of them. Those that nobody has asked for yet wait in its memory.

The ranks of one host write to rings in shared memory, one for each sender and receiver; others send by MPI. The caller
moves what can be moved at once. The rest is done by one thread, which starts with the first call that needs it and
sleeps while nothing is pending.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from ..cluster.process_group import ProcessGroup
from ..cluster.runtime import present
from ..cluster.shared_memory import memory_barrier
from ..errors import Closed, Stalled, TransportError, Unsupported, ValueMismatch
from ..protocols import Array, Group

__all__ = ["Mailbox"]

# Bytes of one ring, and of all rings of a host: with many ranks each has less.
_RING, _ALL_RINGS, _LEAST_RING = 256 << 10, 16 << 20, 4 << 10
# Words of a ring before its bytes: how many were written and how many read, in a pair of cache lines each.
_READ, _HEAD = 16, 32
_SHORTEST_NAP, _LONGEST_NAP = 1e-5, 1e-3
# Seconds between two looks for ranks whose processes have ended.
_PATIENCE = 0.25
# Calls and messages that did not end well. They keep the memory alive: MPI may still read and write it.
_abandoned: list[Any] = []


Done: TypeAlias = "Callable[[BaseException | None, int], None]"


@dataclass(eq=False)
class _Call:
    """A send or a receive."""

    verb: str
    bytes: Array
    peer: int | None
    """The other rank; None: any."""
    tag: int
    done: Done
    due: float
    started: Any = None
    """What the carrier knows of a send."""
    source: int = -1
    """The rank whose message a receive has got."""

    def __str__(self) -> str:
        way = "to" if self.verb == "send" else "from"
        peer = "any rank" if self.peer is None else f"rank {self.peer}"
        return f"{self.verb} of {self.bytes.nbytes} bytes with tag {self.tag} {way} {peer}"

    def wants(self, source: int) -> bool:
        """Return whether it may receive from a rank."""
        return self.peer is None or self.peer == source


@dataclass(eq=False)
class _Message:
    """A message whose head has arrived."""

    source: int
    tag: int
    bytes: Array
    receive: _Call | None = None
    whole: bool = False
    started: Any = None


class _Carrier(Protocol):
    """How messages travel. All methods but the last are local, and move what can be moved now."""

    moved: int
    """Grows with everything that moves."""

    def put(self, send: _Call) -> bool:
        """Return whether a message has been sent. The caller repeats the call until then."""

    def head(self, source: int) -> tuple[int, int] | None:
        """Return tag and length of the next message from a rank, if its head has arrived."""

    def take(self, message: _Message) -> bool:
        """Return whether the bytes after the latest head from a rank have been received."""

    def close(self) -> None:
        """Free what ranks share. Collective."""


class Mailbox:
    """Sends and receives of one rank. All methods but the constructor and :meth:`close` are local.

    After a deadline, or the end of another rank's process during a call with it, all calls raise the same error.
    """

    def __init__(self, group: Group, timeout: float, gone: Callable[[], Sequence[int]] = tuple) -> None:
        """Collective. ``timeout`` is that of each call, in seconds. ``gone`` lists ranks whose processes have ended."""
        self._timeout, self._gone, self._ranks = timeout, gone, range(group.size)
        self._where = f" [rank {group.rank}/{group.size}]" if group.size > 1 else ""
        self._others = {*self._ranks} - {group.rank}
        self._carrier: _Carrier
        self._failure: BaseException | None = None
        if isinstance(group, ProcessGroup) and not group.one_host:
            self._carrier = _Messages(group)
            if not group.threads:
                why = "send and recv between hosts need MPI_THREAD_MULTIPLE, and MPI was initialized without it"
                self._failure = Unsupported(why)
        else:
            self._carrier = _Rings(group)
        self._changed = present().condition()
        self._sends: list[deque[_Call]] = [deque() for _ in self._ranks]
        self._receives: list[_Call] = []
        """Those without a message."""
        self._coming: dict[int, _Message] = {}
        """The message from each rank whose bytes arrive now."""
        self._kept: list[_Message] = []
        """Messages without a receive, in the order of their arrival."""
        self._ended: list[tuple[_Call, BaseException | None]] = []
        self._thread: Any = None
        self._looked = -math.inf

    def send(self, array: Array, to: int, tag: int, done: Callable[[BaseException | None], None]) -> None:
        """Send a contiguous array to a rank.

        ``done`` is called with None when the caller may change the array, else with an error: in this thread before the
        return, or in the mailbox's own.
        """
        self._add("send", array, to, tag, lambda error, _: done(error))

    def receive(self, array: Array, source: int | None, tag: int, done: Done) -> None:
        """Fill a contiguous array from a rank, or from any.

        ``done`` is called as in :meth:`send`, also with the rank that has sent, -1 for none. A message of another
        length is lost; the error is ValueMismatch.
        """
        self._add("recv", array, source, tag, done)

    def abort(self, why: str) -> None:
        """End all calls, present and later ones, with an error. Local."""
        with self._changed:
            self._break(Closed(f"{why}{self._where}"))
        self._tell()

    def close(self) -> None:
        """End all calls, and free what ranks share. Collective."""
        self.abort("the process group is closed")  # and its thread uses the carrier no more
        self._carrier.close()

    def _add(self, verb: str, array: Array, peer: int | None, tag: int, done: Done) -> None:
        call = _Call(verb, array.reshape(-1).view(np.uint8), peer, tag, done, present().now() + self._timeout)
        with self._changed:
            if self._failure is not None:
                self._ended.append((call, self._failure))
            elif verb == "send":
                self._sends[peer or 0].append(call)
            else:
                self._find(call)
        self._move()
        with self._changed:
            if self._pending() and self._thread is None:
                self._thread = present().thread(self._work, "mpikv mailbox")
                self._thread.start()
            self._changed.notify_all()

    def _pending(self) -> list[_Call]:
        bound = [message.receive for message in self._coming.values() if message.receive is not None]
        return [*self._receives, *bound, *(send for sends in self._sends for send in sends)]

    def _must_wake(self) -> bool:
        return self._failure is not None or bool(self._pending())

    def _must_move(self) -> bool:
        with self._changed:
            return bool(self._pending())

    def _work(self) -> None:
        here = present()
        while self._failure is None:
            with self._changed:
                self._changed.wait_for(self._must_wake)
            looks, last = 0, here.now()
            while self._must_move():
                looks += 1
                if self._move():
                    looks, last = 0, here.now()
                if looks < here.polls or not looks:
                    here.give_way()
                else:
                    seconds = min(max(_SHORTEST_NAP, (here.now() - last) / 32), _LONGEST_NAP)
                    here.nap(seconds, here.now() + _PATIENCE)

    def _move(self) -> bool:
        """Move what can be moved, and tell the callers that waited for it; return whether anything has moved."""
        with self._changed:
            gone: Sequence[int] = ()
            before, now = self._carrier.moved, present().now()
            if now >= self._looked + _PATIENCE:
                # Looked up before the move: what a rank has sent before its end still arrives.
                self._looked, gone = now, self._gone()
            try:
                if self._failure is None:
                    for sends in self._sends:
                        while sends and self._carrier.put(sends[0]):
                            self._ended.append((sends.popleft(), None))
                    for source in self._ranks:
                        self._receive(source)
                    self._check(now, () if self._carrier.moved > before else gone)
            except Exception as error:
                self._break(error)
            moved = self._carrier.moved > before
        self._tell()
        return moved

    def _tell(self) -> None:
        """Tell callers of the ends of their calls. Without the lock, since they may call again."""
        while self._ended:
            with self._changed:
                ended, self._ended = self._ended, []
            for call, error in ended:
                call.done(error, call.source)

    def _receive(self, source: int) -> None:
        """Take the messages of a rank, as long as a call may want one of them."""
        while source in self._coming or any(call.wants(source) for call in self._receives):
            if source not in self._coming:
                head = self._carrier.head(source)
                if head is None:
                    return
                self._coming[source] = self._match(source, *head)
            message = self._coming[source]
            message.whole = self._carrier.take(message)
            if not message.whole:
                return
            del self._coming[source]
            self._deliver(message)

    def _match(self, source: int, tag: int, nbytes: int) -> _Message:
        """Return an arriving message, with the first call that wants it."""
        for call in self._receives:
            if call.tag == tag and call.wants(source):
                self._receives.remove(call)
                fits = call.bytes.nbytes == nbytes
                return _Message(source, tag, call.bytes if fits else np.empty(nbytes, np.uint8), call)
        message = _Message(source, tag, np.empty(nbytes, np.uint8))
        self._kept.append(message)
        return message

    def _find(self, call: _Call) -> None:
        """Give a receive the first message that waits for it, or let it wait for one."""
        for message in self._kept:
            if message.tag == call.tag and call.wants(message.source):
                self._kept.remove(message)
                message.receive = call
                self._deliver(message)
                return
        self._receives.append(call)

    def _deliver(self, message: _Message) -> None:
        """End the receive of a whole message."""
        call, data = message.receive, message.bytes
        if call is None or not message.whole:
            return
        call.source, error = message.source, None
        if data.nbytes != call.bytes.nbytes:
            text = f"{call}: rank {message.source} has sent {data.nbytes} bytes, which are lost{self._where}"
            error = ValueMismatch(text)
        elif data is not call.bytes:
            call.bytes[:] = data
        self._ended.append((call, error))

    def _check(self, now: float, gone: Sequence[int]) -> None:
        """Raise if a call has waited for too long, or for a process that has ended."""
        for call in self._pending():
            peers = self._others if call.peer is None else {call.peer}
            if now >= call.due:
                raise Stalled(f"{call}: waited {self._timeout:.1f} s{self._where}", peers)
            if gone and peers <= {*gone}:
                raise TransportError(f"{call}: the other process is gone{self._where}")

    def _break(self, error: BaseException) -> None:
        """End all calls, present and later ones, with an error."""
        self._failure = self._failure or error
        self._ended += [(call, self._failure) for call in self._pending()]
        _abandoned.append((self._coming.copy(), [list(sends) for sends in self._sends]))
        self._receives.clear()
        self._coming.clear()
        self._kept.clear()
        for sends in self._sends:
            sends.clear()
        self._changed.notify_all()


def ring_bytes(size: int) -> int:
    """Return the bytes of each ring among so many ranks."""
    return min(max(_ALL_RINGS // size**2 // 128 * 128, _LEAST_RING), _RING)


class _Ring:
    """Bytes on their way from one rank to another, in shared memory."""

    def __init__(self, memory: Array, order: Callable[[], object]) -> None:
        self._counts, self._bytes, self._order = memory[: 8 * _HEAD].data.cast("q"), memory[8 * _HEAD :], order

    def write(self, data: Array) -> int:
        """Write as many bytes as there is room for; return their number. By the sender alone."""
        size, written = self._bytes.size, self._counts[0]
        count = min(data.size, size - (written - self._counts[_READ]))
        if count:
            self._order()  # not before the reader has read what was there
            at = written % size
            first = min(count, size - at)
            self._bytes[at : at + first] = data[:first]
            self._bytes[: count - first] = data[first:count]
            self._order()  # the bytes before their number
            self._counts[0] = written + count
        return count

    def read(self, into: Array) -> int:
        """Read as many bytes as there are; return their number. By the receiver alone."""
        size, read = self._bytes.size, self._counts[_READ]
        count = min(into.size, self._counts[0] - read)
        if count:
            self._order()
            at = read % size
            first = min(count, size - at)
            into[:first] = self._bytes[at : at + first]
            into[first:count] = self._bytes[: count - first]
            self._order()
            self._counts[_READ] = read + count
        return count


class _Rings:
    """The :class:`_Carrier` of ranks that share memory."""

    def __init__(self, group: Group) -> None:
        """Collective."""
        rank, size = group.rank, group.size
        # Pages that are never written take no memory.
        nbytes = size**2 * (8 * _HEAD + ring_bytes(size))
        memory = group.allocate(nbytes, zeroed=False).reshape(size, size, -1)
        order = memory_barrier() or (lambda: None)
        self._to = [_Ring(part, order) for part in memory[rank]]
        self._from = [_Ring(part, order) for part in memory[:, rank]]
        # Tag and length, which may arrive in parts.
        self._heads = [(np.zeros(16, np.uint8), [0]) for _ in range(size)]
        self.moved = 0

    def put(self, send: _Call) -> bool:
        if send.started is None:
            send.started = [np.array([send.tag, send.bytes.nbytes]).view(np.uint8), send.bytes]
        while send.started:
            written = self._to[send.peer or 0].write(send.started[0])
            self.moved += written
            send.started[0] = send.started[0][written:]
            if send.started[0].size:
                return False
            del send.started[0]
        return True

    def head(self, source: int) -> tuple[int, int] | None:
        head, filled = self._heads[source]
        read = self._from[source].read(head[filled[0] :])
        self.moved += read
        filled[0] += read
        if filled[0] < head.size:
            return None
        filled[0] = 0
        tag, nbytes = head.view(np.int64).tolist()
        return tag, nbytes

    def take(self, message: _Message) -> bool:
        done = message.started or 0
        read = self._from[message.source].read(message.bytes[done:])
        self.moved += read
        message.started = done + read
        return bool(message.started == message.bytes.size)

    def close(self) -> None:
        self._to, self._from = [], []


class _Messages:
    """The :class:`_Carrier` of ranks on several hosts: MPI's messages on a communicator of their own."""

    def __init__(self, group: ProcessGroup) -> None:
        """Collective."""
        self._group, self._mpi = group, group.mpi
        with group.translated("making a communicator"):
            self._comm = group.comm.Dup()
        self._status, self._found, self.moved = group.mpi.Status(), dict[int, Any](), 0

    def put(self, send: _Call) -> bool:
        with self._group.translated("send"):
            if send.started is None:
                send.started = self._comm.Isend([send.bytes, send.bytes.nbytes, self._mpi.BYTE], send.peer, send.tag)
            return self._has_ended(send.started)

    def head(self, source: int) -> tuple[int, int] | None:
        with self._group.translated("recv"):
            found = self._comm.Improbe(source, self._mpi.ANY_TAG, self._status)
            if found is None:
                return None
            self._found[source] = found
            self.moved += 1
            return self._status.tag, self._status.Get_count(self._mpi.BYTE)

    def take(self, message: _Message) -> bool:
        with self._group.translated("recv"):
            if message.started is None:
                found = self._found.pop(message.source)
                message.started = found.Irecv([message.bytes, message.bytes.nbytes, self._mpi.BYTE])
            return self._has_ended(message.started)

    def _has_ended(self, request: Any) -> bool:
        ended = bool(request.Test())
        self.moved += ended
        return ended

    def close(self) -> None:
        with self._group.translated("closing"):
            self._comm.Free()
