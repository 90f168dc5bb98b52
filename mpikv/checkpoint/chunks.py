"""The arrays of a checkpoint, in chunks with a CRC-32 each; all ranks contribute to each checksum.

All ranks go through the arrays in the same windows, and compare their success after each. So no rank waits longer than
a window takes, and all ranks notice a full disk at once.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import numpy as np

from ..engine.spans import cut
from ..errors import CheckpointError, brief
from ..protocols import Array
from .ahead import Ahead
from .files import NONCE, Draft, Reader, Source
from .header import CHUNK, Header

Parts: TypeAlias = "Generator[Array | Callable[[], object]]"
"""The local parts of a collective call; every rank has as many. After each part the caller learns whether it succeeded
on all ranks; only then it runs the next. A part yields its contribution (uint32). The caller overwrites it by the
exclusive or of all ranks' contributions; the next part uses the result. Or all ranks' parts yield a collective
function; the caller runs it."""

Window: TypeAlias = "tuple[slice, Array | Callable[[], object]]"
"""The chunks of a window, and this rank's contribution to the checksum of each; or a collective function, run before
the window is written."""

Gather: TypeAlias = "Callable[[slice, list[Piece]], Callable[[], object]]"
"""Appends the pieces of a window's chunks that this rank writes for others, too; returns the collective function that
fills them. Local, so that all ranks learn of its failure."""

NO_SUMS = np.empty(0, np.uint32)
"""Yielded by a part without a contribution."""

_WINDOW = 256 << 20
"""Bytes that the ranks write or read between two agreements on success. A multiple of CHUNK."""
# CRC-32's polynomial, and x**8 (a shift by one byte) modulo it. Bits are reversed: the highest bit is the constant
# term.
_POLYNOMIAL = np.uint32(0xEDB88320)
_BYTE = 1 << (31 - 8)

_offset = attrgetter("offset")


class Piece(NamedTuple):
    """A range of the file's arrays inside one chunk, and its copy in memory."""

    offset: int
    memory: memoryview

    @property
    def end(self) -> int:
        """Offset of the first byte after the range."""
        return self.offset + self.memory.nbytes


def cut_array(begin: int, array: Array) -> list[Piece]:
    """Return an array's pieces, views cut at chunks' edges; its first byte has the offset ``begin``. Local.

    The array is contiguous.
    """
    memory = array.reshape(-1).view(np.uint8).data
    return [Piece(low, memory[low - begin : high - begin]) for low, high in cut(begin, begin + memory.nbytes, CHUNK)]


def write_arrays(
    draft: Draft, header: Header, windows: Generator[Window] | Ahead[Window], creates: bool, attaches: bool = True
) -> Parts:
    """Save in parts: create the file, write windows, rename it. After each yield numbers to xor, or a collective
    function to run. At the end or an error close the draft. Collective.

    The rank that ``creates`` makes the file, and renames it at the end. ``attaches``: the other ranks open it. After
    two parts the draft is open. Each other part takes one of the ``windows``, those of :func:`write_windows`.
    """
    nonce, sums = np.zeros(NONCE, np.uint8), np.zeros(header.chunks, np.uint32)
    try:
        if creates:
            draft.create(nonce)
        # The name is random: a rank that finds a file of this name sees the same file system as the creator.
        yield nonce.view(np.uint32)
        if attaches and not creates:
            draft.attach(nonce)
        yield NO_SUMS
        for chunks, mine in windows:
            if not callable(mine):
                sums[chunks] = mine
                mine = sums[chunks]
            yield mine
        if creates:
            # The rename is the last step: until then the path holds the old checkpoint.
            draft.commit(header, sums)
        yield NO_SUMS
    finally:
        # First: the system may give the draft's descriptor to another file, and a thread write there.
        windows.close()
        draft.close()


def write_windows(
    draft: Draft, header: Header, pieces: Iterable[Piece], gather: Gather | None = None
) -> Generator[Window]:
    """Write and flush pieces by window; yield (chunks, checksums), with ``gather`` (chunks, a call) before that. Local.

    ``gather`` adds pieces to the window.
    """
    for chunks, (mine,) in cut_windows(header.nbytes, pieces):
        if gather is not None:
            yield chunks, gather(chunks, mine)
        sums = _sum_moved(mine, chunks, header.nbytes, lambda parts, offset: draft.write(parts, header.start + offset))
        if mine:
            # Per window: a full or failing disk shows now, and not at the end.
            draft.flush()
        yield chunks, sums


def read_arrays(reader: Reader, own: Iterable[Piece], shared: Iterable[Piece] = (), checks: bool = True) -> Parts:
    """Read into ``own`` and ``shared`` in parts. After each yield this rank's checksums; the caller replaces them by
    the exclusive or of all ranks' ones; then raise if these are bad. Collective.

    Collective: every rank runs its parts. With ``checks``, compare the checksums; without, only check that the file is
    unchanged.
    """
    nbytes = reader.source.header.nbytes
    for chunks, (mine, everyones) in cut_windows(nbytes, own, shared):
        if checks:
            # Every rank reads the shared pieces: exclusive or over the ranks would cancel them, so they are added
            # after.
            sums, known = (_sum_moved(pieces, chunks, nbytes, reader.read) for pieces in (mine, everyones))
            yield sums
            _check_sums(sums ^ known, reader.source, chunks)
        else:
            for run in _join_runs([*mine, *everyones]):
                reader.read([piece.memory for piece in run], run[0].offset)
            yield NO_SUMS
    reader.check_unchanged()
    yield NO_SUMS


def cut_windows(nbytes: int, *kinds: Iterable[Piece]) -> Iterator[tuple[slice, list[list[Piece]]]]:
    """Sort pieces into windows, alike on all ranks; yield each window's slice of chunks, and pieces by kind. Local."""
    # Blocks lie in memory in another order than keys in the file.
    ordered = [sorted(pieces, key=_offset) for pieces in kinds]
    for begin in range(0, nbytes, _WINDOW):
        end = min(begin + _WINDOW, nbytes)
        edges = [[bisect_left(pieces, edge, key=_offset) for edge in (begin, end)] for pieces in ordered]
        chunks = slice(begin // CHUNK, -(-end // CHUNK))
        yield chunks, [pieces[low:high] for pieces, (low, high) in zip(ordered, edges, strict=True)]


def _sum_moved(
    pieces: Sequence[Piece], chunks: slice, nbytes: int, move: Callable[[Sequence[memoryview], int], None]
) -> Array:
    """Write or read pieces by ``move``; return a new array: their contribution to each chunk's CRC-32. Local."""
    sums, found = np.zeros(chunks.stop - chunks.start, np.uint32), list[tuple[int, int, int]]()
    for run in _join_runs(pieces):
        move([piece.memory for piece in run], run[0].offset)
        crc = 0
        for piece in run:
            crc = zlib.crc32(piece.memory, crc)
        found.append((crc, run[0].offset // CHUNK, run[-1].end))
    # One operation for all runs: of thousands of small keys each would else cost more than its bytes.
    crcs, numbers, ends = np.array(found, np.int64).reshape(-1, 3).T
    parts = shift_crcs(crcs, np.minimum((numbers + 1) * CHUNK, nbytes) - ends)
    # ufunc.at, not an index assignment: several runs may lie in one chunk.
    np.bitwise_xor.at(sums, numbers - chunks.start, parts)
    return sums


def _join_runs(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield lists of adjacent pieces of one chunk, to be moved together. Local."""
    run: list[Piece] = []
    for piece in pieces:
        # A checksum is of one chunk.
        if run and (piece.offset != run[-1].end or piece.offset % CHUNK == 0):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _check_sums(sums: Array, source: Source, chunks: slice) -> None:
    """Raise CheckpointError, with the arrays' names, unless the chunks match the checksums of the header. Local."""
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
    """Return each part's CRC-32 carried over ``following`` bytes; their exclusive or is the CRC-32 of the range. Local.

    A part's contribution is its own CRC-32, carried over the following bytes. The function is zlib's
    ``crc32_combine``, absent from Python's zlib, for many parts at once.

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
    # By squaring: the number of steps grows with the digits of the distance, not with the distance.
    carried = sums.astype(np.uint32)
    power = _BYTE
    for bit in range(int(following.max(initial=0)).bit_length()):
        chosen = (following >> bit & 1).astype(np.bool_)
        carried[chosen] = _multiply(power, carried[chosen])
        power = int(_multiply(power, np.array([power], np.uint32))[0])
    return carried


def _multiply(factor: int, sums: Array) -> Array:
    """Return the numbers times a factor, as polynomials modulo CRC-32's. Local."""
    product, shifted = np.zeros_like(sums), sums
    for bit in range(31, -1, -1):
        if factor >> bit & 1:
            product ^= shifted
        shifted = shifted >> np.uint32(1) ^ _POLYNOMIAL * (shifted & np.uint32(1))
    return product
