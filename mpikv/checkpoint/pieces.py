"""Ranges of a checkpoint's arrays, each in one chunk and beside its memory, which are written, read and summed.

Arrays are gone through a window at a time, the same ones on all ranks, who look between two of them at how the others
fare: nobody waits longer than a window takes, and a full disk is noticed by all when it is full.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from ..errors import CheckpointError, brief
from ..typing import Array
from .checksums import contributions
from .contents import CHUNK, Header
from .files import Draft, Reader

__all__ = ["Piece", "check_sums", "contributed", "cut", "read_pieces", "spans", "windows", "write_pieces"]

_WINDOW = 256 << 20
"""Bytes that the ranks write, or read, between two looks at how the others fare. A multiple of CHUNK."""
_offset = attrgetter("offset")


class Piece(NamedTuple):
    """A range of the file's arrays that lies in one chunk, and the memory that it is a copy of."""

    offset: int
    memory: memoryview
    total: Array | None = None
    """What the numbers that are read are added to."""


def spans(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield the first byte of each window of so many bytes of arrays, and the one after its last."""
    for begin in range(0, nbytes, _WINDOW):
        yield begin, min(begin + _WINDOW, nbytes)


def windows(nbytes: int, *kinds: Iterable[Piece]) -> Iterator[tuple[slice, list[Sequence[Piece]]]]:
    """Yield the chunks of each window of so many bytes, the same on all ranks, and the pieces of each kind in them."""
    ordered = [sorted(pieces, key=_offset) for pieces in kinds]
    for begin, end in spans(nbytes):
        edges = [[bisect_left(pieces, edge, key=_offset) for edge in (begin, end)] for pieces in ordered]
        chunks = slice(begin // CHUNK, -(-end // CHUNK))
        yield chunks, [pieces[low:high] for pieces, (low, high) in zip(ordered, edges, strict=True)]


def cut(offset: int, memory: memoryview) -> Iterator[Piece]:
    """Cut a range of the arrays at the chunks."""
    done = 0
    while done < memory.nbytes:
        length = min(CHUNK - (offset + done) % CHUNK, memory.nbytes - done)
        yield Piece(offset + done, memory[done : done + length])
        done += length


def write_pieces(draft: Draft, pieces: Sequence[Piece], start: int) -> list[int]:
    """Write the pieces; return the CRC-32 of each, made while it is in the cache."""
    sums = []
    for piece in pieces:
        draft.write(piece.memory, start + piece.offset)
        sums.append(zlib.crc32(piece.memory))
    if pieces:
        draft.flush()
    return sums


def read_pieces(reader: Reader, pieces: Sequence[Piece]) -> list[int]:
    """Read the pieces; return the CRC-32 of each, made while it is in the cache."""
    sums = []
    for piece in pieces:
        reader.read(piece.memory, piece.offset)
        sums.append(zlib.crc32(piece.memory))
        if piece.total is not None:
            np.add(piece.total, np.frombuffer(piece.memory, piece.total.dtype), out=piece.total)
    return sums


def contributed(own: Sequence[int], pieces: Sequence[Piece], chunks: slice, nbytes: int) -> Array:
    """Return what the pieces contribute to the checksum of each chunk."""
    sums = np.zeros(chunks.stop - chunks.start, np.uint32)
    if pieces:
        offsets = np.array([piece.offset for piece in pieces], np.int64)
        ends = offsets + np.array([piece.memory.nbytes for piece in pieces], np.int64)
        numbers = offsets // CHUNK
        parts = contributions(np.array(own, np.uint32), np.minimum((numbers + 1) * CHUNK, nbytes) - ends)
        np.bitwise_xor.at(sums, numbers - chunks.start, parts)
    return sums


def check_sums(sums: Array, header: Header, chunks: slice) -> None:
    """Raise CheckpointError unless the chunks have the checksums of the header."""
    wrong = np.flatnonzero(sums != header.sums[chunks])
    if wrong.size:
        chunk = chunks.start + int(wrong[0])
        end = min((chunk + 1) * CHUNK, header.contents.nbytes)
        tensors = header.contents.tensors
        names = [brief(one.name) for one in tensors if one.begin < end and one.end > chunk * CHUNK]
        raise CheckpointError(
            f"the checkpoint is damaged: its bytes {header.start + chunk * CHUNK} to {header.start + end}, of "
            f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''}, do not have their checksum"
        )
