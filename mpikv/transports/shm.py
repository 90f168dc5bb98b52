"""Ranks of one host: sums through shared memory, at the speed of memory.

Every rank has two halves of staging memory that all ranks of the host can read. Exchange number c uses half c % 2: each
rank copies its contribution there, one barrier, and each rank sums the part it is to receive from every rank's half, in
rank order, so that the bits depend on the number of ranks alone.

One barrier per exchange is enough. A rank that fills half c % 2 has passed the barrier of exchange c - 1; every rank
entered that one after it had finished reading exchange c - 2, the last user of this half.

The barrier is flags in shared memory instead of MPI's: each rank writes how often it has arrived, and reads the others'
until they are as far. So a wait has a deadline, knows who is missing, and gives up the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import Stalled
from ..typing import Array
from ..waiting import Waiting
from ..world import Group

__all__ = ["ShmTransport"]

# int64 words per rank: arrivals, then two tokens, in a pair of cache lines of its own (processors fetch lines in
# pairs).
_SLOT = 16
# In place of a token.
_GONE = -1
# Polls before a waiting rank yields its core: some tens of microseconds, and none at all when ranks share cores.
_SPINS = 500


class ShmTransport:
    """The transport of ranks that share one host's memory (MPI-3 shared windows)."""

    name = "shm"
    shared = True

    def __init__(self, group: Group, limit: int, waiting: Waiting) -> None:
        """Collective. ``limit`` is in bytes."""
        self.rank, self.size, self.limit = group.rank, group.size, limit
        self._group, self._waiting = group, waiting
        self._flags = group.share(group.size * _SLOT * 8).data.cast("q")
        self._order = group.ordering()
        self._mine = group.rank * _SLOT
        self._peers = [rank * _SLOT for rank in range(group.size) if rank != group.rank]
        self._arrivals = 0
        self._spins = _SPINS if group.size <= group.host_cores else 0
        staging = group.share(2 * group.size * limit)
        self._halves: Any = staging.reshape(2, group.size, limit)
        self._exchanges = 0

    def allocate(self, nbytes: int) -> Array:
        return self._group.share(nbytes)

    def outbox(self, nbytes: int) -> Array:
        outbox: Array = self._halves[self._exchanges & 1, self.rank, :nbytes]
        return outbox

    def reduce(self, send: Array, recv: Array, root: int) -> None:
        half = self._exchange(send)
        if self.rank == root:
            self._sum(half, 0, send, recv)

    def allreduce(self, send: Array, recv: Array) -> None:
        self._sum(self._exchange(send), 0, send, recv)

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> None:
        half = self._exchange(send)
        if counts[self.rank]:
            self._sum(half, sum(counts[: self.rank]), send, recv)

    def all_gather(self, buffer: Array, counts: Sequence[int]) -> None:
        starts = np.concatenate(([0], np.cumsum(counts))) * buffer.itemsize
        whole = buffer.view(np.uint8)
        for begin in range(0, max(counts) * buffer.itemsize, self.limit):
            low, high = (min(starts[self.rank] + begin + d, starts[self.rank + 1]) for d in (0, self.limit))
            half = self._exchange(whole[low:high])
            for rank in range(self.size):
                low, high = (min(starts[rank] + begin + d, starts[rank + 1]) for d in (0, self.limit))
                if rank != self.rank:
                    whole[low:high] = half[rank, : high - low]

    def broadcast(self, buffer: Array, root: int) -> None:
        whole = buffer.view(np.uint8)
        for begin in range(0, whole.size, self.limit):
            part = whole[begin : begin + self.limit]
            half = self._exchange(part if self.rank == root else part[:0])
            if self.rank != root:
                part[:] = half[root, : part.size]

    def fence(self) -> None:
        self._arrive()

    def agree(self, token: int) -> bool:
        # Tokens alternate between two words: a rank that is already in the next barrier must not overwrite this one's.
        word = 1 + (self._arrivals & 1)
        flags = self._flags
        flags[self._mine + word] = token
        try:
            self._arrive()
        except Stalled:
            # A rank that comes later must not believe that this one goes on with it.
            flags[self._mine + word] = _GONE
            raise
        tokens = [flags[peer + word] for peer in self._peers]
        if _GONE in tokens:
            raise Stalled("the other ranks have given up waiting for this one")
        return tokens.count(token) == len(tokens)

    def close(self) -> None:
        # Arrays over a window keep the interpreter from crashing on a later access only while they are gone with it.
        self._flags.release()
        self._flags = memoryview(b"").cast("q")
        self._halves = np.empty(0, np.uint8)

    def _exchange(self, send: Array) -> Any:
        """Show ``send`` to all ranks and wait for theirs; return the memory (ranks x bytes) where they are."""
        half = self._halves[self._exchanges & 1]
        if send.base is not self._halves.base:
            np.copyto(half[self.rank, : send.nbytes], send.view(np.uint8))
        self._exchanges += 1
        self._arrive()
        return half

    def _sum(self, half: Any, start: int, send: Array, recv: Array) -> None:
        """Sum every rank's elements from ``start`` on, as many as ``recv`` holds, in rank order."""
        begin, end = start * send.itemsize, (start + recv.size) * send.itemsize
        parts = half[:, begin:end].view(send.dtype)
        if self.size == 1:
            np.copyto(recv, parts[0])
            return
        np.add(parts[0], parts[1], out=recv, dtype=recv.dtype)
        for part in parts[2:]:
            np.add(recv, part, out=recv)

    def _arrive(self) -> None:
        """Wait until every rank has arrived as often as this one."""
        if self._order:
            self._order()
        flags = self._flags
        self._arrivals = arrivals = self._arrivals + 1
        flags[self._mine] = arrivals
        for peer in self._peers:
            if flags[peer] < arrivals:
                self._wait(peer, arrivals)
        if self._order:
            self._order()

    def _wait(self, peer: int, arrivals: int) -> None:
        flags = self._flags
        for _ in range(self._spins):
            if flags[peer] >= arrivals:
                return
        self._waiting.until(
            lambda: flags[peer] >= arrivals,
            lambda: [other // _SLOT for other in self._peers if flags[other] < arrivals],
        )
