"""Values that travel packed to the ranks that pull them.

An owner keeps the exact value, which it updates, beside what all ranks hold of it. What is sent is the difference of
the two, rounded; every rank adds it, the owner too, so that all hold the same bits. What rounding leaves out is part of
the next difference: so far the values that ranks hold are from the exact ones, and no further. Where a push replaces
values by sums there is nothing to be near to, and the sums themselves are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

import numpy as np

from .arrays import zeros
from .plan import Bucket, merged
from .typing import Array, RangeCodec, Transport

__all__ = ["Publication", "begin", "end"]

# The part of an owner begins at a multiple of so many bytes, for the codec's sake.
_ALIGNMENT = 8


def begin(buckets: Sequence[Bucket]) -> None:
    """Take the values as the exact ones. Local."""
    for bucket in buckets:
        if bucket.exact is not None:
            own = slice(bucket.share.low, bucket.share.high)
            np.copyto(bucket.exact[own], bucket.value[own])


def end(buckets: Sequence[Bucket]) -> None:
    """Take the exact values as the owners', for the others to be given. Local."""
    for bucket in buckets:
        if bucket.exact is not None:
            own = slice(bucket.share.low, bucket.share.high)
            np.copyto(bucket.value[own], bucket.exact[own])


class Publication:
    """Gives ranks the owners' values, packed by a codec of ranges without feedback."""

    def __init__(self, cast: RangeCodec, transport: Transport) -> None:
        """Collective: it takes memory that neighbours share."""
        self._cast, self._transport = cast, transport
        elements = transport.limit // 4
        room = cast.nbytes(elements) + 2 * _ALIGNMENT * transport.size
        memory = transport.allocate(2 * _padded(room))
        # One is read while the next message comes into the other.
        self._halves = memory[: memory.size // 2], memory[memory.size // 2 :]
        self._turn = 0
        self._change = zeros(4 * elements).view(np.float32)

    def publish(self, bucket: Bucket, assigned: bool) -> None:
        """Give every rank the owners' values of a bucket, which has exact ones; ``assigned``: as they are. Collective.

        When it returns all ranks hold them.
        """
        counts, mine, transport = bucket.share.counts, self._transport.rank, self._transport
        starts = list(accumulate(counts, initial=0))
        places = list(accumulate((_padded(self._cast.nbytes(count)) for count in counts), initial=0))
        half, self._turn = self._halves[self._turn], 1 - self._turn
        message = half[: places[-1]]
        if counts[mine]:
            packed = message[places[mine] : places[mine] + self._cast.nbytes(counts[mine])]
            self._cast.encode(self._changed(bucket, assigned), packed, None)
        owners = [rank for rank, count in enumerate(counts) if count]
        if len(owners) == 1:
            transport.broadcast(message, owners[0])
        else:
            transport.all_gather(message, [last - first for first, last in pairwise(places)])
        if transport.place == 0:  # neighbours share the values
            if assigned:
                for _, low, high in merged(bucket.pieces):
                    bucket.value[low:high] = 0
            for rank in owners:
                packed = message[places[rank] : places[rank] + self._cast.nbytes(counts[rank])]
                self._cast.decode_add(packed, bucket.value[starts[rank] : starts[rank + 1]])
        transport.fence()

    def _changed(self, bucket: Bucket, assigned: bool) -> Array:
        """Return what is to be sent of this rank's elements."""
        assert bucket.exact is not None
        own = slice(bucket.share.low, bucket.share.high)
        if assigned:
            change = self._change[: own.stop - own.start]
            np.copyto(change, bucket.exact[own])
        else:
            change = np.subtract(bucket.exact[own], bucket.value[own], out=self._change[: own.stop - own.start])
        # A codec is promised finite numbers. Of training that diverges every rank is to know.
        finite = np.isfinite(change)
        if not finite.all():
            np.copyto(change, np.nan, where=~finite)
        if not bucket.dense:
            # What lies between belongs to keys that are not asked for.
            edges = [0, *chain(*((low, high) for _, low, high in merged(bucket.pieces))), bucket.value.size]
            for low, high in zip(edges[::2], edges[1::2], strict=True):
                change[max(low - own.start, 0) : max(high - own.start, 0)] = 0
        return change


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
