"""A bound on the lead of one rank over another: the stale synchronous parallel model (Ho et al., NIPS 2013).

The *clock* of a rank is the number of its applied pushes. Before its ``c``-th push a rank asks for permission. The
answer comes once the clock of every active rank is at least ``c - bound``. So clocks never differ by more than the
bound, and after ``c`` pushes a rank reads at least ``c - bound`` pushes of every rank. The slowest rank never waits, so
one rank always makes progress. One rank keeps the clocks of all; this module knows no messages and no threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class _Wait(NamedTuple):
    rank: int
    ticket: int
    least: int


class SspClocks:
    """The clocks of all ranks. The caller makes one call at a time."""

    def __init__(self, size: int, answer: Callable[[int, int, int], None]) -> None:
        """``answer`` receives a rank, its ticket, and the clock of the slowest active rank."""
        self._size, self._answer = size, answer
        self.widest = 0
        """The largest difference between clocks of active ranks so far."""
        self.begin()

    def begin(self) -> None:
        """Start anew after a collective call: all clocks are 0, and all ranks active."""
        self._clocks: dict[int, int] = dict.fromkeys(range(self._size), 0)
        self._waits: list[_Wait] = []

    def tick(self, rank: int, clock: int) -> None:
        """Set the clock of an active rank; a smaller number leaves it unchanged."""
        self._clocks[rank] = max(clock, self._clocks.get(rank, 0))
        self.widest = max(self.widest, max(self._clocks.values()) - min(self._clocks.values()))
        self._release()

    def leave(self, rank: int) -> None:
        """Stop waiting for a rank: it pushes nothing until the next collective call."""
        self._clocks.pop(rank, None)
        self._release()

    def wait(self, rank: int, ticket: int, least: int) -> None:
        """Answer once every active rank's clock is at least ``least``."""
        self._waits.append(_Wait(rank, ticket, least))
        self._release()

    def list_awaited(self, rank: int) -> list[int]:
        """Return the ranks that a rank waits for."""
        least = max((wait.least for wait in self._waits if wait.rank == rank), default=0)
        return [other for other, clock in self._clocks.items() if clock < least]

    def _release(self) -> None:
        """Answer every wait that the slowest clock now allows. An answer may call this object again. Local."""
        slowest = min(self._clocks.values(), default=0)
        # Without clocks all ranks have left, and nobody is behind.
        ready = [wait for wait in self._waits if not self._clocks or wait.least <= slowest]
        # Before the answers: an answer to this rank is a call, which may come back here.
        self._waits = [wait for wait in self._waits if wait not in ready]
        for wait in ready:
            self._answer(wait.rank, wait.ticket, slowest)
