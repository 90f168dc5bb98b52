"""Where values lie in memory: blocks of one dtype, cut from segments that the transport allocates.

A large value is a block of its own. Small values of one dtype share a block, without gaps, so that a list of them is
one message. A block's *grid* cuts it into cells of at most a bucket; who owns an element depends on its place in its
cell, so optimizer state never has to move. Memory never moves either.

What a value leaves is a hole, and the smallest that fits is what a later value gets. A block ends with its last value,
and its state with it; a large segment goes back to the transport when no block is left in it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np

from ..arrays.arrays import accumulator
from ..memory.host import private
from ..protocols import Array, Memory, Slots, Transport

__all__ = ["Arena", "Block", "Place"]

# A block that small values share; a value of a quarter of that or more gets a block of its own, split over all ranks.
_POOL_BYTES = 256 << 10
# There each block is a message and a launch more, which take longer than some megabytes do.
_POOL_BYTES_OF_GPUS = 16 << 20
_SMALLEST_SEGMENT = 1 << 20
_LARGEST_GROWTH = 256 << 20
# The kind of the holes in segments, which are counted in bytes. In blocks it is the dtype's name, and they are in
# elements.
_BYTES = ""


@dataclass(eq=False)
class Block:
    """A contiguous range of elements of one dtype."""

    index: int
    """No other block, and no segment, has this number."""
    values: Array
    cell: int
    """Elements per cell of the grid."""
    owner: int
    """The rank that owns the block where values stay whole."""
    memory: Memory
    """Where all its arrays lie."""
    allocate: Callable[[int], Array]
    """Returns zeroed memory for what owners keep beside values, or raises MemoryError on every rank."""
    state: dict[str, Array] = field(default_factory=dict)
    """Optimizer state, each array parallel to ``values``. Only the owner of an element writes to its state."""
    buffers: Array | None = None
    """What the ranks are to push, where they asked for it: a row parallel to ``values`` for every rank that shares the
    memory, as many on every host, or for this rank alone."""
    residuals: list[Array] = field(default_factory=list)
    """What this rank's compressed pushes have left out so far: an array parallel to ``values`` for each position in the
    lists that were pushed. On a GPU, those of codecs of whole values are the host's."""
    exact: Array | None = None
    """The owners' values where ranks hold what they were sent of them, packed: parallel to ``values``. Only the owner
    of an element has it."""
    origin: tuple[int, int] = (0, 0)
    """The segment that its memory is in, and the byte at which it begins there."""
    old: bool = False
    """Whether other values have been in its memory."""
    used: int = 0
    """From here on no value has been in it."""

    def grid(self, element: int) -> tuple[int, int]:
        """Return the first and the last element (exclusive) of the cell that holds this element."""
        first = element // self.cell * self.cell
        return first, min(first + self.cell, self.values.size)

    @cached_property
    def sums(self) -> Array:
        """Memory for sums parallel to ``values``, for updaters and codecs of whole values. Pages are taken where it is
        written.
        """
        return self._sums_in(self.memory.zeros)

    def _sums_in(self, zeroed: Callable[[int], Array]) -> Array:
        dtype = accumulator(self.values.dtype)
        return zeroed(self.values.size * dtype.itemsize).view(dtype)

    def ensure_sums(self, zeroed: Callable[[int], Array]) -> None:
        """Take the memory for sums now, where a GPU may have too little: ``zeroed``."""
        if "sums" not in self.__dict__:
            self.__dict__["sums"] = self._sums_in(zeroed)

    def ensure_residuals(self, positions: int, zeroed: Callable[[int], Array]) -> None:
        """Have residuals for so many positions in lists; new ones are ``zeroed`` memory."""
        while len(self.residuals) < positions:
            self.residuals.append(zeroed(4 * self.values.size).view(np.float32))

    @property
    def updated(self) -> Array:
        """What pushes change at the owners."""
        return self.values if self.exact is None else self.exact

    def new_exact(self) -> Array | None:
        """Return memory for exact values of what travels as something shorter: single precision. On GPUs collective."""
        return self.allocate(self.values.nbytes).view(np.float32) if self.values.dtype == np.float32 else None

    def drop_sums(self) -> None:
        """Give the memory for sums back. No plan may refer to it."""
        self.__dict__.pop("sums", None)

    def ensure_state(self, slots: Slots) -> None:
        """Start the state that is not there yet with zeros."""
        self.state |= self.new_state({name: dtype for name, dtype in slots.items() if name not in self.state})

    def new_state(self, slots: Slots) -> dict[str, Array]:
        """Return state of zeros. On the host, pages that this rank does not own are never written, so they take no
        memory.
        """
        size = self.values.size
        return {name: self.allocate(size * dtype.itemsize).view(dtype) for name, dtype in slots.items()}


@dataclass(frozen=True)
class Place:
    """A value's elements in its block: ``[start, start + size)``."""

    block: Block
    start: int
    size: int
    old: bool = False
    """Whether it holds what another value has left."""


class _Holes:
    """Free ranges of numbered memories, which are of several kinds. Those that touch are one."""

    def __init__(self) -> None:
        # The same in order of size: kind, size, memory and start; and by where they begin and end in their memory.
        self._by_size: list[tuple[str, int, int, int]] = []
        self._sizes: dict[tuple[int, int], int] = {}
        self._starts: dict[tuple[int, int], int] = {}

    def copy(self) -> _Holes:
        other = _Holes()
        other._by_size, other._sizes, other._starts = self._by_size[:], self._sizes.copy(), self._starts.copy()
        return other

    def add(self, kind: str, memory: int, start: int, size: int) -> None:
        """Make a range free."""
        if not size:
            return
        if (memory, start + size) in self._sizes:
            size += self.remove(kind, memory, start + size)
        if (before := self._starts.get((memory, start))) is not None:
            size += self.remove(kind, memory, before)
            start = before
        insort(self._by_size, (kind, size, memory, start))
        self._sizes[memory, start] = size
        self._starts[memory, start + size] = start

    def remove(self, kind: str, memory: int, start: int) -> int:
        """Let nobody have the hole that begins there; return its size."""
        size = self._sizes.pop((memory, start))
        del self._starts[memory, start + size]
        del self._by_size[bisect_left(self._by_size, (kind, size, memory, start))]
        return size

    def remove_last(self, kind: str, memory: int, end: int) -> None:
        """Let nobody have the hole that ends there, if there is one."""
        if (start := self._starts.get((memory, end))) is not None:
            self.remove(kind, memory, start)

    def take(self, kind: str, size: int) -> tuple[int, int] | None:
        """Return the memory and the start of the smallest hole that fits, whose first ``size`` are then taken."""
        at = bisect_left(self._by_size, (kind, size))
        if at == len(self._by_size) or self._by_size[at][0] != kind:
            return None
        _, _, memory, start = self._by_size[at]
        rest = self.remove(kind, memory, start) - size
        self.add(kind, memory, start + size, rest)
        return memory, start

    def cover(self, memory: int, size: int) -> bool:
        """Return whether all of a memory of this size is free."""
        return self._sizes.get((memory, 0)) == size


class Arena:
    """Hands out places for values; every rank makes the same requests in the same order, so all arenas are alike."""

    def __init__(self, transport: Transport, pooling: bool = True) -> None:
        """Without ``pooling`` every value is a block, so that each has an owner of its own."""
        self._transport = transport
        pool = _POOL_BYTES if transport.memory.is_host else _POOL_BYTES_OF_GPUS
        self._pool = min(pool, transport.limit) if pooling else 0
        self._numbers = count()
        self._segments: dict[int, Array] = {}
        # From here on no block has been in a segment.
        self._reached: dict[int, int] = {}
        self._values: dict[Block, int] = {}
        self._holes = _Holes()
        self._pools: dict[int, Block] = {}
        self._load = [0] * transport.size
        # Whether a block has ended, ever, and whether one has that had buffers, which are the transport's.
        self._ended = self._left_buffers = False

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Those that hold values."""
        return tuple(self._values)

    def place(self, requests: Sequence[tuple[np.dtype[Any], int]], leaving: Sequence[Place] = ()) -> list[Place]:
        """Return a place for each (dtype, number of elements), perhaps in those ``leaving``, which are released.
        Collective: it may allocate.
        """
        self.release(leaving)
        coming = sum(_rounded(size * dtype.itemsize) for dtype, size in requests if not self._is_small(dtype, size))
        places: list[Place] = []
        for dtype, size in requests:
            if self._is_small(dtype, size):
                places.append(self._shared(dtype, size, coming))
            else:
                block = self._block(dtype, size, coming)
                coming -= _rounded(block.values.nbytes)
                places.append(Place(block, 0, size, block.old))
            self._values[places[-1].block] += 1
        return places

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo what was placed and released inside where a MemoryError comes. Collective."""
        names = ("_segments", "_reached", "_values", "_holes", "_pools", "_load")
        kept = {name: getattr(self, name).copy() for name in names}
        try:
            yield
        except MemoryError:
            vars(self).update(kept)
            self._transport.reclaim()
            raise

    def release(self, places: Sequence[Place]) -> None:
        """Take places back, for later values. What is parallel to them in blocks that others share, holds zeros."""
        for block, start, size in ((place.block, place.start, place.size) for place in places):
            self._values[block] -= 1
            if self.is_shared(block):
                self._holes.add(block.values.dtype.name, block.index, start, size)
            if not self._values[block]:
                self._end(block)

    def is_shared(self, block: Block) -> bool:
        """Return whether small values share a block, which has not ended."""
        return block.index in self._pools

    def shrink(self) -> None:
        """Give back to the transport what no block is in, but for small segments. Collective."""
        idle = [
            number
            for number, segment in self._segments.items()
            if segment.size > _SMALLEST_SEGMENT and self._holes.cover(number, segment.size)
        ]
        for number in idle:
            self._holes.remove(_BYTES, number, 0)
            del self._segments[number], self._reached[number]
        if idle or self._left_buffers:
            self._left_buffers = False
            self._transport.reclaim()

    def holds(self, array: Array) -> bool:
        """Return whether an array lies in the memory of values."""
        return any(np.may_share_memory(array, segment) for segment in self._segments.values())

    def _is_small(self, dtype: np.dtype[Any], size: int) -> bool:
        return size * dtype.itemsize * 4 < self._pool

    def _shared(self, dtype: np.dtype[Any], size: int, coming: int) -> Place:
        """Return a place in a block that small values share."""
        found = self._holes.take(dtype.name, size) or self._in_new_pool(dtype, size, coming)
        block, start = self._pools[found[0]], found[1]
        old = block.old or start < block.used
        block.used = max(block.used, start + size)
        return Place(block, start, size, old)

    def _in_new_pool(self, dtype: np.dtype[Any], size: int, coming: int) -> tuple[int, int]:
        full = next((block for block in reversed(self._pools.values()) if block.values.dtype == dtype), None)
        if full is not None:
            # Later values at its end would come between those of a list, which are to lie side by side.
            self._holes.remove_last(dtype.name, full.index, full.values.size)
        block = self._block(dtype, self._pool // dtype.itemsize, coming)
        self._pools[block.index] = block
        self._holes.add(dtype.name, block.index, size, block.values.size - size)
        return block.index, 0

    def _block(self, dtype: np.dtype[Any], size: int, coming: int) -> Block:
        """Return a new block; ``coming`` bytes of others are known to follow, itself included if it is one of them."""
        nbytes = _rounded(size * dtype.itemsize)
        number, start = self._holes.take(_BYTES, nbytes) or self._in_new_segment(nbytes, coming)
        values = self._segments[number][start : start + size * dtype.itemsize].view(dtype)
        old = start < self._reached[number]
        self._reached[number] = max(self._reached[number], start + nbytes)
        owner = self._load.index(min(self._load))
        self._load[owner] += nbytes
        transport = self._transport
        cell, allocate = transport.limit // dtype.itemsize, private(transport)
        origin = number, start
        block = Block(next(self._numbers), values, cell, owner, transport.memory, allocate, origin=origin, old=old)
        self._values[block] = 0
        return block

    def _in_new_segment(self, nbytes: int, coming: int) -> tuple[int, int]:
        """Segments grow with what there is, since an MPI has few thousand windows. Where values come and go, there is
        room for a slightly larger one.
        """
        total = sum(segment.size for segment in self._segments.values())
        wanted = max(nbytes, coming)
        wanted += wanted // 16 if self._ended else 0
        segment = self._transport.allocate(max(wanted, min(total // 8, _LARGEST_GROWTH), _SMALLEST_SEGMENT))
        number = next(self._numbers)
        self._segments[number], self._reached[number] = segment, 0
        self._holes.add(_BYTES, number, nbytes, segment.size - nbytes)
        return number, 0

    def _end(self, block: Block) -> None:
        del self._values[block]
        if self._pools.pop(block.index, None) is not None:
            self._holes.remove(block.values.dtype.name, block.index, 0)
        nbytes = _rounded(block.values.nbytes)
        self._holes.add(_BYTES, *block.origin, nbytes)
        self._load[block.owner] -= nbytes
        self._ended = True
        self._left_buffers |= block.buffers is not None


def _rounded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
