"""Ranks of one host: sums through shared memory, at the speed of memory.

Every rank has two halves of staging memory that all ranks of the host can read. Exchange number c uses half c % 2: each
rank copies its contribution there, one barrier, and each rank reads the part it is to receive from every rank's half,
in rank order, so that the bits of a sum depend on the number of ranks alone.

Where the system lets ranks read each other's memory, what lies in a caller's array is not copied to the halves: the
ranks that are to receive it copy their parts out of that array, into memory that stays in their caches.

One barrier per exchange is enough. A rank that fills half c % 2 has passed the barrier of exchange c - 1; every rank
entered that one after it had finished reading exchange c - 2, the last user of this half.

The barrier is flags in shared memory instead of MPI's: each rank writes how often it has arrived, and reads the others'
until they are as far. So a wait has a deadline, knows who is missing, and gives up the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np

from ..arrays.arrays import zeros
from ..cluster.process_group import ProcessGroup
from ..cluster.waiting import Waits
from ..errors import Stalled
from ..memory.host import HOST
from ..protocols import Array, Memory
from .cma import CopyChoice, attach

__all__ = ["ShmTransport"]

# int64 words per rank: arrivals, two tokens, and for each half where its contribution lies instead, or 0; in a pair of
# cache lines of its own (processors fetch lines in pairs).
_STRIDE = 16
_ADDRESS = 3
# What a rank does with a large message that is not in its send buffer.
_COPYING, _LENDING = 0, 1
# In place of a number of arrivals: the rank has given up waiting.
_GONE = 1 << 62
_ALONE = "the other ranks have given up waiting for this one"
# The same messages come again and again, and making an array over memory takes longer than looking it up.
_MOST_VIEWS = 4096
# Polls before a waiting rank yields its core: some tens of microseconds, and none at all when ranks share cores.
_SPINS = 500

# From here on it pays to look for a way without a copy.
LARGE = 64 << 10
_Key: TypeAlias = "tuple[int, tuple[int, ...] | int, np.dtype[Any]]"


class ShmTransport:
    """The transport of ranks that share one host's memory (MPI-3 shared windows).

    Of a group on several hosts it joins those of this host, whose ranks in here are their local ones.
    """

    name = "shm"
    shared = True

    def __init__(
        self,
        group: ProcessGroup,
        limit: int,
        waiting: Waits,
        single_copy: bool = True,
        large: int = LARGE,
        *,
        memory: Memory = HOST,
    ) -> None:
        """Collective. ``limit`` is in bytes.

        From ``large`` bytes on, sums leave what is not in the send buffer where it lies, as far as its own rank reads
        it; with ``single_copy`` other ranks may read it there, too.
        """
        self.memory = memory
        self.rank, self.size, self.limit = group.local_rank, len(group.host_ranks), limit
        self.sharing_size, self.sharing_rank = self.size, self.rank
        self._group, self._waiting = group, waiting
        self._flags = group.windows.allocate(self.size * _STRIDE * 8).data.cast("q")
        self._order = group.windows.ordering()
        self._mine = self.rank * _STRIDE
        self._peers = [rank * _STRIDE for rank in range(self.size) if rank != self.rank]
        self._arrivals = 0
        self._spins = _SPINS if self.size <= group.host_cores else 0
        staging = group.windows.allocate(2 * self.size * limit, zeroed=False)
        self._large = large
        self._halves: Any = staging.reshape(2, self.size, limit)
        self.send_buffers: tuple[Array, ...] = tuple(self._halves[:, self.rank])
        self.slot = 0
        self._shown = False
        self._views: dict[_Key, tuple[Array, ...]] = {}
        self._attached = attach(group) if single_copy else None
        self.single_copy = self._attached is not None
        self._lent: Array | None = None
        self._choice = CopyChoice()
        # A row for each rank. Pages that are never written take no memory.
        self._inbox = zeros(self.size * limit if self.single_copy else 0).reshape(self.size, -1)

    @property
    def control(self) -> ShmTransport:
        return self

    def allocate(self, nbytes: int) -> Array:
        return self._group.windows.allocate(nbytes)

    def reclaim(self) -> None:
        self._group.windows.reclaim()

    def reduce(self, send: Array, recv: Array, root: int) -> Sequence[Array]:
        return self.reduce_scatter(send, recv, (0,) * root + (send.size,) + (0,) * (self.size - root - 1))

    def allreduce(self, send: Array, recv: Array) -> Sequence[Array]:
        return self._shown_terms(send, None) if send.nbytes < self._large else self._large_terms(send, None)

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Sequence[Array]:
        counts = tuple(counts)
        return self._shown_terms(send, counts) if send.nbytes < self._large else self._large_terms(send, counts)

    def all_to_all(self, send: Array, counts: Sequence[int] | None) -> Sequence[Array]:
        # The terms of a sum are what every rank sent.
        return self._shown_terms(send, None if counts is None else tuple(counts))

    def all_gather(self, buffer: Array, counts: Sequence[int]) -> None:
        parts = np.split(buffer[: sum(counts)].view(np.uint8), np.cumsum(counts[:-1]) * buffer.itemsize)
        for begin in range(0, max(counts) * buffer.itemsize, self.limit):
            pieces = [part[begin : begin + self.limit] for part in parts]
            half = self._halves[self._exchange(pieces[self.rank])]
            for rank, piece in enumerate(pieces):
                if rank != self.rank:
                    piece[:] = half[rank, : piece.size]

    def broadcast(self, buffer: Array, root: int) -> None:
        whole = buffer.view(np.uint8)
        for begin in range(0, whole.size, self.limit):
            part = whole[begin : begin + self.limit]
            half = self._halves[self._exchange(part if self.rank == root else part[:0])]
            if self.rank != root:
                part[:] = half[root, : part.size]

    def fence(self, send_ready: bool = False) -> None:
        self._arrive()
        self._shown = send_ready

    def agree(self, token: int, send_ready: bool = False) -> bool:
        # Tokens alternate between two words: a rank that is already in the next barrier must not overwrite this one's.
        flags, word = self._flags, 1 + (self._arrivals & 1)
        flags[self._mine + word] = token
        self._arrive()
        for peer in self._peers:
            if flags[peer + word] != token:
                return False
        self._shown = send_ready
        return True

    def close(self) -> None:
        # Arrays over a window keep the interpreter from crashing on a later access only while they are gone with it.
        self._flags.release()
        self._flags = memoryview(b"").cast("q")
        self._halves = np.empty(0, np.uint8)
        self.send_buffers = ()
        self._views.clear()
        # What is still lent is kept: other ranks may be about to read it.
        self._attached, self._inbox = None, zeros(0)

    def _shown_terms(self, send: Array, counts: tuple[int, ...] | None) -> Sequence[Array]:
        """Exchange; return every rank's elements for this one: all of them, or as many as ``counts`` says."""
        key = self._exchange(send), counts or send.size, send.dtype
        return self._views.get(key) or self._view(key, *_part(self.rank, counts, send.size))

    def _large_terms(self, send: Array, counts: tuple[int, ...] | None) -> Sequence[Array]:
        """Do the same where each rank decides by itself whether it copies its message or lends it."""
        low, high = _part(self.rank, counts, send.size)
        apart = send.base is not self._halves.base
        way, attached = self._choice.next(), self._attached
        lending = apart and way == _LENDING and attached is not None and attached.can_lend(send)
        if lending:
            self._flags[self._mine + _ADDRESS + self.slot] = send.ctypes.data
        elif apart:
            self._copy(send, *((low, high) if counts else (0, 0)))
        half = self._show()
        self._lent = send if lending else None
        key = half, counts or send.size, send.dtype
        terms = list(self._views.get(key) or self._view(key, low, high))
        if apart:
            terms[self.rank] = send[low:high]
        for peer in self._peers if high > low else ():
            if address := self._flags[peer + _ADDRESS + half]:
                terms[peer // _STRIDE] = self._read(peer // _STRIDE, address + low * send.itemsize, terms[self.rank])
        return terms

    def _copy(self, send: Array, low: int, high: int) -> None:
        """Copy what other ranks are to read, all but ``[low, high)``, to the send buffer."""
        send_buffer, began = self.send_buffers[self.slot][: send.nbytes].view(send.dtype), perf_counter()
        send_buffer[:low], send_buffer[high:] = send[:low], send[high:]
        if copied := send.size - (high - low):
            self._choice.took(_COPYING, perf_counter() - began, copied * send.itemsize)

    def _read(self, place: int, address: int, like: Array) -> Array:
        """Return a copy of what a rank has lent, as large as this rank's own part."""
        assert self._attached is not None
        copy, began = self._inbox[place, : like.nbytes].view(like.dtype), perf_counter()
        self._attached.read(place, address, copy)
        self._choice.took(_LENDING, perf_counter() - began, like.nbytes)
        return copy

    def _exchange(self, send: Array) -> int:
        """Show ``send``, or a copy, to all ranks and wait for theirs; return the half in which they are."""
        if send.base is not self._halves.base:
            np.copyto(self.send_buffers[self.slot][: send.nbytes], send.view(np.uint8))
        return self._show()

    def _show(self) -> int:
        """Let all ranks read this one's message and wait for theirs; return the half that they are in, or lent for."""
        if self._shown:
            self._shown = False
        else:
            self._arrive()
        half, self.slot = self.slot, 1 - self.slot
        return half

    def _view(self, key: _Key, low: int, high: int) -> tuple[Array, ...]:
        """Return where every rank's elements ``[low, high)`` are in a half, in rank order; remember it."""
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        half, _, dtype = key
        first, last = low * dtype.itemsize, high * dtype.itemsize
        terms = self._views[key] = tuple(part[first:last].view(dtype) for part in self._halves[half])
        return terms

    def _arrive(self) -> None:
        """Wait until every rank has arrived as often as this one.

        Raises:
            Stalled: one did not come, or has given up: it does not go on with this rank, and may change what it lends.
        """
        if self._order:
            self._order()
        flags = self._flags
        self._arrivals = arrivals = self._arrivals + 1
        flags[self._mine] = arrivals
        for peer in self._peers:
            if not arrivals <= flags[peer] < _GONE:
                self._await(peer, arrivals)
        if self._lent is not None:
            # All have left the exchange that it was lent for.
            flags[self._mine + _ADDRESS + 1 - self.slot] = 0
            self._lent = None
        if self._order:
            self._order()

    def _await(self, peer: int, arrivals: int) -> None:
        """Wait until this rank has arrived or, where it does not come at once, until all have; tell all where some do
        not come.
        """
        flags = self._flags
        for _ in range(self._spins):
            if arrivals <= flags[peer] < _GONE:
                return
        late = [other for other in self._peers if not arrivals <= flags[other] < _GONE]

        def all_are_here() -> bool:
            while late and flags[late[-1]] >= arrivals:
                if flags[late[-1]] >= _GONE:
                    raise Stalled(_ALONE)
                late.pop()
            return not late

        def missing() -> list[int]:
            return [self._group.host_ranks[other // _STRIDE] for other in self._peers if flags[other] < arrivals]

        try:
            self._waiting.until(all_are_here, missing)
        except Stalled:
            flags[self._mine] = _GONE
            raise


def _part(rank: int, counts: tuple[int, ...] | None, size: int) -> tuple[int, int]:
    """Return which elements of a message are for a rank."""
    if counts is None:
        return 0, size
    low = sum(counts[:rank])
    return low, low + counts[rank]
