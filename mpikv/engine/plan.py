"""Plans: how a list of keys is cut into messages, worked out once per list and used often.

A *bucket* is one message: the elements of the call's keys that lie in one cell of one block, as one range of memory.
Keys that lie side by side are therefore sent, summed and updated together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import count, pairwise, product
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..arrays.arrays import accumulator, name_of
from ..cluster.calls import Call
from ..optimizers.optimizer import BLOCK, LANE_BLOCK, Optimizer
from ..optimizers.recording import is_recordable
from ..optimizers.updaters import check_state
from ..protocols import (
    Array,
    BoundList,
    GpuKernels,
    Kernels,
    Key,
    Placement,
    Shard,
    Transfers,
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
from .team import SHARED_OUT, Team

# From this size on it pays to leave a message where it lies, if the transport need not copy all of it. The lines of a
# send buffer are in another core's cache: fetching or removing them makes a write up to eight times as slow.
_DIRECT_BYTES = 64 << 10
# Keys in all plans of lists together: at least so many, and in a large store so many times its own. A step may use a
# few lists, each of nearly all keys. A key takes some kilobytes at most.
_MOST_KEYS, _TIMES = 64 << 10, 4
# From this size on a pushpull unpacks each bucket while it is in the cache. Smaller calls fit in the last level of
# cache, and there the check that this is safe would take longer than it saves.
_STREAMED_BYTES = 8 << 20

Message = TypeVar("Message")


class Range(NamedTuple):
    """Elements ``[low, high)`` of a bucket, or of a block: of one key, or of several that lie side by side."""

    item: int
    """The position of the (first) key in the call."""
    begin: int
    end: int
    """They are the elements ``[begin, end)`` of that key."""
    low: int
    high: int


@dataclass(frozen=True, eq=False)
class Update:
    """Elements of a bucket updated at once here: on the host up to :data:`~mpikv.optimizers.optimizer.LANE_BLOCK`."""

    item: int
    """The position of its (first) key in the call."""
    low: int
    high: int
    """Its elements in this rank's shard of the bucket: ``[low, high)``."""
    total: Array
    """Memory for its sum. Updates of one bucket may share it: each is used up before the next is added."""
    value: Array
    state: dict[str, Array]
    run: Callable[[Any], None] | None
    """The updater, bound to these arrays; None for updaters of whole values, and where ``add_and_run`` is there."""
    add_and_run: Callable[[Array, Array, Any], None] | None
    """Updates by the sum of two arrays without writing it to ``total``; None where the kernels cannot."""
    items: tuple[int, ...] | None = None
    """The positions of all its keys in the call, where :attr:`run` takes a sequence with a step for each."""
    lane: int = 0
    """Which thread's it is. A bucket's updates are in the order of lanes; those of two lanes share no memory."""


class Bucket:
    """One message. Once made it does not change."""

    def __init__(
        self, planner: Planner, entries: Sequence[Entry], block: Block, start: int, pieces: Sequence[Range], half: int
    ) -> None:
        """Find memory, owners and own updates of keys in one cell; may allocate sums. Local.

        ``half``: which one of the scratch memory is this message's between GPUs.
        """
        stop, dtype, transport = block.grid.end_of(start + pieces[-1].high), block.values.dtype, planner.transport
        where, nbytes = slice(start, stop), (stop - start) * dtype.itemsize
        self._planner, self.block, self.start = planner, block, start
        """The block of its elements, and the first one's place there."""
        self.value: Array = block.values[where]
        self.shard = shard = block.grid.shard(planner.placement, start, stop)
        self.pieces = tuple(pieces)
        """The elements of each key."""
        self.runs = tuple(join_ranges(pieces, block.grid.line))
        """The same, joined where keys lie side by side."""
        self.gapless = len(self.runs) == 1
        """Whether no other key's elements are in the bucket; if some are, they are sent as zeros."""
        self.total = total = planner.find_total(self, half)
        """Memory for the sum of this rank's elements, where the transport's library adds."""
        self.joint_updates = tuple(planner.cut_updates(self, self.runs))
        """This rank's updates for equal steps: keys side by side are updated together."""
        sends = tuple(send_buffer[:nbytes].view(dtype) for send_buffer in transport.send_buffers)
        if transport.size == 1 and not transport.memory.is_host and total.dtype == dtype:
            sends = (total,)  # the updater reads it there, or it is the value: packing there saves a copy
        self.sends: tuple[Array, ...] = sends
        """The message in each of the transport's send_buffers."""
        self.items = _items_slice(pieces, entries)
        """The positions of these keys in the call, if they are whole and follow one another."""
        self.shapes = tuple(_shape_of(piece, entries[piece.item]) for piece in pieces)
        """The shapes of the pieces: that of a whole key, flat for a part of one."""
        may_be_direct = transport.sharing_size == 1 or (transport.shared and nbytes >= _DIRECT_BYTES)
        self.direct = pieces[0].high == stop - start and sends[0] is not total and may_be_direct
        """Whether it pays to send a caller's array from where it lies."""
        rows = () if block.buffers is None else block.buffers
        own = slice(start + shard.low, start + shard.high)
        self.buffer: Array | None = None if block.buffers is None else rows[transport.sharing_rank][where]
        """This rank's message in the keys' buffers, if they have any."""
        self.buffers: tuple[Array, ...] = tuple(row[own] for row in rows) if transport.shared else ()
        """Every rank's elements of this rank's shard in the buffers, where all ranks share memory."""

    # Lazy, as not every call needs them, and many keys make them slow.

    @lazy
    def updates(self) -> tuple[Update, ...]:
        """This rank's Updates for keys with different steps: each of one key or a piece of it, on GPUs of many keys."""
        if (gpu := self._planner.gpu_kernels) is not None:
            return tuple(self._planner.join_updates(gpu, self))
        return tuple(self._planner.cut_updates(self, self.pieces))

    @lazy
    def parts(self) -> tuple[tuple[Array, ...], BoundList | None]:
        """Views of each key's part of the values, in its shape; these bound to a kernel that reads them, or None."""
        return self._parts_of(self.value)

    @lazy
    def slots(self) -> tuple[tuple[tuple[Array, ...], BoundList | None], ...]:
        """Views of each key's part of each send buffer; these bound to a kernel that writes them, or None."""
        return tuple(map(self._parts_of, self.sends))

    def _parts_of(self, message: Array) -> tuple[tuple[Array, ...], BoundList | None]:
        """Return views of each key's part of a message, in its shape; and these bound to kernels, or None. Local."""
        pairs = zip(self.pieces, self.shapes, strict=True)
        parts = tuple(message[piece.low : piece.high].reshape(shape) for piece, shape in pairs)
        return parts, self._planner.kernels.bind_list(parts)


class Plan:
    """Everything that a call on a list of keys needs, except its arrays. Once prepared it does not change."""

    # Set by prepare() and not lazy, as every call asks: CPython 3.11 takes twice as long for a lazy attribute.

    parted: bool
    """Whether a call moves several buckets."""
    cut: bool
    """Whether a key is spread over several buckets."""
    prefetches: Bucket | None
    """The first message, if it is packed before ranks agree, to work while others are late."""
    single_copy: bool
    """Whether other ranks may read a caller's array where it lies, until the next fence."""
    streams: bool
    """Whether a pushpull publishes each message at once when it is updated, while the host has it in the cache."""
    schedule: tuple[tuple[Bucket | None, Bucket | None], ...]
    """As :func:`turns` returns it."""
    bound_values: BoundList | None
    """The values, bound to kernels that compare arrays with them; None where none do."""

    def __init__(self, planner: Planner, entries: Sequence[Entry]) -> None:
        """Allocate nothing; the buckets are cut on first use. Local."""
        self.planner, self.entries = planner, tuple(entries)
        self.keys = tuple(entry.key for entry in entries)
        self.shapes, self.dtypes = [entry.shape for entry in entries], [entry.dtype for entry in entries]
        self.rows = _index_rows([entry.index for entry in entries])
        """The keys' rows in the table: a number, a slice or an array, as indexing by these is fast in this order."""
        self.digest = digest("\n".join(describe(self.keys, self.shapes, self.dtypes)))
        self.label = label(self.keys)
        self.raw = planner.transport.memory.is_host and not planner.compressed
        """Whether arrays are pushed as they are: from the host, not compressed."""
        self.row_sparse = tuple(entry for entry in entries if entry.row_sparse)
        self.values = [entry.value for entry in entries]
        """This rank's memory of each value, in its shape."""
        self.calls = dict[str, Call]()
        """The calls that update nothing, by their verbs."""
        self.update_calls = dict[tuple[str, Contribution], UpdateCall]()
        self.ready = False
        """Whether :meth:`prepare` has set the attributes above."""

    def prepare(self) -> None:
        """Cut the keys into buckets, allocate sums of whole values, set attributes, once; before ranks agree. Local.

        Raises:
            MemoryError: there is too little for the sums.
        """
        if self.ready:
            return
        planner, buckets, _ = self.planner, self.buckets, self.totals
        direct, pieces = [bucket.direct for bucket in buckets], sum(len(bucket.pieces) for bucket in buckets)
        is_long = sum(bucket.value.nbytes for bucket in buckets) >= _STREAMED_BYTES
        ahead = planner.ahead if self.overlaps or len(buckets) == 1 else 0
        # The placement, the updater and the compression answer here, so that a push asks none of them.
        self.parted = len(buckets) > 1
        self.cut = pieces > sum(entry.place.size > 0 for entry in self.entries)
        # Not on a GPU, where packing is queued in the order of calls; nor with compression, as packing changes
        # residuals; nor what may be sent from where it lies.
        self.prefetches = buckets[0] if self.raw and buckets and not direct[0] else None
        self.single_copy = planner.transport.single_copy and not planner.compressed and any(direct)
        self.streams = not (planner.whole or planner.compressed) and (is_long or not planner.transport.memory.is_host)
        self.schedule = turns(buckets, min(ahead, len(buckets)))
        self.bound_values = planner.kernels.bind_list(self.values)
        self.ready = True

    # The rest is lazy: calls of rows need no buckets, and a large value has many.

    def prepare_updates(self) -> None:
        """Make, once, the buckets' updates for keys with different steps; MemoryError may come on this rank alone.
        Local.
        """
        for bucket in self.buckets:
            _ = bucket.updates

    @lazy
    def buckets(self) -> tuple[Bucket, ...]:
        """The messages of the keys, cut at first use; this may allocate sums."""
        return tuple(self.planner.buckets(self.entries))

    @lazy
    def totals(self) -> tuple[Array | None, ...]:
        """Memory for each key's sum, if the updater takes whole values, allocated at first use; None for other ranks'
        keys. Else None for every key.
        """
        if not self.planner.whole:
            return (None,) * len(self.entries)
        return tuple(self.planner.memory_for_total(entry) for entry in self.entries)

    @lazy
    def overlaps(self) -> bool:
        """Whether calls send a message between GPUs or hosts while they update the one before; alike on all ranks."""
        return len(self.buckets) > 1 and all(map(self.planner.may_overlap, self.buckets))

    @lazy
    def update_whole(self) -> Callable[[Sequence[Any]], None] | None:
        """A function that updates this rank's whole values, by a step for each, in few GPU launches. None on a host,
        for elementwise updaters and Python functions, and where it saves nothing.
        """
        planner = self.planner
        if not planner.whole or planner.updater.may_raise or not isinstance(planner.kernels, GpuKernels):
            return None
        pairs = zip(self.entries, self.totals, strict=True)
        wholes = [Whole(total, entry.value, entry.state) for entry, total in pairs if total is not None]
        return planner.kernels.bind_whole(planner.updater, wholes)

    @lazy
    def views(self) -> list[Array]:
        """Views of the values, each in its shape: read-only on the host, writable on a GPU."""
        return [entry.view for entry in self.entries]


class Plans:
    """The plans of a store: all those of single keys, and those of lists, up to a number of keys.

    A full cache is emptied, so that no call pays for the order of use: a list that is used again gets a new plan.
    """

    def __init__(self) -> None:
        self.single: dict[Key, Plan] = {}
        self.lists: dict[tuple[Key, ...], Plan] = {}
        self._held = 0

    def add(self, plan: Plan, key_count: int) -> None:
        """Keep a plan; first forget all plans of lists if they would have more keys than a limit. Local.

        The limit is 4 x ``key_count``, and 65,536 at least. Plans of one key do not count.
        """
        if len(plan.keys) == 1:
            self.single[plan.keys[0]] = plan
            return
        if self._held + len(plan.keys) > max(_TIMES * key_count, _MOST_KEYS):
            self.lists, self._held = {}, 0
        self.lists[plan.keys] = plan
        self._held += len(plan.keys)

    def clear(self) -> None:
        """Forget all plans. Local."""
        self.single.clear()
        self.lists, self._held = {}, 0


def turns(messages: tuple[Message, ...], ahead: int) -> tuple[tuple[Message | None, Message | None], ...]:
    """Return pairs, one per turn of a push: the message to reduce, then the message to update. Local.

    ``ahead``: how many messages are reduced, and in flight, before the first is updated.

    >>> turns(("a", "b", "c"), 1)
    (('a', None), ('b', 'a'), ('c', 'b'), (None, 'c'))
    """
    none = (None,) * ahead
    return tuple(zip(messages + none, none + messages, strict=True))


def digest(text: str) -> int:
    """Return a hash of a text, a number in [0, 2**62 - 2) and the same in every process. Local."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % ((1 << 62) - 2)


def describe(keys: Sequence[Key], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]]) -> list[str]:
    """Return a text for each key, for ranks to compare: the key, its dtype and its shape. Local."""
    # A text for each kind: thousands of keys have few shapes, and formatting takes longer than all else here.
    texts = {
        (shape, dtype): f" {name_of(dtype)}{list(shape)}" for shape, dtype in set(zip(shapes, dtypes, strict=True))
    }
    return [f"{key!r}{texts[kind]}" for key, kind in zip(keys, zip(shapes, dtypes, strict=True), strict=True)]


def _index_rows(rows: Sequence[int]) -> Any:
    """Return row numbers in the form that indexes fastest: a number, a slice or an array. Local."""
    if len(rows) == 1:
        return rows[0]
    if rows and list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return np.array(rows, np.intp)


def label(keys: Sequence[Key]) -> str:
    """Return a short text of a call's keys, for errors and logs. Local."""
    if len(keys) == 1:
        return repr(keys[0])
    if len(keys) <= 3:
        return repr(list(keys))
    return f"[{keys[0]!r}, … {len(keys)} keys … {keys[-1]!r}]"


def by_block(entries: Sequence[Entry]) -> dict[Block, list[int]]:
    """Return for each block the positions of its entries, in the order of their memory. Local."""
    blocks: dict[Block, list[int]] = {}
    for item, entry in enumerate(entries):
        blocks.setdefault(entry.place.block, []).append(item)
    for items in blocks.values():
        # By memory, not by the call: neighbours in memory become one range.
        items.sort(key=lambda item: entries[item].place.start)
    return blocks


def _cells(block: Block, items: Sequence[int], entries: Sequence[Entry]) -> Iterator[tuple[int, list[Range]]]:
    """Cut keys, sorted by memory, at a block's cells; yield (first element, ranges counted from it) per cell. Local."""
    ranges: list[Range] = []
    start = stop = 0
    for item in items:
        place = entries[item].place
        for low, high in block.grid.cut(place.start, place.start + place.size):
            if low >= stop:
                if ranges:
                    yield start, ranges
                start, stop, ranges = low, block.grid.cell(low)[1], []
            ranges.append(Range(item, low - place.start, high - place.start, low - start, high - start))
    if ranges:
        yield start, ranges


def join_ranges(ranges: Sequence[Range], line: int = 1) -> list[Range]:
    """Return ranges joined where at most padding to ``line`` lies between them. A joined one has the ``item``,
    ``begin`` and ``end`` of its first. Local.
    """
    runs: list[Range] = []
    for each in ranges:
        if runs and rounded(runs[-1].high, line) == each.low:
            runs[-1] = runs[-1]._replace(high=each.high)
        else:
            runs.append(each)
    return runs


@dataclass(frozen=True, eq=False)
class Planner:
    """Makes plans for a placement, an updater and a compression."""

    transport: Transport
    placement: Placement
    updater: Updater
    kernels: Kernels
    scratch: Array
    """Memory (uint8) for the sum of one bucket. Updaters of whole values have their sums in :attr:`Plan.totals`."""
    in_pairs: bool = False
    """Whether sums are made as in :func:`mpikv.arrays.arrays.add_in_pairs`."""
    compressed: bool = False
    team: Team | None = None
    """Threads that copy, add and update; None for the caller's alone."""

    @lazy
    def whole(self) -> bool:
        """Whether values are updated key by key instead of bucket by bucket."""
        return self.updater.may_raise or not self.updater.elementwise

    @lazy
    def adds(self) -> bool:
        """Whether this rank adds up sums itself (ranks share memory, or it is alone), not the transport's library."""
        return self.transport.sharing_size > 1 or (self.transport.size == 1 and self.transport.memory.is_host)

    @lazy
    def adding(self) -> bool:
        """Whether kernels may make the last addition of a sum: the addends are here, and added from left to right."""
        here = self.transport.sharing_size > 1 and not self.compressed
        return here and (self.transport.size == 2 or not self.in_pairs)

    @lazy
    def current(self) -> bool:
        """Whether a push leaves every rank with the newest values."""
        return self.transport.shared or self.placement.everywhere or self.transport.size == 1

    def may_overlap(self, bucket: Bucket) -> bool:
        """Return whether the message after this bucket may be summed while this bucket is updated. Local.

        On the host both are in memory of the transport, between GPUs each in a half of the scratch.
        """
        nbytes = max(bucket.shard.counts) * accumulator(bucket.value.dtype).itemsize
        return self.ahead > 0 and (self.transport.memory.is_host or nbytes <= self._half)

    @lazy
    def ahead(self) -> int:
        """How many messages are summed before the first is updated; 0 unless transfers go on beside updates."""
        if self.transport.size == 1 or self.in_pairs or self.compressed or self.whole:
            return 0
        # A GPU's library adds: an update then reads the sum alone, never the messages.
        if not self.transport.memory.is_host:
            return 1
        transport = self.transport
        return transport.ahead if isinstance(transport, Transfers) and not self.placement.everywhere else 0

    @lazy
    def _half(self) -> int:
        """The bytes of half of the scratch memory."""
        return self.scratch.size // 2 // LINE_BYTES * LINE_BYTES

    @lazy
    def gpu_kernels(self) -> GpuKernels | None:
        """The kernels that update several keys in one launch though their steps differ; None without such."""
        there = not self.transport.memory.is_host and is_recordable(self.updater)
        return self.kernels if there and isinstance(self.kernels, GpuKernels) else None

    def kept(self, block: Block) -> Spans:
        """Return the elements whose state this rank keeps: all; on a GPU its own, unless ``block.by_rows``. Local."""
        # The host takes pages only when they are written: state of elements of other ranks costs nothing there.
        all_of_them = block.memory.is_host or block.by_rows
        return Spans.join([(0, block.values.size)]) if all_of_them else self.owned(block)

    def owned(self, block: Block) -> Spans:
        """Return the elements of a block that this rank owns. Local."""
        return block.grid.owned(self.placement, 0, block.grid.size)

    def memory_for_total(self, entry: Entry) -> Array | None:
        """Return memory, of undefined content, for a value's sum; None if another rank owns it. May allocate. Local."""
        block, low = entry.place.block, entry.place.start
        # One element, not all: an empty value belongs to the owner of its place.
        shard = block.grid.shard(self.placement, low, low + 1)
        # This rank owns no element there, so it gets no sum, and no memory for one.
        if shard.low == shard.high:
            return None
        total: Array = block.sums_of(low, low + entry.place.size).reshape(entry.shape)
        return total

    def buckets(self, entries: Sequence[Entry]) -> Iterator[Bucket]:
        """Yield the keys' messages, one a cell; may allocate sums; ConfigError if state misfits the updater. Local."""
        numbers = count()
        for block, items in by_block(entries).items():
            if not self.updater.assigns:
                check_state(self.updater, block.values.dtype, block.state)
            for start, pieces in _cells(block, items, entries):
                yield Bucket(self, entries, block, start, pieces, next(numbers) % 2)

    def find_total(self, bucket: Bucket, half: int) -> Array:
        """Return memory for this rank's part of a bucket's sum: of the block's sums (may allocate them), the value
        itself, or scratch. Local.
        """
        block, shard = bucket.block, bucket.shard
        own = slice(bucket.start + shard.low, bucket.start + shard.high)
        dtype = accumulator(block.values.dtype)
        if self.whole:
            # Without elements of its own, this rank needs no memory for sums: sums_of would allocate it.
            return block.sums_of(own.start, own.stop) if shard.high > shard.low else self.scratch[:0].view(dtype)
        # ASSIGN: the sum is the new value, and can be made in its place. Not with gaps, where a library that adds would
        # overwrite the keys between.
        if self.updater.assigns and dtype == block.values.dtype and (bucket.gapless or self.adds):
            return block.values[own]
        nbytes = (shard.high - shard.low) * dtype.itemsize
        # Between GPUs one message is summed while the one before is updated: they take turns in two halves.
        low = 0 if self.transport.memory.is_host or nbytes > self._half else half * self._half
        return self.scratch[low : low + nbytes].view(dtype)

    def cut_updates(self, bucket: Bucket, ranges: Sequence[Range]) -> Iterator[Update]:
        """Cut this rank's elements of the ranges into pieces, short on the host; yield bound Updates. Local."""
        block, shard, total = bucket.block, bucket.shard, bucket.total
        # Where this rank adds, block by block, one short memory for sums stays in the cache.
        again = self.adds and not np.may_share_memory(total, block.values)
        # On a GPU there is no cache to stay in, and each update is a launch.
        bounds = self._bounds_of_lanes(block, shard)
        most = (LANE_BLOCK if len(bounds) > 2 else BLOCK) if block.memory.is_host else block.values.size
        # In pieces that stay in the cache from the addition to the update.
        lanes = enumerate(pairwise(bounds))
        for (lane, (begin, end)), (item, low, high) in product(lanes, list(_owned(ranges, shard))):
            for first in range(max(low, begin), min(high, end), most):
                last = min(first + most, high, end)
                where = slice(bucket.start + shard.low + first, bucket.start + shard.low + last)
                place = begin if again and not self.whole else first
                part_total = total[place : place + last - first]
                value, state = block.values[where], block.state_of(where.start, where.stop)
                both = self.kernels.bind_adding(self.updater, value, state) if self.adding and not self.whole else None
                with self.updater.in_lane(lane, most) if isinstance(self.updater, Optimizer) else nullcontext():
                    run = None if self.whole or both else self.kernels.bind(self.updater, part_total, value, state)
                yield Update(item, first, last, part_total, value, state, run, both, lane=lane)

    def _bounds_of_lanes(self, block: Block, shard: Shard) -> list[int]:
        """Return where each thread's part of this rank's elements begins, and where the last one ends. Local."""
        size, count = shard.high - shard.low, 1
        # A user's own rule may do more than compute elements, and mind the order of blocks.
        ours = type(self.updater).__module__.startswith("mpikv.") and not self.whole
        if self.team is not None and ours and size * block.values.itemsize >= SHARED_OUT:
            count = self.team.size
        # Two threads must not write to one line of the cache.
        return [*(rounded(size * lane // count, block.grid.line) for lane in range(count)), size]

    def join_updates(self, kernels: GpuKernels, bucket: Bucket) -> Iterator[Update]:
        """Yield a bucket's joint updates, each bound to one launch that takes a step for each of its keys. Local."""
        mine = list(_owned(bucket.pieces, bucket.shard))
        for update in bucket.joint_updates:
            inside = [(item, high - update.low) for item, low, high in mine if update.low <= low < high <= update.high]
            items, ends = zip(*inside, strict=True)
            run = kernels.bind_ranges(self.updater, update.total, update.value, update.state, ends)
            yield replace(update, items=items, run=run)


def _owned(ranges: Sequence[Range], shard: Shard) -> Iterator[tuple[int, int, int]]:
    """Yield (item, low, high) for each range: its item, its part of this rank's shard, none if low >= high. Local."""
    for each in ranges:
        yield each.item, max(each.low, shard.low) - shard.low, min(each.high, shard.high) - shard.low


def _shape_of(piece: Range, entry: Entry) -> tuple[int, ...]:
    """Return the shape of a piece: the key's if it is all of the value, else flat. Local."""
    size = piece.end - piece.begin
    return entry.shape if size == entry.place.size else (size,)


def _items_slice(pieces: Sequence[Range], entries: Sequence[Entry]) -> slice | None:
    """Return the keys' positions in the call as a slice, if they are whole and follow one another; else None. Local."""
    # Then the arrays of the call are a slice, and need no loop.
    first = pieces[0].item
    for number, piece in enumerate(pieces):
        if piece.item != first + number or piece.high - piece.low < entries[piece.item].place.size:
            return None
    return slice(first, first + len(pieces))
