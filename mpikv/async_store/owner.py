"""The owner of keys: it applies pushes and answers pulls in any order of arrival.

It knows no messages and no threads: a request is a call, and an answer is a call of ``answer``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from ..arrays.arrays import accumulator
from ..engine.keys import Entry, KeyTable
from ..errors import TransportError, noted
from ..protocols import Array, Updater

Answer: TypeAlias = "Callable[[int, int, int, Array | BaseException | None], None]"
"""Receives the rank, its ticket, the version of the value, and an answer. A pull is answered by the value; the value
may change after the call. A failed push is answered by the updater's exception, or by a :class:`HalfUpdated`.
"""


class HalfUpdated(TransportError):
    """An optimizer failed in the middle of its rule. The value is undefined, and the store is unusable."""


class KeyOwner:
    """The keys of one owner. The caller makes one call at a time."""

    def __init__(self, answer: Answer) -> None:
        """Keep ``answer``; call :meth:`begin` before any request. Local."""
        self._answer = answer
        self.applied = 0
        """Number of updates made."""

    def begin(self, table: KeyTable, updater: Updater) -> None:
        """Use this table of keys and this updater from now on, after a collective call. Local.

        Args:
            table: the keys and their update counts; the owner counts its updates there.
            updater: makes the updates. Nobody else may use or change it until the next call.
        """
        self._table, self._updater = table, updater
        self._entries = {entry.index: entry for entry in table.entries()}
        self._totals: dict[np.dtype[Any], Array] = {}
        self._bindings: dict[int, tuple[Array, Callable[[Any], None]]] = {}

    def push(self, rank: int, ticket: int, row: int, payload: Array, pulls: bool = False) -> None:
        """Update a value by a rank's push, then answer by the updater's error, else by the value if the push ``pulls``,
        else by None. Raise HalfUpdated, too. Local.

        ``payload`` holds the elements or their bytes. It stays as it is, and the caller may reuse it on return.
        """
        entry, failure = self._entries[row], None
        try:
            # inf and nan are results here; a warning would show in a thread that did not cause them.
            with np.errstate(all="ignore"):
                self._update(entry, payload.reshape(-1).view(entry.dtype))
            self._table.counts[row] += 1
            self.applied += 1
        except BaseException as error:
            # sys.exit in a user's function, too. One that may not fail has left the value half changed.
            if not isinstance(error, Exception) and not self._updater.may_raise:
                raise
            failure = noted(error, f"updating key {entry.key!r}")
        self._answer(rank, ticket, self._version(row), failure if failure or not pulls else entry.value)
        if isinstance(failure, (HalfUpdated, KeyboardInterrupt)):
            raise failure

    def pull(self, rank: int, ticket: int, row: int) -> None:
        """Answer a rank's ticket, by ``answer``, with a key's value itself and its version. Local."""
        self._answer(rank, ticket, self._version(row), self._entries[row].value)

    def _update(self, entry: Entry, payload: Array) -> None:
        """Update a value by a payload; an error but HalfUpdated changes nothing, an interrupt may. Local."""
        updater = self._updater
        step = updater.step(entry.key, int(self._table.counts[entry.index]) + 1)
        if not updater.may_raise:
            total, update = self._bindings.get(entry.index) or self._bind(entry)
            try:
                np.copyto(total, payload.reshape(total.shape))
                update(step)
            except Exception as error:
                text = f"the update of key {entry.key!r} failed halfway: {error!r}"
                raise HalfUpdated(f"{text}; value and state may be half changed: load a checkpoint") from error
            return
        # A rule that may raise works on copies, so that its failure leaves value and state whole.
        value, state, total = entry.value, entry.state, payload.astype(accumulator(entry.dtype))
        changed, states = value.copy(), {name: array.copy() for name, array in state.items()}
        updater.update(step, total.reshape(entry.shape), changed, states)
        np.copyto(value, changed)
        for name, array in states.items():
            np.copyto(state[name], array)

    def _bind(self, entry: Entry) -> tuple[Array, Callable[[Any], None]]:
        """Return (memory to copy a push of a key to, function that then updates the value, given a step); keep both for
        later pushes. Keys of one dtype share the memory. Local.
        """
        dtype = accumulator(entry.dtype)
        if dtype not in self._totals:
            sizes = [other.value.size for other in self._entries.values() if accumulator(other.dtype) == dtype]
            self._totals[dtype] = np.empty(max(sizes), dtype)
        shape = (-1,) if self._updater.elementwise else entry.shape
        value, state = entry.value.reshape(shape), {name: each.reshape(shape) for name, each in entry.state.items()}
        total = self._totals[dtype][: value.size].reshape(shape)
        return self._bindings.setdefault(entry.index, (total, self._updater.bind(total, value, state)))

    def _version(self, row: int) -> int:
        """Return a key's number of updates, by this updater and all before; ``row`` is its row in the table. Local."""
        return int(self._table.counts[row] + self._table.earlier[row])
