"""The owner of keys: it applies pushes and answers pulls in any order of arrival.

It knows no messages and no threads: a request is a call, and an answer is a call of ``answer``, at once or later. A
push is applied when it comes. In *rounds* it is parked until every active rank has pushed the key; then the sum, in
rank order, makes one update, as in a synchronous store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from ..arrays.arrays import accumulator, add
from ..engine.keys import Entry, KeyTable
from ..errors import TransportError, noted
from ..protocols import Array, Updater

Answer: TypeAlias = "Callable[[int, int, int, Array | BaseException | None], None]"
"""Receives the rank, its ticket, the version of the value, and an answer. A pull is answered by the value; the value
may change after the call. A failed push is answered by the updater's exception, or by a :class:`HalfUpdated`.
"""


class HalfUpdated(TransportError):
    """An optimizer failed in the middle of its rule. The value is undefined, and the store is unusable."""


class _Push(NamedTuple):
    rank: int
    ticket: int
    payload: Array


class KeyOwner:
    """The keys of one owner. The caller makes one call at a time."""

    def __init__(self, size: int, rounds: bool, answer: Answer) -> None:
        self._size, self._rounds, self._answer = size, rounds, answer
        self.applied = 0
        """Number of updates made."""

    def begin(self, table: KeyTable, updater: Updater) -> None:
        """Start anew after a collective call: nothing is parked, and all ranks are active.

        Args:
            table: the keys and their update counts; the owner counts its updates there.
            updater: makes the updates. Nobody else may use or change it until the next call.
        """
        self._table, self._updater = table, updater
        self._entries = {entry.index: entry for entry in table.entries()}
        self._active = set(range(self._size))
        self._parked: dict[int, list[_Push]] = {}
        self._pulls: dict[int, list[tuple[int, int]]] = {}

    def push(self, rank: int, ticket: int, row: int, payload: Array) -> None:
        """Update a value by a rank's push, now or when the round is complete.

        ``payload`` holds the elements or their bytes. A rank pushes a key again only after the update: it has at most
        one parked push. The owner may overwrite ``payload``, and the caller may reuse it on return.
        """
        payload = payload.reshape(-1).view(self._entries[row].dtype)
        if not self._rounds:
            self._apply(row, [_Push(rank, ticket, payload)])
            return
        # Copy: the caller reuses its buffer for the next request.
        self._parked.setdefault(row, []).append(_Push(rank, ticket, payload.copy()))
        self._complete(row)

    def pull(self, rank: int, ticket: int, row: int) -> None:
        """Answer with the value, after the rank's own parked push is applied."""
        if any(push.rank == rank for push in self._parked.get(row, ())):
            self._pulls.setdefault(row, []).append((rank, ticket))
        else:
            self._show(row, rank, ticket)

    def leave(self, rank: int) -> None:
        """Stop waiting for a rank: it pushes nothing until the next collective call."""
        self._active.discard(rank)
        for row in list(self._parked):
            self._complete(row)

    def awaited(self, rank: int) -> list[int]:
        """Return the ranks that hold up the rounds of a rank's pushes."""
        come = [{push.rank for push in pushes} for pushes in self._parked.values()]
        return sorted(set().union(*(self._active - ranks for ranks in come if rank in ranks)))

    def _complete(self, row: int) -> None:
        """Update a key if all active ranks have pushed it."""
        # By rank, not by arrival: the bits of a round's sum are those of the synchronous store.
        pushes = sorted(self._parked[row], key=lambda push: push.rank)
        if self._active <= {push.rank for push in pushes}:
            del self._parked[row]
            # Before the update: if it raises, these pushes must not be applied again.
            self._apply(row, pushes)

    def _apply(self, row: int, pushes: Sequence[_Push]) -> None:
        entry, failure = self._entries[row], None
        try:
            # inf and nan are results here; a warning would show in a thread that did not cause them.
            with np.errstate(all="ignore"):
                self._update(entry, [push.payload for push in pushes])
            self._table.counts[row] += 1
            self.applied += 1
        except BaseException as error:
            # sys.exit in a user's function, too. One that may not fail has left the value half changed.
            if not isinstance(error, Exception) and not self._updater.may_raise:
                raise
            failure = noted(error, f"updating key {entry.key!r}")
        for push in pushes:
            self._answer(push.rank, push.ticket, self._version(row), failure)
        if isinstance(failure, HalfUpdated):
            raise failure
        for rank, ticket in self._pulls.pop(row, ()):  # of ranks that have pushed
            self._show(row, rank, ticket)
        if isinstance(failure, KeyboardInterrupt):
            raise failure

    def _update(self, entry: Entry, payloads: Sequence[Array]) -> None:
        """Update a value once, by the sum of the payloads. Any failure but :class:`HalfUpdated` changes nothing."""
        updater = self._updater
        step = updater.step(entry.key, int(self._table.counts[entry.index]) + 1)
        # A single payload may be overwritten by the rule: it is memory of the message, or a copy.
        total = payloads[0]
        if len(payloads) > 1 or accumulator(entry.dtype) != entry.dtype:
            total = np.empty(entry.place.size, accumulator(entry.dtype))
            add(payloads, 0, total.size, total)
        value, state = entry.value, entry.state
        if not updater.may_raise:
            shape = (-1,) if updater.elementwise else entry.shape
            flat = {name: array.reshape(shape) for name, array in state.items()}
            try:
                updater.update(step, total.reshape(shape), value.reshape(shape), flat)
            except Exception as error:
                text = f"the update of key {entry.key!r} failed halfway: {error!r}"
                raise HalfUpdated(f"{text}; value and state may be half changed: load a checkpoint") from error
            return
        # A rule that may raise works on copies, so that its failure leaves value and state whole.
        changed, states = value.copy(), {name: array.copy() for name, array in state.items()}
        updater.update(step, total.reshape(entry.shape), changed, states)
        np.copyto(value, changed)
        for name, array in states.items():
            np.copyto(state[name], array)

    def _show(self, row: int, rank: int, ticket: int) -> None:
        self._answer(rank, ticket, self._version(row), self._entries[row].value)

    def _version(self, row: int) -> int:
        return int(self._table.counts[row] + self._table.earlier[row])
