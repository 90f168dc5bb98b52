"""Bytes of any number from all ranks to all, in messages that a transport can carry."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from .typing import Array, Transport

__all__ = ["Passing"]

_MOST_LABELS = 4096


class Passing:
    """Passes on what is longer on one rank than on another.

    The first message has room for what was the longest the last time, and says how long each part is now. So the same
    call, made again, takes one exchange as long as parts do not grow by more than an eighth.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._rooms: dict[Hashable, Array] = {}
        self.sent = 0
        """How many bytes this rank has sent to others so far, padding included. A transport may carry what goes to all
        once for several of them."""

    def counts(self, mine: Sequence[int]) -> Array:
        """Return every rank's numbers, of which each has as many, in a row for each rank. Collective."""
        size = self._transport.size
        table = np.zeros((size, len(mine)), np.int64)
        table[self._transport.rank] = mine
        self._transport.all_gather(table.reshape(-1), (len(mine),) * size)
        return table

    def to_each(self, parts: Sequence[Array], label: Hashable, notes: Sequence[int] = ()) -> tuple[list[Array], Array]:
        """Pass ``parts[r]`` (uint8) on to rank r. Collective.

        ``label`` says which call this is, the same on every rank.

        Returns:
            What each other rank had for this one, in rank order, with nothing in this one's place; and every rank's
            ``notes``, of which each has as many, in a row for each rank.
        """
        sizes = [0 if to == self._transport.rank else part.size for to, part in enumerate(parts)]
        return self._pass(parts, sizes, label, notes)

    def to_all(self, part: Array, label: Hashable, notes: Sequence[int] = ()) -> tuple[list[Array], Array]:
        """Pass ``part`` (uint8) on to every rank; otherwise as :meth:`to_each`. Collective."""
        return self._pass([part], [part.size], label, notes)

    def _pass(
        self, parts: Sequence[Array], sizes: Sequence[int], label: Hashable, notes: Sequence[int]
    ) -> tuple[list[Array], Array]:
        """Pass on one part for each rank, or one for all."""
        each, rank, limit = len(parts) > 1, self._transport.rank, self._transport.limit
        row = np.array([*sizes, *notes], np.int64)
        label = label, each
        done = self._rooms.get(label, np.zeros(len(parts), np.int64))
        if row.nbytes * len(parts) > limit // 2:
            done, table = done * 0, self.counts(row.tolist())
            first: Sequence[Array] = ()
        else:
            if int(done.sum()) + row.nbytes * len(parts) > limit:
                done = np.minimum(done, (limit // len(parts) - row.nbytes) // 8 * 8)
            head = row.view(np.uint8)
            first = self._exchange([(head, part) for part in parts], (done + row.nbytes).tolist(), each)
            table = np.stack([part[: row.nbytes].view(np.int64) for part in first])
        longest = table[:, : len(parts)].max(axis=0)
        mine = rank if each else 0
        received = [np.empty(int(size) * (origin != rank), np.uint8) for origin, size in enumerate(table[:, mine])]
        for target, part in zip(received, first, strict=False):
            _put(target, part[row.nbytes :])
        chunk = max(limit // max(int((longest > done).sum()), 1), 1)
        while (longest > done).any():
            counts = np.clip(longest - done, 0, chunk)
            rest = [(part[at:],) for part, at in zip(parts, done.tolist(), strict=True)]
            for target, part in zip(received, self._exchange(rest, counts.tolist(), each), strict=True):
                _put(target[done[mine] :], part)
            done = done + counts
        if len(self._rooms) >= _MOST_LABELS:
            self._rooms.clear()
        self._rooms[label] = -(-longest * 9 // 512) * 64
        return received, table[:, len(parts) :]

    def _exchange(self, parts: Sequence[Sequence[Array]], counts: Sequence[int], each: bool) -> Sequence[Array]:
        """Send so many bytes to each rank, or to all: one array after the other, and where they end, anything."""
        send = self._transport.outboxes[self._transport.turn][: sum(counts)]
        at = 0
        for part, count in zip(parts, counts, strict=True):
            begin = at
            for piece in part:
                _put(send[begin : at + count], piece)
                begin += piece.size
            at += count
        own = counts[self._transport.rank] if each else 0
        self.sent += (at - own) * (1 if each else self._transport.size - 1)
        return self._transport.all_to_all(send, counts if each else None)


def _put(target: Array, part: Array) -> None:
    """Copy the beginning of a part, as far as there is a target for it, and a part."""
    count = min(target.size, part.size)
    target[:count] = part[:count]
