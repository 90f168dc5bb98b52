"""How a list of keys is cut into messages: worked out once per list, executed often.

A *bucket* is one message: the elements of the call's keys that lie in one cell of one block, as one range of memory.
Keys that lie side by side are therefore sent, summed and updated together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .arena import Block
from .arrays import accumulator, name_of
from .keys import Entry
from .optimizers.optimizer import BLOCK
from .rowsparse import Presence
from .typing import Array, GpuKernels, Kernels, Key, Placement, Share, Transport, Updater
from .updaters import check_state

__all__ = ["Bucket", "Buffered", "Part", "Piece", "Plan", "Plans", "build", "describe", "digest", "label", "merged"]


# From here on it pays to leave a message where it lies, if the transport need not copy all of it. Lines of shared
# memory are in another core's cache, from which they have to be fetched or removed before they can be written: up to
# eight times as slow as writing to lines of one's own.
_DIRECT_BYTES = 64 << 10
# A key in a plan takes some kilobytes at most.
_MOST_KEYS = 32 << 10


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


@dataclass(frozen=True, eq=False)
class Part:
    """Elements of a bucket that this rank updates at once: on the host up to
    :data:`~mpikv.optimizers.optimizer.BLOCK`.
    """

    item: int
    """The position of its (first) key in the call."""
    low: int
    high: int
    """Where it is in this rank's share of the bucket."""
    total: Array
    """Where its sum goes; parts of one bucket may have the same memory, which is then used again and again."""
    value: Array
    state: dict[str, Array]
    update: Callable[[Any], None] | None
    """What the updater bound to these arrays; None for updaters of whole values, and where the next is there."""
    add_and_update: Callable[[Array, Array, Any], None] | None
    """The same for the sum of two arrays, which is then not written; None where it is made in ``total``."""
    items: tuple[int, ...] | None = None
    """The positions of all its keys in the call, where :attr:`update` takes a step for each, in a sequence."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """One message. A :class:`~mpikv.typing.Span`."""

    value: Array
    share: Share
    pieces: tuple[Piece, ...]
    dense: bool
    """Whether the pieces fill the bucket; the rest belongs to keys that are not in this call and is sent as zeros."""
    total: Array
    """Where a transport whose library adds puts the sum of this rank's elements."""
    parts: tuple[Part, ...]
    """What this rank updates, cut at keys, or where keys are updated together by a step for each."""
    runs: tuple[Part, ...]
    """The same, where neighbours of equal settings may be updated at once."""
    sends: tuple[Array, ...]
    """The message in each of the transport's outboxes."""
    items: slice | None
    """Which keys of the call these are, if they are whole and follow one another."""
    shapes: tuple[tuple[int, ...], ...]
    """The shapes of the keys of the pieces."""
    direct: bool
    """Whether it pays to look for the message where it lies in a caller's array."""
    exact: Array | None
    """The values as their owners know them, where the others hold what was sent of them."""
    buffered: Buffered | None
    """Where the message lies when it is made in the keys' buffers, if they have any."""

    @cached_property
    def slots(self) -> tuple[tuple[Array, ...], ...]:
        """Where whole keys go in each of the sends, in their shapes."""
        return tuple(
            tuple(
                send[piece.at : piece.until].reshape(shape)
                for piece, shape in zip(self.pieces, self.shapes, strict=True)
            )
            for send in self.sends
        )

    @cached_property
    def owned(self) -> tuple[slice, ...]:
        """Which elements of the bucket are this rank's, and of a key of the call."""
        edges = [(max(low, self.share.low), min(high, self.share.high)) for _, low, high in merged(self.pieces)]
        return tuple(slice(low, high) for low, high in edges if low < high)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.value.dtype

    @property
    def nbytes(self) -> int:
        return self.value.nbytes


class Buffered(NamedTuple):
    """A bucket that is made in place, in the buffers of its keys."""

    send: Array
    """This rank's message."""
    terms: tuple[Array, ...]
    """Where all ranks share memory: every rank's elements of this rank's share."""


@dataclass(frozen=True, eq=False)
class Plan:
    """All that a call on a list of keys needs, but for the arrays of the call."""

    keys: tuple[Key, ...]
    entries: tuple[Entry, ...]
    rows: Any
    """The keys' rows in the table: what indexes its arrays fastest, a number, a slice or an array."""
    digest: int
    label: str
    on_host: bool
    """Whether values lie in the host's memory."""
    memo: dict[Any, Any]
    """What the store worked out for the plan and can use again."""
    _cutter: _Cutter

    # Worked out when first asked for: who only passes on rows never does, and a large value has many buckets.

    def prepare(self) -> None:
        """Work out now what moving whole values needs: before ranks agree on it, as it may fail on one of them."""
        _ = self.buckets, self.totals

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        buckets: list[Bucket] = []
        for block, members in _by_block(self.entries).items():
            buckets += [self._cutter.bucket(block, ranges) for ranges in _cells(block, members, self.entries)]
        return tuple(buckets)

    @cached_property
    def totals(self) -> tuple[Array | None, ...]:
        """For updaters of whole values: where the sum of each key that this rank owns is put together."""
        return tuple(self._cutter.total_of(entry) for entry in self.entries)

    @cached_property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    @cached_property
    def cut(self) -> bool:
        """Whether a key is spread over several buckets."""
        sizes = [entry.place.size for entry in self.entries]
        return any(piece.end - piece.begin < sizes[piece.item] for b in self.buckets for piece in b.pieces)

    @cached_property
    def direct(self) -> bool:
        """Whether a message may be left where it lies in a caller's array."""
        return any(bucket.direct for bucket in self.buckets)

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        return [entry.shape for entry in self.entries]

    @cached_property
    def dtypes(self) -> list[np.dtype[Any]]:
        return [entry.dtype for entry in self.entries]

    @cached_property
    def present(self) -> tuple[Presence, ...]:
        """What is known of the row-sparse ones among the values."""
        return tuple(entry.present for entry in self.entries if entry.present is not None)

    @cached_property
    def values(self) -> list[Array]:
        """This rank's memory of each value, in its shape."""
        return [entry.value for entry in self.entries]

    @cached_property
    def views(self) -> list[Array]:
        """The same, read-only."""
        return [entry.view for entry in self.entries]


class Plans:
    """The plans of a store: those of single keys, and of lists those that were used last, up to a number of keys.

    They are in two halves, so that no call pays for the order of their use: when the younger one is full, it becomes
    the older one, and what is still in that is dropped.
    """

    def __init__(self) -> None:
        self.single: dict[Key, Plan] = {}
        self.young: dict[tuple[Key, ...], Plan] = {}
        self._old: dict[tuple[Key, ...], Plan] = {}
        self._held, self._most = 0, _MOST_KEYS

    def find(self, keys: tuple[Key, ...]) -> Plan | None:
        """Return the plan of several keys, if it is kept."""
        plan = self.young.get(keys)
        if plan is None and (plan := self._old.pop(keys, None)) is not None:
            self._keep(plan)
        return plan

    def add(self, plan: Plan, known: int) -> None:
        """Keep a plan. As many keys as are ``known`` may be in the lists of a half in any case."""
        if len(plan.keys) == 1:
            self.single[plan.keys[0]] = plan
        else:
            self._most = max(known, _MOST_KEYS)
            self._keep(plan)

    def _keep(self, plan: Plan) -> None:
        if self._held + len(plan.keys) > self._most:
            _drop(self._old)
            self.young, self._old, self._held = {}, self.young, 0
        self.young[plan.keys] = plan
        self._held += len(plan.keys)

    def clear(self) -> None:
        """Forget all."""
        for plans in (self.single, self.young, self._old):
            _drop(plans)
        self._held = 0


def _drop(plans: dict[Any, Plan]) -> None:
    for plan in plans.values():
        plan.memo.clear()  # it refers to the plan, which would keep memory until the garbage collector comes
    plans.clear()


def digest(text: str) -> int:
    """Return a number in [0, 2**62 - 2) that differs for different texts, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % ((1 << 62) - 2)


def describe(keys: Sequence[Key], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]]) -> list[str]:
    """Return one short text per key, by which ranks compare their calls."""
    return [f"{key!r} {name_of(dtype)}{list(shape)}" for key, shape, dtype in zip(keys, shapes, dtypes, strict=True)]


def build(
    entries: Sequence[Entry],
    placement: Placement,
    transport: Transport,
    updater: Updater,
    kernels: Kernels,
    scratch: Array,
    adding: bool = False,
) -> Plan:
    """Return the plan for some keys, which it cuts into buckets when they are first asked for.

    ``scratch`` is memory (uint8) for the sum of one bucket. For an updater of whole values, sums are put together per
    key instead. ``adding`` lets kernels make the last addition of a sum.
    """
    keys = tuple(entry.key for entry in entries)
    texts = describe(keys, [e.shape for e in entries], [e.dtype for e in entries])
    return Plan(
        keys=keys,
        entries=tuple(entries),
        rows=_rows([entry.index for entry in entries]),
        digest=digest("\n".join(texts)),
        label=label(keys),
        on_host=transport.memory.is_host,
        memo={},
        _cutter=_Cutter(entries, placement, transport, updater, kernels, scratch, adding),
    )


def _rows(rows: Sequence[int]) -> Any:
    if len(rows) == 1:
        return rows[0]
    if rows and list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return np.array(rows, np.intp)


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


def merged(pieces: Sequence[Piece]) -> list[tuple[int, int, int]]:
    """Join pieces that touch."""
    runs: list[tuple[int, int, int]] = []
    for piece in pieces:
        if runs and runs[-1][2] == piece.at:
            runs[-1] = (runs[-1][0], runs[-1][1], piece.until)
        else:
            runs.append((piece.item, piece.at, piece.until))
    return runs


class _Cutter:
    """What all buckets of a plan have in common."""

    def __init__(
        self,
        entries: Sequence[Entry],
        placement: Placement,
        transport: Transport,
        updater: Updater,
        kernels: Kernels,
        scratch: Array,
        adding: bool,
    ) -> None:
        self.whole = updater.fallible or not updater.elementwise
        self._entries, self._placement, self._transport = entries, placement, transport
        self._updater, self._kernels, self._scratch = updater, kernels, scratch
        self._adding = adding and not self.whole
        # Those that update keys together though their steps differ.
        together = not (self.whole or updater.assigns or transport.memory.is_host)
        self._gpu_kernels: Any = kernels if together and isinstance(kernels, GpuKernels) else None

    def total_of(self, entry: Entry) -> Array | None:
        """Return where the sum of a value is put together, if it is on this rank and whole."""
        if not self.whole or not _owned(entry, self._placement):
            return None
        low, high = entry.place.start, entry.place.start + entry.place.size
        total: Array = entry.place.block.sums[low:high].reshape(entry.shape)
        return total

    def bucket(self, block: Block, ranges: Sequence[tuple[int, int, int, int]]) -> Bucket:
        """Return the bucket of (item, first element of the key, start, stop) in a block."""
        start, stop = ranges[0][2], ranges[-1][3]
        dtype = block.values.dtype
        if not self._updater.assigns:
            check_state(self._updater, dtype, block.state)
        pieces = tuple(Piece(item, begin, begin + high - low, low - start) for item, begin, low, high in ranges)
        share = self._placement.share(start, stop, block.grid(start), block.owner)
        dense = sum(piece.end - piece.begin for piece in pieces) == stop - start
        total = self._total(block, start, share, dense)
        each = [(piece.item, piece.at, piece.until) for piece in pieces]
        runs = tuple(self._parts(block, start, share, merged(pieces), total))
        kernels = self._gpu_kernels
        nbytes = (stop - start) * dtype.itemsize
        return Bucket(
            value=block.values[start:stop],
            share=share,
            pieces=pieces,
            dense=dense,
            total=total,
            parts=tuple(
                self._ranged(kernels, runs, share, each) if kernels else self._parts(block, start, share, each, total)
            ),
            runs=runs,
            sends=tuple(outbox[:nbytes].view(dtype) for outbox in self._transport.outboxes),
            items=self._items(pieces),
            shapes=tuple(self._entries[piece.item].shape for piece in pieces),
            direct=len(pieces) == 1 and self._may_be_direct(nbytes),
            exact=None if block.exact is None else block.exact[start:stop],
            buffered=_buffered(block, start, stop, share, self._transport),
        )

    def _may_be_direct(self, nbytes: int) -> bool:
        transport = self._transport
        return transport.neighbours == 1 or (transport.shared and nbytes >= _DIRECT_BYTES)

    def _total(self, block: Block, start: int, share: Share, dense: bool) -> Array:
        own = slice(start + share.low, start + share.high)
        dtype = accumulator(block.values.dtype)
        if self.whole:
            # Taking its memory where nothing is owned would take it for nothing.
            return block.sums[own] if share.high > share.low else self._scratch[:0].view(dtype)
        # What lies between the pieces is no business of this call.
        if self._updater.assigns and dtype == block.values.dtype and (dense or self._transport.neighbours > 1):
            return block.updated[own]
        return self._scratch[: (share.high - share.low) * dtype.itemsize].view(dtype)

    def _items(self, pieces: Sequence[Piece]) -> slice | None:
        first = pieces[0].item
        for number, piece in enumerate(pieces):
            if piece.item != first + number or piece.end - piece.begin < self._entries[piece.item].place.size:
                return None
        return slice(first, first + len(pieces))

    def _parts(
        self, block: Block, start: int, share: Share, ranges: Sequence[tuple[int, int, int]], total: Array
    ) -> Iterator[Part]:
        """Yield what this rank owns of the ranges, which are in elements of the bucket."""
        again = self._transport.neighbours > 1 and not np.may_share_memory(total, block.updated)
        # On a GPU there is no cache to stay in, and each part is a launch.
        most = BLOCK if block.memory.is_host else block.values.size
        for item, begin, end in ranges:
            last = min(end, share.high) - share.low
            for low in range(max(begin, share.low) - share.low, last, most):
                high = min(low + most, last)
                where = slice(start + share.low + low, start + share.low + high)
                part_total = total[: high - low] if again and not self.whole else total[low:high]
                value, state = block.updated[where], {name: array[where] for name, array in block.state.items()}
                both = self._kernels.bind_adding(self._updater, value, state) if self._adding else None
                alone = not self.whole and both is None
                update = self._kernels.bind(self._updater, part_total, value, state) if alone else None
                yield Part(item, low, high, part_total, value, state, update, both)

    def _ranged(
        self, kernels: GpuKernels, runs: Sequence[Part], share: Share, each: Sequence[tuple[int, int, int]]
    ) -> Iterator[Part]:
        """Yield the runs, updated by a step for each of their keys, which are at ``each`` in the bucket."""
        mine = [(item, max(low, share.low) - share.low, min(high, share.high) - share.low) for item, low, high in each]
        for run in runs:
            inside = [(item, high - run.low) for item, low, high in mine if run.low <= low < high <= run.high]
            items, ends = zip(*inside, strict=True)
            update = kernels.bind_ranges(self._updater, run.total, run.value, run.state, ends)
            yield replace(run, items=items, update=update)


def _buffered(block: Block, start: int, stop: int, share: Share, transport: Transport) -> Buffered | None:
    if block.buffers is None:
        return None
    own = block.buffers[transport.place]
    terms = tuple(row[start + share.low : start + share.high] for row in block.buffers) if transport.shared else ()
    return Buffered(own[start:stop], terms)
