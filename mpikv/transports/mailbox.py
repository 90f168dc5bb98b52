"""Messages between two ranks: sends and receives with tags, beside the collectives.

As in MPI, messages from one rank to another with the same tag keep their order, and a receive gets the first message
that fits, of those that come for it; one without a source takes from any rank. The ranks of one host send by
the rings of ``rings.py``: a rank takes messages from another only while a receive may want one of them,
and those that nobody has asked for wait in its memory. Ranks of several hosts send by MPI, which does all that itself.

A call moves what can be moved at once, and more while its caller waits, who looks, and then naps between two looks.
A thread does the same for calls for which nobody waits, so no rank has to be woken.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ..cluster.printing import log
from ..cluster.process_group import ProcessGroup
from ..cluster.runtime import present
from ..cluster.shutdown import abandon
from ..cluster.status_board import StatusBoard
from ..errors import Closed, Stalled, TransportError, ValueMismatch
from ..protocols import Array, Group
from .rings import Rings

# Seconds of the naps of a caller that waits for MPI, and of the thread.
_SHORTEST_NAP, _LONGEST_NAP = 1e-5, 1e-3
# Looks before a caller sleeps: some 100 microseconds.
_SPINS = 20
# Naps of the thread without any call until it ends: in a dialogue, no call starts it anew.
_LINGERS = 1000
# Seconds between two looks for deadlines, and for ranks that have ended.
_PATIENCE = 0.25


Ending: TypeAlias = Callable[[BaseException | None, int], object]
"""What a caller does at the end of a call: it learns of an error, or of none, and of the rank that has sent what was
received, else -1. It is called in the thread of the call before that returns, or in any other. If it raises without an
error, it is called again with what it has raised; what it raises then is logged."""


@dataclass(eq=False)
class Message:
    """A send or a receive that was called."""

    verb: str
    bytes: Array
    peer: int | None
    """The other rank; None: any."""
    tag: int
    end: Ending | None
    """None once it was called."""
    timeout: float = math.inf
    """Seconds that its caller wants to wait."""
    due: float = math.inf
    request: Any = None
    """MPI's."""
    source: int = -1
    """The rank whose message a receive has got."""

    def fits(self, source: int, tag: int) -> bool:
        """Return whether this receive may get a message of that source and tag. Local."""
        return tag == self.tag and self.peer in (None, source)

    def __str__(self) -> str:
        way = "to" if self.verb == "send" else "from"
        peer = "any rank" if self.peer is None else f"rank {self.peer}"
        return f"{self.verb} of {self.bytes.nbytes} bytes with tag {self.tag} {way} {peer}"


class Mailbox:
    """Sends and receives of one rank. All methods but the constructor and :meth:`close` are local.

    After a deadline or an interrupt, or once another rank has ended or given up during a call with it, all calls raise
    the same error.
    """

    def __init__(
        self, group: Group, board: StatusBoard, failed: Callable[[Exception], object], rings: Rings | None
    ) -> None:
        """Prepare messages by ``rings``, or without them by MPI, on a duplicate communicator; start no thread yet.
        Collective.

        Args:
            group: the ranks.
            board: knows where the programs of other ranks are.
            failed: learns of the error after which nothing moves.
            rings: those of ranks that share memory. Without, messages travel by MPI.
        """
        self._board, self._failed, self._others = board, failed, {*range(group.size)} - {group.rank}
        self._where = f" [rank {group.rank}/{group.size}]" if group.size > 1 else ""
        self._lock = present().lock()
        self._pending: list[Message] = []
        self._carrier: _ByRings | _ByMPI
        if rings is None:
            assert isinstance(group, ProcessGroup)
            self._carrier = _ByMPI(group, self._pending, self._end)
        else:
            self._carrier = _ByRings(group, board, rings, self._end)
        self._ended: deque[tuple[Message, BaseException | None]] = deque()
        self._failure: Exception | None = None
        self._has_thread = False
        self._attended = -math.inf
        """Until when the thread leaves all to a caller that waits."""
        self._looked, self._lost = -math.inf, dict[int, str]()

    def send(self, array: Array, to: int, tag: int, end: Ending) -> Message:
        """Begin to send a contiguous array; return its Message. Leave the array unchanged until ``end`` is called,
        maybe before this returns.
        """
        return self._call(Message("send", array.reshape(-1).view(np.uint8), to, tag, end))

    def receive(self, array: Array, source: int | None, tag: int, end: Ending) -> Message:
        """Begin to fill an array from a rank, or any (None); return its Message. ``end`` is called when it is done or
        failed, maybe before this returns.

        The array is contiguous. A message of another length is lost; the error is ValueMismatch.
        """
        return self._call(Message("recv", array.reshape(-1).view(np.uint8), source, tag, end))

    def wait(self, message: Message, timeout: float, seconds: float = math.inf) -> None:
        """Move messages until a call's ``end`` was called, or ``seconds`` are over. A call later than ``timeout`` ends
        all calls, without a raise.

        The deadline of a call is ``timeout`` after the first wait for it; then it ends with Stalled.
        """
        here = present()
        begin, looks = here.now(), 0
        with self._lock:
            if message.due == math.inf:
                message.timeout, message.due = timeout, begin + timeout
        while True:
            self._attended = here.now() + 3 * _LONGEST_NAP
            self._move()
            waited, looks = here.now() - begin, looks + 1
            if message.end is None or waited >= seconds:
                return
            if looks > _SPINS:
                self._carrier.sleep(waited)

    def abort(self, why: str) -> None:
        """End all calls, present and later ones, with an error, and call ``end`` of the present ones. Does not wait."""
        with self._lock:
            self._break(Closed(f"{why}{self._where}"))
        self._tell()

    def close(self) -> None:
        """End all calls with Closed, calling ``end`` of each; free MPI's communicator, or let go of the rings.
        Collective.
        """
        self.abort("the process group is closed")  # and its thread uses the carrier no more
        self._carrier.close()

    def _call(self, message: Message) -> Message:
        """Begin a call, move what can be moved, start the thread for the rest, and return the call. Does not wait."""
        self._move(message)
        with self._lock:
            if self._pending and not self._has_thread:
                self._has_thread = True
                present().thread(self._serve, "mpikv mailbox").start()
        return message

    def _serve(self) -> None:
        """Move messages for which nobody waits, until there have been none for a while. The thread's function."""
        idle = 0
        while True:
            present().sleep(_LONGEST_NAP)
            with self._lock:
                idle = 0 if self._pending else idle + 1
                if idle > _LINGERS or self._failure is not None:
                    self._has_thread = False
                    return
            if present().now() > self._attended:
                try:
                    self._step()
                finally:
                    if self._ended:
                        # By another thread: what a caller does at an end may wait for a call that this one moves.
                        present().thread(self._tell, "mpikv mailbox ends").start()

    def _move(self, new: Message | None = None) -> None:
        """Begin a call if given one, move what can move, and call ``end`` of calls that have ended. Only ``end`` may
        wait.
        """
        try:
            self._step(new)
        finally:
            self._tell()

    def _step(self, new: Message | None = None) -> None:
        """Begin a call if given one, move what can move, note ended calls. An error fails all calls; only an interrupt
        is raised, too.
        """
        with self._lock:
            try:
                if new is not None:
                    self._begin(new)
                if self._pending:
                    self._carrier.step()
                    self._check(present().now())
            except BaseException as error:
                known = error if isinstance(error, Exception) else Closed(f"interrupted by {error!r}{self._where}")
                self._break(known)
                self._failed(known)
                if known is not error:
                    raise

    def _begin(self, new: Message) -> None:
        """Note a call and begin it; its own error ends it alone, or an earlier failure ends it. The lock is held."""
        self._pending.append(new)
        if self._failure is not None:
            self._break(self._failure)
            return
        try:
            self._carrier.begin(new)
        except Exception as error:  # as of a tag above MPI's limit: the other calls go on
            self._end(new, error=error)

    def _end(self, message: Message, sent: str = "", error: Exception | None = None) -> None:
        """Note a call as ended, for _tell(): well, or by ``error``, or by ``sent``, the length of a message that did
        not fit.

        The lock is held.
        """
        if sent:
            text = f"rank {message.source} has sent {sent} bytes, which are lost; the array may have changed"
            error = ValueMismatch(f"{message}: {text}{self._where}")
        self._pending.remove(message)
        self._ended.append((message, error))

    def _check(self, now: float) -> None:
        """At most once in 0.25 s: raise Stalled if a call is late, TransportError if its rank was lost at two such
        looks. The lock is held.
        """
        if now < self._looked + _PATIENCE:
            return
        before, self._lost, self._looked = self._lost, self._carrier.find_lost(), now
        for message in self._pending:
            peers = self._others if message.peer is None else {message.peer}
            if now >= message.due:
                about = "; ".join(
                    [*self._board.describe(sorted(peers)), "if a rank is only slow, raise timeout= or MPIKV_TIMEOUT"]
                )
                raise Stalled(f"{message}: waited {message.timeout:.1f} s; {about}{self._where}", sorted(peers))
            # Lost at two looks: what a rank has sent before its end still arrives.
            if peers and peers <= before.keys() & self._lost.keys():
                raise TransportError(f"{message}: {self._lost[min(peers)]}{self._where}")

    def _break(self, error: Exception) -> None:
        """Note all calls, later ones too, as failed, and own sends as lost; _tell() must follow. The lock is held."""
        self._failure = self._failure or error
        self._carrier.give_up()
        abandon(self._pending)  # they keep their arrays: MPI and other ranks may still read and write these
        self._ended.extend((message, self._failure) for message in self._pending)
        self._pending.clear()

    def _tell(self) -> None:
        """Call ``end`` of each call that has ended, and again with its own error if it raises. The lock must not be
        held, as ``end`` may make calls, and wait for others.
        """
        while self._ended:
            with self._lock:
                if not self._ended:
                    return
                message, error = self._ended.popleft()
                self._attended = -math.inf  # this thread may now wait for a call that nobody else moves
            assert message.end is not None
            try:
                message.end(error, message.source)
                message.end = None
            except BaseException as fault:
                if error is None:
                    self._ended.appendleft((message, fault))
                else:
                    message.end = None
                    log(f"{message}: an error was told, and its caller failed{self._where}", trace=fault)
                if not isinstance(fault, Exception):
                    raise


class _ByRings:
    """How messages of ranks that share memory travel. All methods are local, and only ``sleep`` waits."""

    def __init__(self, group: Group, board: StatusBoard, rings: Rings, end: Callable[[Message, str], None]) -> None:
        """Make a generator for the sends to each rank, and one for the receives. Nothing moves yet. Local.

        ``end`` is called with each complete call, and "" or the length of a message that did not fit.
        """
        self._group, self._board, self._rings, self._end = group, board, rings, end
        ranks = range(group.size)
        self._sends: list[deque[Message]] = [deque() for _ in ranks]
        self._receives: list[Message] = []
        """Those without a message, in the order of their calls."""
        self._kept: list[Message] = []
        """Messages that nobody has asked for yet, as receives without an end, in the order of their arrival."""
        self._streams = [*map(self._send_to, ranks), *map(self._receive_from, ranks)]
        self.give_up, self.sleep = rings.give_up, rings.sleep

    def begin(self, message: Message) -> None:
        """Queue a send or a receive; if a fitting message has come already, copy it and note the call as ended."""
        if message.verb == "send":
            self._sends[message.peer or 0].append(message)
        elif kept := next((kept for kept in self._kept if message.fits(kept.source, kept.tag)), None):
            self._kept.remove(kept)
            self._deliver(message, kept)
        else:
            self._receives.append(message)

    def step(self) -> None:
        """Move what can move, and note complete calls as ended; do not wait."""
        self._rings.look()
        for stream in self._streams:
            next(stream)

    def _send_to(self, rank: int) -> Iterator[None]:
        """Send the messages queued for a rank, by an endless generator that yields where it must wait."""
        while True:
            while sends := self._sends[rank]:
                yield from self._rings.send(rank, sends[0].tag, sends[0].bytes)
                self._end(sends.popleft(), "")
            yield

    def _receive_from(self, source: int) -> Iterator[None]:
        """Receive a rank's messages while a call may want one, and keep those that none wants, by an endless generator
        that yields to wait.
        """
        while True:
            while any(call.peer in (None, source) for call in self._receives):
                tag, nbytes, address = yield from self._rings.receive_head(source)
                receive = self._take_receive(source, tag)
                alike = receive is not None and receive.bytes.size == nbytes
                data = receive.bytes if receive and alike else np.empty(nbytes, np.uint8)
                yield from self._rings.receive(source, address, data)
                arrived = Message("recv", data, source, tag, None, source=source)
                # A call that fits may have come meanwhile.
                if receive := receive or self._take_receive(source, tag):
                    self._deliver(receive, arrived)
                else:
                    self._kept.append(arrived)
            yield

    def _take_receive(self, source: int, tag: int) -> Message | None:
        """Remove and return the first receive that fits a source and a tag; None if none does."""
        receive = next((call for call in self._receives if call.fits(source, tag)), None)
        if receive is not None:
            self._receives.remove(receive)
        return receive

    def _deliver(self, receive: Message, arrived: Message) -> None:
        """Note a receive as ended: copy the arrived message to it, or note the message's length if that differs."""
        receive.source, fits = arrived.source, receive.bytes.size == arrived.bytes.size
        if fits and arrived.bytes is not receive.bytes:
            receive.bytes[:] = arrived.bytes
        self._end(receive, "" if fits else str(arrived.bytes.size))

    def find_lost(self) -> dict[int, str]:
        """Return {rank: reason} of the ranks of this host that move no more messages. Does not wait."""
        end = self._group.find_end()
        lost = dict.fromkeys(self._rings.find_lost(), f"the other rank has given up its messages{end and f' ({end})'}")
        return lost | dict.fromkeys(self._board.gone(), "the other process is gone")

    def close(self) -> None:
        """Drop all that refers back to this object or its owner: the rings then go with the last reference. Local."""
        self._streams.clear()
        del self._end


class _ByMPI:
    """How messages of ranks on several hosts travel: as MPI's, on a communicator of their own.

    Its methods are those of :class:`_ByRings`. All but the constructor and :meth:`close` are local.
    """

    def __init__(self, group: ProcessGroup, pending: Sequence[Message], end: Callable[[Message, str], None]) -> None:
        """Duplicate the group's communicator for these messages, and keep ``pending``, the mailbox's own list, to test
        its calls. Nothing moves yet. Collective.

        ``pending`` are the calls that have begun and not ended; ``end`` as for :class:`_ByRings`.
        """
        self._group, self._mpi, self._pending, self._end = group, group.mpi, pending, end
        with group.translated("making a communicator"):
            self._comm = group.comm.Dup()

    def begin(self, message: Message) -> None:
        """Begin a send or a receive of MPI, and keep its request in the message; does not wait."""
        start = self._comm.Isend if message.verb == "send" else self._comm.Irecv
        peer = self._mpi.ANY_SOURCE if message.peer is None else message.peer
        with self._group.translated(message.verb):
            message.request = start([message.bytes, message.bytes.size, self._mpi.BYTE], peer, message.tag)

    def step(self) -> None:
        """Test the pending calls without waiting, and note complete ones as ended."""
        for message in tuple(self._pending):
            status, sent = self._mpi.Status(), ""
            with self._group.translated(message.verb):
                try:
                    if not message.request.Test(status):
                        continue
                    if message.verb == "recv" and (nbytes := status.Get_count(self._mpi.BYTE)) < message.bytes.size:
                        sent = str(nbytes)
                except self._mpi.Exception as error:
                    if error.Get_error_class() != self._mpi.ERR_TRUNCATE:
                        raise
                    sent = f"more than {message.bytes.size}"
            if message.verb == "recv":
                message.source = status.source
            self._end(message, sent)

    def sleep(self, waited: float) -> None:
        """Sleep for a thirty-second of the seconds waited so far, from 0.01 ms to 1 ms."""
        here = present()
        nap = min(max(_SHORTEST_NAP, waited / 32), _LONGEST_NAP)
        here.nap(nap, here.now() + nap)

    def find_lost(self) -> dict[int, str]:
        """Receive other ranks' notices of their ends; return {rank: reason} of those that have ended. Does not wait."""
        self._group.find_end()
        return dict(self._group.left)

    def give_up(self) -> None:
        """Do nothing: MPI has the bytes of what this rank sends. Local."""

    def close(self) -> None:
        """Free the communicator. Collective."""
        with self._group.translated("closing"):
            self._comm.Free()
