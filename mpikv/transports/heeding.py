"""Waiting for ranks that may tell meanwhile that they do not come."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from ..errors import TransportError
from ..process_group import ProcessGroup
from ..waiting import Waits

__all__ = ["Heeding"]

# Polls between two looks for what was told, which take longer than those.
_LOOK_EVERY = 64


class Heeding:
    """A :class:`~mpikv.waiting.Waits` that ends when another rank has told that it has ended the store."""

    def __init__(self, group: ProcessGroup, waiting: Waits) -> None:
        self._group, self._waiting = group, waiting

    def until(self, ready: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        """Return when ``ready()`` is true.

        Raises:
            TransportError: a rank has ended the store, and says why.
            Stalled: it was not before the deadline.
        """
        polls = itertools.count(1)

        def ready_or_left() -> bool:
            if ready():
                return True
            if next(polls) % _LOOK_EVERY == 0 and (why := self._group.told_end()):
                if ready():
                    return True  # it has left after this
                raise TransportError(why)
            return False

        self._waiting.until(ready_or_left, missing)
