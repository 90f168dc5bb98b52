"""Rows of several values as messages between ranks: their numbers, and what is in them.

On the host both are one message. Of rows on a GPU the numbers go by the host, where they are needed to plan with, and
tell how long all is; the rows follow from GPU to GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..engine.alltoallv import Alltoallv, Part
from ..protocols import Array, Transport

__all__ = ["Kind", "Ready", "RowMessages", "Selected", "Take", "row_messages"]

Selected: TypeAlias = "tuple[Array, Array]"
"""The rising numbers of some rows of a value, and these rows, flat: an array of shape (rows, elements of a row)."""

Take: TypeAlias = "Callable[[Sequence[Array]], Sequence[Array]]"
"""Returns the rows of the numbers of each value, in memory of their own."""


class Kind(NamedTuple):
    """How the rows of a value look as bytes."""

    width: int
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return self.width * self.dtype.itemsize


Ready: TypeAlias = "Callable[[Sequence[Sequence[Array]]], None]"
"""Is told the numbers of each value that each rank sends, before rows move: the last moment at which a rank may find
out that it has too little memory. It raises on all ranks, or on none."""


class Packed:
    """Messages of numbers and rows of the host."""

    def __init__(self, transport: Transport) -> None:
        self._passing, self._rank = Alltoallv(transport), transport.rank

    @property
    def sent(self) -> int:
        """How many bytes this rank has sent to others so far, padding included. Local."""
        return self._passing.sent

    def to_each(
        self,
        numbers: Sequence[Sequence[Array]],
        rows: Callable[[], Sequence[Sequence[Array]]],
        kinds: Sequence[Kind],
        label: Hashable,
        ready: Ready,
    ) -> list[list[Selected]]:
        """Pass rows of the numbers ``numbers[r]`` on to rank r; return what each rank had for this one. Collective.

        ``rows`` returns them, and is called when memory may be taken. ``ready`` is for rows that do not travel with
        their numbers. ``label``, the same on every rank, says which call this is.
        """
        parts = map(_paired, numbers, rows())
        packed = [() if to == self._rank else _pack(part) for to, part in enumerate(parts)]
        received, _ = self._passing.to_each(packed, label)
        return [_unpack(part, kinds) for part in received]

    def to_all(
        self, numbers: Sequence[Array], rows: Sequence[Array], kinds: Sequence[Kind], label: Hashable, ready: Ready
    ) -> list[list[Selected]]:
        """Pass rows on to every rank; otherwise as :meth:`to_each`."""
        received, _ = self._passing.to_all(_pack(_paired(numbers, rows)), label)
        return [_unpack(each, kinds) for each in received]

    def fetch(
        self, wanted: Sequence[Sequence[Array]], kinds: Sequence[Kind], label: Hashable, take: Take, ready: Ready
    ) -> list[list[Array]]:
        """Return what each rank takes of the numbers ``wanted[r]``, as rows of each value. Collective."""
        asked, _ = self._passing.to_each([_pack(_numbers(part)) for part in wanted], ("ask", label))
        # What was asked may be overwritten by the first message of the answers. They are rows alone, copied here: who
        # asked knows in which order.
        answers = [_aligned(take(_numbers_in(part, kinds))) for part in asked]
        received, _ = self._passing.to_each(answers, ("answer", label))
        return [
            [] if rank == self._rank else _split(part, [ids.size for ids in numbers], kinds)
            for rank, (part, numbers) in enumerate(zip(received, wanted, strict=True))
        ]


class Split:
    """Messages of numbers by the host, and of rows by a GPU's transport; otherwise as :class:`Packed`."""

    def __init__(self, transport: Transport) -> None:
        self._numbers, self._rows, self._rank = Alltoallv(transport.control), Alltoallv(transport), transport.rank

    @property
    def sent(self) -> int:
        return self._numbers.sent + self._rows.sent

    def to_each(
        self,
        numbers: Sequence[Sequence[Array]],
        rows: Callable[[], Sequence[Sequence[Array]]],
        kinds: Sequence[Kind],
        label: Hashable,
        ready: Ready,
    ) -> list[list[Selected]]:
        told, table = self._tell(numbers, kinds, label)
        ready(told)
        sent = [_aligned([] if to == self._rank else part) for to, part in enumerate(rows())]
        return _together(told, self._rows.carry(sent, table), kinds)

    def to_all(
        self, numbers: Sequence[Array], rows: Sequence[Array], kinds: Sequence[Kind], label: Hashable, ready: Ready
    ) -> list[list[Selected]]:
        received, table = self._numbers.to_all(_pack(_numbers(numbers)), label, [_nbytes(numbers, kinds)])
        told = [_numbers_in(part, kinds) for part in received]
        ready(told)
        return _together(told, self._rows.carry([_aligned(rows)], table), kinds)

    def fetch(
        self, wanted: Sequence[Sequence[Array]], kinds: Sequence[Kind], label: Hashable, take: Take, ready: Ready
    ) -> list[list[Array]]:
        asked, table = self._tell(wanted, kinds, ("ask", label))
        ready(asked)
        # A rank is sent what it has asked for.
        answers = self._rows.carry([_aligned(take(part)) for part in asked], table.T)
        return [
            [] if rank == self._rank else _split(part, [ids.size for ids in numbers], kinds)
            for rank, (part, numbers) in enumerate(zip(answers, wanted, strict=True))
        ]

    def _tell(
        self, numbers: Sequence[Sequence[Array]], kinds: Sequence[Kind], label: Hashable
    ) -> tuple[list[list[Array]], Array]:
        """Pass numbers on to each other rank; return what each has told this one, and how many bytes the rows take of
        each rank, in a row, for each.
        """
        parts = [[] if to == self._rank else part for to, part in enumerate(numbers)]
        sizes = [_nbytes(part, kinds) for part in parts]
        received, table = self._numbers.to_each([_pack(_numbers(part)) for part in parts], label, sizes)
        return [_numbers_in(part, kinds) for part in received], table


RowMessages: TypeAlias = "Packed | Split"


def row_messages(transport: Transport) -> RowMessages:
    """Return what passes on rows that lie in the memory of a transport. Local."""
    return Packed(transport) if transport.memory.is_host else Split(transport)


# --- Rows as bytes


def _numbers(every: Sequence[Array]) -> list[Selected]:
    return [(ids, np.empty((ids.size, 0))) for ids in every]


def _paired(numbers: Sequence[Array], rows: Sequence[Array]) -> list[Selected]:
    return list(zip(numbers, rows, strict=True))


def _numbers_in(packed: Array, kinds: Sequence[Kind]) -> list[Array]:
    """Return the numbers of a message that has no rows."""
    return [ids for ids, _ in _unpack(packed, [Kind(0, np.dtype(np.float64))] * len(kinds))]


def _nbytes(every: Sequence[Array], kinds: Sequence[Kind]) -> int:
    """Return how long the rows of the numbers of each value are; of no values nothing."""
    return sum(ids.size * kind.nbytes for ids, kind in zip(every, kinds, strict=False))


def _pack(selected: Sequence[Selected]) -> Part:
    """Return as flat arrays: how many rows there are of each value, and the numbers and the rows of each."""
    lengths = np.array([ids.size for ids, _ in selected], np.int64)
    if not lengths.any():
        return ()
    return [lengths, *(np.ascontiguousarray(array).reshape(-1) for pair in selected for array in pair)]


def _unpack(packed: Array, kinds: Sequence[Kind]) -> list[Selected]:
    """Return what :func:`_pack` was given; no bytes are no rows of any."""
    if not packed.size:
        return [(np.empty(0, np.int64), np.empty((0, kind.width), kind.dtype)) for kind in kinds]
    take = _taker(packed)
    lengths = take(8 * len(kinds)).view(np.int64).tolist()
    return [
        (take(8 * count).view(np.int64), _rows_of(take, count, kind))
        for count, kind in zip(lengths, kinds, strict=True)
    ]


def _aligned(rows: Sequence[Array]) -> Part:
    """Return rows as flat arrays, those of the widest elements first, which then all lie where a GPU can read them."""
    return [each.reshape(-1) for each in sorted(rows, key=lambda each: -each.itemsize)]


def _split(packed: Array, counts: Sequence[int], kinds: Sequence[Kind]) -> list[Array]:
    """Return so many rows of each value, of which :func:`_aligned` has chosen the order; of no values none."""
    take = _taker(packed)
    order = sorted(range(len(counts)), key=lambda item: -kinds[item].dtype.itemsize)
    rows = {item: _rows_of(take, counts[item], kinds[item]) for item in order}
    return [rows[item] for item in range(len(counts))]


def _together(told: Sequence[Sequence[Array]], rows: Sequence[Array], kinds: Sequence[Kind]) -> list[list[Selected]]:
    """Return the numbers that each rank has sent, each with its rows."""
    return [
        _paired(numbers, _split(values, [ids.size for ids in numbers], kinds))
        for numbers, values in zip(told, rows, strict=True)
    ]


def _rows_of(take: Callable[[int], Array], count: int, kind: Kind) -> Array:
    return take(count * kind.nbytes).view(kind.dtype).reshape(count, kind.width)


def _taker(packed: Array) -> Callable[[int], Array]:
    """Return a function that takes so many more bytes."""
    at = 0

    def take(count: int) -> Array:
        nonlocal at
        at += count
        return packed[at - count : at]

    return take
