"""Messages between two ranks: sends and receives with tags, beside the collectives.

As in MPI, messages from one rank to another with the same tag keep their order, and a receive gets the first message
that fits, of those that come for it; one without a source takes from any rank. A rank takes messages from another only
while a receive may want one of them. Those that nobody has asked for yet wait in its memory.

The ranks of one host write to rings in shared memory, one for each sender and receiver, or read large messages in
place; others send by MPI. The caller moves what can be moved at once, and more while it waits (:meth:`Mailbox.help`).
The rest is done by one thread, which starts with the first call that needs it and sleeps while nothing is pending.
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
from ..cluster.shared_memory import memory_barrier, sleep_on, wake_sleepers
from ..errors import Closed, Stalled, TransportError, Unsupported, ValueMismatch
from ..protocols import Array, Group

# Bytes of one ring, and of all rings of a host: with many ranks each has less.
_RING, _ALL_RINGS, _LEAST_RING = 256 << 10, 16 << 20, 4 << 10
# Words of a ring before its bytes, in a pair of cache lines for each side: the sender writes how many bytes it has
# written and whether it has given up, the receiver how many it has read, and how many messages in place.
_WRITTEN, _GIVEN_UP, _READ, _TAKEN, _HEAD, _LINE = 0, 1, 16, 17, 32, 128
# Bytes from which on a message is read in place. Shorter ones fit in a ring, and their senders need not wait.
_LARGE = 256 << 10
# Seconds to sleep at once. Two ranks that ring at the same moment may make one sound.
_NAP = 0.01
_SHORTEST_NAP, _LONGEST_NAP = 1e-5, 1e-3
# Looks before a thread sleeps, if ranks have cores of their own: some 100 microseconds.
_SPINS = 20
# Naps before the thread sleeps until it is woken: in a dialogue it need not be woken for each call.
_LINGERS = 100
# Seconds between two looks for deadlines, and for ranks whose processes have ended.
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
    awaited: int = 0
    """How many messages in place the receiver has counted when it has taken this one."""
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


class Reader(Protocol):
    """Reads the memory of other ranks of this host."""

    def is_readable(self, array: Array) -> bool:
        """Return whether others can read an array."""

    def read(self, local_rank: int, address: int, into: Array) -> None:
        """Fill an array from an address of another rank."""


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

    def look(self) -> int:
        """Return a number that changes when something may move."""

    def sleep(self, seen: int) -> None:
        """Return soon after the number has changed."""

    def ring(self, rank: int | None) -> None:
        """Wake a rank that sleeps; None: this one, in other threads."""

    def give_up(self) -> None:
        """Mark this rank's messages as lost."""

    def find_lost(self) -> Sequence[int]:
        """Return the ranks that have given up, as far as it is known here."""

    def close(self) -> None:
        """Free what ranks share. Collective."""


class Mailbox:
    """Sends and receives of one rank. All methods but the constructor and :meth:`close` are local.

    After a deadline, or once another rank has ended or given up during a call with it, all calls raise the same error.
    """

    def __init__(
        self,
        group: Group,
        timeout: float,
        gone: Callable[[], Sequence[int]] = tuple,
        reader: Reader | None = None,
    ) -> None:
        """Collective. ``timeout`` is that of each call, in seconds. ``gone`` lists ranks whose processes have ended.

        By ``reader``, equal on all ranks, receivers read large messages in place.
        """
        self._group, self._timeout, self._gone, self._ranks = group, timeout, gone, range(group.size)
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
            self._carrier = _Rings(group, reader)
        self._changed = present().condition()
        self._sends: list[deque[_Call]] = [deque() for _ in self._ranks]
        self._receives: list[_Call] = []
        """Those without a message."""
        self._coming: dict[int, _Message] = {}
        """The message from each rank whose bytes arrive now."""
        self._kept: list[_Message] = []
        """Messages without a receive, in the order of their arrival."""
        self._ended: deque[tuple[_Call, BaseException | None]] = deque()
        self._thread: Any = None
        self._helpers = 0
        self._spins = min(_SPINS, present().polls) if group.size <= group.host_cores else 0
        self._looked = -math.inf

    def send(self, array: Array, to: int, tag: int, done: Callable[[BaseException | None], None]) -> None:
        """Send a contiguous array to a rank.

        ``done`` is called with None when the caller may change the array, else with an error: in this thread before the
        return, or in the mailbox's own. If it raises with None, it is called again with what it has raised.
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

    def help(self, is_done: Callable[[], bool], seconds: float = math.inf) -> None:
        """Move messages in this thread, which waits for a call, until it has ended or some seconds are over."""
        due = present().now() + seconds
        with self._changed:
            self._helpers += 1
        try:
            self._drive(lambda: not is_done() and self._failure is None and present().now() < due, helping=True)
        finally:
            with self._changed:
                self._helpers -= 1
                if self._pending():
                    self._changed.notify_all()

    def _must_wake(self) -> bool:
        return self._failure is not None or bool(self._pending() and not self._helpers)

    def _must_move(self) -> bool:
        with self._changed:
            return self._failure is None and self._must_wake()

    def _work(self) -> None:
        here, idle = present(), 0
        while self._failure is None:
            with self._changed:
                if idle > _LINGERS:
                    self._changed.wait_for(self._must_wake)
            # A caller that waits for its call moves it faster than this thread, and has begun to by then.
            here.nap(_LONGEST_NAP, here.now() + _LONGEST_NAP)
            idle = 0 if self._must_move() else idle + 1
            self._drive(self._must_move)

    def _drive(self, goes_on: Callable[[], bool], helping: bool = False) -> None:
        looks = 0
        while goes_on():
            seen, looks = self._carrier.look(), looks + 1
            if self._move(helping):
                looks = 0
            elif looks >= self._spins:
                self._carrier.sleep(seen)

    def _move(self, helping: bool = False) -> bool:
        """Move what can be moved, and tell the callers that waited for it; return whether anything has moved."""
        with self._changed:
            before, now = self._carrier.moved, present().now()
            looks = now >= self._looked + _PATIENCE
            # Looked up before the move: what a rank has sent before its end still arrives.
            lost = self._find_lost() if looks else {}
            try:
                if self._failure is None:
                    for sends in self._sends:
                        while sends and self._carrier.put(sends[0]):
                            self._ended.append((sends.popleft(), None))
                    for source in self._ranks if self._receives or self._coming else ():
                        self._receive(source)
                    if looks:
                        self._looked = now
                        self._check(now, {} if self._carrier.moved > before else lost)
            except Exception as error:
                self._break(error)
            moved = bool(self._ended) or self._carrier.moved > before
        self._tell()
        if moved and self._helpers > helping:  # another thread may sleep, and wait for what has ended
            self._carrier.ring(None)
        return moved

    def _tell(self) -> None:
        """Tell callers of the ends of their calls. Without the lock, since they may call again, and wait for others."""
        while True:
            with self._changed:
                if not self._ended:
                    return
                call, error = self._ended.popleft()
            try:
                call.done(error, call.source)
            except Exception as fault:
                if error is not None:
                    raise
                self._ended.append((call, fault))

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

    def _find_lost(self) -> dict[int, str]:
        """Return the ranks that move no more messages, and why."""
        lost = {rank: f"rank {rank} has given up its messages" for rank in self._carrier.find_lost()}
        lost |= dict.fromkeys(self._gone(), "the other process is gone")
        end = self._group.find_end()
        return lost | {rank: end for rank in self._others if end.startswith(f"rank {rank} has left")}

    def _check(self, now: float, lost: dict[int, str]) -> None:
        """Raise if a call has waited for too long, or for a rank that is lost."""
        for call in self._pending():
            peers = self._others if call.peer is None else {call.peer}
            if now >= call.due:
                raise Stalled(f"{call}: waited {self._timeout:.1f} s{self._where}", peers)
            if lost and peers <= lost.keys():
                raise TransportError(f"{call}: {lost[min(peers)]}{self._where}")

    def _break(self, error: BaseException) -> None:
        """End all calls, present and later ones, with an error."""
        self._failure = self._failure or error
        self._carrier.give_up()
        self._ended += [(call, self._failure) for call in self._pending()]
        _abandoned.extend([*self._coming.values(), *(send for sends in self._sends for send in sends)])
        self._receives.clear()
        self._coming.clear()
        self._kept.clear()
        for sends in self._sends:
            sends.clear()
        self._changed.notify_all()


def ring_bytes(size: int) -> int:
    """Return the bytes of each ring among so many ranks.

    >>> [ring_bytes(size) for size in (2, 16, 100)]
    [262144, 65536, 4096]
    """
    return min(max(_ALL_RINGS // size**2 // 128 * 128, _LEAST_RING), _RING)


class _Ring:
    """Bytes on their way from one rank to another, in shared memory."""

    def __init__(self, memory: Array, order: Callable[[], object]) -> None:
        self.words, self._bytes, self._order = memory[: 8 * _HEAD].data.cast("q"), memory[8 * _HEAD :], order

    def write(self, data: Array) -> int:
        """Write as many bytes as there is room for; return their number. By the sender alone."""
        size, written = self._bytes.size, self.words[_WRITTEN]
        count = min(data.size, size - (written - self.words[_READ]))
        if count:
            self._order()  # not before the reader has read what was there
            at = written % size
            first = min(count, size - at)
            self._bytes[at : at + first] = data[:first]
            self._bytes[: count - first] = data[first:count]
            self._order()  # the bytes before their number
            self.words[_WRITTEN] = written + count
        return count

    def read(self, into: Array) -> tuple[int, bool]:
        """Read as many bytes as there are; return their number, and whether the sender may wait for their room. By the
        receiver alone.
        """
        size, read = self._bytes.size, self.words[_READ]
        count = min(into.size, self.words[_WRITTEN] - read)
        if count:
            self._order()
            at = read % size
            first = min(count, size - at)
            into[:first] = self._bytes[at : at + first]
            into[first:count] = self._bytes[: count - first]
            self._order()
            self.words[_READ] = read + count
            self._order()  # it may have filled the ring meanwhile, and seen no room
        return count, count > 0 and self.words[_WRITTEN] - read == size


class _Rings:
    """The :class:`_Carrier` of ranks that share memory.

    A large message is not written to the ring if the receiver can read it in place. Its sender then waits until the
    receiver has counted it.
    """

    def __init__(self, group: Group, reader: Reader | None) -> None:
        """Collective."""
        self._rank, size, self._reader = group.rank, group.size, reader
        # Pages that are never written take no memory.
        memory = group.allocate(size * _LINE + size**2 * (8 * _HEAD + ring_bytes(size)), zeroed=False)
        self._bells, self._address = memory[: size * _LINE].data.cast("i")[:: _LINE // 4], memory.ctypes.data
        """A word for each rank, which changes when there is something new for it."""
        rings = memory[size * _LINE :].reshape(size, size, -1)
        self._order = memory_barrier() or (lambda: None)
        self._to = [_Ring(part, self._order) for part in rings[self._rank]]
        self._from = [_Ring(part, self._order) for part in rings[:, self._rank]]
        # Tag, length, and an address if the message is to be read in place. A head may arrive in parts.
        self._heads = [(np.zeros(24, np.uint8), [0]) for _ in range(size)]
        self.moved = 0

    def put(self, send: _Call) -> bool:
        ring, nbytes = self._to[send.peer or 0], send.bytes.nbytes
        if send.started is None:
            in_place = nbytes >= _LARGE and self._reader is not None and self._reader.is_readable(send.bytes)
            head = np.array([send.tag, nbytes, send.bytes.ctypes.data if in_place else 0]).view(np.uint8)
            send.started = [head] if in_place else [head, send.bytes]
            send.awaited = ring.words[_TAKEN] + in_place
        before = self.moved
        while send.started:
            written = ring.write(send.started[0])
            self.moved += written
            send.started[0] = send.started[0][written:]
            if send.started[0].size:
                break
            del send.started[0]
        if self.moved > before:
            self.ring(send.peer)
        return not send.started and ring.words[_TAKEN] >= send.awaited

    def head(self, source: int) -> tuple[int, int] | None:
        head, filled = self._heads[source]
        filled[0] += self._read(source, head[filled[0] :])
        if filled[0] < head.size:
            return None
        filled[0] = 0
        tag, nbytes, _ = head.view(np.int64).tolist()
        return tag, nbytes

    def take(self, message: _Message) -> bool:
        address = int(self._heads[message.source][0].view(np.int64)[2])
        if not address:
            message.started = (message.started or 0) + self._read(message.source, message.bytes[message.started or 0 :])
            return bool(message.started == message.bytes.size)
        words = self._from[message.source].words
        if self._reader is not None and not words[_GIVEN_UP]:
            self._reader.read(message.source, address, message.bytes)
            self._order()
        if words[_GIVEN_UP]:  # its array may have changed meanwhile
            raise TransportError(f"recv with tag {message.tag}: rank {message.source} has given up its send")
        self._order()
        words[_TAKEN] += 1
        self.moved += 1
        self.ring(message.source)
        return True

    def _read(self, source: int, into: Array) -> int:
        read, was_full = self._from[source].read(into)
        self.moved += read
        if was_full:
            self.ring(source)
        return read

    def ring(self, rank: int | None) -> None:
        """Wake a rank that sleeps."""
        self._order()  # what it is woken for comes before the bell
        rank = self._rank if rank is None else rank
        self._bells[rank] = (self._bells[rank] + 1) & 0x7FFFFFFF
        wake_sleepers(self._address + rank * _LINE)

    def look(self) -> int:
        return int(self._bells[self._rank])

    def sleep(self, seen: int) -> None:
        here = present()
        if here.world is None:
            sleep_on(self._address + self._rank * _LINE, seen, _NAP)
        else:
            here.nap(_NAP, here.now() + _PATIENCE, lambda: self.look() != seen)

    def give_up(self) -> None:
        for ring in self._to:
            ring.words[_GIVEN_UP] = 1
        self._order()

    def find_lost(self) -> list[int]:
        lost = [rank for rank, ring in enumerate(self._from) if ring.words[_GIVEN_UP]]
        self._order()  # what they have sent before is read afterwards
        return lost

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
        self._nap = _SHORTEST_NAP

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

    def look(self) -> int:
        return self.moved

    def sleep(self, seen: int) -> None:
        here = present()
        self._nap = _SHORTEST_NAP if self.moved != seen else min(1.03 * self._nap, _LONGEST_NAP)
        here.nap(self._nap, here.now() + _PATIENCE)

    def ring(self, rank: int | None) -> None:
        pass  # threads look again soon

    def give_up(self) -> None:
        pass  # MPI has the bytes of what it sends

    def find_lost(self) -> tuple[()]:
        return ()  # the group knows

    def _has_ended(self, request: Any) -> bool:
        ended = bool(request.Test())
        self.moved += ended
        return ended

    def close(self) -> None:
        with self._group.translated("closing"):
            self._comm.Free()
