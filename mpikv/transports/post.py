"""Letters between ranks that need not meet: requests, which a thread of the rank they go to answers, and replies.

The thread is asleep but for a look at MPI now and then: some microseconds after the last letter, and a few milliseconds
when there was none for long. MPI moves messages only while somebody is in it, so that the thread also carries on what
this rank sends while it computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..arrays import zeros
from ..typing import Array
from ..world import Group

__all__ = ["Letter", "Post"]

_REQUEST, _REPLY = 1, 2
_HEAD = 64
_WORDS = _HEAD // 8
_SHORTEST_NAP, _LONGEST_NAP = 2e-5, 2e-3
# A message of so many bytes is there when MPI tells of it. Receiving a longer one takes its sender, too.
_ARRIVED_WHOLE = 2048
# Of messages on their way, as many are looked at when one is sent.
_MOST_UNFINISHED = 16


class Letter(NamedTuple):
    """A message that has arrived. Its body may be overwritten once the next one is taken."""

    source: int
    head: Sequence[int]
    """Eight numbers."""
    body: Array
    """Bytes."""


Serve: TypeAlias = "Callable[[Letter], bool]"
"""Answers a request, or returns False if it is too early for it. Called by the thread."""


class Post:
    """The letters of one rank, on a communicator of their own. Requests and :meth:`replies` are for one thread; answers
    need a lock of the caller's.
    """

    def __init__(self, group: Group, serve: Serve) -> None:
        """Collective."""
        self._group, self._serve = group, serve
        with group.translated("making a communicator"):
            self._comm = group.comm.Dup()
        self._requests, self._answers = _Outbox(self._comm, _REQUEST), _Outbox(self._comm, _REPLY)
        self._replies = _Inbox(self._comm, _REPLY)
        self.failure: BaseException | None = None
        """What has ended the thread, if it was not told to end."""
        self._ending = False
        self._thread = threading.Thread(target=self._work, name="mpikv post", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def request(self, rank: int, head: Sequence[int], body: Array | None = None) -> None:
        """Send a request. ``body``, contiguous, may be changed when this returns."""
        self._requests.send(rank, head, body)

    def answer(self, rank: int, head: Sequence[int], body: Array | None = None) -> None:
        """Send a reply, as :meth:`request`."""
        self._answers.send(rank, head, body)

    def reply(self) -> Letter | None:
        """Return the next reply, if it has arrived."""
        return self._replies.take()

    def stop(self, wait: bool = True) -> None:
        """Answer no more requests."""
        self._ending = True
        if wait and self._thread.is_alive():
            self._thread.join()

    def discard(self) -> None:
        """Receive whatever arrives, so that no rank has to wait for this one at its end. After :meth:`stop`."""
        requests = _Inbox(self._comm, _REQUEST)
        while requests.take() or self._replies.take():
            pass
        self._requests.tidy()
        self._answers.tidy()

    def close(self) -> None:
        """Free the communicator, on which no letter is on its way. Collective."""
        self.stop()
        # Every one was received; MPI only has to take note of it.
        while self._requests.tidy() or self._answers.tidy():
            time.sleep(_SHORTEST_NAP)
        with self._group.translated("closing"):
            self._comm.Free()

    def _work(self) -> None:
        try:
            with self._group.translated("answering other ranks"):
                self._answer_all()
        except BaseException as error:  # the calling thread raises it
            self.failure = error

    def _answer_all(self) -> None:
        inbox, early = _Inbox(self._comm, _REQUEST), list[Letter]()
        last = time.monotonic()
        while not self._ending:
            early = [letter for letter in early if not self._serve(letter)]
            letter = inbox.take()
            if letter is None:
                idle = time.monotonic() - last
                time.sleep(min(max(_SHORTEST_NAP, idle / 32), _LONGEST_NAP))
                continue
            # Of one rank, none may overtake another.
            if letter.source in [other.source for other in early] or not self._serve(letter):
                early.append(letter._replace(body=letter.body.copy()))
            last = time.monotonic()


class _Inbox:
    """Receives the letters of one tag."""

    def __init__(self, comm: Any, tag: int) -> None:
        from mpi4py import MPI

        self._comm, self._tag, self._mpi = comm, tag, MPI
        self._status = MPI.Status()
        self._memory = zeros(1 << 16)
        self._coming: tuple[Any, int, int] | None = None

    def take(self) -> Letter | None:
        """Return the next letter, if it is all there."""
        if self._coming is None and not self._begin():
            return None
        assert self._coming is not None
        request, source, nbytes = self._coming
        if request is not None and not request.Test():
            return None
        self._coming = None
        return Letter(source, self._memory[:_HEAD].view(np.int64).tolist(), self._memory[_HEAD:nbytes])

    def _begin(self) -> bool:
        status, mpi = self._status, self._mpi
        if not self._comm.Iprobe(mpi.ANY_SOURCE, self._tag, status):
            return False
        source, nbytes = status.source, status.Get_count(mpi.BYTE)
        if nbytes > self._memory.size:
            self._memory = zeros(nbytes)
        memory = [self._memory, nbytes, mpi.BYTE]
        if nbytes <= _ARRIVED_WHOLE:
            self._comm.Recv(memory, source, self._tag)
            self._coming = None, source, nbytes
        else:
            self._coming = self._comm.Irecv(memory, source, self._tag), source, nbytes
        return True


class _Outbox:
    """Sends letters of one tag from memory of its own, which it uses again."""

    def __init__(self, comm: Any, tag: int) -> None:
        from mpi4py import MPI

        self._comm, self._tag, self._mpi = comm, tag, MPI
        self._sent: list[tuple[Any, Array]] = []
        self._free: dict[int, list[Array]] = {}

    def send(self, rank: int, head: Sequence[int], body: Array | None) -> None:
        nbytes = _HEAD + (0 if body is None else body.nbytes)
        if len(self._sent) >= _MOST_UNFINISHED:
            self.tidy()
        free = self._free.get(nbytes)
        memory = free.pop() if free else zeros(nbytes)
        memory[:_HEAD].view(np.int64)[: len(head)] = head
        if body is not None:
            np.copyto(memory[_HEAD:].view(body.dtype).reshape(body.shape), body)
        self._sent.append((self._comm.Isend([memory, nbytes, self._mpi.BYTE], rank, self._tag), memory))

    def tidy(self) -> int:
        """Take the memory of what was sent back; return how many letters are still on their way."""
        # One call for all: after each, a thread waits for Python's lock, which the other may have for milliseconds.
        if self._sent and self._mpi.Request.Testsome([request for request, _ in self._sent]):
            for request, memory in self._sent:
                if not request:
                    self._free.setdefault(memory.size, []).append(memory)
            self._sent = [(request, memory) for request, memory in self._sent if request]
        return len(self._sent)
