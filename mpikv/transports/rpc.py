"""Point-to-point messages between ranks that need not meet: requests and replies.

A thread of the receiving rank answers requests. On one host a sender rings a bell once MPI has taken its request, and
the thread sleeps until a ring. It counts: while it has heard more rings than it has received requests, a request is on
its way, and the thread looks at MPI again. So no request is slept through. A thread that falls asleep has received a
request for each ring that it has heard; the ring of any other request is not heard yet, and ends the sleep. MPI moves
messages only inside of its calls. A caller that leaves with unsent messages wakes the thread of its rank, and the
thread looks until they are sent.

While messages are on their way, and on several hosts, the thread naps between looks: some microseconds after the last
message, up to a few milliseconds after a long pause.

Each call of MPI releases Python's lock. A main thread that runs pure Python gives it back only after Python's switch
interval: 5 ms by default, several times for a request. While such a thread lives, the interval is 0.02 ms.
"""

from __future__ import annotations

import logging
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
_HEAD = 64
_SHORTEST_NAP, _LONGEST_NAP = 2e-5, 2e-3
# An owner in pure Python answers a request in 1.3 ms with it, in 1.8 ms with 0.1 ms.
_SWITCH_INTERVAL = 2e-5
# Sent messages whose completion is tested only when there are this many: each test releases Python's lock.
_MOST_UNFINISHED = 16
# Buffers of sent messages kept for each size.
_MOST_KEPT = 2


class Request(NamedTuple):
    """A received message. Its body may be overwritten once the next message is taken."""

    source: int
    head: Sequence[int]
    """Eight numbers: the sent ones, then zeros."""
    body: Array
    """Bytes."""


Serve: TypeAlias = "Callable[[Request], bool]"
"""Answers a request, or returns False if it is too early for it. The thread calls it."""


def serve_ready(requests: Sequence[Request], serve: Serve) -> list[Request]:
    """Serve requests in order; return those that are too early, and later ones of their senders. Local.

    Requests of one rank keep their order: one that is too early holds back its successors, even if it is ready by the
    time that they are tried.
    """
    left: list[Request] = []
    for request in requests:
        # Per sender: its requests build on each other, and those of other ranks do not wait for them.
        if request.source in [other.source for other in left] or not serve(request):
            left.append(request)
    return left


class Endpoint:
    """The messages of one rank, on a communicator of their own.

    All methods but the constructor and :meth:`close` are local. One thread reads replies; any thread makes requests.
    The caller holds a lock for answers.
    """

    def __init__(self, group: ProcessGroup, serve: Serve) -> None:
        """Collective. Starts no thread."""
        self._group, self._serve = group, serve
        self._bells, self._waking, self._wakes = Bells(group) if group.one_host else None, present().lock(), 0
        with group.translated("making a communicator"):
            self._comm = group.comm.Dup()
        self._requests, self._answers = (_Outbox(self._comm, tag, group.mpi) for tag in (_REQUEST, _REPLY))
        # They live as long as the endpoint: MPI may be writing to their memory when the thread ends.
        self._asked, self._replies = _Inbox(self._comm, _REQUEST, group.mpi), _Inbox(self._comm, _REPLY, group.mpi)
        self.failure: BaseException | None = None
        """The exception that ended the thread; None if :meth:`stop` did."""
        self._ending = False
        self._thread = present().thread(self._work, "mpikv rpc")

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def request(self, rank: int, head: Sequence[int], body: Array | None = None) -> None:
        """Send a copy of a request without waiting, and wake its receiver. Local."""
        self._requests.send(rank, head, body)
        if self._bells:
            self._bells.ring(rank)

    def answer(self, rank: int, head: Sequence[int], body: Array | None = None) -> None:
        """Send a reply. Arguments as of :meth:`request`."""
        self._answers.send(rank, head, body)

    def hand_over(self) -> None:
        """Leave the messages that are not sent yet to the thread."""
        if self._requests.tidy() or self._answers.tidy():
            self._wake()

    def reply(self) -> Request | None:
        """Return the next reply, if it has arrived."""
        return self._replies.take()

    def stop(self) -> None:
        """Answer no more requests after the present one."""
        self._ending = True
        self._wake()

    @property
    def answering(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def discard(self) -> list[int]:
        """Receive and drop messages, without waiting; return the ranks with one still on its way. Local.

        Call it when the thread has ended, until no rank is returned: no other waits for this one then.
        """
        while self._asked.take() or self._replies.take():
            pass
        ranks = {*self._requests.tidy(), *self._answers.tidy(), *self._asked.coming, *self._replies.coming}
        return sorted(ranks)

    def close(self, waiting: Waits) -> None:
        """Wait for the thread to end, and free the communicator. No message may be on its way. Collective.

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
            request = self._asked.take()
            # One request, then all that are early once more: it may be the one they wait for.
            if request is not None:
                early = serve_ready([*early, request], self._serve)
                if early and early[-1] is request:
                    # The inbox's memory receives the next message; a request that waits needs its own.
                    early[-1] = request._replace(body=request.body.copy())
                last, due = here.now(), due - 1
                continue
            early = serve_ready(early, self._serve)
            moving = [*self._requests.tidy(), *self._answers.tidy(), *self._asked.coming, *early]
            if self._bells and not moving and due <= self._wakes:
                due += self._bells.listen()
                last = here.now()
            else:
                idle = here.now() - last
                here.nap(min(max(_SHORTEST_NAP, idle / 32), _LONGEST_NAP))

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
        self._comm, self._tag, self._mpi = comm, tag, mpi
        self._status = mpi.Status()
        self._memory = zeros(1 << 16)
        self._coming: tuple[Any, int, int] | None = None

    @property
    def coming(self) -> tuple[int, ...]:
        """The rank of the message that MPI is writing into the memory, if there is one."""
        return () if self._coming is None else (self._coming[1],)

    def take(self) -> Request | None:
        """Return a received message, or begin to receive one; None until it is complete. Does not wait.

        The next message overwrites its body.
        """
        if self._coming is None:
            # Any source: owners do not know who will ask next.
            status, mpi = self._status, self._mpi
            # A matched probe: the following receive gets exactly this message, whatever other threads receive. MPICH's
            # first probe only makes progress; the second sees the message.
            sought = mpi.ANY_SOURCE, self._tag, status
            if (message := self._comm.Improbe(*sought) or self._comm.Improbe(*sought)) is None:
                return None
            nbytes = status.Get_count(mpi.BYTE)
            if nbytes > self._memory.size:
                self._memory = zeros(nbytes)
            self._coming = message.Irecv([self._memory, nbytes, mpi.BYTE]), status.source, nbytes
        request, source, nbytes = self._coming
        # Never a blocking receive: a long message needs its sender, who may be gone.
        if not request.Test():
            return None
        self._coming = None
        return Request(source, self._memory[:_HEAD].view(np.int64).tolist(), self._memory[_HEAD:nbytes])


class _Outbox:
    """Sends messages of one tag from memory of its own, used again and again. Any thread may send."""

    def __init__(self, comm: Any, tag: int, mpi: Any) -> None:
        self._comm, self._tag, self._mpi = comm, tag, mpi
        self._lock = present().lock()
        self._sent: list[tuple[Any, Array, int]] = []
        self._free: dict[int, list[Array]] = {}

    def send(self, rank: int, head: Sequence[int], body: Array | None) -> None:
        """Send a copy of a message without waiting for its receiver. Local; any thread."""
        nbytes = _HEAD + (0 if body is None else body.nbytes)
        if len(self._sent) >= _MOST_UNFINISHED:
            self.tidy()
        with self._lock:
            # A training sends messages of few sizes, and new memory costs more than the copy.
            free = self._free.get(nbytes)
            memory = free.pop() if free else zeros(nbytes)
            numbers = memory[:_HEAD].view(np.int64)
            numbers[: len(head)] = head
            numbers[len(head) :] = 0
            if body is not None:
                np.copyto(memory[_HEAD:].view(body.dtype).reshape(body.shape), body)
            request = self._comm.Isend([memory, nbytes, self._mpi.BYTE], rank, self._tag)
            self._sent.append((request, memory, rank))

    def tidy(self) -> list[int]:
        """Take back the memory of completed messages; return the ranks whose messages are still on their way."""
        if not self._sent:
            return []
        with self._lock:
            # One call for all: after each call a thread waits for Python's lock, perhaps for milliseconds.
            if self._sent and self._mpi.Request.Testsome([request for request, _, _ in self._sent]):
                for request, memory, _ in self._sent:
                    if not request and len(free := self._free.setdefault(memory.size, [])) < _MOST_KEPT:
                        free.append(memory)
                self._sent = [message for message in self._sent if message[0]]
            return [rank for _, _, rank in self._sent]
