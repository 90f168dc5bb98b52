"""An alltoallv: each rank sends any number of bytes to each, in messages that fit a transport's buffers."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import TypeAlias

import numpy as np

from ..protocols import Array, Transport

_MOST_LABELS = 4096

Part: TypeAlias = "Sequence[Array]"
"""Flat arrays of any dtype: their bytes are sent one array after the other."""

# Bytes. Parts of messages are padded to multiples of it, so that a GPU copies each from an aligned address.
_EVEN = 64


def gather(transport: Transport, mine: Array) -> Array:
    """Return all ranks' numbers in a new host array, a row per rank; each rank brings equally many. Collective."""
    # One row per rank: an all-gather fills each rank's part in place.
    table = np.zeros((transport.size, mine.size), mine.dtype)
    table[transport.rank] = mine
    transport.all_gather(table.reshape(-1), (mine.size,) * transport.size)
    return table


class Alltoallv:
    """Exchanges parts of different lengths.

    The first message states how long each part is, and has room for the longest part of the last such call. So a call
    that repeats takes one exchange, as long as its parts do not grow by more than an eighth.
    """

    def __init__(self, transport: Transport) -> None:
        """Allocate and send nothing. Local."""
        self._transport, self._tables = transport, transport.memory.workspace
        self._rooms: dict[Hashable, Array] = {}
        self.sent = 0
        """Bytes that this rank has sent to others, padding included. A transport may carry fewer, where one copy of a
        message to all serves several ranks."""

    def send(self, parts: Sequence[Part], label: Hashable, notes: Sequence[int] = ()) -> tuple[list[Array], Array]:
        """Send rank r its part, or all ranks one, and notes. Return received parts, valid until the next exchange (of
        several, this rank's own is undefined), and all ranks' notes. Collective.

        Args:
            parts: one part per rank, or a single one.
            label: names the call, the same on every rank: lengths are remembered by it.
            notes: a few numbers for all ranks, equally many on each.

        Returns:
            The parts for this rank as uint8, in rank order; of several, this rank's own entry is undefined. Read them
            before the next exchange. Then the notes, one row per rank.
        """
        each, limit = len(parts) > 1, self._transport.limit
        sizes = [sum(map(_nbytes, part)) for part in parts]
        if each:
            # This rank has its own part: sent as well, it would take room in every message.
            sizes[self._transport.rank] = 0
        row = np.array([*sizes, *notes], np.int64)
        label = label, each
        done = self._rooms.get(label, np.zeros(len(parts), np.int64))
        first: Sequence[Array] = ()
        if row.nbytes * len(parts) > limit // 2:
            # Many ranks with a small buffer: the lengths alone would fill a message, and get an exchange of their own.
            done, table = done * 0, gather(self._transport, row)
        else:
            if int(done.sum()) + row.nbytes * len(parts) > limit:
                done = np.minimum(done, (limit // len(parts) - row.nbytes) // 8 * 8)
            heads = [(row, *part) for part in parts]
            first = self._exchange(heads, [0] * len(parts), (done + row.nbytes).tolist())
            table = np.stack([part[: row.nbytes].view(np.int64) for part in first])
        longest = table[:, : len(parts)].max(axis=0)
        # All at once, on all ranks in the same call: each rank must size the next message alike.
        if len(self._rooms) >= _MOST_LABELS:
            self._rooms.clear()
        # An eighth more than now, in multiples of 64 bytes. All ranks have the same table, so they agree on the room.
        self._rooms[label] = -(-longest * 9 // 512) * 64
        mine = table[:, self._transport.rank if each else 0].tolist()
        if first and (longest <= done).all():
            received = [part[row.nbytes : row.nbytes + size] for part, size in zip(first, mine, strict=True)]
        else:
            received = self._send_rest(parts, [part[row.nbytes :] for part in first], mine, longest, done)
        return received, table[:, len(parts) :]

    def carry(self, parts: Sequence[Part], sizes: Array) -> list[Array]:
        """Send parts as :meth:`send`, of sizes that all ranks know. Return received parts in new arrays; of several,
        this rank's own is undefined. Collective.

        It sends no lengths, and uses no memory of the host.

        ``sizes`` has a row for each sender, with its bytes for each receiver, or for all. Every rank passes the same.

        Returns:
            The parts for this rank, as new arrays of uint8, in rank order.
        """
        mine = sizes[:, self._transport.rank if len(parts) > 1 else 0].tolist()
        longest = -(-sizes.max(axis=0) // _EVEN) * _EVEN
        return self._send_rest(parts, (), mine, longest, np.zeros_like(longest))

    def _send_rest(
        self, parts: Sequence[Part], first: Sequence[Array], coming: Sequence[int], longest: Array, done: Array
    ) -> list[Array]:
        """Send the bytes of parts that ``first``, their received beginnings, lack. Return whole received parts in new
        arrays; of several, this rank's own is undefined. Collective.

        ``coming`` has the bytes that come from each rank. ``done`` and ``longest`` count the bytes of the
        longest part to each rank, sent so far and in all.
        """
        each = len(parts) > 1
        received = [self._tables.empty((size,), _BYTES) for size in coming]
        self._put(zip(received, repeat(0), first, strict=False))  # ``first`` may be empty
        # Shared out among the parts that are still long: short ones end first, and leave their room to the others.
        chunk = max(self._transport.limit // max(int((longest > done).sum()), 1), 1)
        while (longest > done).any():
            counts = np.clip(longest - done, 0, chunk)
            begin = int(done[self._transport.rank if each else 0])
            got = self._exchange(parts, done.tolist(), counts.tolist())
            self._put(zip(received, repeat(begin), got, strict=False))
            done = done + counts
        return received

    def _exchange(self, parts: Sequence[Part], begins: Sequence[int], counts: Sequence[int]) -> Sequence[Array]:
        """Send ``counts[r]`` bytes from ``begins[r]`` of part r to rank r. Return views of those received, valid until
        the next exchange. Collective.

        A single part goes to all ranks. The message is undefined where it is longer than the part.
        """
        each, rank, at = len(parts) > 1, self._transport.rank, 0
        send = self._transport.send_buffers[self._transport.slot][: sum(counts)]
        places: list[tuple[Array, int, Array]] = []
        for to, (part, begin, count) in enumerate(zip(parts, begins, counts, strict=True)):
            message, start = send[at : at + count], -begin
            # This rank has its own part already: of the copy it reads the lengths alone, the first array.
            for piece in part[:1] if each and to == rank else part:
                places.append((message, start, piece.view(_BYTES)))
                start += piece.nbytes
            at += count
        self._put(places)
        self.sent += at - counts[rank] if each else at * (self._transport.size - 1)
        return self._transport.all_to_all(send, counts if each else None)

    def _put(self, places: Iterable[tuple[Array, int, Array]]) -> None:
        """For each (target, byte, part), copy the part to that byte of the target, as far as it fits there. Local."""
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
