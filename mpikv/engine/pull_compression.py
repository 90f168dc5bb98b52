"""Values that travel packed to the ranks that pull them.

An owner keeps the exact value, which it updates, beside what all ranks hold of it. What is sent is the difference of
the two, rounded; every rank adds it, the owner too, so that all hold the same bits. What rounding leaves out is part of
the next difference: so far the values that ranks hold are from the exact ones, and no further. Where a push replaces
values by sums there is nothing to be near to, and the sums themselves are sent. Where there is a number that a cast
cannot say, because it is too large or none, the exact values are sent as they are: of what is asked for alone, as
between the keys of a call lie others, with pushes that ranks have not seen yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np

from ..memory.host import private
from ..protocols import Array, ElementwiseCodec, Transport
from .plan import Bucket

__all__ = ["Cast", "PullCompression", "begin", "end"]

# The part of an owner begins at a multiple of so many bytes, for the codec's sake.
_ALIGNMENT = 8


class Cast(ElementwiseCodec, Protocol):
    """A codec of ranges without feedback that rounds each number for itself."""

    @property
    def largest(self) -> float:
        """The largest number that is sent as one as large, but for rounding."""
        ...


def begin(buckets: Sequence[Bucket]) -> None:
    """Take the values as the exact ones. Local."""
    for bucket in buckets:
        if bucket.exact is not None:
            for own in bucket.owned:
                np.copyto(bucket.exact[own], bucket.value[own])


def end(buckets: Sequence[Bucket]) -> None:
    """Take the exact values as the owners', for the others to be given. Local."""
    for bucket in buckets:
        if bucket.exact is not None:
            for own in bucket.owned:
                np.copyto(bucket.value[own], bucket.exact[own])


class PullCompression:
    """Gives ranks the owners' values, packed by a cast."""

    def __init__(self, cast: Cast, transport: Transport) -> None:
        """Collective: it takes memory that ranks share."""
        self._cast, self._transport, self._on_host = cast, transport, transport.memory.is_host
        elements = transport.limit // 4
        self._memory = transport.allocate(cast.nbytes(elements) + 2 * _ALIGNMENT * transport.size)
        self._change = private(transport)(4 * elements).view(np.float32)

    def publish(self, bucket: Bucket, assigned: bool) -> bool:
        """Give every rank the owners' values of a bucket, which has exact ones; ``assigned``: as they are. Collective.

        Returns:
            The same on all ranks: whether they hold them now. Else nothing has changed, and they have to be sent
            without a cast, which cannot say one of them.
        """
        counts, mine, transport = bucket.shard.counts, self._transport.rank, self._transport
        starts = list(accumulate(counts, initial=0))
        places = list(accumulate(map(self._room, counts), initial=0))
        message = self._memory[: places[-1]]
        change = self._changed(bucket, assigned) if counts[mine] else None
        exceeds = change is not None and True in transport.memory.exceeding((change,), self._cast.largest)
        # Whoever reads a message of a GPU waits for it, so that there ranks are told beforehand.
        if not self._on_host and (not transport.agree(int(exceeds)) or exceeds):
            return False
        if change is not None:
            if self._on_host:
                message[places[mine]] = exceeds
            if not exceeds:
                self._cast.encode(change, self._packed(message, places[mine], counts[mine]), None)
        owners = [rank for rank, count in enumerate(counts) if count]
        if len(owners) == 1:
            (owner,) = owners
            transport.broadcast(message, owner)
        else:
            transport.all_gather(message, [last - first for first, last in pairwise(places)])
        if self._on_host and any(message[places[rank]] for rank in owners):
            return False
        if transport.sharing_rank == 0:  # the others share the values
            if assigned:
                for run in bucket.runs:
                    bucket.value[run.low : run.high] = 0
            for rank in owners:
                packed = self._packed(message, places[rank], counts[rank])
                self._cast.decode_add(packed, bucket.value[starts[rank] : starts[rank + 1]])
        transport.fence()
        return True

    def _room(self, count: int) -> int:
        """Return the bytes of an owner's part: whether it is unpacked, and its elements, packed."""
        return _ALIGNMENT - (-self._cast.nbytes(count) // _ALIGNMENT) * _ALIGNMENT if count else 0

    def _packed(self, message: Array, place: int, count: int) -> Array:
        return message[place + _ALIGNMENT : place + _ALIGNMENT + self._cast.nbytes(count)]

    def _changed(self, bucket: Bucket, assigned: bool) -> Array:
        """Return what is to be sent of this rank's elements."""
        assert bucket.exact is not None
        low, high = bucket.shard.low, bucket.shard.high
        change = self._change[: high - low]
        if bucket.owned != (slice(low, high),):
            change.fill(0)  # what lies between belongs to keys that are not asked for, or to nobody
        for own in bucket.owned:
            part = change[own.start - low : own.stop - low]
            if assigned:
                np.copyto(part, bucket.exact[own])
            else:
                with np.errstate(all="ignore"):
                    np.subtract(bucket.exact[own], bucket.value[own], out=part)
        return change
