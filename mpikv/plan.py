"""How a list of keys is cut into messages: worked out once per list, executed often.

A *bucket* is one message: the elements of the call's keys that lie in one cell of one block, as one range of memory.
Keys that lie side by side are therefore sent, summed and updated together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arena import Block
from .arrays import accumulator
from .keys import Entry
from .typing import Array, Key, Placement, Share

__all__ = ["Bucket", "Part", "Piece", "Plan", "build", "describe", "digest", "label"]


@dataclass(frozen=True)
class Piece:
    """A part of one key in a bucket."""

    item: int
    """The position of the key in the call."""
    begin: int
    end: int
    """Its elements, counted in the key: ``[begin, end)``."""
    at: int
    """Where they are in the bucket, in elements."""

    @property
    def until(self) -> int:
        return self.at + self.end - self.begin


@dataclass(frozen=True)
class Part:
    """A range of a bucket that this rank updates."""

    item: int
    """The position of its (first) key in the call."""
    total: Array
    value: Array
    state: dict[str, Array]


@dataclass(frozen=True, eq=False)
class Bucket:
    """One message. A :class:`~mpikv.typing.Span`."""

    value: Array
    share: Share
    dtype: np.dtype[Any]
    nbytes: int
    pieces: tuple[Piece, ...]
    dense: bool
    """Whether the pieces fill the bucket; the rest belongs to keys that are not in this call and is sent as zeros."""
    total: Array
    """Where the sum of this rank's elements goes."""
    parts: tuple[Part, ...]
    """What this rank updates, cut at keys."""
    runs: tuple[Part, ...]
    """The same, where neighbours of equal settings may be updated at once."""


@dataclass(frozen=True, eq=False)
class Plan:
    """All that a call on a list of keys needs, but for the arrays of the call."""

    keys: tuple[Key, ...]
    entries: tuple[Entry, ...]
    rows: Any
    """The keys' rows in the table."""
    buckets: tuple[Bucket, ...]
    totals: tuple[Array | None, ...]
    """For updaters of whole values: where the sum of each key that this rank owns is put together."""
    nbytes: int
    digest: int
    label: str
    calls: dict[str, Any]
    """What the store compares with other ranks before it runs the plan, per verb."""


def digest(text: str) -> int:
    """Return a number in [0, 2**62 - 2) that differs for different texts, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % ((1 << 62) - 2)


def describe(keys: Sequence[Key], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]]) -> list[str]:
    """Return one short text per key, by which ranks compare their calls."""
    return [f"{key!r} {dtype.name}{list(shape)}" for key, shape, dtype in zip(keys, shapes, dtypes, strict=True)]


def build(
    entries: Sequence[Entry], placement: Placement, scratch: Callable[[np.dtype[Any], int], Array], whole: bool
) -> Plan:
    """Cut the keys into buckets.

    ``scratch(dtype, count)`` returns memory for the sum of one bucket. With ``whole``, sums are put together per key
    instead.
    """
    keys = tuple(entry.key for entry in entries)
    buckets: list[Bucket] = []
    totals: list[Array | None] = [None] * len(entries)
    for block, members in _by_block(entries).items():
        buckets += [_bucket(block, ranges, placement, scratch, whole) for ranges in _cells(block, members, entries)]
        for item in members if whole else ():
            if _owned(entries[item], placement):
                low, high = entries[item].place.start, entries[item].place.start + entries[item].place.size
                totals[item] = block.sums[low:high].reshape(entries[item].shape)
    texts = describe(keys, [e.shape for e in entries], [e.dtype for e in entries])
    nbytes = sum(bucket.nbytes for bucket in buckets)
    rows = np.array([entry.index for entry in entries], np.intp)
    return Plan(
        keys, tuple(entries), rows, tuple(buckets), tuple(totals), nbytes, digest("\n".join(texts)), label(keys), {}
    )


def label(keys: Sequence[Key]) -> str:
    """Return the keys of a call for a message, shortened."""
    if len(keys) == 1:
        return repr(keys[0])
    if len(keys) <= 3:
        return repr(list(keys))
    return f"[{keys[0]!r}, … {len(keys)} keys … {keys[-1]!r}]"


def _owned(entry: Entry, placement: Placement) -> bool:
    """Return whether this rank owns the value, kept whole; an empty one belongs to the owner of its place."""
    place = entry.place
    share = placement.share(place.start, place.start + 1, place.block.grid(place.start), place.block.owner)
    return share.high > share.low


def _by_block(entries: Sequence[Entry]) -> dict[Block, list[int]]:
    """Return the items in each block, in the order of their memory."""
    blocks: dict[Block, list[int]] = {}
    for item, entry in enumerate(entries):
        blocks.setdefault(entry.place.block, []).append(item)
    for items in blocks.values():
        items.sort(key=lambda item: entries[item].place.start)
    return blocks


def _cells(block: Block, members: Sequence[int], entries: Sequence[Entry]) -> list[list[tuple[int, int, int, int]]]:
    """Cut the items at the cells of the block's grid: per cell, (item, first element of the key, start, stop)."""
    cells: dict[int, list[tuple[int, int, int, int]]] = {}
    for item in members:
        place = entries[item].place
        start, end = place.start, place.start + place.size
        while start < end:
            stop = min(end, block.grid(start)[1])
            cells.setdefault(start // block.cell, []).append((item, start - place.start, start, stop))
            start = stop
    return list(cells.values())


def _bucket(
    block: Block,
    ranges: Sequence[tuple[int, int, int, int]],
    placement: Placement,
    scratch: Callable[[np.dtype[Any], int], Array],
    whole: bool,
) -> Bucket:
    start, stop = ranges[0][2], ranges[-1][3]
    dtype = block.values.dtype
    pieces = tuple(Piece(item, begin, begin + high - low, low - start) for item, begin, low, high in ranges)
    share = placement.share(start, stop, block.grid(start), block.owner)
    owned = share.high - share.low
    in_whole = whole and owned > 0
    total = block.sums[start + share.low : start + share.high] if in_whole else scratch(accumulator(dtype), owned)
    parts = tuple(_parts(block, start, share, [(p.item, p.at, p.until) for p in pieces], total))
    runs = tuple(_parts(block, start, share, _merged(pieces), total))
    dense = sum(p.end - p.begin for p in pieces) == stop - start
    return Bucket(
        block.values[start:stop], share, dtype, (stop - start) * dtype.itemsize, pieces, dense, total, parts, runs
    )


def _merged(pieces: Sequence[Piece]) -> list[tuple[int, int, int]]:
    """Join pieces that touch."""
    runs: list[tuple[int, int, int]] = []
    for piece in pieces:
        if runs and runs[-1][2] == piece.at:
            runs[-1] = (runs[-1][0], runs[-1][1], piece.until)
        else:
            runs.append((piece.item, piece.at, piece.until))
    return runs


def _parts(block: Block, start: int, share: Share, ranges: Sequence[tuple[int, int, int]], total: Array) -> list[Part]:
    """Return what this rank owns of the ranges, which are in elements of the bucket."""
    parts = []
    for item, low, high in ranges:
        low, high = max(low, share.low), min(high, share.high)
        if low < high:
            where = slice(start + low, start + high)
            state = {name: array[where] for name, array in block.state.items()}
            parts.append(Part(item, total[low - share.low : high - share.low], block.values[where], state))
    return parts
