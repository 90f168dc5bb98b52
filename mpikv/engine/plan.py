"""How a list of keys is cut into messages: worked out once per list, executed often.

A *bucket* is one message: the elements of the call's keys that lie in one cell of one block, as one range of memory.
Keys that lie side by side are therefore sent, summed and updated together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..arrays.arrays import accumulator, name_of
from ..cluster.calls import Call
from ..memory.row_sparse import NonzeroRows
from ..optimizers.optimizer import BLOCK
from ..optimizers.updaters import check_state
from ..protocols import (
    Array,
    BoundList,
    GpuKernels,
    Kernels,
    Key,
    ListKernels,
    Placement,
    Shard,
    Transport,
    Updater,
    Whole,
)
from .arena import LINE_BYTES, Block
from .calls import Contribution, UpdateCall
from .grid import rounded
from .keys import Entry
from .lazy import lazy
from .spans import Spans

__all__ = ["Bucket", "Plan", "Planner", "Plans", "Range", "Update", "describe", "digest", "joined", "label", "schedule"]


# From here on it pays to leave a message where it lies, if the transport need not copy all of it. Lines of shared
# memory are in another core's cache, from which they have to be fetched or removed before they can be written: up to
# eight times as slow as writing to lines of one's own.
_DIRECT_BYTES = 64 << 10
# A key in a plan takes some kilobytes at most.
_MOST_KEYS = 32 << 10
# From here on a pushpull unpacks each bucket while it is in the cache. Below, everything stays in the last level of
# cache, and finding out whether that is safe would take longer.
_STREAMED_BYTES = 8 << 20

Message = TypeVar("Message")


class Range(NamedTuple):
    """Elements ``[low, high)`` of a bucket, or of a block: of one key, or of several that lie side by side."""

    item: int
    """The position of the (first) key in the call."""
    begin: int
    end: int
    """Which elements of that key they are: ``[begin, end)``."""
    low: int
    high: int


@dataclass(frozen=True, eq=False)
class Update:
    """Elements of a bucket that this rank updates at once: on the host up to
    :data:`~mpikv.optimizers.optimizer.BLOCK`.
    """

    item: int
    """The position of its (first) key in the call."""
    low: int
    high: int
    """Where it is in this rank's shard of the bucket."""
    total: Array
    """Where its sum goes; updates of one bucket may have the same memory, which is then used again and again."""
    value: Array
    state: dict[str, Array]
    run: Callable[[Any], None] | None
    """What the updater bound to these arrays; None for updaters of whole values, and where the next is there."""
    add_and_run: Callable[[Array, Array, Any], None] | None
    """The same for the sum of two arrays, which is then not written; None where it is made in ``total``."""
    items: tuple[int, ...] | None = None
    """The positions of all its keys in the call, where :attr:`run` takes a step for each, in a sequence."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """One message."""

    value: Array
    shard: Shard
    pieces: tuple[Range, ...]
    """What there is of each key."""
    runs: tuple[Range, ...]
    """The same, joined where nothing of another key is between."""
    dense: bool
    """Whether no other key's elements are in the bucket; if some are, they are sent as zeros."""
    total: Array
    """Where a transport whose library adds puts the sum of this rank's elements."""
    joint_updates: tuple[Update, ...]
    """What this rank updates, where keys side by side with equal settings may be updated at once."""
    cut_updates: Callable[[], Iterable[Update]]
    """Makes :attr:`updates`."""
    sends: tuple[Array, ...]
    """The message in each of the transport's send_buffers."""
    items: slice | None
    """Which keys of the call these are, if they are whole and follow one another."""
    shapes: tuple[tuple[int, ...], ...]
    """The shapes of the pieces: those of their keys, or flat ones of parts of keys."""
    direct: bool
    """Whether it pays to look for the message where it lies in a caller's array."""
    buffer: Array | None
    """This rank's message when it is made in the keys' buffers, if they have any."""
    buffers: tuple[Array, ...]
    """There, where all ranks share memory: every rank's elements of this rank's shard."""
    bind_list: Callable[[Sequence[Array]], BoundList | None]
    """As :meth:`Planner.bind_list`."""

    # Not every call needs them, and they take a while where keys are many.

    @lazy
    def updates(self) -> tuple[Update, ...]:
        """What this rank updates, cut at keys, or where keys are updated together by a step for each."""
        return tuple(self.cut_updates())

    @lazy
    def parts(self) -> tuple[Array, ...]:
        """The pieces of the value, in their shapes."""
        return self._parts_of(self.value)

    @lazy
    def slots(self) -> tuple[tuple[Array, ...], ...]:
        """Where the pieces go in each of the sends, in their shapes."""
        return tuple(map(self._parts_of, self.sends))

    @lazy
    def bound_parts(self) -> BoundList | None:
        """The parts, where kernels copy from them."""
        return self.bind_list(self.parts)

    @lazy
    def bound_slots(self) -> tuple[BoundList | None, ...]:
        """The slots, where kernels copy to them."""
        return tuple(map(self.bind_list, self.slots))

    def _parts_of(self, message: Array) -> tuple[Array, ...]:
        pairs = zip(self.pieces, self.shapes, strict=True)
        return tuple(message[piece.low : piece.high].reshape(shape) for piece, shape in pairs)


@dataclass(frozen=True, eq=False)
class Plan:
    """All that a call on a list of keys needs, but for the arrays of the call."""

    keys: tuple[Key, ...]
    entries: tuple[Entry, ...]
    rows: Any
    """The keys' rows in the table: what indexes its arrays fastest, a number, a slice or an array."""
    digest: int
    label: str
    raw: bool
    """Whether arrays are pushed as they are: of the host, and not compressed."""
    calls: dict[str, Call]
    """By their verbs, the calls that updated nothing."""
    update_calls: dict[tuple[str, Contribution], UpdateCall]
    planner: Planner

    # Worked out when first asked for: who only passes on rows never does, and a large value has many buckets.

    def prepare(self) -> None:
        """Work out now what moving whole values needs: before ranks agree on it, as it may fail on one of them."""
        _ = self.buckets, self.totals

    def prepare_updates(self) -> None:
        """Work out, as early, what keys with different steps need."""
        for bucket in self.buckets:
            _ = bucket.updates

    @lazy
    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(self.planner.buckets(self.entries))

    @lazy
    def totals(self) -> tuple[Array | None, ...]:
        """For updaters of whole values: where the sum of each key that this rank owns is put together."""
        if not self.planner.whole:
            return (None,) * len(self.entries)
        return tuple(self.planner.total_of(entry) for entry in self.entries)

    @lazy
    def nbytes(self) -> int:
        return sum(bucket.value.nbytes for bucket in self.buckets)

    @lazy
    def cut(self) -> bool:
        """Whether a key is spread over several buckets."""
        return sum(len(bucket.pieces) for bucket in self.buckets) > sum(entry.place.size > 0 for entry in self.entries)

    # What a push need not ask of the placement, the updater and the compression.

    @lazy
    def prefetches(self) -> bool:
        """Whether the first message is prepared before ranks agree: on the host, where no stream does it in the order
        of the calls; not what is compressed, as residuals change in that; nor what may stay where it lies.
        """
        return self.raw and bool(self.buckets) and not self.buckets[0].direct

    @lazy
    def single_copy(self) -> bool:
        """Whether other ranks may read a caller's array where it lies, until the next fence."""
        lends = self.planner.transport.single_copy and not self.planner.compressed
        return lends and any(bucket.direct for bucket in self.buckets)

    @lazy
    def streams(self) -> bool:
        """Whether a pushpull publishes each message when it is updated: on the host where it is still in the cache
        then.
        """
        planner = self.planner
        if not planner.transport.memory.is_host:
            return not (planner.whole or planner.compressed)
        return planner.by_bucket and not planner.whole and self.nbytes >= _STREAMED_BYTES

    @lazy
    def overlaps(self) -> bool:
        """Whether messages between GPUs are on their way while those ahead of them are updated. The same on all
        ranks.
        """
        return len(self.buckets) > 1 and all(map(self.planner.may_overlap, self.buckets))

    @lazy
    def schedule(self) -> tuple[tuple[Bucket | None, Bucket | None], ...]:
        """As :func:`schedule` returns it."""
        ahead = self.planner.adds_there and (self.overlaps or len(self.buckets) == 1)
        return schedule(self.buckets, int(ahead))

    @lazy
    def update_whole(self) -> Callable[[Sequence[Any]], None] | None:
        """Updates all whole values that this rank owns, by as few launches as can be; None where each is updated by
        itself.
        """
        return self.planner.bind_whole(self.entries, self.totals)

    @lazy
    def shapes(self) -> list[tuple[int, ...]]:
        return [entry.shape for entry in self.entries]

    @lazy
    def dtypes(self) -> list[np.dtype[Any]]:
        return [entry.dtype for entry in self.entries]

    @lazy
    def present(self) -> tuple[NonzeroRows, ...]:
        """What is known of the row-sparse ones among the values."""
        return tuple(entry.present for entry in self.entries if entry.present is not None)

    @lazy
    def values(self) -> list[Array]:
        """This rank's memory of each value, in its shape."""
        return [entry.value for entry in self.entries]

    @lazy
    def bound_values(self) -> BoundList | None:
        """The same, where kernels compare arrays with them."""
        return self.planner.bind_list(self.values)

    @lazy
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
        self.recent: dict[tuple[Key, ...], Plan] = {}
        self._old: dict[tuple[Key, ...], Plan] = {}
        self._held, self._most = 0, _MOST_KEYS

    def find(self, keys: tuple[Key, ...]) -> Plan | None:
        """Return the plan of several keys, if it is kept."""
        plan = self.recent.get(keys)
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
            self.recent, self._old, self._held = {}, self.recent, 0
        self.recent[plan.keys] = plan
        self._held += len(plan.keys)

    def clear(self) -> None:
        """Forget all."""
        for plans in (self.single, self.recent, self._old):
            plans.clear()
        self._held = 0


def schedule(messages: tuple[Message, ...], ahead: int) -> tuple[tuple[Message | None, Message | None], ...]:
    """Return, for each turn of a push, the message that is reduced in it, and the one that is updated after that: the
    messages reduced ``ahead`` of the updates are in flight meanwhile.

    >>> schedule(("a", "b", "c"), 1)
    (('a', None), ('b', 'a'), ('c', 'b'), (None, 'c'))
    """
    none = (None,) * ahead
    return tuple(zip(messages + none, none + messages, strict=True))


def digest(text: str) -> int:
    """Return a number in [0, 2**62 - 2) that differs for different texts, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % ((1 << 62) - 2)


def describe(keys: Sequence[Key], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]]) -> list[str]:
    """Return one short text per key, by which ranks compare their calls."""
    texts = {
        (shape, dtype): f" {name_of(dtype)}{list(shape)}" for shape, dtype in set(zip(shapes, dtypes, strict=True))
    }
    return [f"{key!r}{texts[kind]}" for key, kind in zip(keys, zip(shapes, dtypes, strict=True), strict=True)]


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


def _by_block(entries: Sequence[Entry]) -> dict[Block, list[int]]:
    """Return the items in each block, in the order of their memory."""
    blocks: dict[Block, list[int]] = {}
    for item, entry in enumerate(entries):
        blocks.setdefault(entry.place.block, []).append(item)
    for items in blocks.values():
        items.sort(key=lambda item: entries[item].place.start)
    return blocks


def _cells(block: Block, items: Sequence[int], entries: Sequence[Entry]) -> Iterator[tuple[int, list[Range]]]:
    """Cut keys, which are in the order of their memory, at the cells of the block's grid; yield for each cell where its
    first range begins in the block, and the ranges, which count from there.
    """
    ranges: list[Range] = []
    start = stop = 0
    for item in items:
        place = entries[item].place
        low, end = place.start, place.start + place.size
        while low < end:
            if low >= stop:
                if ranges:
                    yield start, ranges
                start, stop, ranges = low, block.grid.cell(low)[1], []
            high = min(end, stop)
            ranges.append(Range(item, low - place.start, high - place.start, low - start, high - start))
            low = high
    if ranges:
        yield start, ranges


def joined(ranges: Sequence[Range], line: int = 1) -> list[Range]:
    """Join ranges that touch, but for what belongs to nobody where ranges begin at multiples of a ``line``."""
    runs: list[Range] = []
    first, high = 0, None
    for number, each in enumerate(ranges):
        if high is not None and rounded(high, line) != each.low:
            runs.append(ranges[first]._replace(high=high))
            first = number
        high = each.high
    if high is not None:
        runs.append(ranges[first]._replace(high=high))
    return runs


@dataclass(frozen=True, eq=False)
class Planner:
    """Makes plans for a placement, an updater and a compression."""

    transport: Transport
    placement: Placement
    updater: Updater
    kernels: Kernels
    scratch: Array
    """Memory (uint8) for the sum of one bucket. For an updater of whole values, sums are put together per key."""
    in_pairs: bool = False
    """Whether sums are made as in :func:`mpikv.arrays.arrays.add_in_pairs`."""
    compressed: bool = False
    by_bucket: bool = True
    """Whether each bucket's sum makes an exchange, which no rank passes before all have updated the last one."""

    def plan(self, entries: Sequence[Entry]) -> Plan:
        """Return the plan for some keys, which is cut into buckets when they are first asked for."""
        keys = tuple(entry.key for entry in entries)
        texts = describe(keys, [e.shape for e in entries], [e.dtype for e in entries])
        return Plan(
            keys=keys,
            entries=tuple(entries),
            rows=_rows([entry.index for entry in entries]),
            digest=digest("\n".join(texts)),
            label=label(keys),
            raw=self.transport.memory.is_host and not self.compressed,
            calls={},
            update_calls={},
            planner=self,
        )

    @lazy
    def whole(self) -> bool:
        """Whether values are updated key by key instead of bucket by bucket."""
        return self.updater.may_raise or not self.updater.elementwise

    @lazy
    def adding(self) -> bool:
        """Whether kernels may make the last addition of a sum: the addends are here, and added from left to right."""
        here = self.transport.sharing_size > 1 and not self.compressed
        return here and (self.transport.size == 2 or not self.in_pairs)

    def bind_list(self, arrays: Sequence[Array]) -> BoundList | None:
        """Return arrays beside which kernels look at others, if they do."""
        kernels = self._list_kernels
        return None if kernels is None else kernels.bind_list(arrays)

    @lazy
    def _list_kernels(self) -> ListKernels | None:
        """Return the kernels, if they look at lists. Asked once: for each plan it would take as long as all else."""
        here = self.transport.memory.is_host
        return self.kernels if here and isinstance(self.kernels, ListKernels) else None

    @lazy
    def current(self) -> bool:
        """Whether a push leaves every rank with the newest values."""
        return self.transport.shared or self.placement.everywhere or self.transport.size == 1

    def may_overlap(self, bucket: Bucket) -> bool:
        """Return whether the sum of the message that comes next may be made while this one is updated: each has a half
        of the scratch memory.
        """
        nbytes = max(bucket.shard.counts) * accumulator(bucket.value.dtype).itemsize
        return self.adds_there and nbytes <= self._half

    @lazy
    def adds_there(self) -> bool:
        """Whether the library of a GPU's transport adds: an update then reads the sum alone, never what is sent."""
        adds = self.transport.size > 1 and not (self.in_pairs or self.compressed or self.whole)
        return adds and not self.transport.memory.is_host

    @lazy
    def _half(self) -> int:
        """The bytes of half of the scratch memory."""
        return self.scratch.size // 2 // LINE_BYTES * LINE_BYTES

    @lazy
    def _gpu_kernels(self) -> GpuKernels | None:
        """Return what updates keys together though their steps differ."""
        apart = self.whole or self.updater.assigns or self.transport.memory.is_host
        return self.kernels if not apart and isinstance(self.kernels, GpuKernels) else None

    def kept(self, block: Block) -> Spans | None:
        """Return the elements of a block of which this rank is to keep state, None for all: on a GPU those it owns.
        The host gives pages when they are written, so that there what this rank does not own takes none.
        """
        return None if block.memory.is_host or block.by_rows else self.owned(block)

    def owned(self, block: Block) -> Spans:
        """Return the elements of a block that this rank owns."""
        cells = ((first, block.grid.shard(self.placement, first, last)) for first, last in block.grid.cells())
        return Spans.join((first + shard.low, first + shard.high) for first, shard in cells)

    def total_of(self, entry: Entry) -> Array | None:
        """Return where the sum of a value is put together, if it is on this rank and whole."""
        block, low = entry.place.block, entry.place.start
        # An empty value belongs to the owner of its place.
        shard = block.grid.shard(self.placement, low, low + 1)
        if shard.low == shard.high:
            return None
        total: Array = block.sums_of(low, low + entry.place.size).reshape(entry.shape)
        return total

    def bind_whole(
        self, entries: Sequence[Entry], totals: Sequence[Array | None]
    ) -> Callable[[Sequence[Any]], None] | None:
        """Return what updates whole values by their totals, at once on a GPU; None where nothing does."""
        if not self.whole or self.updater.may_raise or not isinstance(self.kernels, GpuKernels):
            return None
        pairs = zip(entries, totals, strict=True)
        wholes = [Whole(total, entry.value, entry.state) for entry, total in pairs if total is not None]
        return self.kernels.bind_whole(self.updater, wholes)

    def buckets(self, entries: Sequence[Entry]) -> Iterator[Bucket]:
        """Cut keys into messages."""
        numbers = count()
        for block, items in _by_block(entries).items():
            if not self.updater.assigns:
                check_state(self.updater, block.values.dtype, block.state)
            for start, pieces in _cells(block, items, entries):
                yield self._bucket(entries, block, start, tuple(pieces), next(numbers))

    def _bucket(
        self, entries: Sequence[Entry], block: Block, start: int, pieces: tuple[Range, ...], number: int
    ) -> Bucket:
        stop, dtype = block.grid.end_of(start + pieces[-1].high), block.values.dtype
        where, nbytes = slice(start, stop), (stop - start) * dtype.itemsize
        shard = block.grid.shard(self.placement, start, stop)
        runs = tuple(joined(pieces, block.grid.line))
        dense = len(runs) == 1
        total = self._total(block, start, shard, dense, number)
        joint = tuple(self._updates(block, start, shard, runs, total))
        if (gpu := self._gpu_kernels) is not None:
            cut_updates = partial(self._ranged, gpu, joint, shard, pieces)
        else:
            cut_updates = partial(self._updates, block, start, shard, pieces, total)
        sends = tuple(send_buffer[:nbytes].view(dtype) for send_buffer in self.transport.send_buffers)
        alone = self.transport.size == 1 and not self.transport.memory.is_host
        if alone and total.dtype == dtype and not self.updater.assigns:
            sends = (total,)  # where it is to be read anyway
        value, own = block.values[where], slice(start + shard.low, start + shard.high)
        buffers = () if block.buffers is None else block.buffers
        return Bucket(
            value=value,
            shard=shard,
            pieces=pieces,
            runs=runs,
            dense=dense,
            total=total,
            joint_updates=joint,
            cut_updates=cut_updates,
            sends=sends,
            items=_items(pieces, entries),
            shapes=tuple(_shape_of(piece, entries[piece.item]) for piece in pieces),
            direct=pieces[0].high == stop - start and sends[0] is not total and self._may_be_direct(nbytes),
            buffer=None if block.buffers is None else block.buffers[self.transport.sharing_rank][where],
            buffers=tuple(row[own] for row in buffers) if self.transport.shared else (),
            bind_list=self.bind_list,
        )

    def _may_be_direct(self, nbytes: int) -> bool:
        return self.transport.sharing_size == 1 or (self.transport.shared and nbytes >= _DIRECT_BYTES)

    def _total(self, block: Block, start: int, shard: Shard, dense: bool, number: int) -> Array:
        own = slice(start + shard.low, start + shard.high)
        dtype = accumulator(block.values.dtype)
        if self.whole:
            # Taking its memory where nothing is owned would take it for nothing.
            return block.sums_of(own.start, own.stop) if shard.high > shard.low else self.scratch[:0].view(dtype)
        # What lies between the pieces is no business of this call.
        if self.updater.assigns and dtype == block.values.dtype and (dense or self.transport.sharing_size > 1):
            return block.values[own]
        nbytes = (shard.high - shard.low) * dtype.itemsize
        # Of two messages between GPUs that follow one another each has a half, if they fit there.
        low = 0 if self.transport.memory.is_host or nbytes > self._half else number % 2 * self._half
        return self.scratch[low : low + nbytes].view(dtype)

    def _updates(
        self, block: Block, start: int, shard: Shard, ranges: Sequence[Range], total: Array
    ) -> Iterator[Update]:
        """Yield what this rank owns of the ranges."""
        again = self.transport.sharing_size > 1 and not np.may_share_memory(total, block.values)
        # On a GPU there is no cache to stay in, and each update is a launch.
        most = BLOCK if block.memory.is_host else block.values.size
        for item, low, high in _owned(ranges, shard):
            for first in range(low, high, most):
                last = min(first + most, high)
                where = slice(start + shard.low + first, start + shard.low + last)
                part_total = total[: last - first] if again and not self.whole else total[first:last]
                value, state = block.values[where], block.state_of(where.start, where.stop)
                adding = self.adding and not self.whole
                both = self.kernels.bind_adding(self.updater, value, state) if adding else None
                alone = not self.whole and both is None
                run = self.kernels.bind(self.updater, part_total, value, state) if alone else None
                yield Update(item, first, last, part_total, value, state, run, both)

    def _ranged(
        self, kernels: GpuKernels, joint: Sequence[Update], shard: Shard, pieces: Sequence[Range]
    ) -> Iterator[Update]:
        """Yield joint updates by a step for each of their keys."""
        mine = list(_owned(pieces, shard))
        for update in joint:
            inside = [(item, high - update.low) for item, low, high in mine if update.low <= low < high <= update.high]
            items, ends = zip(*inside, strict=True)
            run = kernels.bind_ranges(self.updater, update.total, update.value, update.state, ends)
            yield replace(update, items=items, run=run)


def _owned(ranges: Sequence[Range], shard: Shard) -> Iterator[tuple[int, int, int]]:
    """Yield the item of each range, and the elements of the shard that are in it: none where the first is the last."""
    for each in ranges:
        yield each.item, max(each.low, shard.low) - shard.low, min(each.high, shard.high) - shard.low


def _shape_of(piece: Range, entry: Entry) -> tuple[int, ...]:
    size = piece.end - piece.begin
    return entry.shape if size == entry.place.size else (size,)


def _items(pieces: Sequence[Range], entries: Sequence[Entry]) -> slice | None:
    first = pieces[0].item
    for number, piece in enumerate(pieces):
        if piece.item != first + number or piece.high - piece.low < entries[piece.item].place.size:
            return None
    return slice(first, first + len(pieces))
