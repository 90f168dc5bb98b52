"""How far ranks may be ahead of each other: the stale synchronous parallel model (Ho et al., NIPS 2013).

The *clock* of a rank is the number of its pushes that were applied. A rank asks before it pushes for the ``c``-th time,
and is answered once the clock of every active rank is at least ``c - bound``. So clocks never differ by more than the
bound, and what a rank reads after ``c`` pushes has at least ``c - bound`` of every rank's. The rank that is furthest
behind never waits, so somebody always goes on. One rank keeps the clocks of all; it knows no messages and no threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["SspClocks"]


class _Wait(NamedTuple):
    rank: int
    ticket: int
    least: int


class SspClocks:
    """The clocks of all ranks. Calls must come one at a time."""

    def __init__(self, size: int, answer: Callable[[int, int, int], None]) -> None:
        """``answer`` is told a rank, its ticket, and the clock of the active rank that is furthest behind."""
        self._size, self._answer = size, answer
        self.widest = 0
        """The largest difference between the clocks of active ranks that there was."""
        self.begin()

    def begin(self) -> None:
        """Start anew, when all ranks have met: all clocks are 0, and all ranks active."""
        self._clocks: dict[int, int] = dict.fromkeys(range(self._size), 0)
        self._waits: list[_Wait] = []

    def tick(self, rank: int, clock: int) -> None:
        """Set the clock of an active rank, which never goes back."""
        self._clocks[rank] = max(clock, self._clocks.get(rank, 0))
        self.widest = max(self.widest, max(self._clocks.values()) - min(self._clocks.values()))
        self._release()

    def leave(self, rank: int) -> None:
        """Wait for a rank no more: it pushes nothing until all have met."""
        self._clocks.pop(rank, None)
        self._release()

    def wait(self, rank: int, ticket: int, least: int) -> None:
        """Answer once no active rank's clock is below ``least``."""
        self._waits.append(_Wait(rank, ticket, least))
        self._release()

    def awaited(self, rank: int) -> list[int]:
        """Return the ranks for which a rank waits."""
        least = max((wait.least for wait in self._waits if wait.rank == rank), default=0)
        return [other for other, clock in self._clocks.items() if clock < least]

    def _release(self) -> None:
        slowest = min(self._clocks.values(), default=0)
        ready = [wait for wait in self._waits if not self._clocks or wait.least <= slowest]
        self._waits = [wait for wait in self._waits if wait not in ready]
        for wait in ready:
            self._answer(wait.rank, wait.ticket, slowest)
