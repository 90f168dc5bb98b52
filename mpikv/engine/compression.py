"""A push whose gradients travel packed: who is sent what, and the sums that come of it.

A codec of ranges packs a bucket in pieces, one for each owner, which are passed from all ranks to all; an owner unpacks
and adds up what it owns, in rank order. A codec of values exchanges what it asks for, value by value, before the
buckets are updated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from ..arrays.arrays import add, add_in_pairs, local_sum
from ..errors import NotFinite, Unsupported, ValueMismatch
from ..memory.host import HOST, private
from ..protocols import Array, Codec, ElementwiseCodec, Gather, Memory, Rounds, Sum, TensorCodec, Transport
from ..protocols.codec import LARGEST
from .alltoallv import gather
from .arena import Block
from .grid import rounded
from .keys import Entry
from .plan import Bucket, Plan
from .spans import Spans

__all__ = [
    "Compression",
    "Layers",
    "RangeCompression",
    "ValueCompression",
    "check",
    "check_payloads",
    "compress",
    "ensure_residuals",
    "restoring",
]

Layers: TypeAlias = "Sequence[Sequence[Array]]"
"""What this rank pushes: for each position in the lists of arrays, the flat array of each key. None at all where the
rank brings nothing."""

_DTYPES = ("float16", "bfloat16", "float32")
# A part of a message begins with a byte that says whether a payload follows, and whether another message will come for
# the same elements. The rest of its 8 bytes keeps payloads aligned. On GPUs nothing is said there.
_HEADER = 8
_PRESENT, _MORE = 1, 2
# Ranges are cut at multiples of this many elements, which fill whole words of any payload.
_GRAIN = 64


class Compression(Protocol):
    """Sums what is pushed by a codec."""

    @property
    def codec(self) -> Codec:
        """What packs."""
        ...

    @property
    def by_bucket(self) -> bool:
        """Whether each bucket is exchanged when it is summed; else all of the push is when it begins."""
        ...

    def start(self, plan: Plan, layers: Layers) -> Callable[[Bucket], Array]:
        """Begin a push. Returns what sums a bucket over ranks; it is called for each bucket in order.

        The function returns this rank's elements of the bucket, of which only those of the plan's keys are set, and
        which may be read until it is called again. Collective, like the function.
        """
        ...


def compress(codec: Codec, transport: Transport, in_pairs: bool) -> Compression:
    """Return what sums by the codec. ``in_pairs`` says in which order plain arrays are added up. Collective on GPUs.

    Raises:
        MemoryError: on every rank, if the GPU of one has too little.
    """
    if codec.elementwise:
        return RangeCompression(codec, transport)
    return ValueCompression(codec, transport, in_pairs)


def check_payloads(codec: Codec, transport: Transport) -> None:
    """Raise if a message cannot hold the smallest part of a gradient that is packed by itself. Local.

    Raises:
        Unsupported: it cannot.
    """
    if not codec.elementwise:
        return
    # Each rank may own some of a message.
    room = transport.limit - _HEADER * transport.size
    needed = max(codec.nbytes(count) for count in range(1, _GRAIN + 1))
    if rounded(needed, _HEADER) > room:
        raise Unsupported(
            f"{_GRAIN} elements packed by {codec.settings()} take {needed} bytes, and a message of "
            f"{transport.limit} has room for {room} with {transport.size} ranks; create the store with larger "
            "bucket_bytes"
        )


def check(codec: Codec, plan: Plan, groups: Sequence[Sequence[Array]], memory: Memory) -> None:
    """Raise if this rank's arrays cannot be compressed; make room for what is left out of them. Local. It waits for
    arrays of a GPU.

    Raises:
        MemoryError: there is no room.
        Unsupported: a value is not of half or single precision.
        ValueMismatch: the keys bring lists of different lengths.
        NotFinite: an element is NaN, infinite or too large.
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
    arrays = [array for group in groups for array in group]
    exceeding = memory.exceeding(arrays, LARGEST)
    if True in exceeding:
        owners = [entry for entry, group in zip(plan.entries, groups, strict=True) for _ in group]
        first = exceeding.index(True)
        _refuse(owners[first], memory.to_host(arrays[first]))
    for block in dict.fromkeys(entry.place.block for entry in plan.entries):
        ensure_residuals(codec, block, lengths[-1] if lengths else 1)
        if not codec.elementwise:
            block.ensure_sums()


def ensure_residuals(codec: Codec, block: Block, positions: int) -> None:
    """Have what a codec keeps of pushes of lists of this length: where it does its work. Local."""
    if not codec.feedback:
        return
    if codec.elementwise:
        block.ensure_residuals(positions, block.memory.zeros)
    else:  # lists are added up first
        block.ensure_residuals(1, HOST.zeros)


def _refuse(entry: Entry, array: Array) -> NoReturn:
    """Raise what an array that is no gradient is refused by."""
    # What is above the bound in half precision is infinite there, as the bound would be.
    values = array.astype(np.float32) if array.dtype.itemsize == 2 else array
    nans, infinite = np.count_nonzero(np.isnan(values)), np.count_nonzero(np.isinf(values))
    large = np.count_nonzero(np.abs(values) > LARGEST) - infinite
    raise NotFinite(
        f"the value of key {entry.key!r} has {nans} NaN, {infinite} infinite and {large} elements above {LARGEST:.2g} "
        "in size; a residual would keep them forever, so nothing was sent; skip this step, or push it while "
        "set_gradient_compression(None)"
    )


def restoring(plan: Plan, confirm: Callable[[BaseException | None], None]) -> Callable[[BaseException | None], None]:
    """Return ``confirm``, which in addition brings residuals back to what they are now where it raises."""
    arrays = [array for entry in plan.entries for array in (*entry.residuals(), *entry.codec_state.values())]
    kept = [(array, array.copy()) for array in arrays]
    stateless = [entry for entry in plan.entries if not entry.codec_state]

    def confirm_or_restore(failure: BaseException | None) -> None:
        try:
            confirm(failure)
        except BaseException:
            for array, before in kept:
                np.copyto(array, before)
            for entry in stateless:
                entry.codec_state.clear()
            raise

    return confirm_or_restore


@dataclass(frozen=True)
class _Range:
    """Elements of a bucket that are packed by themselves: ``[low, high)``."""

    low: int
    high: int
    at: int
    """Where the payload begins, in bytes of the message; or of the part, where it is this rank's."""
    nbytes: int


@dataclass(frozen=True, eq=False)
class _Message:
    """What one exchange carries of a bucket, which every rank works out alike."""

    ranges: Sequence[_Range]
    headers: Sequence[int]
    """Where the part of each owner begins."""
    counts: tuple[int, ...] | None
    """The bytes of each rank's part; None where every rank owns everything."""
    nbytes: int
    own: Sequence[_Range]
    """This rank's."""


class RangeCompression:
    """Sums by a codec of ranges. Each array of a list is packed by itself, with a residual of its own."""

    by_bucket = True

    def __init__(self, codec: ElementwiseCodec, transport: Transport) -> None:
        self.codec, self._transport, self._memory = codec, transport, transport.memory
        # A bucket of halves is twice as large in float32.
        zeros = private(transport)
        self._gradient = zeros(2 * transport.limit).view(np.float32)
        self._total = zeros(2 * transport.limit).view(np.float32)
        self._messages_of = WeakKeyDictionary[Plan, dict[Bucket, Sequence[_Message]]]()
        if not self._memory.is_host:
            # The first exchange may take memory, too, and makes the ways: here nothing is lost if it fails.
            transport.all_to_all(transport.send_buffers[transport.slot][:_HEADER], None)

    def start(self, plan: Plan, layers: Layers) -> Callable[[Bucket], Array]:
        messages = self._messages_of.get(plan)
        if messages is None:
            messages = {bucket: self._messages(bucket) for bucket in plan.buckets}
            self._messages_of[plan] = messages
        # Whoever reads a message of a GPU waits for it, so that there ranks are told beforehand.
        told = None
        if not self._memory.is_host:
            told = gather(self._transport.control, np.array([len(layers)])).reshape(-1).tolist()
        return lambda bucket: self._sum(plan, bucket, messages[bucket], layers, told)

    def _sum(
        self,
        plan: Plan,
        bucket: Bucket,
        messages: Sequence[_Message],
        layers: Layers,
        told: Sequence[int] | None,
    ) -> Array:
        """Exchange the arrays of one position after the other, until no rank has more."""
        share = bucket.shard
        total = self._total[: share.high - share.low]
        total.fill(0)
        block, start = _origin(plan, bucket)
        position, more = 0, True
        while more:
            gradient = self._packed(bucket, layers[position]) if position < len(layers) else None
            residual: Array | None = None
            if gradient is not None and self.codec.feedback:
                residual = block.residuals[position][start : start + bucket.value.size]
            more, mine = False, _said(position, len(layers))
            for message in messages:
                self._write(message, gradient, residual, mine)
                send = self._transport.send_buffers[self._transport.slot][: message.nbytes]
                for rank, part in enumerate(self._transport.all_to_all(send, message.counts)):
                    said = part[0] if told is None else _said(position, told[rank])
                    more |= bool(said & _MORE)
                    if said & _PRESENT:
                        for each in message.own:
                            payload = part[each.at : each.at + each.nbytes]
                            self.codec.decode_add(payload, total[each.low - share.low : each.high - share.low])
            position += 1
        return total

    def _packed(self, bucket: Bucket, arrays: Sequence[Array]) -> Array:
        """Return the elements of a bucket in float32, side by side; what is not in the call is undefined."""
        if len(bucket.pieces) == 1:
            piece = bucket.pieces[0]
            array = arrays[piece.item]
            usual = array.dtype == np.float32 and array.flags.c_contiguous
            if usual and (not self._memory.is_host or array.flags.aligned):
                return array[piece.begin : piece.end]
        gradient = self._gradient[: bucket.value.size]
        if not self._memory.is_host:
            # Between keys there: a codec whose scale is that of a whole range would see what was in it before.
            gradient.fill(0)
        self._memory.copy(
            [gradient[piece.low : piece.high] for piece in bucket.pieces],
            [arrays[piece.item][piece.begin : piece.end] for piece in bucket.pieces],
        )
        return gradient

    def _write(self, message: _Message, gradient: Array | None, residual: Array | None, said: int) -> None:
        """Pack what the gradient has of a message into the send buffer."""
        send = self._transport.send_buffers[self._transport.slot]
        for at in message.headers if self._memory.is_host else ():
            send[at] = said
        if gradient is None:
            return
        for each in message.ranges:
            left = None if residual is None else residual[each.low : each.high]
            self.codec.encode(gradient[each.low : each.high], send[each.at : each.at + each.nbytes], left)

    def _messages(self, bucket: Bucket) -> list[_Message]:
        """Cut a bucket into ranges that are packed by themselves, and these into messages that the transport takes."""
        replicated = sum(bucket.shard.counts) > bucket.value.size
        runs = Spans.join((run.low, run.high) for run in bucket.runs)
        shares = _shares_of(bucket)[:1] if replicated else _shares_of(bucket)
        open_ranges = [list(runs.within(low, high)) for low, high in shares]
        own = 0 if replicated else self._transport.rank
        messages: list[_Message] = []
        while any(open_ranges) or not messages:
            messages.append(self._message(open_ranges, own, replicated))
        return messages

    def _message(self, open_ranges: list[list[tuple[int, int]]], own: int, replicated: bool) -> _Message:
        """Take as much as one message holds from the ranges of each owner."""
        room = self._transport.limit - _HEADER * len(open_ranges)
        ranges: list[list[_Range]] = []
        headers, at = [], 0
        for waiting in open_ranges:
            headers.append(at)
            at += _HEADER
            ranges.append([])
            while waiting:
                low, high = waiting[0]
                count = self._fitting(high - low, room)
                if count == 0:
                    break
                nbytes = self.codec.nbytes(count)
                ranges[-1].append(_Range(low, low + count, at, nbytes))
                length = rounded(nbytes, _HEADER)
                at, room = at + length, room - length
                waiting[:1] = [(low + count, high)] if low + count < high else []
        begin = headers[own]
        return _Message(
            ranges=tuple(each for part in ranges for each in part),
            headers=tuple(headers),
            counts=None if replicated else tuple(high - low for low, high in pairwise([*headers, at])),
            nbytes=at,
            own=tuple(_Range(each.low, each.high, each.at - begin, each.nbytes) for each in ranges[own]),
        )

    def _fitting(self, count: int, room: int) -> int:
        """Return how many elements fit, of so many: all, or about half, and so on. Some fit an empty message."""
        while count and rounded(self.codec.nbytes(count), _HEADER) > room:
            count = max(count // 2 // _GRAIN * _GRAIN, _GRAIN) if count > _GRAIN else 0
        return count


class _Held(NamedTuple):
    """Where a value lives."""

    owners: Sequence[int]
    own: Sequence[tuple[int, int]]
    """Which elements this rank owns."""


class ValueCompression:
    """Sums by a codec of whole values. A list of arrays is summed on its rank first.

    The codec does its work on the host, and the host's transport carries what it sends. Of a GPU's arrays the sum of
    each list is copied here, which is waited for, and what this rank owns of the sum over ranks is copied there.
    """

    by_bucket = False

    def __init__(self, codec: TensorCodec, transport: Transport, in_pairs: bool) -> None:
        self.codec, self._transport, self._memory = codec, transport.control, transport.memory
        self._add, self._in_pairs = add_in_pairs if in_pairs else add, in_pairs
        self._held_of = WeakKeyDictionary[Plan, Sequence[_Held]]()

    def start(self, plan: Plan, layers: Layers) -> Callable[[Bucket], Array]:
        held = self._held_of.get(plan)
        if held is None:
            held = self._held_of[plan] = _held(plan, self._transport.rank)
        for item, (owners, own) in enumerate(held):
            entry, place = plan.entries[item], plan.entries[item].place
            if place.size:
                rounds = self._rounds(entry, [layer[item] for layer in layers])
                summed = self._run(rounds, owners[0] if len(owners) == 1 else None)
                self._memory.copy(
                    [place.block.sums_of(place.start + low, place.start + high) for low, high in own],
                    [summed[low:high] for low, high in own],
                )

        def total(bucket: Bucket) -> Array:
            block, start = _origin(plan, bucket)
            return block.sums_of(start + bucket.shard.low, start + bucket.shard.high)

        return total

    def _rounds(self, entry: Entry, arrays: Sequence[Array]) -> Rounds:
        """Return the exchange of a value; a rank that brings nothing takes part with zeros, and keeps its residual."""
        place = entry.place
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
        """Make the exchanges that a codec asks for; return the sum."""
        answer: Any = None
        while True:
            try:
                asked = rounds.send(answer)
            except StopIteration as done:
                total: Array = done.value[0]
                return total
            answer = self._summed(asked.array) if isinstance(asked, Sum) else self._gathered(asked, owner)

    def _summed(self, array: Array) -> Array:
        """Return the sum of the ranks' arrays."""
        total = np.empty_like(array)
        step = self._transport.limit // array.itemsize
        for low in range(0, array.size, step):
            send, recv = array[low : low + step], total[low : low + step]
            terms = self._transport.allreduce(send, recv)
            if terms[0] is not recv:
                self._add(terms, 0, recv.size, recv)
        if self._transport.single_copy:
            self._transport.fence()  # the codec may change what it has given
        return total

    def _gathered(self, asked: Gather, owner: int | None) -> Sequence[Array]:
        """Return the ranks' payloads; where one rank owns all, to that alone."""
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


def _said(position: int, length: int) -> int:
    """Return what a rank whose lists have this length says at a position."""
    return (position < length) * _PRESENT + (position + 1 < length) * _MORE


def _origin(plan: Plan, bucket: Bucket) -> tuple[Block, int]:
    """Return the block of a bucket, and where in it the bucket begins."""
    piece = bucket.pieces[0]
    place = plan.entries[piece.item].place
    return place.block, place.start + piece.begin - piece.low


def _shares_of(bucket: Bucket) -> list[tuple[int, int]]:
    """Return the elements of a bucket that each rank owns: all of them on every rank where values are replicated."""
    counts, size = bucket.shard.counts, bucket.value.size
    return [(0, size)] * len(counts) if sum(counts) > size else list(pairwise(accumulate(counts, initial=0)))


def _held(plan: Plan, mine: int) -> list[_Held]:
    """Work out where each value lives; ``mine`` is this rank."""
    owners: list[set[int]] = [set() for _ in plan.entries]
    own: list[list[tuple[int, int]]] = [[] for _ in plan.entries]
    for bucket in plan.buckets:
        shares = _shares_of(bucket)
        for piece in bucket.pieces:
            for rank, (low, high) in enumerate(shares):
                begin, end = max(low, piece.low), min(high, piece.high)
                if begin < end:
                    owners[piece.item].add(rank)
                    if rank == mine:
                        shift = piece.begin - piece.low
                        own[piece.item].append((begin + shift, end + shift))
    return [_Held(sorted(ranks), ranges) for ranks, ranges in zip(owners, own, strict=True)]
