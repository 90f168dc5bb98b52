"""What the owner of keys does with the pushes and pulls that arrive in any order, for a store without rounds.

It knows no messages and no threads: a request is a call, and an answer is a call of ``answer``, in the same call or in
a later one. With a bound, the *clock* of a rank is the number of its pushes of a key that were applied, and

    the clocks of a key never differ by more than the bound

among the ranks that are active. A push that would break that is parked until the ranks behind have pushed, or left. A
rank that has applied ``c`` pushes therefore reads a value that has at least ``c - bound`` of everybody's: the stale
synchronous parallel model (Ho et al., NIPS 2013). A bound of 0 leaves no order of arrival: the pushes of all active
ranks are added up in rank order and make one update, which is what a synchronous store does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from .arrays import accumulator, add
from .errors import noted
from .keys import Entry
from .typing import Array, Updater

__all__ = ["Answer", "Ledger"]

Answer: TypeAlias = "Callable[[int, int, int, Array | BaseException | None], None]"
"""Told the rank, its ticket, the version of the value, and for a pull the value, which may change when it returns; for
a push that has changed nothing, what its updater raised."""


class _Push(NamedTuple):
    rank: int
    ticket: int
    payload: Array


class _Pull(NamedTuple):
    rank: int
    ticket: int


class Ledger:
    """The requests to one owner. Calls must come one at a time."""

    def __init__(self, size: int, bound: int | None, answer: Answer) -> None:
        """``bound`` is the largest difference of clocks; None is none."""
        self._size, self._bound, self._answer = size, bound, answer
        self.widest = 0
        """The largest difference of clocks that there was."""
        self.applied = 0
        """How many updates were made."""
        self._active = [True] * size
        self._clocks: dict[int, list[int]] = {}
        self._parked: dict[int, list[_Push]] = {}
        self._pulls: dict[int, list[_Pull]] = {}

    def begin(self, entries: Mapping[int, Entry], counts: Array, updater: Updater, check: Callable[[], None]) -> None:
        """Start anew, when all ranks have met: all clocks are 0, and all ranks active.

        Args:
            entries: the keys that there are, by their rows.
            counts: how often each row was updated, which is kept here.
            updater: what makes an update.
            check: raises if the updater, whose settings have changed since, needs other state than there is.
        """
        self._entries, self._counts, self._updater = entries, counts, updater
        self._check, self._revision = check, updater.revision
        self._active = [True] * self._size
        self._clocks, self._parked, self._pulls = {}, {}, {}

    def push(self, rank: int, ticket: int, row: int, payload: Array) -> None:
        """Update a value by what a rank has pushed, flat and of the value's dtype, now or when the bound permits.

        A rank's pushes of a key wait for each other: it has none that is parked. ``payload`` may be overwritten, and
        again by others when this returns.
        """
        if self._bound is None or (self._bound > 0 and self._permitted(row, rank)):
            self._apply(row, [_Push(rank, ticket, payload)])
        else:
            self._parked.setdefault(row, []).append(_Push(rank, ticket, payload.copy()))
        self._release(row)

    def pull(self, rank: int, ticket: int, row: int) -> None:
        """Answer with the value, once it has all that the rank itself has pushed."""
        if any(push.rank == rank for push in self._parked.get(row, ())):
            self._pulls.setdefault(row, []).append(_Pull(rank, ticket))
        else:
            self._show(row, _Pull(rank, ticket))

    def leave(self, rank: int, ticket: int) -> None:
        """Wait for a rank no more: it pushes nothing until all have met."""
        self._active[rank] = False
        for row in list(self._parked):
            self._release(row)
        self._answer(rank, ticket, 0, None)

    def awaited(self, rank: int) -> list[int]:
        """Return the ranks whose pushes the parked ones of a rank wait for."""
        found: set[int] = set()
        for row, pushes in self._parked.items():
            if any(push.rank == rank for push in pushes):
                here = {push.rank for push in pushes} if self._bound == 0 else set()
                clocks = self._of(row)
                behind = [other for other in self._working() if clocks[other] + (self._bound or 0) <= clocks[rank]]
                found |= set(behind) - here
        return sorted(found)

    def _of(self, row: int) -> list[int]:
        return self._clocks.setdefault(row, [0] * self._size)

    def _working(self) -> list[int]:
        return [rank for rank, active in enumerate(self._active) if active]

    def _permitted(self, row: int, rank: int) -> bool:
        clocks = self._of(row)
        slowest = min((clocks[other] for other in self._working()), default=clocks[rank])
        return clocks[rank] + 1 <= slowest + (self._bound or 0)

    def _release(self, row: int) -> None:
        """Apply the parked pushes that the bound permits."""
        while ready := self._ready(row):
            self._parked[row] = [push for push in self._parked[row] if push not in ready]
            self._apply(row, ready)
        if not self._parked.get(row, True):
            del self._parked[row]

    def _ready(self, row: int) -> Sequence[_Push]:
        """Return the parked pushes that make the next update."""
        parked = self._parked.get(row, ())
        if self._bound == 0:
            complete = {push.rank for push in parked}.issuperset(self._working())
            return sorted(parked, key=lambda push: push.rank) if complete else ()
        # Where nobody is left to wait for, the rank that is behind comes first, which breaks no bound.
        clocks = self._of(row)
        free = [push for push in parked if self._permitted(row, push.rank) or not self._working()]
        return [min(free, key=lambda push: clocks[push.rank])] if free else ()

    def _apply(self, row: int, pushes: Sequence[_Push]) -> None:
        entry, failure = self._entries[row], None
        try:
            with np.errstate(all="ignore"):
                self._update(entry, [push.payload for push in pushes])
            self._counts[row] += 1
            self.applied += 1
        except BaseException as error:
            # sys.exit in a user's function, too. One that may not fail has left the value half changed.
            if not isinstance(error, Exception) and not self._updater.fallible:
                raise
            failure = noted(error, f"updating key {entry.key!r}")
        self._tick(row, [push.rank for push in pushes])
        for push in pushes:
            self._answer(push.rank, push.ticket, int(self._counts[row]), failure)
            self._show_to(row, push.rank)
        if isinstance(failure, KeyboardInterrupt):
            raise failure

    def _tick(self, row: int, ranks: Sequence[int]) -> None:
        clocks = self._of(row)
        for rank in ranks:
            clocks[rank] += 1
        working = [clocks[rank] for rank in self._working()]
        self.widest = max(self.widest, max(working, default=0) - min(working, default=0))

    def _update(self, entry: Entry, payloads: Sequence[Array]) -> None:
        """Make one update by the sum of the payloads. A failure changes nothing."""
        updater = self._updater
        if updater.revision != self._revision:
            self._check()
            self._revision = updater.revision
        step = updater.step(entry.key, int(self._counts[entry.index]) + 1)
        total = payloads[0]
        if len(payloads) > 1 or accumulator(entry.dtype) != entry.dtype:
            total = np.empty(entry.place.size, accumulator(entry.dtype))
            add(payloads, 0, total.size, total)
        value, state = entry.value, entry.state
        if not updater.fallible:
            shape = (-1,) if updater.elementwise else entry.shape
            flat = {name: array.reshape(shape) for name, array in state.items()}
            updater.update(step, total.reshape(shape), value.reshape(shape), flat)
            return
        changed, states = value.copy(), {name: array.copy() for name, array in state.items()}
        updater.update(step, total.reshape(entry.shape), changed, states)
        np.copyto(value, changed)
        for name, array in states.items():
            np.copyto(state[name], array)

    def _show_to(self, row: int, rank: int) -> None:
        """Answer the pulls of a rank that have waited for its push."""
        waiting = self._pulls.get(row)
        if waiting:
            self._pulls[row] = [pull for pull in waiting if pull.rank != rank]
            for pull in waiting:
                if pull.rank == rank:
                    self._show(row, pull)

    def _show(self, row: int, pull: _Pull) -> None:
        self._answer(pull.rank, pull.ticket, int(self._counts[row]), self._entries[row].value)
