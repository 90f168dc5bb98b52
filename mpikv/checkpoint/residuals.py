"""What compressed pushes have left out, in a checkpoint: every rank's residuals, and what codecs keep for a value.

A residual is a gradient that was not sent yet, so that any codec with feedback can send it, and any rank: of a file of
other ranks each rank takes the residuals of those whose number, modulo the number of ranks, is its own, added up in
their order. What all ranks have left out together stays the same.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from ..engine.alltoallv import gather
from ..engine.arena import Block
from ..engine.compression import ensure_residuals
from ..engine.exchange import Exchange
from ..engine.keys import Entry
from ..protocols import Array, Codec
from .chunks import Piece, cut, cut_array
from .header import CHUNK, CodecArray, Column, Header, Kind, number_alike, parse_dtype
from .saving import Span

__all__ = ["add_residuals", "count_positions", "list_residuals", "make_room", "place_residuals"]

_log = logging.getLogger("mpikv")


# --- Save


def add_residuals(exchange: Exchange, header: Header) -> Header:
    """Return the header of a checkpoint with the residuals of all ranks, if there are any. Collective."""
    if exchange.compression is None:
        return header
    entries = [entry for _, entry in _pair(exchange, header)]
    mine = np.array([len(entry.residuals()) for entry in entries], np.int64)
    # Other ranks may have pushed longer lists.
    positions = gather(exchange.transport.control, mine).max(axis=0)
    if not positions.any() and not any(entry.codec_state for entry in entries):
        return header
    kept = [tuple((name, each.dtype.name, each.shape) for name, each in entry.codec_state.items()) for entry in entries]
    described, kind_of = number_alike(zip(header.kind_of, positions.tolist(), kept, strict=True))
    kinds = tuple(
        header.kinds[number]._replace(
            positions=count, codec={name: CodecArray(dtype, shape) for name, dtype, shape in arrays}
        )
        for number, count, arrays in described
    )
    settings = exchange.compression.codec.settings()
    return Header(header.keys, kinds, kind_of, header.values, header.updater, settings, exchange.transport.size)


def list_residuals(exchange: Exchange, header: Header) -> list[Span]:
    """Return what this rank writes: its residuals, and at the first rank what codecs keep. Local."""
    entries, mine = [entry for _, entry in _pair(exchange, header)], exchange.transport.rank
    spans = []
    for column, at in _list_extras(header, "residual"):
        rank, position = map(int, at.split("/"))
        for item, begin, _ in _list_arrays(column) if rank == mine else ():
            spans.append(Span(begin, _find_residual(entries[item], position)))
    for column, name in _list_extras(header, "codec") if mine == 0 else ():
        for item, begin, _ in _list_arrays(column):
            spans.append(Span(begin, entries[item].codec_state[name]))
    return spans


def _find_residual(entry: Entry, position: int) -> Array:
    """Return a residual of this rank; zeros, where it has pushed shorter lists than others."""
    residuals = entry.residuals()
    return residuals[position] if position < len(residuals) else np.zeros(entry.place.size, np.float32)


# --- Load


def count_positions(exchange: Exchange, header: Header) -> dict[Block, int]:
    """Return for each block how many residuals its keys have in a checkpoint that the store can send. Local."""
    positions = Counter[Block]()
    if (codec := _find_codec(exchange)) is not None:
        for one, entry in _pair(exchange, header):
            if one.positions:
                block, count = entry.place.block, one.positions if codec.elementwise else 1
                positions[block] = max(positions[block], count)
    return positions


def make_room(exchange: Exchange, header: Header) -> None:
    """Have memory for the residuals of a checkpoint, whose keys the store has. Local.

    Raises:
        MemoryError: there is too little; nothing has changed but what memory there is.
    """
    if (codec := _find_codec(exchange)) is not None:
        for block, positions in count_positions(exchange, header).items():
            ensure_residuals(codec, block, positions)


def place_residuals(
    exchange: Exchange, header: Header, on_host: Callable[[Array], Array]
) -> tuple[list[Piece], list[Piece]]:
    """Return the pieces of what codecs keep and of residuals, to be read to where they go in the store. Local.

    ``on_host`` returns what is to be filled in place of an array, of zeros as that is.

    Returns:
        What no other rank reads, and what every rank does.
    """
    if not header.compression:
        return [], []
    lost = _find_codec(exchange) is None and any(kind.positions for kind in header.kinds)
    if lost and exchange.transport.rank == 0:
        _log.warning(
            "the checkpoint has the residuals of compressed pushes (%s), and this store cannot send them: they are "
            "dropped; call set_gradient_compression(...) before load to keep them",
            header.compression,
        )
    make_room(exchange, header)
    return _cut_targets(exchange, header, on_host), _cut_codec_arrays(exchange, header)


def _cut_targets(exchange: Exchange, header: Header, on_host: Callable[[Array], Array]) -> list[Piece]:
    """Return the pieces of the residuals that this rank takes: they are read to memory of their own, and added to what
    is zero before. Where the store cannot send them, they are read for their checksums alone.
    """
    sends, transport = _find_codec(exchange) is not None, exchange.transport
    rooms = [
        [on_host(array) for array in entry.residuals()] if sends and one.positions else []
        for one, entry in _pair(exchange, header)
    ]
    spare, pieces = np.empty(CHUNK, np.uint8), list[Piece]()
    for column, at in _list_extras(header, "residual"):
        rank, position = map(int, at.split("/"))
        for item, begin, end in _list_arrays(column) if rank % transport.size == transport.rank else ():
            room = rooms[item]
            for part in cut(begin, end - begin):
                total = room[min(position, len(room) - 1)].view(np.uint8)[part].view(np.float32) if room else None
                pieces.append(Piece(begin + part.start, spare[: part.stop - part.start].data, total))
    return pieces


def _cut_codec_arrays(exchange: Exchange, header: Header) -> list[Piece]:
    """Return the pieces of what the codec of the file keeps, which a codec of the same settings takes over."""
    pieces: list[Piece] = []
    same = exchange.compression is not None and exchange.compression.codec.settings() == header.compression
    for column, name in _list_extras(header, "codec"):
        for item, begin, _ in _list_arrays(column):
            array = np.empty(column.shapes[header.kind_of[item]], parse_dtype(column.dtype))
            if same:
                exchange.values.table[header.keys[item]].codec_state[name] = array
            pieces += cut_array(begin, array)
    return pieces


def _find_codec(exchange: Exchange) -> Codec | None:
    """Return the store's codec if it can send residuals."""
    codec = None if exchange.compression is None else exchange.compression.codec
    return codec if codec is not None and codec.feedback else None


def _pair(exchange: Exchange, header: Header) -> list[tuple[Kind, Entry]]:
    return [(kind, exchange.values.table[key]) for key, kind in header.pairs]


def _list_extras(header: Header, kind: str) -> Iterator[tuple[Column, str]]:
    """Yield columns of a kind beside values and state, in the order of the file, and what their slots say of them."""
    for column in header.columns:
        prefix, _, rest = column.slot.partition("/")
        if rest and prefix == kind:
            yield column, rest


def _list_arrays(column: Column) -> Iterator[tuple[int, int, int]]:
    """Yield the position of the key of each array, and its first byte and its end."""
    edges = column.edges.tolist()
    return zip(column.items.tolist(), edges[:-1], edges[1:], strict=True)
