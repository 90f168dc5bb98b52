"""How a rank waits for another: without burning a core, with a warning, and with an end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from ..errors import Stalled
from .runtime import present

__all__ = ["Waiting", "Waits"]

_SHORTEST_NAP, _LONGEST_NAP = 1e-5, 1e-3


Warn = Callable[[float, Sequence[int]], None]


class Waits(Protocol):
    """What waits as :class:`Waiting` does."""

    def until(self, ready: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        """Return when ``ready()`` is true, or raise :class:`~mpikv.errors.Stalled`."""


class Waiting:
    """Waits until something is ready, up to a deadline."""

    def __init__(self, timeout: float, warn_after: float = math.inf, warn: Warn | None = None) -> None:
        """Times are in seconds; ``warn`` is told how long was waited, and for which ranks."""
        self._timeout, self._warn_after, self._warn = timeout, warn_after, warn

    def warning(self, warn: Warn) -> Waiting:
        """Return one that waits as long, and tells ``warn`` of it."""
        return Waiting(self._timeout, self._warn_after, warn)

    def until(self, ready: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        """Return when ``ready()`` is true.

        Raises:
            Stalled: it was not before the deadline; ``missing()`` are the ranks that were waited for, if it can be
            told.
        """
        # Before the first yield: on a busy core each may take a scheduler's slice, and all of them seconds.
        here = present()
        started, warned = here.now(), False
        for _ in range(here.polls):
            if ready():
                return
            here.give_way()
        while not ready():
            waited = here.now() - started
            if waited >= self._timeout and not ready():
                who = missing()
                raise Stalled(f"waited {waited:.1f} s for " + (f"ranks {list(who)}" if who else "other ranks"), who)
            if self._warn and waited >= self._warn_after and not warned:
                warned = True
                self._warn(waited, missing())
            # Short beside what was waited already: MPI may make progress only when it is asked whether it is ready.
            due = self._timeout if warned or not self._warn else min(self._warn_after, self._timeout)
            if here.nap(min(max(_SHORTEST_NAP, waited / 32), _LONGEST_NAP), started + due, ready):
                return
