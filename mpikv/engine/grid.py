"""How a block of values is cut into messages, and who owns what: by where an element lies alone, never by the call."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from ..protocols import Placement, Shard

__all__ = ["Grid", "rounded"]


@dataclass(frozen=True)
class Grid:
    """Cuts a block into cells, each of at most a bucket, and divides its values among ranks."""

    size: int
    """Elements of the block."""
    cell_size: int
    """Elements of each cell but the last."""
    bounds: tuple[int, ...]
    """Who owns values where they stay whole: those of rank r begin in ``[bounds[r], bounds[r + 1])``."""
    line: int = 1
    """Values begin at multiples of this many elements."""
    padding: int = 0
    """Elements at the block's end in which no value can be."""

    def cell(self, element: int) -> tuple[int, int]:
        """Return the first and the last element (exclusive) of the cell that holds this element."""
        first = element // self.cell_size * self.cell_size
        return first, min(first + self.cell_size, self.size)

    def cells(self) -> Iterator[tuple[int, int]]:
        """Yield the first and the last element (exclusive) of each cell."""
        return map(self.cell, range(0, self.size, self.cell_size))

    def shard(self, placement: Placement, low: int, high: int) -> Shard:
        """Return who owns elements that are all in one cell."""
        return placement.shard(low, high, self.cell(low), self.bounds)

    def owner(self, element: int) -> int:
        """Return the rank that owns the value that begins there, where values stay whole."""
        return min(bisect_right(self.bounds, element), len(self.bounds) - 1) - 1

    def end_of(self, element: int) -> int:
        """Return the end of what belongs to nobody behind a value's last element."""
        end = rounded(element, self.line)
        return end if end < self.size - self.padding else self.size


def rounded(count: int, unit: int) -> int:
    """Return the least multiple of a unit that is not below."""
    return -(-count // unit) * unit
