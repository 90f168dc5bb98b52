"""How a rank waits for another: without burning a core, with a warning, and with an end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from ..errors import Stalled
from .runtime import present

_SHORTEST_NAP, _LONGEST_NAP = 1e-5, 1e-3


Warn = Callable[[float, Sequence[int]], None]


class Waits(Protocol):
    """Anything that waits as :class:`Waiting` does."""

    def until(self, ready: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        """Wait until ``ready()``; after a timeout raise :class:`~mpikv.errors.Stalled`, naming ``missing()``."""


class Waiting:
    """Waits until something is ready, up to a deadline."""

    def __init__(self, timeout: float, warn_after: float = math.inf, warn: Warn | None = None) -> None:
        """Times are in seconds. ``warn`` gets the seconds waited so far and the missing ranks."""
        self.timeout, self._warn_after, self._warn = timeout, warn_after, warn

    def warning(self, warn: Warn) -> Waiting:
        """Return a :class:`Waiting` with the same times and another ``warn``."""
        return Waiting(self.timeout, self._warn_after, warn)

    def until(self, ready: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        """Wait until ``ready()`` is true; after a while call ``warn`` once; at the deadline raise Stalled. Local.

        Raises:
            Stalled: the deadline passed. ``missing()`` names the missing ranks, as far as they are known.
        """
        # Measured from before the first yield: on a busy core each yield may take a scheduler's slice, and 200 of them
        # seconds.
        here = present()
        started, warned = here.now(), False
        for _ in range(here.polls):
            if ready():
                return
            here.give_way()
        while not ready():
            waited = here.now() - started
            # Asked once more: after a nap of a busy machine the deadline may be long past, and the others here.
            if waited >= self.timeout and not ready():
                who = missing()
                raise Stalled(f"waited {waited:.1f} s for " + (f"ranks {list(who)}" if who else "other ranks"), who)
            if self._warn and waited >= self._warn_after and not warned:
                warned = True
                self._warn(waited, missing())
            # Naps of 1/32 of the time waited so far add 3 % at most. Not longer than 1 ms: MPI makes progress only
            # inside of its calls, here those of ready().
            due = self.timeout if warned or not self._warn else min(self._warn_after, self.timeout)
            if here.nap(min(max(_SHORTEST_NAP, waited / 32), _LONGEST_NAP), started + due, ready):
                return
