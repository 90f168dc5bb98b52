"""Messages of row numbers and rows of several values.

On the host one message carries both. For rows on a GPU the numbers travel between hosts: the host plans with them, and
they give the lengths. The rows follow from GPU to GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..engine.alltoallv import Alltoallv, Part
from ..protocols import Array, Transport

Selected: TypeAlias = "tuple[Array, Array]"
"""The rising numbers of some rows of a value, and these rows, flat: an array of shape (rows, elements of a row)."""

Lists: TypeAlias = "Sequence[Sequence[Array]]"
"""For each rank, or for all, an array for each value."""

Take: TypeAlias = "Callable[[Sequence[Array]], Sequence[Array]]"
"""Returns the rows of the numbers of each value, in memory of their own."""

_Take: TypeAlias = "Callable[[int], Array]"
"""Returns so many bytes of a message, the next ones."""


class Kind(NamedTuple):
    """How the rows of a value look as bytes."""

    width: int
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return self.width * self.dtype.itemsize


Reserve: TypeAlias = "Callable[[Lists], None]"
"""Receives the row numbers of each value from each rank, before rows move. A rank may run out of memory here, and not
later. It raises on all ranks, or on none."""


class Packed:
    """Row numbers and rows in one message, on the host."""

    def __init__(self, transport: Transport) -> None:
        """Prepare to send by the transport; allocate and send nothing. Local."""
        self._alltoallv, self._rank = Alltoallv(transport), transport.rank

    @property
    def sent(self) -> int:
        """How many bytes this rank has sent to others so far, padding included. Local."""
        return self._alltoallv.sent

    def send(
        self, numbers: Lists, rows: Callable[[], Lists], kinds: Sequence[Kind], label: Hashable, reserve: Reserve
    ) -> list[list[Selected]]:
        """Call ``rows`` at once, and send rank r the row numbers ``numbers[r]`` with these rows, or all ranks one list.
        Return views of both by sender, valid until the next exchange; this rank's own entry is undefined. Never call
        ``reserve``. Collective.

        ``rows`` returns the rows of each rank's numbers. ``reserve`` has no use here: rows travel with their numbers.
        ``label``, the same on every rank, names the call.
        """
        received, _ = self._alltoallv.send(list(map(_pack, numbers, rows())), label)
        selected = []
        for take in map(_taker, received):
            ids = _read_numbers(take, len(kinds))
            selected.append(list(zip(ids, _read_rows(take, ids, kinds), strict=True)))
        return selected

    def fetch(
        self, wanted: Lists, kinds: Sequence[Kind], label: Hashable, take: Take, reserve: Reserve
    ) -> list[list[Array]]:
        """Ask ranks for rows ``wanted[r]``; answer others by ``take``. Return views of the answers by rank, valid until
        the next exchange, [] for this rank; never call ``reserve``. Collective.
        """
        asked, _ = self._alltoallv.send(list(map(_pack, wanted)), ("ask", label))
        # Copy before sending: the answers may overwrite the receive buffer of the questions. Answers carry no numbers,
        # since the asking rank knows their order.
        answers = [_flatten(take(_read_numbers(_taker(part), len(kinds)))) for part in asked]
        received, _ = self._alltoallv.send(answers, ("answer", label))
        return _read_answers(received, wanted, kinds, self._rank)


class Split:
    """Row numbers between hosts, and rows between GPUs; otherwise as :class:`Packed`."""

    def __init__(self, transport: Transport) -> None:
        """Prepare for numbers on ``transport.control``, and for rows on ``transport``; send nothing. Local."""
        self._numbers, self._rows, self._rank = Alltoallv(transport.control), Alltoallv(transport), transport.rank

    @property
    def sent(self) -> int:
        """How many bytes this rank has sent to others so far, numbers and rows. Local."""
        return self._numbers.sent + self._rows.sent

    def send(
        self, numbers: Lists, rows: Callable[[], Lists], kinds: Sequence[Kind], label: Hashable, reserve: Reserve
    ) -> list[list[Selected]]:
        """Send row numbers by the host transport, call ``reserve`` with those received, then ``rows``, and send rows
        between GPUs. Return both by sender, the rows in new arrays; this rank's own entry is undefined. Collective.
        """
        received, table = self._send_numbers(numbers, kinds, label)
        # Every rank knows all lengths now: reserve() raises on all ranks or on none, before any rank sends rows.
        reserve(received)
        sent = [_flatten(part) for part in self._drop_own(rows())]
        pairs = zip(received, self._rows.carry(sent, table), strict=True)
        return [list(zip(ids, _read_rows(_taker(part), ids, kinds), strict=True)) for ids, part in pairs]

    def fetch(
        self, wanted: Lists, kinds: Sequence[Kind], label: Hashable, take: Take, reserve: Reserve
    ) -> list[list[Array]]:
        """Ask ranks for rows ``wanted[r]``, call ``reserve`` with the numbers asked for, answer others by ``take``.
        Return answers by rank, new arrays on the GPU, [] for this rank. Collective.
        """
        asked, table = self._send_numbers(wanted, kinds, ("ask", label))
        reserve(asked)
        # Transposed: the table says how much each rank asks for, and the answers go the other way.
        answers = self._rows.carry([_flatten(take(part)) for part in asked], table.T)
        return _read_answers(answers, wanted, kinds, self._rank)

    def _send_numbers(self, numbers: Lists, kinds: Sequence[Kind], label: Hashable) -> tuple[list[list[Array]], Array]:
        """Send row numbers to other ranks by the host transport; return views of those received, by sender, and a table
        of the bytes of all ranks' rows. Collective.

        Without a part for each rank, the numbers are for all. The bytes are a table of one line per sender, and one
        column per receiver, or one for all.
        """
        parts = self._drop_own(numbers)
        sizes = [sum(ids.size * kind.nbytes for ids, kind in zip(part, kinds, strict=False)) for part in parts]
        received, table = self._numbers.send(list(map(_pack, parts)), label, sizes)
        return [_read_numbers(_taker(part), len(kinds)) for part in received], table

    def _drop_own(self, parts: Lists) -> Lists:
        """Return the parts with () for this rank's own, which stays; a single part, for all, as it is. Local."""
        return parts if len(parts) == 1 else [() if to == self._rank else part for to, part in enumerate(parts)]


# --- Rows as bytes


def _pack(every: Sequence[Array], rows: Sequence[Array] = ()) -> Part:
    """Return a message's arrays: counts and numbers of rows, and the rows, flat; () if there are no rows. Local."""
    lengths = np.array([ids.size for ids in every], np.int64)
    # Most parts of a sparse push are empty: they take no byte of the message.
    if not lengths.any():
        return ()
    # On the host: a caller's rows may have gaps between them.
    whole = np.ascontiguousarray
    return [lengths, *map(whole, every), *_flatten(list(map(whole, rows)))]


def _flatten(rows: Sequence[Array]) -> Part:
    """Return rows as flat arrays, widest elements first: each array of the message starts aligned for a GPU. Local."""
    return [each.reshape(-1) for each in sorted(rows, key=lambda each: -each.itemsize)]


def _read_numbers(take: _Take, values: int) -> list[Array]:
    """Return the next row numbers of a message, an array per value; empty arrays from an empty message. Local."""
    lengths = take(8 * values).view(np.int64).tolist() or [0] * values
    return [take(8 * count).view(np.int64) for count in lengths]


def _read_rows(take: _Take, numbers: Sequence[Array], kinds: Sequence[Kind]) -> list[Array]:
    """Return the next rows of a message as views: of each value, as many as there are numbers. Local."""
    # As _flatten has put them: the receiver knows all kinds, so no message says it.
    order = sorted(range(len(numbers)), key=lambda item: -kinds[item].dtype.itemsize)
    rows = {item: take(numbers[item].size * kinds[item].nbytes).view(kinds[item].dtype) for item in order}
    return [rows[item].reshape(ids.size, kinds[item].width) for item, ids in enumerate(numbers)]


def _read_answers(received: Sequence[Array], wanted: Lists, kinds: Sequence[Kind], rank: int) -> list[list[Array]]:
    """Return, by sender, the wanted rows of each message, as views of it; [] for this rank. Local."""
    pairs = enumerate(zip(received, wanted, strict=True))
    return [[] if sender == rank else _read_rows(_taker(part), numbers, kinds) for sender, (part, numbers) in pairs]


def _taker(packed: Array) -> _Take:
    """Return a function that returns the next ``count`` bytes of ``packed`` at each call. Local."""
    at = 0

    def take(count: int) -> Array:
        """Return a view of the next bytes, and move on behind them."""
        nonlocal at
        at += count
        return packed[at - count : at]

    return take
