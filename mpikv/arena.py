"""Where values lie in memory: blocks of one dtype, cut from segments that the transport allocates.

A large value is a block of its own. Small values of one dtype share a block, without gaps, so that a list of them is
one message. A block's *grid* cuts it into cells of at most a bucket; who owns an element depends on its place in its
cell, so optimizer state never has to move. Memory never moves either: later keys get later blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from .arrays import accumulator
from .memory import private
from .typing import Array, Memory, Slots, Transport

__all__ = ["Arena", "Block", "Place"]

# A block that small values share; a value of a quarter of that or more gets a block of its own, split over all ranks.
_POOL_BYTES = 256 << 10
# There each block is a message and a launch more, which take longer than some megabytes do.
_POOL_BYTES_OF_GPUS = 16 << 20
_SMALLEST_SEGMENT = 1 << 20
_LARGEST_GROWTH = 256 << 20


@dataclass(eq=False)
class Block:
    """A contiguous range of elements of one dtype."""

    index: int
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
    used: int = 0

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


class Arena:
    """Hands out places for values; every rank makes the same requests in the same order, so all arenas are alike."""

    def __init__(self, transport: Transport, pooling: bool = True) -> None:
        """Without ``pooling`` every value is a block, so that each has an owner of its own."""
        self._transport = transport
        pool = _POOL_BYTES if transport.memory.on_host else _POOL_BYTES_OF_GPUS
        self._pool = min(pool, transport.limit) if pooling else 0
        self.blocks: list[Block] = []
        self._open: dict[np.dtype[Any], Block] = {}
        self._free: dict[tuple[np.dtype[Any], int], list[Place]] = {}
        self._segments = [transport.memory.zeros(0)]
        self._next = self._total = 0
        self._load = [0] * transport.size

    def place(self, requests: Sequence[tuple[np.dtype[Any], int]]) -> list[Place]:
        """Return a place for each (dtype, number of elements). Collective: it may allocate."""
        large = [request for request in requests if not self._small(*request) and not self._free.get(request)]
        self._reserve(sum(_rounded(size * dtype.itemsize) for dtype, size in large))
        places: list[Place] = []
        try:
            for dtype, size in requests:
                places.append(self._one(dtype, size))
        except MemoryError:
            for place in places:
                self.release(place)
            raise
        return places

    def leaves_old(self, dtype: np.dtype[Any], size: int) -> bool:
        """Return whether the next place for such a value is one that another has left, with what it held."""
        return bool(self._free.get((dtype, size)))

    def release(self, place: Place) -> None:
        """Take a place back, for a later value of the same dtype and size."""
        self._free.setdefault((place.block.values.dtype, place.size), []).append(place)

    def holds(self, array: Array) -> bool:
        """Return whether an array lies in the memory of values."""
        return any(np.may_share_memory(array, segment) for segment in self._segments)

    def _one(self, dtype: np.dtype[Any], size: int) -> Place:
        if free := self._free.get((dtype, size)):
            return free.pop()
        block = self._open.get(dtype)
        if not self._small(dtype, size):
            block = self._block(dtype, size)
        elif block is None or block.used + size > block.values.size:
            block = self._open[dtype] = self._block(dtype, self._pool // dtype.itemsize)
        start, block.used = block.used, block.used + size
        return Place(block, start, size)

    def _small(self, dtype: np.dtype[Any], size: int) -> bool:
        return size * dtype.itemsize * 4 < self._pool

    def _block(self, dtype: np.dtype[Any], size: int) -> Block:
        nbytes = _rounded(size * dtype.itemsize)
        self._reserve(nbytes)
        memory = self._segments[-1][self._next : self._next + size * dtype.itemsize].view(dtype)
        self._next += nbytes
        owner = self._load.index(min(self._load))
        self._load[owner] += nbytes
        transport = self._transport
        cell = transport.limit // dtype.itemsize
        block = Block(len(self.blocks), memory, cell, owner, transport.memory, private(transport))
        self.blocks.append(block)
        return block

    def _reserve(self, nbytes: int) -> None:
        """Make the open segment hold ``nbytes`` more. Segments grow with the total, since an MPI has few thousand
        windows.
        """
        if self._next + nbytes > self._segments[-1].size:
            growth = min(self._total // 2, _LARGEST_GROWTH)
            self._segments.append(self._transport.allocate(max(nbytes, growth, _SMALLEST_SEGMENT)))
            self._total += self._segments[-1].size
            self._next = 0


def _rounded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
