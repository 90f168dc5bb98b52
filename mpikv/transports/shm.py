"""Ranks of one host: sums through shared memory, at the speed of memory.

Every rank has two halves of staging memory that all ranks of the host can read. Exchange number c uses half c % 2. Each
rank copies its contribution there, and one barrier follows. Then each rank reads its own part from every rank's half,
in rank order, so the bits of a sum depend on the number of ranks alone.

If the system lets ranks read each other's memory, a large private array is not copied to the halves. The other ranks
copy their parts straight out of that array, into memory that stays in their caches. A broadcast or an all_gather copies
straight to its target, and ends with a second barrier.

One barrier per exchange is enough. A rank that fills half c % 2 has passed the barrier of exchange c - 1. Every rank
entered that barrier after it had finished reading exchange c - 2, the last user of this half.

The barrier is flags in shared memory instead of MPI's. Each rank writes how often it has arrived, and reads the others'
counts until they are as high. So a wait has a deadline, names the missing ranks, and gives up the core.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np

from ..arrays.arrays import zeros
from ..cluster.shared_memory import find_flag_fence
from ..cluster.waiting import Waits
from ..errors import Stalled
from ..memory.host import HOST
from ..protocols import Array, Group, Memory
from .cma import CopyChoice, attach

# int64 words per rank, in a pair of cache lines of its own (processors fetch lines in pairs): arrivals, two tokens, and
# for each half the address of a contribution outside of it, or 0.
_STRIDE = 16
_ADDRESS = 3
# The ways of a large private message: a copy to the send buffer, or single-copy by its readers.
_COPY, _SINGLE_COPY = 0, 1
# In place of a number of arrivals: the rank has given up waiting. Larger than any number of arrivals.
GONE = 1 << 62
_ALONE = "the other ranks have given up waiting for this one"
# The same messages come again and again, and a look-up is faster than making an array over memory.
_MOST_VIEWS = 4096
# Polls before a waiting rank yields its core: some tens of microseconds; none if ranks share cores.
_SPINS = 500

# Bytes from which on single-copy may pay; smaller messages are always copied.
LARGE = 64 << 10
_Key: TypeAlias = "tuple[int, tuple[int, ...] | int, np.dtype[Any]]"


class Arrivals:
    """How often each rank of a host has arrived, in memory that they share. Each rank writes to its own part only."""

    def __init__(self, group: Group, waiting: Waits, stride: int) -> None:
        """Allocate counts in shared memory: ``stride`` words for each rank, the first its arrivals. Collective."""
        # Tickets ask for more than waits.
        self.waiting: Any = waiting
        self._host_ranks, self._stride, size = group.host_ranks, stride, len(group.host_ranks)
        self._flags = group.allocate(size * stride * 8).data.cast("q")
        self._order = find_flag_fence()
        self._mine = group.local_rank * stride
        self._peers = [rank * stride for rank in range(size) if rank != group.local_rank]
        # Where ranks share cores, a rank that spins keeps the awaited one from running.
        self._spins = _SPINS if size <= group.host_cores else 0

    def _await_peers(self, peer: int, arrivals: int) -> None:
        """Poll the flag at ``peer``; if it stays behind ``arrivals``, wait for all late ranks. If these do not come,
        mark this rank as given up, and raise Stalled.
        """
        flags = self._flags
        for _ in range(self._spins):
            if arrivals <= flags[peer] < GONE:
                return
        late = [other for other in self._peers if not arrivals <= flags[other] < GONE]

        # Checks the last late rank until it comes, then the next: one read per poll, however many ranks are late.
        def all_are_here() -> bool:
            """Return whether no awaited rank is late; raise Stalled if one has given up."""
            while late and flags[late[-1]] >= arrivals:
                if flags[late[-1]] >= GONE:
                    raise Stalled(_ALONE)
                late.pop()
            return not late

        def missing() -> list[int]:
            """Return the ranks of the group that have not arrived."""
            return [self._host_ranks[other // self._stride] for other in self._peers if flags[other] < arrivals]

        try:
            self.waiting.until(all_are_here, missing)
        except Stalled:
            flags[self._mine] = GONE
            raise


class ShmTransport(Arrivals):
    """The transport of ranks that share one host's memory (``cluster/shared_memory.py``).

    Of a group on several hosts it joins the ranks of this host; their ranks in it are their local ranks.
    """

    name = "shm"
    shared = True

    def __init__(
        self,
        group: Group,
        limit: int,
        waiting: Waits,
        single_copy: bool = True,
        large: int = LARGE,
        *,
        slots: int = 2,
        memory: Memory = HOST,
    ) -> None:
        """Allocate staging memory that this host's ranks share, and try ``single_copy`` if wanted. Collective.

        ``limit`` is in bytes. There are 2 ``slots``, halves; more if messages are staged for longer.

        From ``large`` bytes on, a rank reads its own part of a private message in place. With ``single_copy`` other
        ranks may do so too.
        """
        self.memory = memory
        self.rank, self.size, self.limit = group.local_rank, len(group.host_ranks), limit
        self.sharing_size, self.sharing_rank = self.size, self.rank
        super().__init__(group, waiting, _STRIDE)
        self._group, self._arrivals = group, 0
        # Without pages now: sums write before they read, and pages that are never used take no memory.
        staging = group.allocate(slots * self.size * limit, pages_now=False)
        self._large = large
        self._halves: Any = staging.reshape(slots, self.size, limit)
        self.send_buffers: tuple[Array, ...] = tuple(self._halves[:, self.rank])
        self.slot = 0
        self._send_ready = False
        self._views: dict[_Key, tuple[Array, ...]] = {}
        self._attached = attach(group) if single_copy else None
        self.single_copy = self._attached is not None
        # The private message that other ranks may be reading. Held here, so its memory outlives the caller's reference.
        self._exposed: Array | None = None
        self._choice, self._choice_of_gather = CopyChoice(), CopyChoice()
        # A row for each rank. Unwritten pages take no memory.
        self._inbox = zeros(self.size * limit if self.single_copy else 0).reshape(self.size, -1)

    @property
    def control(self) -> ShmTransport:
        """The transport by which ranks agree: this one."""
        return self

    def allocate(self, nbytes: int) -> Array:
        """Return zeros that this host's ranks share; MemoryError on all of them if there is no room. Collective."""
        return self._group.allocate(nbytes)

    def reduce(self, send: Array, recv: Array, root: int) -> Sequence[Array]:
        """Return, at the root, every rank's ``send``, for it to add; elsewhere empty arrays. Collective."""
        return self.reduce_scatter(send, recv, (0,) * root + (send.size,) + (0,) * (self.size - root - 1))

    def allreduce(self, send: Array, recv: Array) -> Sequence[Array]:
        """Return every rank's ``send``, in rank order, for the caller to add; ``recv`` is unused. Collective."""
        return self._staged_terms(send, None) if send.nbytes < self._large else self._large_terms(send, None)

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Sequence[Array]:
        """Return this rank's part of every rank's ``send``, for the caller to add; ``recv`` is unused. Collective."""
        counts = tuple(counts)
        return self._staged_terms(send, counts) if send.nbytes < self._large else self._large_terms(send, counts)

    def read_terms(self, send: Array, counts: Sequence[int]) -> Iterator[Sequence[Array]] | None:
        """Return an iterator that reads this rank's part by pieces, each a list of terms; None on all ranks if one's
        ``send`` is small or unreadable. Collective.
        """
        if (addresses := self._expose(send.view(np.uint8))) is None:
            return None
        return self._read_pieces(send, addresses, *_part(self.rank, tuple(counts), send.size))

    def all_to_all(self, send: Array, counts: Sequence[int] | None) -> Sequence[Array]:
        """Send rank r the r-th part, of ``counts[r]`` elements, or with ``counts`` None everything; return a view from
        each rank, valid until the next exchange. All ranks pass the same ``counts``. Collective.
        """
        # The terms of a sum are every rank's part, not yet added: just an exchange.
        return self._staged_terms(send, None if counts is None else tuple(counts))

    def all_gather(self, buffer: Array, counts: Sequence[int]) -> None:
        """Fill each rank's part of ``buffer`` on every rank, in place, through staging or a single copy. Collective."""
        whole, longest = buffer[: sum(counts)].view(np.uint8), max(counts) * buffer.itemsize
        parts = np.split(whole, np.cumsum(counts[:-1]) * buffer.itemsize)
        is_large = whole.size >= self._large
        way = self._choice_of_gather.next() if is_large else _COPY
        addresses, began = self._expose(whole, way == _SINGLE_COPY), perf_counter()
        if addresses is not None:
            for rank, part in enumerate(parts):
                self._fill(part, rank, addresses[rank] + part.ctypes.data - whole.ctypes.data)
            self._arrive()  # no rank changes what others still read
        else:
            way = _COPY
            # All ranks make as many exchanges as the longest part needs, some of them with nothing to send.
            for begin in range(0, longest, self.limit):
                pieces = [part[begin : begin + self.limit] for part in parts]
                half = self._halves[self._meet(pieces[self.rank])]
                for rank, piece in enumerate(pieces):
                    if rank != self.rank:
                        piece[:] = half[rank, : piece.size]
        if is_large:
            self._choice_of_gather.took(way, perf_counter() - began, longest)

    def broadcast(self, buffer: Array, root: int) -> None:
        """Copy the root's ``buffer`` to every rank's, in place. Collective."""
        self.all_gather(buffer, [buffer.size if rank == root else 0 for rank in range(self.size)])

    def fence(self) -> None:
        """Wait for all ranks, so that their writes to shared memory are visible; forget ``send_ready``. Collective."""
        self._arrive()
        self._send_ready = False

    def agree(self, token: int, send_ready: bool = False) -> bool:
        """Return whether every rank passed the same token; wait for all, and keep ``send_ready`` if so. Collective."""
        # Tokens alternate between two words: a rank already in the next barrier must not overwrite this one's token.
        # Two suffice, since no rank is two barriers ahead. The token is written before the arrival that announces it.
        flags, word = self._flags, 1 + (self._arrivals & 1)
        flags[self._mine + word] = token
        self._arrive()
        for peer in self._peers:
            if flags[peer + word] != token:
                return False
        self._send_ready = send_ready
        return True

    def close(self) -> None:
        """Drop this rank's arrays over the shared memory, which ends with the last one. Local, idempotent."""
        # Every array over the shared memory: it goes back to the system with the last one.
        self._flags.release()
        self._flags = memoryview(b"").cast("q")
        self._halves = np.empty(0, np.uint8)
        self.send_buffers = ()
        self._views.clear()
        # An exposed message is kept: other ranks may be about to read it.
        self._attached, self._inbox = None, zeros(0)

    def _staged_terms(self, send: Array, counts: tuple[int, ...] | None) -> Sequence[Array]:
        """Exchange through staging memory; return views of every rank's part for this one, or without ``counts`` of
        all. Collective.
        """
        key = self._meet(send), counts or send.size, send.dtype
        return self._views.get(key) or self._view(key, *_part(self.rank, counts, send.size))

    def _large_terms(self, send: Array, counts: tuple[int, ...] | None) -> Sequence[Array]:
        """Exchange large messages, copied or read in place; return every rank's part for this one. Collective."""
        low, high = _part(self.rank, counts, send.size)
        private = send.base is not self._halves.base
        # Chosen even if the message is not private, so that ranks choose equally often and try a way together.
        way, attached = self._choice.next(), self._attached
        exposes = private and way == _SINGLE_COPY and attached is not None and attached.is_readable(send)
        if exposes:
            self._flags[self._mine + _ADDRESS + self.slot] = send.ctypes.data
        elif private:
            self._copy(send, *((low, high) if counts else (0, 0)))
        half = self._meet()
        self._exposed = send if exposes else None
        # The cached views are of the halves; exposed messages take their places in a copy of the list.
        key = half, counts or send.size, send.dtype
        terms = list(self._views.get(key) or self._view(key, low, high))
        if private:
            terms[self.rank] = send[low:high]
        for peer in self._peers if high > low else ():
            if address := self._flags[peer + _ADDRESS + half]:
                terms[peer // _STRIDE] = self._read(peer // _STRIDE, address + low * send.itemsize, terms[self.rank])
        return terms

    def _expose(self, whole: Array, offers: bool = True) -> list[int] | None:
        """Show this array's address, meet, and return all ranks' addresses; None if any shows none. Return None without
        meeting if the array is small, or ranks cannot read each other. Collective.

        A rank shows its own if it ``offers`` it and others can read it.
        """
        if self._attached is None or whole.size < self._large:
            return None
        address = whole.ctypes.data if offers and self._attached.is_readable(whole) else 0
        self._flags[self._mine + _ADDRESS + self.slot] = address
        half = self._meet()
        self._exposed = whole
        addresses = [self._flags[rank * _STRIDE + _ADDRESS + half] for rank in range(self.size)]
        return addresses if all(addresses) else None

    def _read_pieces(self, send: Array, addresses: Sequence[int], low: int, high: int) -> Iterator[Sequence[Array]]:
        """Yield, piece by piece, a list of all ranks' elements of ``[low, high)``; the next piece overwrites the copies
        of other ranks' elements. Local.
        """
        for begin in range(low, high, self.limit // send.itemsize):
            own = send[begin : min(begin + self.limit // send.itemsize, high)]
            there = [address + begin * own.itemsize for address in addresses]
            yield [own if rank == self.rank else self._read(rank, there[rank], own) for rank in range(self.size)]

    def _fill(self, part: Array, rank: int, address: int) -> None:
        """Read another rank's memory into an array; do nothing for this rank's own, or an empty array. Local."""
        if rank != self.rank and part.nbytes:
            assert self._attached is not None
            self._attached.read(rank, address, part)

    def _copy(self, send: Array, low: int, high: int) -> None:
        """Copy all but ``[low, high)`` to the slot's send buffer, for other ranks; time it for a choice. Local."""
        send_buffer, began = self.send_buffers[self.slot][: send.nbytes].view(send.dtype), perf_counter()
        send_buffer[:low], send_buffer[high:] = send[:low], send[high:]
        if copied := send.size - (high - low):
            self._choice.took(_COPY, perf_counter() - began, copied * send.itemsize)

    def _read(self, peer: int, address: int, like: Array) -> Array:
        """Copy ``like.nbytes`` bytes at a peer's ``address`` to its row of the inbox; return them in ``like``'s dtype,
        valid until its next read. Count the time for a choice. Local.
        """
        copy, began = self._inbox[peer, : like.nbytes].view(like.dtype), perf_counter()
        self._fill(copy, peer, address)
        self._choice.took(_SINGLE_COPY, perf_counter() - began, like.nbytes)
        return copy

    def _meet(self, send: Array | None = None) -> int:
        """Stage ``send``, meet all ranks unless an agreement for it was the meeting, advance the slot; return the old
        slot, to read. Collective.

        It is not copied if it lies there. None: the message is exposed, or copied already.
        """
        if send is not None and send.base is not self._halves.base:
            np.copyto(self.send_buffers[self.slot][: send.nbytes], send.view(np.uint8))
        if self._send_ready:  # the barrier of the last fence or agreement serves this exchange too
            self._send_ready = False
        else:
            self._arrive()
        half, self.slot = self.slot, (self.slot + 1) % len(self.send_buffers)
        return half

    def _view(self, key: _Key, low: int, high: int) -> tuple[Array, ...]:
        """Return every rank's elements ``[low, high)`` in a half, in rank order; keep the views for later. Local."""
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        half, _, dtype = key
        first, last = low * dtype.itemsize, high * dtype.itemsize
        terms = self._views[key] = tuple(part[first:last].view(dtype) for part in self._halves[half])
        return terms

    def _arrive(self) -> None:
        """Count this rank's arrival, and wait until every rank has arrived as often. Collective.

        Raises:
            Stalled: a rank did not come, or has given up. It does not go on with this rank, and may change its exposed
                message.
        """
        # Before the flag: writes to the halves must be visible before the arrival that announces them.
        if self._order:
            self._order()
        flags = self._flags
        self._arrivals = arrivals = self._arrivals + 1
        flags[self._mine] = arrivals
        for peer in self._peers:
            if not arrivals <= flags[peer] < GONE:
                self._await_peers(peer, arrivals)
        if self._exposed is not None:
            # All ranks have finished reading the exchange of this message.
            flags[self._mine + _ADDRESS + 1 - self.slot] = 0
            self._exposed = None
        # After the flags: reads of the halves must not move before the reads of the arrivals.
        if self._order:
            self._order()


def _part(rank: int, counts: tuple[int, ...] | None, size: int) -> tuple[int, int]:
    """Return (low, high) of the elements that a rank gets of a message; all of them without ``counts``. Local."""
    if counts is None:
        return 0, size
    low = sum(counts[:rank])
    return low, low + counts[rank]
