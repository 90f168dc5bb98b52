"""Where values lie in memory: blocks of one dtype, cut from segments that the transport allocates.

A large value is a block of its own. Small values of one dtype share a block, side by side, so that a list of them is
one message. A block's *grid* cuts it into cells of at most a bucket; who owns an element depends on its place in its
cell, so optimizer state never has to move. Memory never moves either.

On GPUs the values of one dtype that come together are one block of any length: there messages have to be long, and NCCL
is fast where each rank's part of a message is as long as the others'. So cells, and the block, are padded to equal
parts, and keys begin where GPUs copy fast. The padding between keys belongs to no value: it is sent and updated with
its neighbours, and never read.

A small value that is released leaves a hole; a later value gets the smallest hole that fits. A block ends with its last
value, and its state with it. A large segment goes back to the transport when no block is left in it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, count, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np

from ..arrays.arrays import accumulator, name_of
from ..memory.host import private_allocator
from ..protocols import Array, Slots, Transport
from .grid import Grid, rounded
from .spans import Spans

# The size of a block that small values share. A value of a quarter of it or more gets a block of its own, cut over all
# ranks.
_POOL_BYTES = 256 << 10
# On GPUs each block costs a message and a launch, and those take longer than some megabytes do.
_POOL_BYTES_OF_GPUS = 16 << 20
# On GPUs, values that come together and have this many bytes get a block of their own.
_LIST_BYTES = 1 << 20
# On GPUs keys begin at multiples of so many bytes and of so many elements, the larger of both: shards do, too.
LINE_BYTES, _LINE_ELEMENTS = 256, 64
_SMALLEST_SEGMENT = 1 << 20
_LARGEST_GROWTH = 256 << 20
# The kind of holes in segments, counted in bytes. Holes in blocks have the dtype's name as kind, and count elements.
_BYTES = ""


class Block:
    """A contiguous range of elements of one dtype."""

    def __init__(
        self, index: int, values: Array, grid: Grid, transport: Transport, origin: tuple[int, int], old: bool
    ) -> None:
        """Allocate nothing. Local."""
        self.index = index
        """No other block, and no segment, has this number."""
        self.values, self.grid, self.memory = values, grid, transport.memory
        self.allocate = private_allocator(transport)
        """Returns zeroed memory for optimizer state, or raises MemoryError on every rank."""
        self.kept = Spans.join([(0, grid.size)])
        """The elements that have state, and sums of whole values, on this rank."""
        self.state = dict[str, Array]()
        """Optimizer state of the elements that are ``kept``, one behind the other. Only the owner of an element writes
        to its state."""
        self.by_rows = False
        """Whether optimizers address the state by rows of the value: then all elements are ``kept``."""
        self.buffers: Array | None = None
        """Buffers that users push from, if any asked for them: a row parallel to ``values`` for each rank that shares
        the memory, equally many on every host, or for this rank alone."""
        self.residuals = list[Array]()
        """The errors that this rank's compressed pushes have left so far: an array parallel to ``values`` for each
        position in the lists that were pushed. Those of codecs of whole values lie on the host, even for a GPU's."""
        self.origin = origin
        """The segment of its memory, and the byte at which it begins there."""
        self.old = old
        """Whether other values may have been in its memory; if not, it is zero where no value has been written."""
        self.sums: Array | None = None
        """Memory for sums of the elements that are ``kept``, for updaters and codecs of whole values. The host takes
        pages for it only where it is written. To give it back, set None: no plan may refer to it."""

    def sums_of(self, low: int, high: int) -> Array:
        """Return a view of ``sums`` for ``[low, high)``, one range of kept elements; may allocate ``sums``. Local."""
        return self.ensure_sums()[self.kept.locate(low, high)]

    def ensure_sums(self) -> Array:
        """Return ``sums``, memory for sums of kept elements; allocate zeros if None, may raise MemoryError. Local."""
        if self.sums is None:
            dtype = accumulator(self.values.dtype)
            self.sums = self.memory.zeros(self.kept.size * dtype.itemsize).view(dtype)
        return self.sums

    def ensure_state(self, slots: Slots) -> None:
        """Add zeroed arrays to ``state`` for slots that it lacks. On GPUs collective, and may raise MemoryError."""
        self.state |= self.new_state(
            {name: dtype for name, dtype in slots.items() if name not in self.state}, self.kept
        )

    def has_state(self, slots: Slots, kept: Spans) -> bool:
        """Return whether the block has state of exactly these slots, dtypes and elements. Local."""
        return kept == self.kept and slots == {name: array.dtype for name, array in self.state.items()}

    def new_state(self, slots: Slots, kept: Spans) -> dict[str, Array]:
        """Allocate and return zeroed state for the elements ``kept``. On GPUs collective, and may raise MemoryError."""
        return {name: self.allocate(kept.size * dtype.itemsize).view(dtype) for name, dtype in slots.items()}

    def state_of(self, low: int, high: int) -> dict[str, Array]:
        """Return views of the optimizer state of elements ``[low, high)``, one range that this rank keeps. Local."""
        where = self.kept.locate(low, high)
        return {name: array[where] for name, array in self.state.items()}


class Place(NamedTuple):
    """A value's elements in its block: ``[start, start + size)``."""

    block: Block
    start: int
    size: int


class _Group(NamedTuple):
    """Values that get a new block together."""

    dtype: np.dtype[Any]
    numbers: Sequence[int]
    """Their positions in the request."""
    starts: Sequence[int]
    """Where they begin in the block, side by side, and where the last ends."""


class _Holes:
    """Free ranges of numbered memories of several kinds. Ranges that touch are one.

    Every rank makes the same calls in the same order: so all find the same hole, and values lie alike on all ranks.
    """

    def __init__(self) -> None:
        # Three indices of the same holes: (kind, size, memory, start) in order; size by start; start by end.
        self._by_size: list[tuple[str, int, int, int]] = []
        self._sizes: dict[tuple[int, int], int] = {}
        self._starts: dict[tuple[int, int], int] = {}

    def copy(self) -> _Holes:
        """Return a copy of the record of free ranges, so that placing can be undone. Local."""
        other = _Holes()
        other._by_size, other._sizes, other._starts = self._by_size[:], self._sizes.copy(), self._starts.copy()
        return other

    def add(self, kind: str, memory: int, start: int, size: int) -> None:
        """Note ``size`` units of memory number ``memory`` as free, joined with free neighbours; none for 0. Local."""
        if not size:
            return
        # Joined with its neighbours: else a hole as large as a later value could be two, and never fit.
        if (memory, start + size) in self._sizes:
            size += self.remove(kind, memory, start + size)
        if (before := self._starts.get((memory, start))) is not None:
            size += self.remove(kind, memory, before)
            start = before
        insort(self._by_size, (kind, size, memory, start))
        self._sizes[memory, start] = size
        self._starts[memory, start + size] = start

    def remove(self, kind: str, memory: int, start: int) -> int:
        """Remove the hole that begins at ``start``, and must be there, from the notes; return its size. Local."""
        size = self._sizes.pop((memory, start))
        del self._starts[memory, start + size]
        del self._by_size[bisect_left(self._by_size, (kind, size, memory, start))]
        return size

    def remove_last(self, kind: str, memory: int, end: int) -> None:
        """Remove the hole that ends at ``end``, if there is one, so that nothing is placed there. Local."""
        if (start := self._starts.get((memory, end))) is not None:
            self.remove(kind, memory, start)

    def take(self, kind: str, size: int, most: int) -> tuple[int, int, int] | None:
        """Take up to ``most`` ranges of ``size``, side by side, from the smallest hole that fits one. Return (memory,
        start, taken), or None if none fits. Local.

        Returns:
            The memory, the start of the first, and how many were taken; None where no hole fits.
        """
        # The rest of that hole is still the smallest that fits, so this equals taking them one by one.
        at = bisect_left(self._by_size, (kind, size))
        if at == len(self._by_size) or self._by_size[at][0] != kind:
            return None
        _, length, memory, start = self._by_size[at]
        taken = min(length // size, most) if size else most
        self.remove(kind, memory, start)
        self.add(kind, memory, start + taken * size, length - taken * size)
        return memory, start, taken

    def cover(self, memory: int, size: int) -> bool:
        """Return whether all of a memory of this size is free. Local."""
        return self._sizes.get((memory, 0)) == size


class Arena:
    """Hands out places for values. Every rank makes the same requests in the same order, so all arenas are alike."""

    def __init__(self, transport: Transport, pooling: bool = True) -> None:
        """Allocate nothing. Without ``pooling`` each value of a host will have its own block, and one owner. Local."""
        self._transport = transport
        self._on_host = transport.memory.is_host
        pool = _POOL_BYTES if self._on_host else _POOL_BYTES_OF_GPUS
        self._pool = min(pool, transport.limit) if pooling else 0
        self._numbers, self._cells = count(), 0
        self._segments: dict[int, Array] = {}
        # By segment, the byte from which on no block has been in it: memory beyond is still zero.
        self._reached: dict[int, int] = {}
        self._values: dict[Block, int] = {}
        self._holes = _Holes()
        self._pools: dict[int, Block] = {}
        self._load = [0] * transport.size
        # Whether a block has ever ended.
        self._ended = False

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks that hold values."""
        return tuple(self._values)

    def place(
        self, requests: Sequence[tuple[np.dtype[Any], int]], leaving: Sequence[Place] = (), alone: Container[int] = ()
    ) -> list[Place]:
        """Release the places ``leaving``, then return one per (dtype, elements). May allocate memory: a MemoryError
        leaves the arena half changed, except in :meth:`restored_on_memory_error`. Collective.

        On GPUs the requests at the positions ``alone`` get a block for themselves.
        """
        self.release(leaving)
        groups = self._plan_new_blocks(requests, alone)
        bytes_to_come = sum(self._nbytes(group.dtype, group.starts[-1]) for group in groups)
        listed: dict[int, Place] = {}
        for dtype, numbers, starts in groups:
            block = self._add_block(dtype, bytes_to_come, starts)
            bytes_to_come -= self._nbytes(dtype, starts[-1])
            for number, start in zip(numbers, starts, strict=False):
                listed[number] = Place(block, start, requests[number][1])
        places: list[Place] = []
        shared = (request for number, request in enumerate(requests) if number not in listed)
        for (dtype, size), alike in groupby(shared):
            places += self._place_shared(dtype, size, sum(1 for _ in alike))
        if listed:
            following = iter(places)
            places = [listed.get(number) or next(following) for number in range(len(requests))]
        for block, number in Counter(place.block for place in places).items():
            self._values[block] += number
        return places

    @contextmanager
    def restored_on_memory_error(self) -> Iterator[None]:
        """In a with block: a MemoryError, raised on all ranks, restores segments, holes and blocks as before. Local."""
        names = ("_segments", "_reached", "_values", "_holes", "_pools", "_load")
        kept = {name: getattr(self, name).copy() for name in names}
        try:
            yield
        # All ranks come here or none: allocations fail on every rank.
        except MemoryError:
            vars(self).update(kept)
            raise

    def release(self, places: Sequence[Place]) -> None:
        """Give places and emptied blocks back to the arena, contents unchanged; only shrink() frees memory. The caller
        zeroes the state and residuals of places in blocks that values share: these live on for other values. Local.
        """
        # Before the new places are taken: a value that starts anew may get its old one.
        for block, start, size in ((place.block, place.start, place.size) for place in places):
            self._values[block] -= 1
            if self.is_shared(block):
                self._holes.add(name_of(block.values.dtype), block.index, start, rounded(size, block.grid.line))
            if not self._values[block]:
                self._end_block(block)

    def is_shared(self, block: Block) -> bool:
        """Return whether a block is one that small values share, and has not ended. Local."""
        return block.index in self._pools

    def shrink(self) -> None:
        """Drop large segments of memory without blocks, so that the system gets them back. Collective."""
        idle = [
            number
            for number, segment in self._segments.items()
            if segment.size > _SMALLEST_SEGMENT and self._holes.cover(number, segment.size)
        ]
        for number in idle:
            self._holes.remove(_BYTES, number, 0)
            del self._segments[number], self._reached[number]

    def holds(self, array: Array) -> bool:
        """Return whether an array's range of addresses overlaps the arena's segments, free parts, too. Local."""
        return any(map(partial(np.may_share_memory, array), self._segments.values()))

    def holds_any(self, addresses: Array, address: Callable[[Array], int]) -> bool:
        """Return whether any of a GPU's addresses is in the arena's segments; ``address`` returns an array's. Local."""
        places = [(address(segment), segment.size) for segment in self._segments.values()]
        return any(bool(((first <= addresses) & (addresses < first + nbytes)).any()) for first, nbytes in places)

    def _plan_new_blocks(self, requests: Sequence[tuple[np.dtype[Any], int]], alone: Container[int]) -> list[_Group]:
        """Group the requests that get a new block, by block; requests in no group will share blocks. Local.

        ``alone``: positions of requests that a GPU's block must not share.
        """
        together: dict[np.dtype[Any], list[int]] = {}
        groups: list[_Group] = []
        for number, (dtype, size) in enumerate(requests):
            if not self._on_host and number not in alone:
                together.setdefault(dtype, []).append(number)
            elif not self._on_host or size * dtype.itemsize * 4 >= self._pool:
                groups.append(_Group(dtype, [number], (0, self._room(dtype, size))))
        for dtype, numbers in together.items():
            sizes = [requests[number][1] for number in numbers]
            if sum(sizes) * dtype.itemsize >= min(_LIST_BYTES, self._pool // 4):
                rooms = (self._room(dtype, size) for size in sizes)
                groups.append(_Group(dtype, numbers, list(accumulate(rooms, initial=0))))
        return groups

    def _place_shared(self, dtype: np.dtype[Any], size: int, most: int) -> Iterator[Place]:
        """Yield ``most`` places of one size in blocks that small values share; may add such blocks. Collective."""
        room = self._room(dtype, size)
        while most:
            found = self._holes.take(name_of(dtype), room, most)
            if found is None:
                self._add_pool(dtype)
                continue
            number, start, taken = found
            block, most = self._pools[number], most - taken
            for _ in range(taken):
                yield Place(block, start, size)
                start += room

    def _add_pool(self, dtype: np.dtype[Any]) -> None:
        """Add a block that small values share; give up the free end of the newest one of this dtype. Collective."""
        # The newest block of this dtype is the one that small values filled up last.
        full = next((block for block in reversed(self._pools.values()) if block.values.dtype == dtype), None)
        if full is not None:
            # Later values at its end would separate the values of a list, which make one message side by side.
            self._holes.remove_last(name_of(dtype), full.index, full.values.size - full.grid.padding)
        block = self._add_block(dtype, 0, (0, self._pool // dtype.itemsize))
        block.old = True  # its values come and go
        self._pools[block.index] = block
        self._holes.add(name_of(dtype), block.index, 0, block.values.size - block.grid.padding)

    def _add_block(self, dtype: np.dtype[Any], bytes_to_come: int, starts: Sequence[int]) -> Block:
        """Add and return a block without values, in a hole (old bytes) or a new segment. Collective if that is new.

        Its values will begin at ``starts``; the last of these is where they end. ``bytes_to_come``: those of segments
        that this request is still to take, for this block and those after it.
        """
        size = starts[-1]
        nbytes = self._nbytes(dtype, size)
        number, start, *_ = self._holes.take(_BYTES, nbytes, 1) or self._add_segment(nbytes, bytes_to_come)
        cell, line = self._grid(dtype)
        length = self._padded(dtype, size)
        values = self._segments[number][start : start + length * dtype.itemsize].view(dtype)
        # New segments are zeros, and need not be cleared.
        old = start < self._reached[number]
        self._reached[number] = max(self._reached[number], start + nbytes)
        grid = Grid(length, cell, self._divide(starts, length), line, length - size, self._cells)
        block = Block(next(self._numbers), values, grid, self._transport, (number, start), old)
        self._values[block] = 0
        self._cells += -(-length // cell)
        self._add_load(block, 1)
        return block

    def _divide(self, starts: Sequence[int], size: int) -> tuple[int, ...]:
        """Return bounds that deal values to ranks in order, about equally; a single one to the least loaded. Local."""
        ranks = self._transport.size
        if len(starts) == 2:  # one value: it goes to the rank that owns least
            owner = self._load.index(min(self._load))
            return (0,) * (owner + 1) + (size,) * (ranks - owner)
        # By the middle of each value: one that reaches over a bound goes to the side that has more of it.
        middles = [(low + high) // 2 for low, high in pairwise(starts)]
        firsts = (bisect_left(middles, -(-rank * starts[-1] // ranks)) for rank in range(1, ranks))
        return (0, *(starts[first] for first in firsts), size)

    def _add_load(self, block: Block, sign: int) -> None:
        """Add each rank's bytes, by the bounds of the block, to its load; subtract them if ``sign`` is -1. Local."""
        for rank, (low, high) in enumerate(pairwise(block.grid.bounds)):
            self._load[rank] += sign * (high - low) * block.values.itemsize

    def _grid(self, dtype: np.dtype[Any]) -> tuple[int, int]:
        """Return how many elements a cell of a block's grid has, and the multiple at which values begin. Local."""
        cell = self._transport.limit // dtype.itemsize
        line = max(LINE_BYTES // dtype.itemsize, _LINE_ELEMENTS)
        lines = line * self._transport.size
        return (cell, 1) if self._on_host or cell < lines else (cell // lines * lines, line)

    def _room(self, dtype: np.dtype[Any], size: int) -> int:
        """Return how many elements of a block a value of ``size`` takes: on GPUs rounded up, for alignment. Local."""
        return rounded(size, self._grid(dtype)[1])

    def _padded(self, dtype: np.dtype[Any], size: int) -> int:
        """Return the length of a block for ``size`` elements; on GPUs padded to equally many per rank. Local."""
        line = self._grid(dtype)[1]
        return size if line == 1 else rounded(size, line * self._transport.size)

    def _nbytes(self, dtype: np.dtype[Any], size: int) -> int:
        """Return how many bytes of a segment a block for ``size`` elements takes, padding included. Local."""
        return rounded(self._padded(dtype, size) * dtype.itemsize, LINE_BYTES)

    def _add_segment(self, nbytes: int, bytes_to_come: int) -> tuple[int, int]:
        """Allocate a segment for ``nbytes``, or ``bytes_to_come`` if more. Return (its number, 0: where ``nbytes`` of
        it are taken); the rest is noted as free. Collective.
        """
        # Segments grow with the memory there is, as MPI libraries offer only a few thousand windows. Where values come
        # and go, a sixteenth more leaves room for one slightly larger than its predecessor.
        total = sum(segment.size for segment in self._segments.values())
        # At once for all that is still to come in this request: each allocation is a collective of its own.
        wanted = max(nbytes, bytes_to_come)
        wanted += wanted // 16 if self._ended else 0
        segment = self._transport.allocate(max(wanted, min(total // 8, _LARGEST_GROWTH), _SMALLEST_SEGMENT))
        number = next(self._numbers)
        self._segments[number], self._reached[number] = segment, 0
        self._holes.add(_BYTES, number, nbytes, segment.size - nbytes)
        return number, 0

    def _end_block(self, block: Block) -> None:
        """Forget a block without values, and make its memory in the segment free. Local."""
        del self._values[block]
        if self._pools.pop(block.index, None) is not None:
            # By now the block is one hole: its last value has just left.
            self._holes.remove(name_of(block.values.dtype), block.index, 0)
        self._holes.add(_BYTES, *block.origin, self._nbytes(block.values.dtype, block.values.size))
        self._add_load(block, -1)
        self._ended = True
