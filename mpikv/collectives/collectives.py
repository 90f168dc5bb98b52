"""Collectives of flat arrays of any length.

A small message lies in the send buffer before ranks agree, so one barrier serves the agreement and the exchange. A
large reduction is cut into messages. Of each message every rank reduces its part, into memory of all where ranks share
some; each copies the whole of it out one message later, behind the barrier of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ..arrays.arrays import accumulator
from ..engine.alltoallv import Alltoallv
from ..errors import ValueMismatch, settled
from ..memory.host import private
from ..protocols import Array, Transport
from .operations import Op, combine

__all__ = ["Collectives"]

# Bytes that one rank reads in a reduction by one exchange. Beyond, it is faster if each rank reduces a part.
_SMALL = 512 << 10
_BYTES = np.dtype(np.uint8)


class Collectives:
    """Moves the arrays of calls on which ranks have agreed. All methods are collective.

    Arrays are flat and contiguous. Every rank passes the same sizes, dtype, operation and root. ``staged`` is what
    :meth:`stage` has returned for the message, on every rank alike. A message may be changed when its call returns.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport, self._size, self._rank = transport, transport.size, transport.rank
        self._small = min(_SMALL // self._size, transport.limit)
        self._alltoallv = Alltoallv(transport)
        # Twice the limit: half precision is summed in float32. Unwritten pages take no memory.
        self._received = private(transport)(2 * transport.limit)
        self._shared = transport.allocate(2 * transport.limit) if transport.sharing_size > 1 else None

    def stage(self, *parts: Array) -> bool:
        """Put a message, made of parts, into the send buffer, if it is small and that saves a barrier. Local.

        Only its number of bytes decides. So they must be the same on all ranks that then agree.
        """
        if not (self._transport.shared and 0 < sum(part.nbytes for part in parts) <= self._small):
            return False
        self._pack(parts)
        return True

    def all_reduce(self, array: Array, op: Op, staged: bool = False) -> None:
        """Reduce every rank's array, in place on every rank, with the same bits on each."""
        if self._size == 1 or not array.size:
            return
        if staged or array.nbytes <= self._small:
            send = self._send(array) if staged or self.stage(array) else array
            combine(self._terms_of_all(send, op), array, op, self._size)
        else:
            self._reduce_in_parts(array, op)

    def reduce(self, array: Array, op: Op, root: int, staged: bool = False) -> None:
        """Reduce every rank's array, in place at the root. The others' stay as they are."""
        if self._size == 1:
            return
        step = self._transport.limit // array.itemsize
        for low in range(0, array.size, step):
            part = array[low : low + step]
            send = self._send(part) if staged or self.stage(part) else part
            counts = [part.size if rank == root else 0 for rank in range(self._size)]
            terms = self._transport.reduce(send, self._recv(part), root) if op.adds else self._exchange(send, counts)
            if self._rank == root:
                # A term may be the array itself, and adding the terms before it would overwrite it.
                into = part if self._rank < 2 else self._recv(part).view(part.dtype)[: part.size]
                combine(terms, into, op, self._size)
                if into is not part:
                    np.copyto(part, into)
        self._release(array)

    def reduce_scatter(self, parts: Sequence[Array], out: Array, op: Op, staged: bool = False) -> None:
        """Reduce every rank's r-th part into the ``out`` of rank r, which may be that part."""
        most, longest = self._transport.limit // out.itemsize, max(part.size for part in parts)
        step = (longest or 1) if sum(part.size for part in parts) <= most else most // self._size
        for low in range(0, longest, step):
            pieces = [part[low : low + step] for part in parts]
            if not staged:
                self._pack(pieces)
            counts = [piece.size for piece in pieces]
            send = self._front(sum(counts) * out.itemsize).view(out.dtype)
            terms = self._terms(send, counts, op)
            if counts[self._rank]:
                combine(terms, out[low : low + counts[self._rank]], op, self._size)

    def all_gather(self, buffer: Array, counts: Sequence[int], staged: bool = False) -> None:
        """Fill ``buffer``: its r-th part, of ``counts[r]`` elements, is there on rank r. The message is that part."""
        ends = np.cumsum(counts).tolist()
        parts = [buffer[end - count : end] for end, count in zip(ends, counts, strict=True)]
        longest = max(counts) * buffer.itemsize
        if not (staged or (self._transport.shared and longest <= self._small)):
            self._transport.all_gather(buffer, counts)
        elif longest:
            if not staged:
                self._pack([parts[self._rank]])
            rows = self._transport.all_to_all(self._front(longest), None)
            for rank, (part, row) in enumerate(zip(parts, rows, strict=True)):
                if rank != self._rank:
                    part.view(_BYTES)[:] = row[: part.nbytes]

    def broadcast(self, array: Array, root: int, staged: bool = False) -> None:
        """Copy the root's array to every rank's."""
        if not (staged or self.stage(array)):
            self._transport.broadcast(array, root)
            return
        row = self._transport.all_to_all(self._front(array.nbytes), None)[root]
        if self._rank != root:
            array.view(_BYTES)[:] = row

    def all_to_all(self, sends: Sequence[Array], receives: Sequence[Array]) -> None:
        """Send ``sends[r]`` to rank r, and fill ``receives[r]`` with what comes from there. The latter may be the
        former.

        Raises:
            ValueMismatch: on every rank, if one sends another number of bytes than the receiver expects.
        """
        notes = [array.nbytes for array in (*sends, *receives)]
        received, table = self._alltoallv.to_each([[send] for send in sends], "all_to_all", notes)
        sent, expected = table[:, : self._size], table[:, self._size :].T
        for source, to in np.argwhere(sent != expected).tolist():
            raise settled(
                ValueMismatch(
                    f"rank {source} sends {sent[source, to]} bytes to rank {to}, which expects {expected[source, to]}"
                )
            )
        for rank, (receive, row) in enumerate(zip(receives, received, strict=True)):
            receive.view(_BYTES)[:] = sends[rank].view(_BYTES) if rank == self._rank else row

    def gather(self, part: Array, receives: Sequence[Array] | None, root: int) -> None:
        """Fill ``receives``, which only the root has, with every rank's part. Parts may differ in size."""
        none = [part[:0]] * self._size
        self.all_to_all([part if rank == root else part[:0] for rank in range(self._size)], receives or none)

    def scatter(self, parts: Sequence[Array] | None, receive: Array, root: int) -> None:
        """Fill ``receive`` with this rank's part of ``parts``, which only the root has. Parts may differ in size."""
        none = [receive[:0]] * self._size
        self.all_to_all(parts or none, [receive if rank == root else receive[:0] for rank in range(self._size)])

    def _reduce_in_parts(self, array: Array, op: Op) -> None:
        """Reduce a message at a time, of which each rank reduces its part. Collective."""
        step = self._transport.limit // array.itemsize
        behind: tuple[Array, Array] | None = None
        for number, start in enumerate(range(0, array.size, step)):
            part = array[start : start + step]
            bounds = [part.size * rank // self._size for rank in range(self._size + 1)]
            counts = [high - low for low, high in pairwise(bounds)]
            terms = self._terms(part, counts, op)
            # Only now: other ranks have read the message before from this array, and their parts of it are complete.
            if behind is not None:
                np.copyto(*behind)
            into = part if self._shared is None else self._halves(number % 2, part)
            if counts[self._rank]:
                combine(terms, into[bounds[self._rank] : bounds[self._rank + 1]], op, self._size)
            if not self._transport.shared:
                self._transport.all_gather(into, counts)
            behind = None if self._shared is None else (part, into)
        if behind is not None:
            self._transport.fence()
            np.copyto(*behind)

    def _halves(self, half: int, like: Array) -> Array:
        assert self._shared is not None
        begin = half * self._transport.limit
        return self._shared[begin : begin + like.nbytes].view(like.dtype)

    def _terms_of_all(self, send: Array, op: Op) -> Sequence[Array]:
        """Return terms whose reduction is the whole result. Collective."""
        return self._transport.allreduce(send, self._recv(send)) if op.adds else self._exchange(send, None)

    def _terms(self, send: Array, counts: Sequence[int], op: Op) -> Sequence[Array]:
        """Return terms whose reduction is this rank's part. Collective."""
        if not op.adds:
            return self._exchange(send, counts)
        return self._transport.reduce_scatter(send, self._recv(send)[: counts[self._rank]], counts)

    def _exchange(self, send: Array, counts: Sequence[int] | None) -> list[Array]:
        """Return every rank's part for this one, or its whole message. Collective."""
        nbytes = None if counts is None else [count * send.itemsize for count in counts]
        return [row.view(send.dtype) for row in self._transport.all_to_all(send.view(_BYTES), nbytes)]

    def _release(self, array: Array) -> None:
        """Wait until no rank reads an array in place any more. Collective."""
        if self._transport.single_copy and array.nbytes > self._small:
            self._transport.fence()

    def _recv(self, send: Array) -> Array:
        """Return memory for the sum of a message, if the transport's library adds."""
        dtype = accumulator(send.dtype)
        return self._received[: send.size * dtype.itemsize].view(dtype)

    def _send(self, like: Array) -> Array:
        return self._front(like.nbytes).view(like.dtype)

    def _front(self, nbytes: int) -> Array:
        """Return the beginning of the send buffer, as bytes."""
        return self._transport.send_buffers[self._transport.slot][:nbytes]

    def _pack(self, parts: Sequence[Array]) -> None:
        """Copy arrays to the send buffer, one after the other. Local."""
        send, begin = self._transport.send_buffers[self._transport.slot], 0
        for part in parts:
            end = begin + part.nbytes
            send[begin:end] = part.view(_BYTES)
            begin = end
