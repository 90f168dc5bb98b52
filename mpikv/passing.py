"""Bytes of any number from all ranks to all, in messages that a transport can carry."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .typing import Array, Transport

__all__ = ["Passing"]

_EMPTY = np.empty(0, np.uint8)


class Passing:
    """Passes on what is longer on one rank than on another. Its calls are collective."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.sent = 0
        """How many bytes this rank has sent to others so far, padding included, which the transport may carry once for
        several of them."""

    def counts(self, mine: Sequence[int]) -> Array:
        """Return every rank's numbers, of which each has as many, in a row for each rank."""
        size = self._transport.size
        table = np.zeros((size, len(mine)), np.int64)
        table[self._transport.rank] = mine
        self._transport.all_gather(table.reshape(-1), (len(mine),) * size)
        return table

    def to_each(self, parts: Sequence[Array]) -> list[Array]:
        """Pass ``parts[r]`` (uint8) on to rank r; return what each rank had for this one, in rank order."""
        rank, size = self._transport.rank, self._transport.size
        if size == 1:
            return list(parts)
        sizes = self.counts([part.size if to != rank else 0 for to, part in enumerate(parts)])
        received = [np.empty(int(count), np.uint8) for count in sizes[:, rank]]
        received[rank] = parts[rank]
        longest = sizes.max(axis=0)
        chunk = max(self._transport.limit // max(int(np.count_nonzero(longest)), 1), 1)
        for begin in range(0, int(longest.max()), chunk):
            counts = np.clip(longest - begin, 0, chunk).tolist()
            send = self._outbox(sum(counts))
            at = 0
            for to, count in enumerate(counts):
                if to != rank:
                    _put(send[at:], parts[to][begin : begin + count])
                    self.sent += count
                at += count
            for origin, part in enumerate(self._transport.all_to_all(send, counts)):
                if origin != rank:
                    _put(received[origin][begin:], part)
        return received

    def to_all(self, part: Array) -> list[Array]:
        """Pass ``part`` (uint8) on to every rank; return what each rank had, in rank order."""
        rank, size = self._transport.rank, self._transport.size
        if size == 1:
            return [part]
        sizes = self.counts([part.size])[:, 0]
        received = [np.empty(int(count), np.uint8) for count in sizes]
        received[rank] = part
        longest, limit = int(sizes.max()), self._transport.limit
        for begin in range(0, longest, limit):
            count = min(longest - begin, limit)
            send = self._outbox(count)
            _put(send, part[begin : begin + count])
            self.sent += count * (size - 1)
            for origin, whole in enumerate(self._transport.all_to_all(send, None)):
                if origin != rank:
                    _put(received[origin][begin:], whole)
        return received

    def from_one(self, part: Array, root: int) -> Array:
        """Return the root's ``part`` on every rank."""
        mine = part if self._transport.rank == root else _EMPTY
        return self.to_all(mine)[root]

    def _outbox(self, count: int) -> Array:
        return self._transport.outboxes[self._transport.turn][:count]


def _put(target: Array, part: Array) -> None:
    """Copy the beginning of a part, as far as there is a target for it, and a part."""
    count = min(target.size, part.size)
    target[:count] = part[:count]
