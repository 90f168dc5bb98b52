"""Waiting for other ranks, some of which never come: a rank that gives up, or has ended the store, tells the others.

A wait of :class:`Requests` that failed leaves operations behind that MPI may still carry out, hence their memory must
stay; one that succeeded leaves nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..cluster.process_group import GONE, ProcessGroup
from ..cluster.runtime import OfMessages, present
from ..cluster.waiting import Waits
from ..errors import Stalled, TransportError

__all__ = ["AbortableWaiting", "Requests"]

# Polls between two looks for what other ranks tell, which take longer than those.
_LOOK_EVERY = 64
# Operations that were given up. MPI may still read and write their buffers, which their requests keep alive.
_unfinished: list[Any] = []


def _looking(
    ready: Callable[[], bool], look: Callable[[], Exception | None], every: int = _LOOK_EVERY
) -> Callable[[], bool]:
    """Return a function that asks ``ready``, and now and then raises what ``look`` returns."""
    polls = itertools.count(1)

    def ready_or_raise() -> bool:
        if ready():
            return True
        if (every > 1 and next(polls) % every) or not (failure := look()):
            return False
        if ready():
            return True  # whoever tells of a failure has come here before
        raise failure

    return ready_or_raise


class AbortableWaiting:
    """A :class:`~mpikv.cluster.waiting.Waits` that raises TransportError when another rank has told that it has ended
    the store, and why; with ``listening`` false not before :meth:`listen`, and nothing is slower until then.
    """

    def __init__(self, group: ProcessGroup, waiting: Waits, *, listening: bool = True) -> None:
        self._group, self._waiting = group, waiting
        self.until: Callable[[Callable[[], bool], Callable[[], Sequence[int]]], None] = waiting.until
        if listening:
            self.listen()

    def listen(self) -> None:
        """Hear from now on what other ranks tell. Local."""
        self.until = self._until_told

    def _until_told(self, ready: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        self._waiting.until(_looking(ready, self._look), missing)

    def _look(self) -> TransportError | None:
        why = self._group.told_end()
        return TransportError(why) if why else None


class Requests:
    """Waits for what the other ranks of a group take part in, up to a deadline. The library's errors leave as
    :class:`~mpikv.errors.TransportError`.
    """

    def __init__(self, group: ProcessGroup, waiting: Waits) -> None:
        self._group, self._comm, self._waiting = group, group.comm, waiting
        self._translated = group.translated("waiting")

    def until(self, ready: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        """Return when ``ready()`` is true, which need not be of MPI's making. Whatever is raised here instead, the
        other ranks are told that this one has given up.

        Raises:
            Stalled: it was not before the deadline, or another rank has given up.
        """
        # At every poll: the rest of a message of this rank, for which others wait, may go on only while it is in MPI.
        self._until(_looking(ready, partial(self._look, missing), every=1), missing)

    def _until(self, ready: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        try:
            with self._translated:
                self._waiting.until(ready, missing)
        except BaseException:
            self._give_up()
            raise

    def complete(self, *requests: Any) -> None:
        """Wait until the operations are complete. As :meth:`until`."""
        if not requests:
            return
        test = requests[0].Test if len(requests) == 1 else partial(type(requests[0]).Testall, requests)
        # A simulated rank polls only where something may have changed.
        every = _LOOK_EVERY if present().polls else 1
        try:
            # Some operations need the others to go on, so that one that they have left may never complete.
            self._until(OfMessages(_looking(test, partial(self._look, tuple), every)), tuple)
        except BaseException:
            _unfinished.extend(requests)
            raise

    @contextmanager
    def completed(self) -> Iterator[list[Any]]:
        """Give a list for the operations that a block starts, and wait for them at its end. As :meth:`until`."""
        started: list[Any] = []
        try:
            yield started
        except BaseException:
            _unfinished.extend(started)
            self._give_up()
            raise
        self.complete(*started)

    def _give_up(self) -> None:
        # A rank that comes later may find its operation complete; this tells it that it is alone.
        for rank in range(self._comm.size):
            if rank != self._comm.rank:
                self._group.send_word(b"", rank, GONE)

    def check(self) -> None:
        """Raise Stalled if another rank has given up."""
        with self._translated:
            # MPICH's first probe only makes progress, by which the second sees the message.
            if failure := self._look(tuple) or self._look(tuple):
                raise failure

    def _look(self, missing: Callable[[], Sequence[int]]) -> Exception | None:
        """Return a failure if another rank has given up; this one says for whom it waited itself, if it can tell."""
        if not self._comm.Iprobe():  # most often there is no message of any kind
            return None
        self._group.witness()
        if not self._comm.Iprobe(tag=GONE):
            return None
        if why := self._group.told_end():  # by the rank for which they have
            return TransportError(why)
        who = missing()
        about = f", and this one still waited for ranks {list(who)}" if who else ""
        return Stalled(f"other ranks have given up waiting in this call{about}", who)
