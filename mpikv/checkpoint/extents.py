"""The map from values and their state in memory to the file, in ranges as long as possible.

Blocks hold small values side by side, in the order of their keys as in the file. So thousands of keys make few ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..engine.arena import Block
from ..engine.keys import Entry
from ..protocols import Array
from .header import VALUE, Header


class Extent(NamedTuple):
    """Elements of a block, or of its state, that are contiguous in memory and in the file."""

    block: Block
    slot: str
    low: int
    """The range of elements in the block is ``[low, high)``."""
    high: int
    begin: int
    """Byte offset of the first element, from the first array of the file."""

    def find(self, low: int, high: int) -> Array:
        """Return a view of elements ``[low, high)`` of the block, or of their state, kept by this rank. Local."""
        block, slot = self.block, self.slot
        return block.values[low:high] if slot == VALUE else block.state[slot][block.kept.locate(low, high)]


def list_extents(header: Header, entries: Sequence[Entry]) -> Iterator[Extent]:
    """Yield the longest ranges contiguous both in memory and in the file, by slot, block and position. Local.

    ``entries`` are those of the header's keys, in their order.
    """
    numbers: dict[Block, int] = {}
    places = [
        (numbers.setdefault(entry.place.block, len(numbers)), entry.place.start, entry.place.size) for entry in entries
    ]
    block_of, lows, sizes = np.array(places, np.int64).reshape(-1, 3).T
    highs = lows + sizes
    # By block, then by place: neighbours in memory become neighbours in the list.
    order = np.lexsort((highs, lows, block_of))
    order, blocks = order[sizes[order] > 0], list(numbers)
    for column in header.columns:
        # A slot may belong to some keys only, as the master of half precision.
        items = order[np.isin(order, column.items, assume_unique=True)]
        at = np.searchsorted(column.items, items)
        begins, ends = column.edges[at], column.edges[at + 1]
        of, low, high = block_of[items], lows[items], highs[items]
        # A new extent begins at a new block, or at a gap in memory or in the file.
        apart = (of[1:] != of[:-1]) | (low[1:] != high[:-1]) | (begins[1:] != ends[:-1])
        firsts = np.flatnonzero(np.append(True, apart))[: items.size]
        lasts = np.append(firsts[1:], items.size)[: firsts.size] - 1
        columns = of[firsts], low[firsts], high[lasts], begins[firsts]
        for number, *extent in zip(*(each.tolist() for each in columns), strict=True):
            yield Extent(blocks[number], column.slot, *extent)
