"""Letters between ranks that need not meet: requests, which a thread of the rank they go to answers, and replies.

The thread is asleep but for a look at MPI now and then: some microseconds after the last letter, and a few milliseconds
when there was none for long. MPI moves messages only while somebody is in it, so that the thread also carries on what
this rank sends while it computes.

Each call of MPI gives up Python's lock, and a main thread that runs Python alone gives it back after Python's switch
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
from ..cluster.process_group import ProcessGroup
from ..cluster.runtime import present
from ..cluster.waiting import Waits
from ..protocols import Array

__all__ = ["Endpoint", "Request", "Serve", "unserved"]

_REQUEST, _REPLY = 1, 2
_HEAD = 64
_SHORTEST_NAP, _LONGEST_NAP = 2e-5, 2e-3
_SWITCH_INTERVAL = 2e-5
# Of messages on their way, as many are looked at when one is sent.
_MOST_UNFINISHED = 16
# Of the memory of messages that have arrived, as many pieces of a size are kept for the next ones.
_MOST_KEPT = 2


class Request(NamedTuple):
    """A message that has arrived. Its body may be overwritten once the next one is taken."""

    source: int
    head: Sequence[int]
    """Eight numbers: those that were sent, and zeros."""
    body: Array
    """Bytes."""


Serve: TypeAlias = "Callable[[Request], bool]"
"""Answers a request, or returns False if it is too early for it. Called by the thread."""


def unserved(letters: Sequence[Request], serve: Serve) -> list[Request]:
    """Serve letters in their order; return those that are left.

    Of one rank, none may overtake another: what is too early may be so no more when the next one is looked at.
    """
    left: list[Request] = []
    for letter in letters:
        if letter.source in [other.source for other in left] or not serve(letter):
            left.append(letter)
    return left


class Endpoint:
    """The letters of one rank, on a communicator of their own. Requests and :meth:`reply` are for one thread; answers
    need a lock of the caller's.
    """

    def __init__(self, group: ProcessGroup, serve: Serve) -> None:
        """Collective."""
        self._group, self._serve = group, serve
        with group.translated("making a communicator"):
            self._comm = group.comm.Dup()
        self._requests, self._answers = _Outbox(self._comm, _REQUEST, group.mpi), _Outbox(self._comm, _REPLY, group.mpi)
        # They live as long as the post: MPI may be writing to their memory when the thread ends.
        self._asked, self._replies = _Inbox(self._comm, _REQUEST, group.mpi), _Inbox(self._comm, _REPLY, group.mpi)
        self.failure: BaseException | None = None
        """What has ended the thread, if it was not told to end."""
        self._ending = False
        self._thread = present().thread(self._work, "mpikv rpc")

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def request(self, rank: int, head: Sequence[int], body: Array | None = None) -> None:
        """Send a request. ``body``, contiguous, may be changed when this returns."""
        self._requests.send(rank, head, body)

    def answer(self, rank: int, head: Sequence[int], body: Array | None = None) -> None:
        """Send a reply, as :meth:`request`."""
        self._answers.send(rank, head, body)

    def reply(self) -> Request | None:
        """Return the next reply, if it has arrived."""
        return self._replies.take()

    def stop(self) -> None:
        """Answer no more requests, when the one that is being answered is done."""
        self._ending = True

    @property
    def answering(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def discard(self) -> list[int]:
        """Receive whatever arrives, so that no rank has to wait for this one at its end; return the ranks from or to
        which something is still on its way. When the thread has ended.
        """
        while self._asked.take() or self._replies.take():
            pass
        ranks = {*self._requests.tidy(), *self._answers.tidy(), *self._asked.coming, *self._replies.coming}
        return sorted(ranks)

    def close(self, waiting: Waits) -> None:
        """Free the communicator, on which no letter is on its way. Collective.

        Raises:
            Stalled: the thread does not end, or a letter that was answered does not, before the deadline.
        """
        self.stop()
        # Every letter was received; MPI only has to take note of it.
        waiting.until(lambda: not self.answering and not self.discard(), lambda: [self._group.rank])
        with self._group.translated("closing"):
            self._comm.Free()

    def _work(self) -> None:
        try:
            with self._group.translated("answering other ranks"), _switching_often():
                self._answer_all()
        except BaseException as error:
            # The calling thread raises it, in its next call; it may compute for long before.
            self.failure = error
            text = (
                "the thread of rank %d that answers other ranks has ended, and their calls to it will not complete: %r"
            )
            logging.getLogger("mpikv").error(text, self._group.rank, error, exc_info=error)

    def _answer_all(self) -> None:
        early: list[Request] = []
        here = present()
        last = here.now()
        while not self._ending:
            letter = self._asked.take()
            if letter is not None:
                early = unserved([*early, letter], self._serve)
                if early and early[-1] is letter:
                    early[-1] = letter._replace(body=letter.body.copy())
                last = here.now()
                continue
            early = unserved(early, self._serve)
            self._requests.tidy()
            self._answers.tidy()
            idle = here.now() - last
            here.nap(min(max(_SHORTEST_NAP, idle / 32), _LONGEST_NAP))


_switching = threading.Lock()
_intervals: list[float] = []
"""The switch interval when each of the living threads began: the first one's is the program's own."""


@contextmanager
def _switching_often() -> Iterator[None]:
    """Have Python's threads change places often meanwhile. An interval that the program sets by itself stays."""
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
    """Receives the letters of one tag."""

    def __init__(self, comm: Any, tag: int, mpi: Any) -> None:
        self._comm, self._tag, self._mpi = comm, tag, mpi
        self._status = mpi.Status()
        self._memory = zeros(1 << 16)
        self._coming: tuple[Any, int, int] | None = None

    @property
    def coming(self) -> tuple[int, ...]:
        """The rank whose letter is on its way into the memory, if there is one."""
        return () if self._coming is None else (self._coming[1],)

    def take(self) -> Request | None:
        """Return the next letter, if it is all there."""
        if self._coming is None and not self._begin():
            return None
        assert self._coming is not None
        request, source, nbytes = self._coming
        # Never a blocking receive: its sender, who may be gone, takes part in that of a long message.
        if not request.Test():
            return None
        self._coming = None
        return Request(source, self._memory[:_HEAD].view(np.int64).tolist(), self._memory[_HEAD:nbytes])

    def _begin(self) -> bool:
        status, mpi = self._status, self._mpi
        # What was probed is what is received, whatever other threads do.
        message = self._comm.Improbe(mpi.ANY_SOURCE, self._tag, status)
        if message is None:
            return False
        nbytes = status.Get_count(mpi.BYTE)
        if nbytes > self._memory.size:
            self._memory = zeros(nbytes)
        self._coming = message.Irecv([self._memory, nbytes, mpi.BYTE]), status.source, nbytes
        return True


class _Outbox:
    """Sends letters of one tag from memory of its own, which it uses again."""

    def __init__(self, comm: Any, tag: int, mpi: Any) -> None:
        self._comm, self._tag, self._mpi = comm, tag, mpi
        self._lock = present().lock()
        self._sent: list[tuple[Any, Array, int]] = []
        self._free: dict[int, list[Array]] = {}

    def send(self, rank: int, head: Sequence[int], body: Array | None) -> None:
        nbytes = _HEAD + (0 if body is None else body.nbytes)
        with self._lock:
            if len(self._sent) >= _MOST_UNFINISHED:
                self._tidy()
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
        """Take the memory of what was sent back; return the ranks to which letters are still on their way."""
        if not self._sent:
            return []
        with self._lock:
            self._tidy()
            return [rank for _, _, rank in self._sent]

    def _tidy(self) -> None:
        # One call for all: after each, a thread waits for Python's lock, which the other may have for milliseconds.
        if self._sent and self._mpi.Request.Testsome([request for request, _, _ in self._sent]):
            for request, memory, _ in self._sent:
                if not request and len(free := self._free.setdefault(memory.size, [])) < _MOST_KEPT:
                    free.append(memory)
            self._sent = [letter for letter in self._sent if letter[0]]
