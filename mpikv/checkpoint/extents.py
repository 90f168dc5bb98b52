"""Where values and their state lie, in memory and in a file: ranges that are as long as they can be in both.

Small values lie side by side in blocks, in the order of their keys as in the file, so that thousands of keys are few
ranges.
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
    """Elements of a block, or of their state, that are side by side in the file."""

    low: int
    """Where they are in the block: ``[low, high)``."""
    high: int
    begin: int
    """The first of their bytes, counted from the first array of the file."""


def list_extents(header: Header, entries: Sequence[Entry]) -> Iterator[tuple[Block, str, list[Extent]]]:
    """Yield for each slot and block the extents of what the file has of them, in the order of the block's memory.

    ``entries`` are those of the header's keys, in their order.
    """
    numbers: dict[Block, int] = {}
    places = [
        (numbers.setdefault(entry.place.block, len(numbers)), entry.place.start, entry.place.size) for entry in entries
    ]
    block_of, lows, sizes = np.array(places, np.int64).reshape(-1, 3).T
    highs = lows + sizes
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
    """Return the extents of values, one behind the other in each block's memory, whose arrays are in a column: of each
    block its number, and of each extent that number and the rest.
    """
    numbers = np.searchsorted(column.items, items)
    begins, ends = column.edges[numbers], column.edges[numbers + 1]
    apart = (block_of[1:] != block_of[:-1]) | (lows[1:] != highs[:-1]) | (begins[1:] != ends[:-1])
    begin_one = np.concatenate((np.ones(min(items.size, 1), np.bool_), apart))
    firsts = np.flatnonzero(begin_one)
    lasts = np.append(firsts[1:], items.size)[: firsts.size] - 1
    columns = block_of[firsts], lows[firsts], highs[lasts], begins[firsts]
    return groupby(zip(*(each.tolist() for each in columns), strict=True), key=itemgetter(0))
