"""Bytes of any number from all ranks to all, in messages that a transport can carry."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import TypeAlias

import numpy as np

from ..protocols import Array, Transport

__all__ = ["Alltoallv", "Part", "gather"]

_MOST_LABELS = 4096

Part: TypeAlias = "Sequence[Array]"
"""Flat arrays of any dtype, whose bytes are passed on one after the other."""

# To which parts of messages are filled up, so that all of them begin where a GPU moves many bytes at once.
_EVEN = 64


def gather(transport: Transport, mine: Array) -> Array:
    """Return every rank's numbers, of which each has as many, in a row for each rank. Collective."""
    table = np.zeros((transport.size, mine.size), mine.dtype)
    table[transport.rank] = mine
    transport.all_gather(table.reshape(-1), (mine.size,) * transport.size)
    return table


class Alltoallv:
    """Passes on what is longer on one rank than on another.

    The first message has room for what was the longest the last time, and says how long each part is now. So the same
    call, made again, takes one exchange as long as parts do not grow by more than an eighth.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport, self._tables = transport, transport.memory.workspace
        self._rooms: dict[Hashable, Array] = {}
        self.sent = 0
        """How many bytes this rank has sent to others so far, padding included. A transport may carry what goes to all
        once for several of them."""

    def to_each(self, parts: Sequence[Part], label: Hashable, notes: Sequence[int] = ()) -> tuple[list[Array], Array]:
        """Pass ``parts[r]`` on to rank r. Collective.

        ``label`` says which call this is, the same on every rank.

        Returns:
            What each other rank had for this one, as uint8, in rank order, with anything in this one's place, to be
            read before the next exchange; and every rank's ``notes``, of which each has as many, in a row for each
            rank.
        """
        sizes = [sum(map(_nbytes, part)) for part in parts]
        sizes[self._transport.rank] = 0
        return self._pass(parts, sizes, label, notes)

    def to_all(self, part: Part, label: Hashable, notes: Sequence[int] = ()) -> tuple[list[Array], Array]:
        """Pass ``part`` on to every rank; otherwise as :meth:`to_each`. Collective."""
        return self._pass([part], [sum(map(_nbytes, part))], label, notes)

    def carry(self, parts: Sequence[Part], sizes: Array) -> list[Array]:
        """Pass ``parts[r]`` on to rank r, or the only part to all, where ``sizes`` is known to every rank: how many
        bytes each has for each, or for all, in a row for each rank. Collective. Alone of all here, it needs no memory
        of the host.

        Returns:
            What each rank had for this one, as new arrays of uint8, in rank order.
        """
        mine = sizes[:, self._transport.rank if len(parts) > 1 else 0].tolist()
        longest = -(-sizes.max(axis=0) // _EVEN) * _EVEN
        return self._rest(parts, (), mine, longest, np.zeros_like(longest))

    def _pass(
        self, parts: Sequence[Part], sizes: Sequence[int], label: Hashable, notes: Sequence[int]
    ) -> tuple[list[Array], Array]:
        """Pass on one part for each rank, or one for all."""
        each, limit = len(parts) > 1, self._transport.limit
        row = np.array([*sizes, *notes], np.int64)
        label = label, each
        done = self._rooms.get(label, np.zeros(len(parts), np.int64))
        first: Sequence[Array] = ()
        if row.nbytes * len(parts) > limit // 2:
            done, table = done * 0, gather(self._transport, row)
        else:
            if int(done.sum()) + row.nbytes * len(parts) > limit:
                done = np.minimum(done, (limit // len(parts) - row.nbytes) // 8 * 8)
            heads = [(row, *part) for part in parts]
            first = self._exchange(heads, [0] * len(parts), (done + row.nbytes).tolist(), each)
            table = np.stack([part[: row.nbytes].view(np.int64) for part in first])
        longest = table[:, : len(parts)].max(axis=0)
        if len(self._rooms) >= _MOST_LABELS:
            self._rooms.clear()
        self._rooms[label] = -(-longest * 9 // 512) * 64
        mine = table[:, self._transport.rank if each else 0].tolist()
        if first and (longest <= done).all():
            received = [part[row.nbytes : row.nbytes + size] for part, size in zip(first, mine, strict=True)]
        else:
            received = self._rest(parts, [part[row.nbytes :] for part in first], mine, longest, done)
        return received, table[:, len(parts) :]

    def _rest(
        self, parts: Sequence[Part], first: Sequence[Array], mine: Sequence[int], longest: Array, done: Array
    ) -> list[Array]:
        """Pass on what the first message had no room for; return all."""
        each = len(parts) > 1
        received = [self._tables.empty((size,), _BYTES) for size in mine]
        self._put(zip(received, repeat(0), first, strict=False))
        chunk = max(self._transport.limit // max(int((longest > done).sum()), 1), 1)
        while (longest > done).any():
            counts = np.clip(longest - done, 0, chunk)
            begin = int(done[self._transport.rank if each else 0])
            got = self._exchange(parts, done.tolist(), counts.tolist(), each)
            self._put(zip(received, repeat(begin), got, strict=False))
            done = done + counts
        return received

    def _exchange(
        self, parts: Sequence[Part], begins: Sequence[int], counts: Sequence[int], each: bool
    ) -> Sequence[Array]:
        """Send so many bytes to each rank, or to all, from some byte on; where a part ends, anything."""
        rank, at = self._transport.rank, 0
        send = self._transport.send_buffers[self._transport.slot][: sum(counts)]
        places: list[tuple[Array, int, Array]] = []
        for to, (part, begin, count) in enumerate(zip(parts, begins, counts, strict=True)):
            message, start = send[at : at + count], -begin
            # Nobody but this rank reads what it sends itself, but for the numbers at the beginning.
            for piece in part[:1] if each and to == rank else part:
                places.append((message, start, piece.view(_BYTES)))
                start += piece.nbytes
            at += count
        self._put(places)
        self.sent += at - counts[rank] if each else at * (self._transport.size - 1)
        return self._transport.all_to_all(send, counts if each else None)

    def _put(self, places: Iterable[tuple[Array, int, Array]]) -> None:
        """Copy to a place in each target, which may be before its beginning, a part, as far as both go."""
        into: list[Array] = []
        these: list[Array] = []
        for target, at, part in places:
            begin, end = max(at, 0), min(at + part.size, target.size)
            if begin < end:
                into.append(target[begin:end])
                these.append(part[begin - at : end - at])
        self._tables.copy(into, these)


_nbytes = attrgetter("nbytes")
_BYTES = np.dtype(np.uint8)
