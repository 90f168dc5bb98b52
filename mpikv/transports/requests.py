"""Waits for other ranks, some of which may never come. A rank that gives up, or has ended the store, tells the others.

After a failed wait of :class:`Requests`, MPI may still carry out its operations, so their memory must stay. After a
successful one nothing is left.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..cluster.process_group import GONE, ProcessGroup
from ..cluster.runtime import OfMessages, present
from ..cluster.shutdown import abandon
from ..cluster.waiting import Waits
from ..errors import Stalled, TransportError

# Polls between two looks for notices of other ranks: a look takes longer than a poll.
_LOOK_EVERY = 64


def _raising(
    ready: Callable[[], bool], look: Callable[[], Exception | None], every: int = _LOOK_EVERY
) -> Callable[[], bool]:
    """Return a condition: ``ready()``, except that each ``every``-th vain poll raises an error of ``look()``. Local."""
    polls = itertools.count(1)

    def ready_or_raise() -> bool:
        """Return whether it is ready; raise an error that ``look()`` has found, at one of ``every`` polls."""
        # First the operation: in the usual case it is complete, and no look is needed.
        if ready():
            return True
        if (every > 1 and next(polls) % every) or not (failure := look()):
            return False
        if ready():
            return True  # the sender of the notice may have completed this operation before it failed
        raise failure

    return ready_or_raise


class AbortableWaiting:
    """A :class:`~mpikv.cluster.waiting.Waits` that raises TransportError once another rank has ended the store.

    The error has that rank's reason.
    """

    def __init__(self, find_end: Callable[[], str], waiting: Waits) -> None:
        """Keep ``waiting``, and ``find_end``: it returns why another rank has left, or "". Wait for nothing. Local."""
        self._find_end, self._waiting = find_end, waiting

    def until(self, ready: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        """Wait until ``ready()``; TransportError once another rank has ended the store, Stalled at the deadline."""
        self._waiting.until(_raising(ready, self._look), missing)

    def _look(self) -> TransportError | None:
        """Return a TransportError with the reason if another rank has ended the store, else None. Does not wait."""
        return TransportError(why) if (why := self._find_end()) else None


class Requests:
    """Waits for the other ranks' part of an operation, up to a deadline.

    The library's errors become :class:`~mpikv.errors.TransportError`.
    """

    def __init__(self, group: ProcessGroup, waiting: Waits) -> None:
        """Keep ``waiting``, and ``group``, to tell other ranks of failed waits; send nothing yet. Local."""
        self._group, self._comm, self._waiting = group, group.comm, waiting
        self._translated = group.translated("waiting")

    def until(self, ready: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        """Wait until ``ready()`` is true; if that fails, or another rank gave up, tell ranks and raise. May wait.

        The condition need not be one of MPI.

        Raises:
            Stalled: the deadline passed, or another rank has given up.
        """
        # A look at every poll: it calls MPI, and others may wait for a message of this rank that moves only inside MPI.
        self._until(_raising(ready, partial(self._look, missing), every=1), missing)

    def _until(
        self, ready: Callable[[], bool], missing: Callable[[], Sequence[int]], requests: Sequence[Any] = ()
    ) -> None:
        """Wait until ``ready()``; if that raises, keep the requests' memory and tell the other ranks. May wait."""
        try:
            with self._translated:
                self._waiting.until(ready, missing)
        except BaseException:
            self._give_up(requests)
            raise

    def complete(self, *requests: Any) -> None:
        """Wait until MPI's operations end; if that fails, or others gave up, keep their memory, tell ranks, raise."""
        if not requests:
            return
        test = requests[0].Test if len(requests) == 1 else partial(type(requests[0]).Testall, requests)
        # A simulated rank (polls 0) is asked only after a change, so each poll looks.
        every = _LOOK_EVERY if present().polls else 1
        # An operation that others have left may never complete: the looks end the wait.
        self._until(OfMessages(_raising(test, partial(self._look, tuple), every)), tuple, requests)

    @contextmanager
    def started(self) -> Iterator[list[Any]]:
        """In a with block, yield a list for the operations that it starts; do not wait for them. If the block raises,
        keep their memory and tell other ranks.
        """
        started: list[Any] = []
        try:
            yield started
        except BaseException:
            # They may have sent something already: the other ranks must not wait for the rest.
            self._give_up(started)
            raise

    def _give_up(self, requests: Sequence[Any]) -> None:
        """Keep the memory of requests, and send all other ranks, without waiting, a notice of giving up. Local."""
        abandon(requests)
        # A rank that comes later may find its operation complete. The notice tells it that it is alone.
        self._group.send_notice(b"", self._group.others, GONE)

    def check(self) -> None:
        """Raise Stalled or TransportError if another rank has given up or left, as far as known. Does not wait."""
        with self._translated:
            # MPICH's first probe only makes progress; the second sees the message.
            if failure := self._look(tuple) or self._look(tuple):
                raise failure

    def _look(self, missing: Callable[[], Sequence[int]]) -> Exception | None:
        """Return an error if another rank has given up or left, else None; first answer other hosts' questions."""
        # One probe in the usual case: there is no message of any kind. A rank that is alone has no communicator.
        if not self._group.others or not self._comm.Iprobe():
            return None
        self._group.witness()
        if not self._comm.Iprobe(tag=GONE):
            return None
        if why := self._group.find_end():  # by the rank for which they have
            return TransportError(why)
        who = missing()
        about = f", and this one still waited for ranks {list(who)}" if who else ""
        return Stalled(f"other ranks have given up waiting in this call{about}", who)
