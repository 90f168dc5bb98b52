"""Point-to-point messages between ranks that need not meet: requests and replies.

A thread of the receiving rank answers requests. On one host a sender rings a bell once MPI has taken its request, and
the thread sleeps until a ring. It counts: while it has heard more rings than it has received messages, one is on its
way, and the thread looks at MPI again. So none is slept through. A thread that falls asleep has received a message for
each ring that it has heard; the ring of any other message is not heard yet, and ends the sleep. MPI moves messages only
inside of its calls. A caller that leaves with unsent messages wakes the thread of its rank, and the
thread looks until they are sent.

Short requests to one rank, and short replies, are collected and travel as one message: a call for a hundred small keys
sends a few. Whoever is about to wait first sends what is collected. A reply waits for other requests of its message a
millisecond at most, or until the update that is made then has ended.

While messages are on their way, and on several hosts, the thread naps between looks: some microseconds after the last
message, up to a few milliseconds after a long pause.

Each call of MPI releases Python's lock. A main thread that runs pure Python gives it back only after Python's switch
interval: 5 ms by default, several times for a request. While such a thread lives, the interval is 0.02 ms.
"""

from __future__ import annotations

import logging
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..arrays.arrays import zeros
from ..cluster.bells import Bells
from ..cluster.printing import log
from ..cluster.process_group import ProcessGroup
from ..cluster.runtime import present
from ..cluster.waiting import Waits
from ..protocols import Array

_REQUEST, _REPLY = 1, 2
# The numbers before a body; the last is its bytes. The body is filled up to a multiple of their length.
_NUMBERS = struct.Struct("8q")
_HEAD = _NUMBERS.size
# Bytes of a message of several requests or replies. A list of 161 keys took longer with 16 KiB, and with 128 KiB as
# long. A longer request travels alone.
_COLLECTED = 1 << 16
# Seconds that replies may wait for others.
_PROMPT = 1e-3
_SHORTEST_NAP, _LONGEST_NAP = 2e-5, 2e-3
# An owner in pure Python answers a request in 1.3 ms with it, in 1.8 ms with 0.1 ms.
_SWITCH_INTERVAL = 2e-5
# Sent messages whose completion is tested only when there are this many: each test releases Python's lock.
_MOST_UNFINISHED = 16
# Buffers of sent messages kept for each size.
_MOST_KEPT = 2


class Request(NamedTuple):
    """A received request or reply. Its body may be overwritten once the next message is taken."""

    source: int
    head: Sequence[int]
    """Eight numbers: the sent ones, then zeros, last the bytes of the body."""
    body: Array
    """Bytes."""


Serve: TypeAlias = "Callable[[Request], bool]"
"""Answers a request, or returns False if it is too early for it. The thread calls it."""


def serve_ready(requests: Sequence[Request], serve: Serve) -> list[Request]:
    """Serve requests in order; return those that are too early, and, unserved, later ones of their senders. Local.

    Requests of one rank keep their order: one that is too early holds back its successors, even if it is ready by the
    time that they are tried.
    """
    left: list[Request] = []
    waiting = set[int]()
    for request in requests:
        # Per sender: its requests build on each other, and those of other ranks do not wait for them.
        if request.source in waiting or not serve(request):
            waiting.add(request.source)
            left.append(request)
    return left


class Endpoint:
    """The messages of one rank, on a communicator of their own.

    All methods but the constructor and :meth:`close` are local. One thread reads replies; any thread makes requests.
    The caller holds a lock for answers.
    """

    def __init__(self, group: ProcessGroup, serve: Serve) -> None:
        """Duplicate the communicator, and make bells if all ranks share a host; start no thread yet. Collective."""
        self._group, self._serve = group, serve
        self._bells, self._waking, self._wakes = Bells(group) if group.one_host else None, present().lock(), 0
        with group.translated("making a communicator"):
            self._comm = group.comm.Dup()
        ring = self._bells.ring if self._bells else None
        self._requests = _Outbox(self._comm, _REQUEST, group.mpi, ring)
        self._answers = _Outbox(self._comm, _REPLY, group.mpi)
        self.request, self.answer = self._requests.add, self._answers.add
        """Copy a request, or a reply, to be sent by :meth:`flush` at the latest; see :meth:`_Outbox.add`. Local."""
        # They live as long as the endpoint: MPI may be writing to their memory when the thread ends.
        self._asked, self._replies = _Inbox(self._comm, _REQUEST, group.mpi), _Inbox(self._comm, _REPLY, group.mpi)
        self.take_replies = self._replies.take
        """Return the replies of the next message, if it has arrived, else none. Local."""
        self.failure: BaseException | None = None
        """The exception that ended the thread; None if :meth:`stop` did."""
        self._ending, self._flushed = False, 0.0
        self._thread = present().thread(self._work, "mpikv rpc")

    def start(self) -> None:
        """Start the thread that answers other ranks; call it once. Local."""
        self._thread.start()

    def flush(self) -> None:
        """Send all collected requests and replies without waiting, and wake the receivers of requests. Local."""
        self._flushed = present().now()
        self._requests.flush()
        self._answers.flush()

    def hand_over(self) -> None:
        """Send what is collected, and leave messages that MPI has not taken yet to the thread. Local."""
        if [*self._requests.tidy(), *self._answers.tidy()]:
            self._wake()

    def stop(self) -> None:
        """Wake the thread to end after its present request; does not wait for that. Local."""
        self._ending = True
        self._wake()

    @property
    def answering(self) -> bool:
        """Whether the thread was started, and has not ended."""
        return self._thread.is_alive()

    def discard(self) -> list[int]:
        """After the thread's end: send what is collected, and drop what has come; return the ranks with a message on
        its way. Local: no wait.

        Call it until no rank is returned: no other waits for this one then.
        """
        while self._asked.take() or self._replies.take():
            pass
        ranks = {*self._requests.tidy(), *self._answers.tidy(), *self._asked.coming, *self._replies.coming}
        return sorted(ranks)

    def close(self, waiting: Waits) -> None:
        """Stop the thread, wait for its end or raise, free the communicator. No message may be in flight. Collective.

        Raises:
            Stalled: the thread does not end, or an answered message does not complete, before the deadline.
        """
        self.stop()
        # Every message was received; MPI only has to note that.
        waiting.until(lambda: not self.answering and not self.discard(), lambda: [self._group.rank])
        with self._group.translated("closing"):
            self._comm.Free()

    def _work(self) -> None:
        """Answer requests until :meth:`stop`; keep and log an error that ends it. The thread's function."""
        try:
            with self._group.translated("answering other ranks"), _switching_often():
                self._answer_all()
        except BaseException as error:
            # The main thread raises it in its next call, perhaps much later: so log it now.
            self.failure = error
            text = "the thread of rank %d that answers other ranks has ended; calls to it will not complete: %r"
            log(text, self._group.rank, error, level=logging.ERROR, trace=error)

    def _answer_all(self) -> None:
        """Answer requests as they come, and sleep between them, until :meth:`stop`. Local."""
        early: list[Request] = []
        here = present()
        last, due = here.now(), 0
        while not self._ending:
            requests = self._asked.take()
            # With all that are early: what they wait for may have come.
            try:
                early = serve_ready([*early, *requests], self._serve_promptly)
            finally:  # an error that ends the thread is answered, too
                self.flush()
            if requests:
                # The inbox's memory receives the next message; a request that waits needs its own.
                new = set(map(id, requests))
                early = [one._replace(body=one.body.copy()) if id(one) in new else one for one in early]
                last, due = here.now(), due - 1
                continue
            moving = [*self._requests.tidy(), *self._answers.tidy(), *self._asked.coming, *early]
            if self._bells and not moving and due <= self._wakes:
                due += self._bells.listen()
                last = here.now()
            else:
                idle = here.now() - last
                here.nap(min(max(_SHORTEST_NAP, idle / 32), _LONGEST_NAP))

    def _serve_promptly(self, request: Request) -> bool:
        """Serve a request, or return False if too early; then flush if the last flush was over 1 ms ago. Local."""
        served = self._serve(request)
        if present().now() - self._flushed > _PROMPT:
            self.flush()
        return served

    def _wake(self) -> None:
        """Wake this rank's thread, if it sleeps, to look at all messages once more, or to end. Local."""
        # Counted before the ring: the thread must not take this ring for one of a request.
        with self._waking:
            self._wakes += 1
        if self._bells:
            self._bells.ring(self._group.rank)


_switching = threading.Lock()
_intervals: list[float] = []
"""The switch interval at the start of each living thread; the first is the program's own."""


@contextmanager
def _switching_often() -> Iterator[None]:
    """In a with block, shorten Python's switch interval to 0.02 ms, in all threads of the process. Local."""
    with _switching:
        _intervals.append(sys.getswitchinterval())
        if _intervals[-1] > _SWITCH_INTERVAL:
            sys.setswitchinterval(_SWITCH_INTERVAL)
    try:
        yield
    finally:
        with _switching:
            before = _intervals[0]
            _intervals.pop()
            if not _intervals and sys.getswitchinterval() <= _SWITCH_INTERVAL < before:
                sys.setswitchinterval(before)


class _Inbox:
    """Receives the messages of one tag. Used by one thread."""

    def __init__(self, comm: Any, tag: int, mpi: Any) -> None:
        """Allocate memory for a message, replaced for longer ones; receive nothing yet. Local."""
        self._comm, self._tag, self._mpi = comm, tag, mpi
        self._status = mpi.Status()
        self._memory = zeros(1 << 16)
        self._coming: tuple[Any, int, int] | None = None

    @property
    def coming(self) -> tuple[int, ...]:
        """Return (source,) of the message that MPI is writing into the memory, or () if there is none."""
        return () if self._coming is None else (self._coming[1],)

    def take(self) -> list[Request]:
        """Return the parts of the next message if all of it has arrived, else []; their bodies last until the next
        call. Local: no wait.
        """
        if self._coming is None:
            # Any source: owners do not know who will ask next.
            status, mpi = self._status, self._mpi
            # A matched probe: the following receive gets exactly this message, whatever other threads receive. MPICH's
            # first probe only makes progress; the second sees the message.
            sought = mpi.ANY_SOURCE, self._tag, status
            if (message := self._comm.Improbe(*sought) or self._comm.Improbe(*sought)) is None:
                return []
            nbytes = status.Get_count(mpi.BYTE)
            if nbytes > self._memory.size:
                self._memory = zeros(nbytes)
            self._coming = message.Irecv([self._memory, nbytes, mpi.BYTE]), status.source, nbytes
        request, source, nbytes = self._coming
        # Never a blocking receive: a long message needs its sender, who may be gone.
        if not request.Test():
            return []
        self._coming = None
        parts, begin = list[Request](), 0
        while begin < nbytes:
            head = _NUMBERS.unpack_from(self._memory.data, begin)
            begin += _HEAD
            parts.append(Request(source, head, self._memory[begin : begin + head[-1]]))
            begin += head[-1] + -head[-1] % _HEAD
        return parts


class _Outbox:
    """Sends messages of one tag from memory of its own, used again and again. Any thread may call all methods."""

    def __init__(self, comm: Any, tag: int, mpi: Any, sent: Callable[[int], None] | None = None) -> None:
        """Make an empty outbox; ``sent`` is called with the receiver once MPI was given a message. Local."""
        self._comm, self._tag, self._mpi, self._sent_to = comm, tag, mpi, sent
        self._lock = present().lock()
        # For each rank the message that is collected, and its length so far.
        self._collected: dict[int, tuple[Array, int]] = {}
        self._sent: list[tuple[Any, Array, int]] = []
        self._free: dict[int, list[Array]] = {}

    def add(self, rank: int, head: Sequence[int], body: Array | None = None) -> None:
        """Copy a request or reply into the message that is collected for a rank; it is sent by a flush, or once 64 KiB
        are collected. Does not wait. Local.

        ``head`` has seven numbers at most.
        """
        nbytes = 0 if body is None else body.nbytes
        length = _HEAD + nbytes + -nbytes % _HEAD
        with self._lock:
            if (held := self._collected.get(rank)) and held[1] + length > held[0].size:
                self._send(rank)
            memory, begin = self._collected.get(rank) or (self._take_memory(max(length, _COLLECTED)), 0)
            _NUMBERS.pack_into(memory.data, begin, *head, *(0,) * (7 - len(head)), nbytes)
            if body is not None:
                place = memory[begin + _HEAD : begin + _HEAD + nbytes]
                np.copyto(place.view(body.dtype).reshape(body.shape), body)
            self._collected[rank] = memory, begin + length
            if begin + length >= _COLLECTED:
                self._send(rank)

    def flush(self) -> None:
        """Send what is collected, without waiting. Local."""
        if self._collected:
            with self._lock:
                for rank in list(self._collected):
                    self._send(rank)

    def tidy(self) -> list[int]:
        """Send what is collected; reuse memory of sent messages; return the ranks of unsent ones. Local: no wait."""
        self.flush()
        with self._lock:
            self._take_back()
            return [rank for _, _, rank in self._sent]

    def _take_memory(self, size: int) -> Array:
        """Return ``size`` bytes of any content: the memory of a sent message, else new. Local; the lock is held."""
        # A training sends messages of few sizes, and new memory costs more than the copy.
        return (self._free.get(size) or [zeros(size)]).pop()

    def _send(self, rank: int) -> None:
        """Send the message collected for a rank (there is one); do not wait; call ``sent``. Local; the lock is held."""
        if len(self._sent) >= _MOST_UNFINISHED:
            self._take_back()
        memory, length = self._collected.pop(rank)
        self._sent.append((self._comm.Isend([memory, length, self._mpi.BYTE], rank, self._tag), memory, rank))
        if self._sent_to:
            self._sent_to(rank)

    def _take_back(self) -> None:
        """Forget messages that MPI has taken, and keep their memory for later ones. Local; the lock is held."""
        # One call for all: after each call a thread waits for Python's lock, perhaps for milliseconds.
        if self._sent and self._mpi.Request.Testsome([request for request, _, _ in self._sent]):
            for request, memory, _ in self._sent:
                if not request and len(free := self._free.setdefault(memory.size, [])) < _MOST_KEPT:
                    free.append(memory)
            self._sent = [message for message in self._sent if message[0]]
