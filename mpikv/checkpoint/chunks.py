"""The arrays of a checkpoint, in chunks that have a CRC-32 each, to which every rank's bytes contribute.

All ranks go through the arrays in the same windows. After each window they compare how they fare: nobody waits longer
than a window takes, and all ranks notice a full disk when it is full.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import numpy as np

from ..errors import CheckpointError, brief
from ..protocols import Array
from .ahead import Ahead
from .files import MOST_PARTS, NONCE, Draft, Reader, Source
from .header import CHUNK, Header

__all__ = ["NO_SUMS", "Parts", "Piece", "Window", "cut", "cut_array", "read_arrays", "shift_crcs", "write_arrays"]

Parts: TypeAlias = "Generator[Array]"
"""The local parts of a collective call; every rank has as many. After each the caller learns whether it went well on
all ranks, and goes on only then. A part yields its contribution (uint32) to what the next part needs of all ranks: the
caller replaces it by the exclusive or of all contributions, unless that is the same."""

Window: TypeAlias = "tuple[slice, Array]"
"""The chunks of a window, and what a rank contributes to the checksum of each."""

NO_SUMS = np.empty(0, np.uint32)
"""What a part yields that has nothing to put together."""

_WINDOW = 256 << 20
"""Bytes that the ranks write, or read, between two looks at how the others fare. A multiple of CHUNK."""
# The polynomial of CRC-32 and x**8, one byte, modulo it; the highest bit is the coefficient of 1.
_POLYNOMIAL = np.uint32(0xEDB88320)
_BYTE = 1 << (31 - 8)

_offset = attrgetter("offset")


class Piece(NamedTuple):
    """A range of the file's arrays that lies in one chunk, and the memory that it is a copy of."""

    offset: int
    memory: memoryview

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.memory.nbytes


def cut(begin: int, nbytes: int) -> Iterator[slice]:
    """Cut a range of the arrays at the chunks; count from its first byte."""
    low = 0
    while low < nbytes:
        high = min(low + CHUNK - (begin + low) % CHUNK, nbytes)
        yield slice(low, high)
        low = high


def cut_array(begin: int, array: Array) -> list[Piece]:
    """Return the pieces of a contiguous array whose first byte this is."""
    memory = array.reshape(-1).view(np.uint8).data
    return [Piece(begin + part.start, memory[part]) for part in cut(begin, memory.nbytes)]


def write_arrays(
    draft: Draft,
    header: Header,
    start: int,
    pieces: Iterable[Piece],
    creates: bool,
    attaches: bool = True,
    ahead: Ahead[Window] | None = None,
) -> Parts:
    """Write a checkpoint, of which this rank has pieces, and whose arrays begin at ``start``.

    The one rank that ``creates`` it makes the file and puts it in its place. ``attaches``: the others have to see it.
    ``ahead`` is given what writes, to be started once the ranks see the file; without it parts write a window each.
    """
    nonce, sums = np.zeros(NONCE, np.uint8), np.zeros(header.chunks, np.uint32)
    windows = _write_windows(draft, header, start, pieces)
    try:
        if creates:
            draft.create(nonce)
        # By the name that one rank has drawn the others know whether they see its file.
        yield nonce.view(np.uint32)
        if attaches and not creates:
            draft.attach(nonce)
        if ahead is not None:
            windows = ahead.prepare(windows)
        yield NO_SUMS
        for chunks, mine in windows:
            sums[chunks] = mine
            yield sums[chunks]
        if creates:
            draft.commit(header, sums)
        yield NO_SUMS
    finally:
        if ahead is not None:
            ahead.stop()  # first: the number of a closed file may be that of another one next
        draft.close()


def _write_windows(draft: Draft, header: Header, start: int, pieces: Iterable[Piece]) -> Iterator[Window]:
    """Write one window after the other; yield the chunks of each, and what these pieces contribute to their sums."""
    for chunks, (mine,) in _windows(header.nbytes, pieces):
        sums = _sum(mine, chunks, header.nbytes, lambda parts, offset: draft.write(parts, start + offset))
        if mine:
            draft.flush()
        yield chunks, sums


def read_arrays(reader: Reader, own: Iterable[Piece], shared: Iterable[Piece] = (), checks: bool = True) -> Parts:
    """Read the pieces that no other rank reads, and those that every rank does; compare the checksums if it ``checks``,
    else only whether the file has changed.
    """
    nbytes = reader.source.header.nbytes
    for chunks, (mine, everyones) in _windows(nbytes, own, shared):
        if checks:
            sums, known = (_sum(pieces, chunks, nbytes, reader.read) for pieces in (mine, everyones))
            yield sums
            _check_sums(sums ^ known, reader.source, chunks)
        else:
            for run in _runs([*mine, *everyones]):
                reader.read([piece.memory for piece in run], run[0].offset)
            yield NO_SUMS
    reader.check_unchanged()
    yield NO_SUMS


def _windows(nbytes: int, *kinds: Iterable[Piece]) -> Iterator[tuple[slice, list[Sequence[Piece]]]]:
    """Yield the chunks of each window of so many bytes, the same on all ranks, and the pieces of each kind in them."""
    ordered = [sorted(pieces, key=_offset) for pieces in kinds]
    for begin in range(0, nbytes, _WINDOW):
        end = min(begin + _WINDOW, nbytes)
        edges = [[bisect_left(pieces, edge, key=_offset) for edge in (begin, end)] for pieces in ordered]
        chunks = slice(begin // CHUNK, -(-end // CHUNK))
        yield chunks, [pieces[low:high] for pieces, (low, high) in zip(ordered, edges, strict=True)]


def _sum(
    pieces: Sequence[Piece], chunks: slice, nbytes: int, move: Callable[[Sequence[memoryview], int], None]
) -> Array:
    """Write or read pieces; return what they contribute to the checksum of each chunk, made while they are cached."""
    sums = np.zeros(chunks.stop - chunks.start, np.uint32)
    crcs, offsets, ends = list[int](), list[int](), list[int]()
    for run in _runs(pieces):
        move([piece.memory for piece in run], run[0].offset)
        crc = 0
        for piece in run:
            crc = zlib.crc32(piece.memory, crc)
        crcs.append(crc)
        offsets.append(run[0].offset)
        ends.append(run[-1].end)
    if crcs:
        numbers = np.array(offsets, np.int64) // CHUNK
        parts = shift_crcs(np.array(crcs, np.uint32), np.minimum((numbers + 1) * CHUNK, nbytes) - ends)
        np.bitwise_xor.at(sums, numbers - chunks.start, parts)
    return sums


def _runs(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield pieces that are one range of a chunk, to be moved by one call."""
    run: list[Piece] = []
    for piece in pieces:
        if run and (piece.offset != run[-1].end or piece.offset % CHUNK == 0 or len(run) == MOST_PARTS):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _check_sums(sums: Array, source: Source, chunks: slice) -> None:
    """Raise CheckpointError unless the chunks have the checksums of the header."""
    wrong = np.flatnonzero(sums != source.sums[chunks])
    if wrong.size:
        begin = (chunks.start + int(wrong[0])) * CHUNK
        end = min(begin + CHUNK, source.header.nbytes)
        names = list(islice(source.header.names_between(begin, end), 4))
        raise CheckpointError(
            f"the checkpoint is damaged: the checksum of its bytes {source.start + begin} to {source.start + end}, of "
            f"{', '.join(map(brief, names[:3]))}{' …' if len(names) > 3 else ''}, does not match"
        )


def shift_crcs(sums: Array, following: Array) -> Array:
    """Return what parts contribute to the CRC-32 of their range, which is the exclusive or of that.

    A part contributes its own CRC-32, carried over the bytes that follow it. This is zlib's ``crc32_combine``, which
    Python does not offer, for many parts at once.

    Args:
        sums: the CRC-32 of each part, uint32.
        following: how many bytes of the range follow each part.

    Example:
        >>> from zlib import crc32
        >>> first, second = shift_crcs(np.array([crc32(b"check"), crc32(b"point")], np.uint32), np.array([5, 0]))
        >>> int(first ^ second) == crc32(b"checkpoint")
        True

    Source: Mark Adler, zlib, crc32.c.
    """
    carried = sums.astype(np.uint32)
    power = _BYTE
    for bit in range(int(following.max(initial=0)).bit_length()):
        chosen = (following >> bit & 1).astype(np.bool_)
        carried[chosen] = _multiply(power, carried[chosen])
        power = int(_multiply(power, np.array([power], np.uint32))[0])
    return carried


def _multiply(factor: int, sums: Array) -> Array:
    """Multiply polynomials modulo that of CRC-32."""
    product, shifted = np.zeros_like(sums), sums
    for bit in range(31, -1, -1):
        if factor >> bit & 1:
            product ^= shifted
        shifted = shifted >> np.uint32(1) ^ _POLYNOMIAL * (shifted & np.uint32(1))
    return product
