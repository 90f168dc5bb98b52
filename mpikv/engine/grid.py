"""How a block is cut into messages, and who owns each element.

Both follow from where an element lies, never from the call: so optimizer state stays where it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from ..protocols import Placement, Shard
from .spans import Spans, cut


@dataclass(frozen=True)
class Grid:
    """Cuts a block into cells, each of at most a bucket, and divides its values among ranks."""

    size: int
    """Elements of the block."""
    cell_size: int
    """Elements of each cell but the last."""
    bounds: tuple[int, ...]
    """The owners of whole values: rank r owns those that begin in ``[bounds[r], bounds[r + 1])``."""
    line: int = 1
    """Values begin at multiples of this many elements."""
    padding: int = 0
    """Elements at the block's end that no value uses."""
    number: int = 0
    """How many cells the blocks before this one have."""

    def cell(self, element: int) -> tuple[int, int]:
        """Return the range ``[first, last)`` of the cell that holds this element."""
        first = element // self.cell_size * self.cell_size
        return first, min(first + self.cell_size, self.size)

    def cut(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of ``[low, high)`` that lie in one cell each."""
        return cut(low, high, self.cell_size)

    def shard(self, placement: Placement, low: int, high: int) -> Shard:
        """Return how many of ``[low, high)``, all in one cell, each rank owns, and this rank's range of them."""
        return placement.shard(low, high, self.cell(low), self.bounds, self.number + low // self.cell_size)

    def shares(self, placement: Placement, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Yield (element count, owner) for the ranges of ``[low, high)``, in order; replicated ones once per rank."""
        for begin, end in self.cut(low, high):
            counts = self.shard(placement, begin, end).counts
            yield from ((count, rank) for rank, count in enumerate(counts) if count)

    def owned(self, placement: Placement, low: int, high: int) -> Spans:
        """Return the elements of ``[low, high)`` that this rank owns."""
        shards = ((begin, self.shard(placement, begin, end)) for begin, end in self.cut(low, high))
        return Spans.join((begin + shard.low, begin + shard.high) for begin, shard in shards)

    def owner(self, element: int) -> int:
        """Return the owner of the whole value that begins at this element."""
        # The last rank owns an empty value at the block's end, too: it begins at the last bound.
        return min(bisect_right(self.bounds, element), len(self.bounds) - 1) - 1

    def end_of(self, element: int) -> int:
        """Return the end of the padding behind a value that ends before ``element``."""
        # With the padding, messages of neighbours touch, and are sent and updated as one range.
        end = rounded(element, self.line)
        return end if end < self.size - self.padding else self.size


def rounded(count: int, unit: int) -> int:
    """Return a count rounded up to a multiple of a unit."""
    return -(-count // unit) * unit
