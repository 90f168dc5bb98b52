"""Where values and their state lie, in memory and in a file: ranges that are as long as they can be in both.

Small values lie side by side in blocks, in the order of their keys as in the file, so that thousands of keys are few
ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import starmap
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
    """Yield for each block and slot the extents of what the file has of them, in the order of the block's memory.

    ``entries`` are those of the header's keys, in their order.
    """
    blocks: dict[Block, list[int]] = {}
    for item, entry in enumerate(entries):
        blocks.setdefault(entry.place.block, []).append(item)
    for block, items in blocks.items():
        places = [entries[item].place for item in items]
        lows = np.array([place.start for place in places], np.int64)
        highs = lows + np.array([place.size for place in places], np.int64)
        order = np.lexsort((highs, lows))
        order = order[highs[order] > lows[order]]
        for column in header.columns:
            array = block.updated if column.slot == VALUE else block.state.get(column.slot)
            if order.size and array is not None and column.dtype == name_of(array.dtype):
                yield block, column.slot, _join(lows[order], highs[order], column, np.array(items, np.int64)[order])


def _join(lows: Array, highs: Array, column: Column, items: Array) -> list[Extent]:
    """Return the extents of values, one behind the other in memory, whose arrays are in a column."""
    numbers = np.searchsorted(column.items, items)
    begins, ends = column.edges[numbers], column.edges[numbers + 1]
    apart = np.flatnonzero((lows[1:] != highs[:-1]) | (begins[1:] != ends[:-1]))
    firsts, lasts = np.concatenate(([0], apart + 1)), np.concatenate((apart, [lows.size - 1]))
    return list(
        starmap(Extent, zip(lows[firsts].tolist(), highs[lasts].tolist(), begins[firsts].tolist(), strict=True))
    )
