"""Pushes of compressed gradients: the messages, and the sums at the owners.

An elementwise codec packs a bucket in pieces, one for each owner. An all-to-all carries them, and an owner unpacks and
adds up its elements in rank order. A codec of tensors asks for exchanges, value by value, before buckets are updated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, NoReturn, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from ..arrays.arrays import add, add_in_pairs, local_sum
from ..errors import NotFinite, Unsupported, ValueMismatch
from ..memory.host import HOST, private_allocator
from ..protocols import Array, Codec, ElementwiseCodec, Gather, Memory, Rounds, Sum, TensorCodec, Transport
from ..protocols.codec import LARGEST
from .alltoallv import gather
from .arena import Block
from .grid import rounded
from .keys import Entry
from .plan import Bucket, Plan
from .spans import Spans

Layers: TypeAlias = "Sequence[Sequence[Array]]"
"""The arrays that this rank pushes: for each position in the keys' lists, the flat array of each key. Empty where the
rank brings nothing."""

_DTYPES = ("float16", "bfloat16", "float32")
# A part of a message begins with a byte of two flags: a payload follows; another message will come for the same
# elements. The rest of its 8 bytes keeps payloads aligned. GPUs leave it undefined, as reading it would wait for them.
_HEADER = 8
_PRESENT, _MORE = 1, 2
# Ranges are cut at multiples of this many elements: they fill whole words of any payload.
_GRAIN = 64


def make_compression(codec: Codec, transport: Transport, in_pairs: bool) -> Compression:
    """Return the object that sums pushes by a codec, with its buffers allocated. Collective on GPUs, else local.

    With ``in_pairs`` it adds plain arrays as a binary tree.

    Raises:
        MemoryError: on every rank, if the GPU of one has too little.
    """
    return RangeCompression(codec, transport) if codec.elementwise else ValueCompression(codec, transport, in_pairs)


def check_payloads(codec: Codec, transport: Transport) -> None:
    """Raise Unsupported unless a message can hold the smallest range that is packed by itself. Local."""
    if not codec.elementwise:
        return
    # Each rank may own a part of a message, and each part has a header.
    room = transport.limit - _HEADER * transport.size
    needed = max(codec.nbytes(count) for count in range(1, _GRAIN + 1))
    if rounded(needed, _HEADER) > room:
        raise Unsupported(
            f"{_GRAIN} elements packed by {codec.settings()} take {needed} bytes, and a message of "
            f"{transport.limit} has room for {room} with {transport.size} ranks; create the store with larger "
            "bucket_bytes"
        )


def check_arrays(codec: Codec, plan: Plan, groups: Sequence[Sequence[Array]], memory: Memory) -> None:
    """Raise Unsupported, ValueMismatch or NotFinite for arrays that cannot be compressed; else allocate missing
    residuals and sums. Wait for a GPU. Local.

    Raises:
        MemoryError: there is no room.
        Unsupported: a value is not of half or single precision.
        ValueMismatch: the keys bring lists of different lengths.
        NotFinite: an element is NaN, infinite or too large. For this it waits for a GPU.
    """
    for entry in plan.entries:
        if entry.dtype.name not in _DTYPES:
            raise Unsupported(
                f"key {entry.key!r} has dtype {entry.dtype.name}, and compression {codec.settings()} is for "
                f"{', '.join(_DTYPES)}; store it as float32, or push it while set_gradient_compression(None)"
            )
    lengths = sorted(set(map(len, groups)))
    if len(lengths) > 1:
        raise ValueMismatch(
            f"the keys have lists of {' and '.join(map(str, lengths))} arrays; with compression, all lists of one "
            "call need the same length: push the others in another call"
        )
    # All arrays by one question: a GPU answers it by one launch and one copy.
    arrays = [array for group in groups for array in group]
    exceeding = memory.exceeding(arrays, LARGEST)
    if True in exceeding:
        owners = [entry for entry, group in zip(plan.entries, groups, strict=True) for _ in group]
        first = exceeding.index(True)
        _raise_not_finite(owners[first], memory.to_host(arrays[first]))
    for block in dict.fromkeys(entry.place.block for entry in plan.entries):
        ensure_residuals(codec, block, lengths[-1] if lengths else 1)
        if not codec.elementwise:
            block.ensure_sums()


def ensure_residuals(codec: Codec, block: Block, positions: int) -> None:
    """Allocate zeroed residuals that a block lacks for lists of ``positions`` arrays; none without feedback. Local."""
    # A codec of tensors works on the host, on the sum of a list.
    memory, needed = (block.memory, positions) if codec.elementwise else (HOST, 1)
    while codec.feedback and len(block.residuals) < needed:
        # Float32, however wide the values are: it is added to the gradient before the codec rounds.
        block.residuals.append(memory.zeros(4 * block.values.size).view(np.float32))


def _raise_not_finite(entry: Entry, array: Array) -> NoReturn:
    """Raise NotFinite about a host array, always: it says how many elements are NaN, infinite or too large. Local."""
    # Half precision cannot hold the bound: compared there, it would be infinite.
    values = array.astype(np.float32) if array.dtype.itemsize == 2 else array
    nans, infinite = np.count_nonzero(np.isnan(values)), np.count_nonzero(np.isinf(values))
    large = np.count_nonzero(np.abs(values) > LARGEST) - infinite
    raise NotFinite(
        f"the value of key {entry.key!r} has {nans} NaN, {infinite} infinite and {large} elements above {LARGEST:.2g} "
        "in size; a residual would keep them forever, so nothing was sent; skip this step, or push it while "
        "set_gradient_compression(None)"
    )


def restoring(plan: Plan, confirm: Callable[[BaseException | None], None]) -> Callable[[BaseException | None], None]:
    """Copy a plan's residuals and codec state; return ``confirm`` wrapped to put them back when it raises. Local."""
    arrays = [array for entry in plan.entries for array in (*entry.residuals(), *entry.codec_state.values())]
    kept = [(array, array.copy()) for array in arrays]
    # A push makes the state of a codec at its first use: after a failure the next one has to make it again.
    stateless = [entry for entry in plan.entries if not entry.codec_state]

    def confirm_or_restore(failure: BaseException | None) -> None:
        """Call the given ``confirm``; if it raises, put the copies back, and raise on. Collective."""
        try:
            confirm(failure)
        except BaseException:
            for array, before in kept:
                np.copyto(array, before)
            for entry in stateless:
                entry.codec_state.clear()
            raise

    return confirm_or_restore


class _Range(NamedTuple):
    """Elements packed by themselves."""

    elements: slice
    """Counted in the bucket; in :attr:`_Message.own`, counted in this rank's shard of it."""
    payload: slice
    """Its bytes, counted in the message; in :attr:`_Message.own`, counted in the part."""


@dataclass(frozen=True, eq=False)
class _Message:
    """The layout of one exchange of a bucket, the same on every rank."""

    ranges: Sequence[_Range]
    headers: Sequence[int]
    """The first byte of each owner's part."""
    counts: tuple[int, ...] | None
    """The bytes of each rank's part; None where every rank owns everything."""
    nbytes: int
    own: Sequence[_Range]
    """The ranges that this rank owns."""


class RangeCompression:
    """Sums by an elementwise codec. Each array of a list is packed by itself, with a residual of its own."""

    def __init__(self, codec: ElementwiseCodec, transport: Transport) -> None:
        """Allocate scratch memory for sums; on GPUs also exchange a first message. On GPUs collective, else local."""
        self.codec, self._transport, self._memory = codec, transport, transport.memory
        # A bucket of float16 is twice as large in float32.
        zeros = private_allocator(transport)
        self._gradient = zeros(2 * transport.limit).view(np.float32)
        self._total = zeros(2 * transport.limit).view(np.float32)
        # Weakly: the layouts of a bucket's messages last as long as the bucket does.
        self._messages_of = WeakKeyDictionary[Bucket, Sequence[_Message]]()
        if not self._memory.is_host:
            # The first exchange sets up NCCL's connections and may lack memory: here nothing is lost if it fails.
            transport.all_to_all(transport.send_buffers[transport.slot][:_HEADER], None)

    def start(self, plan: Plan, layers: Layers) -> Callable[[Bucket], Array]:
        """Return a collective function: it sums one bucket over ranks, and its result is valid until the next call. On
        GPUs first exchange list lengths.

        On GPUs collective, else local.

        The caller calls it for each bucket in order. It returns this rank's elements of the bucket; those of keys that
        are not in the plan are undefined.
        """
        # To read flags in a message the host would wait for the GPU, so there ranks exchange list lengths beforehand.
        list_lengths = None
        if not self._memory.is_host:
            list_lengths = gather(self._transport.control, np.array([len(layers)])).reshape(-1).tolist()
        return lambda bucket: self._sum(bucket, layers, list_lengths)

    def _sum(self, bucket: Bucket, layers: Layers, list_lengths: Sequence[int] | None) -> Array:
        """Exchange a bucket, packed; return this rank's part of its sum, valid until the next call. Change residuals.
        Collective.

        ``list_lengths`` has how many arrays each rank's lists have, where messages do not state it.
        """
        share, messages = bucket.shard, self._messages_of.get(bucket)
        if messages is None:
            messages = self._messages_of[bucket] = self._cut_messages(bucket)
        total = self._total[: share.high - share.low]
        total.fill(0)
        # The lists of other ranks may be longer: a rank with nothing more to send still takes part.
        position, more = 0, True
        while more:
            gradient = self._pack(bucket, layers[position]) if position < len(layers) else None
            residual: Array | None = None
            if gradient is not None and self.codec.feedback:
                residual = bucket.block.residuals[position][bucket.start : bucket.start + bucket.value.size]
            more, own_flags = False, _flags(position, len(layers))
            for message in messages:
                self._encode(message, gradient, residual, own_flags)
                send = self._transport.send_buffers[self._transport.slot][: message.nbytes]
                # In rank order, so that sums do not depend on who is first.
                for rank, part in enumerate(self._transport.all_to_all(send, message.counts)):
                    flags = part[0] if list_lengths is None else _flags(position, list_lengths[rank])
                    more |= bool(flags & _MORE)
                    if flags & _PRESENT:
                        for elements, payload in message.own:
                            self.codec.decode_add(part[payload], total[elements])
            position += 1
        return total

    def _pack(self, bucket: Bucket, arrays: Sequence[Array]) -> Array:
        """Return a bucket in float32: a view of a caller's array, or scratch, gaps undefined or, on GPUs, 0. Local."""
        if len(bucket.pieces) == 1:
            piece = bucket.pieces[0]
            array = arrays[piece.item]
            usual = array.dtype == np.float32 and array.flags.c_contiguous
            if usual and (not self._memory.is_host or array.flags.aligned):
                return array[piece.begin : piece.end]
        gradient = self._gradient[: bucket.value.size]
        if not self._memory.is_host:
            # There a run includes the padding between keys: leftovers in it would be packed, too.
            gradient.fill(0)
        self._memory.copy(
            [gradient[piece.low : piece.high] for piece in bucket.pieces],
            [arrays[piece.item][piece.begin : piece.end] for piece in bucket.pieces],
        )
        return gradient

    def _encode(self, message: _Message, gradient: Array | None, residual: Array | None, flags: int) -> None:
        """Write flags (on hosts) and any gradient, packed, to the send buffer; change the residual in place. Local."""
        send = self._transport.send_buffers[self._transport.slot]
        for at in message.headers if self._memory.is_host else ():
            send[at] = flags
        if gradient is None:
            return
        for elements, payload in message.ranges:
            self.codec.encode(gradient[elements], send[payload], None if residual is None else residual[elements])

    def _cut_messages(self, bucket: Bucket) -> list[_Message]:
        """Return the layouts of a bucket's messages, one at least; each has as many ranges as fit. Local."""
        counts, size = bucket.shard.counts, bucket.value.size
        replicated = sum(counts) > size
        shares = [(0, size)] if replicated else pairwise(accumulate(counts, initial=0))
        runs = Spans.join((run.low, run.high) for run in bucket.runs)
        open_ranges = [list(runs.within(low, high)) for low, high in shares]
        messages: list[_Message] = []
        while any(open_ranges) or not messages:
            messages.append(self._fill_message(open_ranges, bucket.shard.low, replicated))
        return messages

    def _fill_message(self, open_ranges: list[list[tuple[int, int]]], first: int, replicated: bool) -> _Message:
        """Remove from ``open_ranges`` as many ranges as fit one message; return that message's layout. Local.

        ``first``: this rank's first element of the bucket.
        """
        room = self._transport.limit - _HEADER * len(open_ranges)
        ranges, own = list[_Range](), list[_Range]()
        headers, at = list[int](), 0
        for owner, waiting in enumerate(open_ranges):
            headers.append(at)
            at += _HEADER
            while waiting:
                low, high = waiting[0]
                count = self._count_fitting(high - low, room)
                if count == 0:
                    break
                nbytes = self.codec.nbytes(count)
                ranges.append(_Range(slice(low, low + count), slice(at, at + nbytes)))
                if replicated or owner == self._transport.rank:
                    start = at - headers[-1]
                    own.append(_Range(slice(low - first, low + count - first), slice(start, start + nbytes)))
                length = rounded(nbytes, _HEADER)
                at, room = at + length, room - length
                waiting[:1] = [(low + count, high)] if low + count < high else []
        counts = None if replicated else tuple(end - begin for begin, end in pairwise([*headers, at]))
        return _Message(ranges, headers, counts, at, own)

    def _count_fitting(self, count: int, room: int) -> int:
        """Return how many of ``count`` elements, packed, fit in ``room`` bytes: all, half, a quarter … or 0. Local.

        At least one grain fits an empty message: :func:`check_payloads` has seen to that.
        """
        while count and rounded(self.codec.nbytes(count), _HEADER) > room:
            count = max(count // 2 // _GRAIN * _GRAIN, _GRAIN) if count > _GRAIN else 0
        return count


class ValueCompression:
    """Sums by a codec of tensors. A list of arrays is summed on its rank first.

    The codec works on the host, and the host's transport carries its messages. For values on a GPU, this rank copies
    the sum of each list to the host, waits for it, and copies its own elements of the sum over ranks back.
    """

    def __init__(self, codec: TensorCodec, transport: Transport, in_pairs: bool) -> None:
        """Allocate nothing. Local."""
        self.codec, self._transport, self._memory = codec, transport.control, transport.memory
        self._add, self._in_pairs = add_in_pairs if in_pairs else add, in_pairs

    def start(self, plan: Plan, layers: Layers) -> Callable[[Bucket], Array]:
        """Sum values over ranks into the blocks' sums, change residuals; return a getter of bucket sums. Collective."""
        for item, entry in enumerate(plan.entries):
            block, start, size = entry.place
            if size:
                place = plan.planner.placement, start, start + size
                owners = {rank for count, rank in block.grid.shares(*place) if count}
                rounds = self._make_rounds(entry, [layer[item] for layer in layers])
                summed = self._run(rounds, owners.pop() if len(owners) == 1 else None)
                own = block.grid.owned(*place)
                self._memory.copy(
                    [block.sums_of(low, high) for low, high in own],
                    [summed[low - start : high - start] for low, high in own],
                )

        def total(bucket: Bucket) -> Array:
            """Return this rank's elements of the sum of a bucket, made by :meth:`start`. Local."""
            return bucket.block.sums_of(bucket.start + bucket.shard.low, bucket.start + bucket.shard.high)

        return total

    def _make_rounds(self, entry: Entry, arrays: Sequence[Array]) -> Rounds:
        """Return the codec's generator of a value's exchanges, not begun; may make its state. Waits for GPUs. Local."""
        place = entry.place
        # A copy: a codec may change its gradient, and the caller's array must stay.
        gradient = np.zeros(place.size, np.float32)
        residual = np.zeros(place.size, np.float32) if self.codec.feedback else None
        if arrays:
            mine = self._memory.to_host(local_sum(arrays, entry.dtype, self._in_pairs))
            np.copyto(gradient, mine, casting="unsafe")
            if residual is not None:
                residual = entry.residuals()[0]
        if not entry.codec_state:
            entry.codec_state.update(self.codec.state(entry.shape))
        return self.codec.exchange(gradient, entry.shape, entry.codec_state, residual)

    def _run(self, rounds: Rounds, owner: int | None) -> Array:
        """Run a codec's generator to its end, and make the exchanges that it asks for; return the sum, as far as this
        rank receives it. Collective.
        """
        answer: Any = None
        while True:
            try:
                asked = rounds.send(answer)
            except StopIteration as done:
                total: Array = done.value[0]
                return total
            answer = self._sum_ranks(asked.array) if isinstance(asked, Sum) else self._gather(asked, owner)

    def _sum_ranks(self, array: Array) -> Array:
        """Return a new array: the sum of the ranks' arrays. Collective."""
        total = np.empty_like(array)
        # A codec knows no limit of messages.
        step = self._transport.limit // array.itemsize
        for low in range(0, array.size, step):
            send, recv = array[low : low + step], total[low : low + step]
            terms = self._transport.allreduce(send, recv)
            if terms[0] is not recv:
                self._add(terms, 0, recv.size, recv)
        if self._transport.single_copy:
            self._transport.fence()  # the codec may change its array, and other ranks may still read it until here
        return total

    def _gather(self, asked: Gather, owner: int | None) -> Sequence[Array]:
        """Return copies of the ranks' payloads; an empty list where another rank owns the value. Collective."""
        payload, transport = asked.payload, self._transport
        receives = owner is None or owner == transport.rank
        received = [np.empty_like(payload) for _ in range(transport.size if receives else 0)]
        for low in range(0, payload.size, transport.limit):
            send = payload[low : low + transport.limit]
            counts = None if owner is None else [send.size if rank == owner else 0 for rank in range(transport.size)]
            parts = transport.all_to_all(send, counts)
            for whole, part in zip(received, parts if receives else (), strict=True):
                whole[low : low + send.size] = part
        return received


Compression: TypeAlias = "RangeCompression | ValueCompression"
"""Sums pushed arrays by a codec."""


def _flags(position: int, length: int) -> int:
    """Return the flags for ``position`` in lists of ``length``: has an array; has more after it. Local."""
    return (position < length) * _PRESENT + (position + 1 < length) * _MORE
