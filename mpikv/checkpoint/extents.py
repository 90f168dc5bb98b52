"""The map from values and their state in memory to the file, in ranges as long as possible.

Blocks hold small values side by side, in the order of their keys as in the file. So thousands of keys make few ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from ..arrays.arrays import name_of
from ..engine.arena import Block
from ..engine.keys import Entry
from ..protocols import Array
from .header import VALUE, Column, Header

__all__ = ["Extent", "list_extents"]


class Extent(NamedTuple):
    """Elements of a block, or of its state, that are contiguous in memory and in the file."""

    low: int
    """The range of elements in the block is ``[low, high)``."""
    high: int
    begin: int
    """Byte offset of the first element, from the first array of the file."""


def list_extents(header: Header, entries: Sequence[Entry]) -> Iterator[tuple[Block, str, list[Extent]]]:
    """Yield for each slot and block its extents in the file, in the order of the block's memory.

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
        items = order[np.isin(order, column.items, assume_unique=True)]
        for number, extents in _join(block_of[items], lows[items], highs[items], column, items):
            block = blocks[number]
            array = block.values if column.slot == VALUE else block.state.get(column.slot)
            if array is not None and column.dtype == name_of(array.dtype):
                yield block, column.slot, [Extent(*extent[1:]) for extent in extents]


def _join(
    block_of: Array, lows: Array, highs: Array, column: Column, items: Array
) -> Iterator[tuple[int, Iterator[tuple[int, ...]]]]:
    """Return the longest extents of a column's arrays, grouped by block. The values come sorted by block and place.
    Each item is a block number, and an iterator of (block number, low, high, begin).
    """
    numbers = np.searchsorted(column.items, items)
    begins, ends = column.edges[numbers], column.edges[numbers + 1]
    # A new extent begins at a new block, or at a gap in memory or in the file.
    apart = (block_of[1:] != block_of[:-1]) | (lows[1:] != highs[:-1]) | (begins[1:] != ends[:-1])
    begin_one = np.concatenate((np.ones(min(items.size, 1), np.bool_), apart))
    firsts = np.flatnonzero(begin_one)
    lasts = np.append(firsts[1:], items.size)[: firsts.size] - 1
    columns = block_of[firsts], lows[firsts], highs[lasts], begins[firsts]
    return groupby(zip(*(each.tolist() for each in columns), strict=True), key=itemgetter(0))
