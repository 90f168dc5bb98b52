"""Collectives of flat arrays of any length.

A small message lies in the send buffer before ranks agree, so one barrier serves the agreement and the exchange. A
large reduction is cut into messages, or ranks read each other's arrays where they lie. Every rank reduces its part, and
copies the others' parts of the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from ..arrays.arrays import accumulator, add_in_pairs
from ..engine.alltoallv import Alltoallv
from ..engine.plan import turns
from ..errors import ValueMismatch, mark
from ..memory.host import private_allocator
from ..protocols import Array, ReadsInPlace, SumsInPlace, Transfers, Transport
from .operations import Op, combine

# Bytes that one rank reads in a reduction by one exchange. Beyond, it is faster if each rank reduces a part.
_SMALL = 2 << 20
_BYTES = np.dtype(np.uint8)

Pair: TypeAlias = tuple[Array, Array]
"""An array to send, and the one to fill, of the same size and dtype: the same memory, or without overlap."""


def check_sizes(sent: Array, expected: Array) -> None:
    """Raise ValueMismatch unless each rank expects as many bytes as each sends it; tables of all ranks. Local.

    The tables have the bytes from each rank to each, and are the same on every rank.
    """
    for source, to in np.argwhere(sent != expected).tolist():
        text = f"rank {source} sends {sent[source, to]} bytes to rank {to}, which expects {expected[source, to]}"
        raise mark(ValueMismatch(text), "settled")


class Collectives:
    """Moves the arrays of calls on which ranks have agreed. All methods are collective.

    Arrays are flat and contiguous. Every rank passes the same sizes, dtype, operation and root. ``staged`` is what
    :meth:`stage` has returned for the message, on every rank alike. A message may be changed when its call returns.
    Arrays of GPUs are summed and broadcast only.
    """

    def __init__(self, transport: Transport, in_pairs: bool = False, combine: Callable[..., None] = combine) -> None:
        """Allocate a receive buffer of twice the transport's limit; collective on GPUs.

        ``in_pairs``: sums have the order of :func:`~mpikv.arrays.arrays.add_in_pairs`.
        A library of arrays may be faster at what :func:`~.operations.combine` does.
        """
        self.memory = transport.memory
        self._transport, self._size, self._rank = transport, transport.size, transport.rank
        self._in_pairs, self._alltoallv = in_pairs, Alltoallv(transport)
        self._combine = partial(combine, size=transport.size, in_pairs=in_pairs)
        self._small = min(_SMALL // self._size, transport.limit)
        # Twice the limit: half precision is summed in float32. Unwritten pages take no memory.
        self._received = private_allocator(transport)(2 * transport.limit)

    def close(self) -> None:
        """Drop the receive buffer, memory of the transport; the transport stays open. Local."""
        self._received = self.memory.zeros(0)

    def stage(self, *parts: Array) -> bool:
        """Copy a small message of one dtype to the send buffer, if ranks share memory; return whether it was. Local.

        It is not put there where that saves no barrier. Only its bytes and dtypes decide. So they must be the same on
        all ranks that then agree.
        """
        fits = self._transport.shared and 0 < sum(part.nbytes for part in parts) <= self._small
        if fits := fits and len({part.dtype for part in parts}) == 1:
            self._pack(parts)
        return fits

    def all_reduce_each(self, pairs: Sequence[Pair], op: Op, staged: bool = False) -> None:
        """Fill each pair's second array with the reduction of all ranks' first ones; both may be one array. Collective.

        Each rank gets the same bits. Large arrays are reduced first, one by one; then small ones travel together.
        The message that may be staged is all first arrays, one after the other: with a large one, it is not small.
        """
        if self._size == 1:
            apart = [pair for pair in pairs if pair[0] is not pair[1]]
            self.memory.copy([out for _, out in apart], [send for send, _ in apart])
        elif self.memory.is_host:
            # Those of one dtype can travel together. By its letter: numbers of dtypes may differ between processes.
            ordered = sorted(pairs, key=lambda pair: pair[0].dtype.char)
            self._reduce_small([pair for pair in ordered if not self._reduce_large(*pair, op)], op, staged)
        else:
            self._sum_on_gpus(pairs, op)

    def reduce(self, array: Array, op: Op, root: int, staged: bool = False) -> None:
        """Reduce every rank's array, in place at the root; the others' arrays stay as they are. Return when they may be
        changed. Collective.
        """
        if self._size == 1:  # it may be read-only, or hold NaNs whose bits stay
            return
        step = self._transport.limit // array.itemsize
        for low in range(0, array.size, step):
            part = array[low : low + step]
            send = self._pack_message([part], True) if staged or self.stage(part) else part
            counts = [part.size if rank == root else 0 for rank in range(self._size)]
            terms = self._transport.reduce(send, self._room_of(part), root) if op.adds else self._exchange(send, counts)
            if self._rank == root:
                self._reduce_over(terms, part, op)
        if self._transport.single_copy and array.nbytes > self._small:
            # The root reads large arrays in place, and has read this one when it comes to the fence.
            self._transport.fence()

    def reduce_scatter(self, parts: Sequence[Array], out: Array, op: Op, staged: bool = False) -> None:
        """Reduce every rank's r-th part into the ``out`` of rank r, which may be that part. Collective."""
        most, longest = self._transport.limit // out.itemsize, max(part.size for part in parts)
        step = (longest or 1) if sum(part.size for part in parts) <= most else most // self._size
        for low in range(0, longest, step):
            pieces = [part[low : low + step] for part in parts]
            send, counts = self._pack_message(pieces, staged), [piece.size for piece in pieces]
            terms = self._make_terms(send, counts, op)
            if counts[self._rank]:
                self._combine(terms, out[low : low + counts[self._rank]], op)

    def all_gather(self, buffer: Array, counts: Sequence[int], staged: bool = False) -> None:
        """Fill ``buffer`` on every rank: its r-th part, of ``counts[r]`` elements, is there on rank r. Collective."""
        parts = [buffer[end - count : end] for end, count in zip(accumulate(counts), counts, strict=True)]
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
        """Copy the root's array to every rank's, in place. Collective."""
        if not (staged or self.stage(array)):
            self._transport.broadcast(array, root)
            return
        row = self._transport.all_to_all(self._front(array.nbytes), None)[root]
        if self._rank != root:
            array.view(_BYTES)[:] = row

    def all_to_all(self, sends: Sequence[Array], receives: Sequence[Array]) -> None:
        """Send ``sends[r]`` to rank r, fill ``receives[r]`` from there; ValueMismatch on every rank if sizes differ.
        Collective.

        ``sends[r]`` and ``receives[r]`` may be one array.
        """
        notes = [array.nbytes for array in (*sends, *receives)]
        received, table = self._alltoallv.send([[send] for send in sends], "all_to_all", notes)
        check_sizes(table[:, : self._size], table[:, self._size :].T)
        for rank, (receive, row) in enumerate(zip(receives, received, strict=True)):
            receive.view(_BYTES)[:] = sends[rank].view(_BYTES) if rank == self._rank else row

    def gather(self, part: Array, receives: Sequence[Array] | None, root: int) -> None:
        """Fill the root's ``receives`` with every rank's part, of any size; ValueMismatch on every rank if sizes
        differ. Collective.
        """
        sends = [part if rank == root else part[:0] for rank in range(self._size)]
        self.all_to_all(sends, receives or [part[:0]] * self._size)

    def scatter(self, parts: Sequence[Array] | None, receive: Array, root: int) -> None:
        """Fill ``receive`` with this rank's part of the root's ``parts``; ValueMismatch on every rank if sizes differ.
        Collective.
        """
        none = [receive[:0]] * self._size
        self.all_to_all(parts or none, [receive if rank == root else receive[:0] for rank in range(self._size)])

    def _reduce_large(self, send: Array, out: Array, op: Op) -> bool:
        """Reduce a large array to every rank's ``out``: read in place, or by messages. For a small one do nothing, and
        return False. Collective.
        """
        if send.nbytes <= self._small:
            return False
        reads, counts = self._transport if isinstance(self._transport, ReadsInPlace) else None, self._divide(send)
        if reads is not None and (pieces := reads.read_terms(send, counts)) is not None:
            self._reduce_parts(pieces, out, counts, op)
        else:
            self._reduce_by_messages(send, out, op)
        return True

    def _reduce_by_messages(self, send: Array, out: Array, op: Op) -> None:
        """Reduce an array to every rank's ``out``, cut into messages; return when all is done. Between hosts several
        messages are on their way at once. Collective.
        """
        step = self._transport.limit // send.itemsize
        messages = tuple((send[low : low + step], out[low : low + step]) for low in range(0, send.size, step))
        flights = self._transport if op.adds and isinstance(self._transport, Transfers) else None
        ahead, apart = (0, nullcontext) if flights is None else (min(flights.ahead, len(messages)), flights.apart)
        # Without flights both do nothing: each exchange is complete when it returns.
        sent, wait_for = (bool, bool) if flights is None else (flights.sent, flights.wait_for)
        sums, results = deque[tuple[Sequence[Array], Any]](), deque[Any]()
        with apart():
            for coming, ready in turns(messages, ahead):
                if coming is not None:
                    sums.append((self._make_terms(coming[0], self._divide(coming[0]), op), sent()))
                if ready is not None:
                    terms, flight = sums.popleft()
                    wait_for(flight)
                    self._reduce_parts([terms], ready[1], self._divide(ready[1]), op)
                    results.append(sent())
                if len(results) > ahead:
                    wait_for(results.popleft())
            for flight in results:
                wait_for(flight)

    def _reduce_small(self, pairs: Sequence[Pair], op: Op, staged: bool) -> None:
        """Fill the second arrays of small pairs with reductions of the first, many in a message. Collective."""
        for message in self._cut_messages(pairs):
            sends, outs = zip(*message, strict=True)
            packs = staged or len(sends) > 1 or self._transport.shared
            send = self._pack_message(sends, staged) if packs else sends[0]
            self._unpack(self._make_terms(send, None, op), outs, op)

    def _divide(self, array: Array) -> list[int]:
        """Return the size of each rank's part of an array."""
        return [array.size * (rank + 1) // self._size - array.size * rank // self._size for rank in range(self._size)]

    def _reduce_parts(self, pieces: Iterable[Sequence[Array]], out: Array, counts: Sequence[int], op: Op) -> None:
        """Reduce this rank's part from the terms of its pieces, and fill ``out`` with all ranks' parts. Collective."""
        begin = sum(counts[: self._rank])
        for terms in pieces:
            end = begin + terms[0].size
            self._reduce_over(terms, out[begin:end], op)
            begin = end
        # By now, no rank reads the others' parts of an array that is sent and filled.
        self._transport.all_gather(out, counts)

    def _reduce_over(self, terms: Sequence[Array], part: Array, op: Op) -> None:
        """Reduce terms into ``part``, maybe this rank's own term; may overwrite the receive buffer. Local."""
        # Adding the terms before it would overwrite it.
        into = part if self._rank < 2 else self._room_of(part).view(part.dtype)[: part.size]
        self._combine(terms, into, op)
        if into is not part:
            np.copyto(part, into)

    def _cut_messages(self, pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
        """Yield a list of pairs for each message: small neighbours of one dtype together; empty arrays are left out.
        Local.
        """
        together: list[Pair] = []
        room = self._small
        for send, out in pairs:
            if send.nbytes > room or (together and send.dtype != together[0][0].dtype):
                yield together
                together, room = [], self._small
            if send.nbytes:
                together.append((send, out))
                room -= send.nbytes
        if together:
            yield together

    def _unpack(self, terms: Sequence[Array], outs: Sequence[Array], op: Op) -> None:
        """Reduce the terms of one message, and copy to each of ``outs`` its part; may overwrite the receive buffer.
        Local.
        """
        whole = outs[0] if len(outs) == 1 else self._received[: terms[0].size * outs[0].itemsize].view(outs[0].dtype)
        self._combine(terms, whole, op)
        if len(outs) > 1:
            for out, end in zip(outs, accumulate(out.size for out in outs), strict=True):
                out[...] = whole[end - out.size : end]

    def _sum_on_gpus(self, pairs: Sequence[Pair], op: Op) -> None:
        """Sum each pair's first array over ranks, into the second, on GPUs: by one call or by messages. ``op`` must be
        SUM. Collective.
        """
        transport = self._transport
        assert op is Op.SUM
        assert isinstance(transport, SumsInPlace)
        exact = [pair for pair in pairs if transport.adds(pair[0].dtype)]
        if exact:
            transport.allreduce_each(exact)
        for send, out in pairs:
            step = self._transport.limit // send.itemsize
            for low in range(0, 0 if transport.adds(send.dtype) else send.size, step):
                message = send[low : low + step]
                total = self._room_of(message)
                # The library's sum is in ``total``, unless it only carries.
                terms = self._transport.allreduce(message, total)
                if self._in_pairs:
                    add_in_pairs(terms, 0, message.size, total, self._rank)
                self.memory.copy((out[low : low + step],), (total,))

    def _make_terms(self, send: Array, counts: Sequence[int] | None, op: Op) -> Sequence[Array]:
        """Exchange a message; return arrays for the caller to reduce by ``op``: to this rank's part, or without
        ``counts`` to the whole. They may lie in the receive buffer. Collective.
        """
        if not op.adds:
            return self._exchange(send, counts)
        recv = self._room_of(send)
        if counts is None:
            return self._transport.allreduce(send, recv)
        return self._transport.reduce_scatter(send, recv[: counts[self._rank]], counts)

    def _exchange(self, send: Array, counts: Sequence[int] | None) -> list[Array]:
        """Send rank r its part, or without ``counts`` all ranks the whole message; return an array from each rank, in
        the dtype of ``send``. Collective.
        """
        nbytes = None if counts is None else [count * send.itemsize for count in counts]
        return [row.view(send.dtype) for row in self._transport.all_to_all(send.view(_BYTES), nbytes)]

    def _room_of(self, send: Array) -> Array:
        """Return the beginning of the receive buffer, as long as a message, in the dtype of sums. The next use
        overwrites it.
        """
        dtype = accumulator(send.dtype)
        return self._received[: send.size * dtype.itemsize].view(dtype)

    def _pack_message(self, parts: Sequence[Array], staged: bool) -> Array:
        """Return a message in the send buffer, a view in the parts' dtype; copy the parts there unless they are staged.
        Local.
        """
        if not staged:
            self._pack(parts)
        return self._front(sum(part.nbytes for part in parts)).view(parts[0].dtype)

    def _front(self, nbytes: int) -> Array:
        """Return the beginning of the send buffer, as bytes."""
        return self._transport.send_buffers[self._transport.slot][:nbytes]

    def _pack(self, parts: Sequence[Array]) -> None:
        """Copy arrays' bytes to the beginning of the send buffer, one after the other. Local."""
        np.concatenate([part.view(_BYTES) for part in parts], out=self._front(sum(part.nbytes for part in parts)))
