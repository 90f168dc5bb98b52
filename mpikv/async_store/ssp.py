"""A bound on the lead of one rank over another: the stale synchronous parallel model (Ho et al., NIPS 2013).

The *clock* of a rank is the number of its applied pushes. Before its ``c``-th push a rank asks for permission. The
answer comes once the clock of every active rank is at least ``c - bound``. So clocks never differ by more than the
bound, and after ``c`` pushes a rank reads at least ``c - bound`` pushes of every rank. The slowest rank waits for no
other, so one rank always makes progress. One rank keeps the clocks of all. The owners of a push tell it when they have
applied their parts. This module knows no messages and no threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class _Wait(NamedTuple):
    rank: int
    ticket: int
    least: int
    """The clock of every active rank from which it is answered; of a rank that leaves, its own."""


class SspClocks:
    """The clocks of all ranks. All methods are local. The caller makes one call at a time."""

    def __init__(self, size: int, answer: Callable[[int, int], None]) -> None:
        """Set all clocks to 0. ``answer(rank, ticket)`` is called when a wait or a leave is over. Local."""
        self._size, self._answer = size, answer
        self.widest = 0
        """The largest difference between clocks of active ranks so far."""
        self.begin()

    def begin(self) -> None:
        """Forget waits, unanswered, after a collective call; clocks are 0, ranks active, ``widest`` stays. Local."""
        self._clocks: dict[int, int] = dict.fromkeys(range(self._size), 0)
        # The owners that have not told yet, by rank and number of its push.
        self._unapplied: dict[tuple[int, int], int] = {}
        self._waits: list[_Wait] = []
        self._leaving: list[_Wait] = []
        self.slowest = 0
        """The clock of the slowest active rank; 0 if all have left."""

    def tick(self, rank: int, clock: int, owners: int) -> None:
        """Note that one of ``owners`` has applied its part of a rank's push ``clock``. After the last part, count the
        push and answer the waits that are over. Does not block.
        """
        assert clock > self._clocks[rank], "a push was counted before all its owners had applied it"
        left = self._unapplied
        left[rank, clock] = left.get((rank, clock), owners) - 1
        # Owners tell in any order, and a clock counts pushes that are applied with all before them.
        while left.get((rank, self._clocks[rank] + 1)) == 0:
            self._clocks[rank] += 1
            del left[rank, self._clocks[rank]]
        self.widest = max(self.widest, self._clocks[rank] - min(self._clocks.values()))
        self._release()

    def leave(self, rank: int, ticket: int, clock: int) -> None:
        """Count a rank as not active once its push ``clock`` is applied, then answer its ticket. Does not block."""
        self._leaving.append(_Wait(rank, ticket, clock))
        self._release()

    def wait(self, rank: int, ticket: int, least: int) -> None:
        """Answer a ticket once all active clocks are ``least`` or more, now or in a later call. Does not block."""
        self._waits.append(_Wait(rank, ticket, least))
        self._release()

    def list_awaited(self, rank: int) -> list[int]:
        """Return the other ranks with clocks below one that a rank waits for."""
        least = max((wait.least for wait in self._waits if wait.rank == rank), default=0)
        return [other for other, clock in self._clocks.items() if clock < least and other != rank]

    def _release(self) -> None:
        """Answer every wait that the clocks now allow. An answer may call this object again. Local."""
        gone = [wait for wait in self._leaving if wait.least <= self._clocks[wait.rank]]
        for wait in gone:
            del self._clocks[wait.rank]
        self.slowest = min(self._clocks.values(), default=0)
        # Without clocks all ranks have left, and nobody is behind.
        ready = [wait for wait in self._waits if not self._clocks or wait.least <= self.slowest]
        # Before the answers: an answer to this rank is a call, which may come back here.
        self._waits = [wait for wait in self._waits if wait not in ready]
        self._leaving = [wait for wait in self._leaving if wait not in gone]
        for wait in gone + ready:
            self._answer(wait.rank, wait.ticket)
