"""Residuals in a checkpoint: each rank's quantization errors, and the state that codecs keep per value.

A store with as many ranks and the same codec restores them. In any other store compression starts anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..cluster.printing import log
from ..engine.alltoallv import gather
from ..engine.compression import ensure_residuals
from ..engine.keys import Entry
from ..engine.spans import cut
from ..protocols import Array
from .chunks import Piece, cut_array
from .header import CHUNK, CodecArray, Column, Header, Kind, number_alike, parse_dtype
from .saving import Span

if TYPE_CHECKING:
    from ..engine.exchange import Exchange

# --- Save


def add_residuals(exchange: Exchange, header: Header) -> Header:
    """Return the header extended by the residuals of all ranks, if there are any. Collective."""
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
    """Return the arrays for this rank to write: its residuals, and on rank 0 the codecs' state. Local."""
    entries, mine = [entry for _, entry in _pair(exchange, header)], exchange.transport.rank
    spans = []
    for column, at in _list_extras(header, "residual"):
        rank, position = map(int, at.split("/"))
        for item, begin in _list_arrays(column) if rank == mine else ():
            spans.append(Span(begin, _find_residual(entries[item], position)))
    # A codec's state between pushes is the same on all ranks: one of them writes it.
    for column, name in _list_extras(header, "codec") if mine == 0 else ():
        for item, begin in _list_arrays(column):
            spans.append(Span(begin, entries[item].codec_state[name]))
    return spans


def _find_residual(entry: Entry, position: int) -> Array:
    """Return a residual of this rank; zeros if this rank has pushed shorter lists than others."""
    residuals = entry.residuals()
    return residuals[position] if position < len(residuals) else np.zeros(entry.place.size, np.float32)


# --- Load


def restores_residuals(exchange: Exchange, header: Header) -> bool:
    """Return whether the store can restore a checkpoint's residuals: same codec, same number of ranks. Local."""
    if exchange.compression is None or header.ranks != exchange.transport.size:
        return False
    return exchange.compression.codec.settings() == header.compression


def make_room(exchange: Exchange, header: Header) -> None:
    """Allocate residuals for a checkpoint's keys; the store must have these keys. Local.

    Raises:
        MemoryError: there is too little memory; no content has changed.
    """
    if exchange.compression is not None and restores_residuals(exchange, header):
        for kind, entry in _pair(exchange, header):
            if kind.positions:
                ensure_residuals(exchange.compression.codec, entry.place.block, kind.positions)


def place_residuals(
    exchange: Exchange, header: Header, on_host: Callable[[Array], Array]
) -> tuple[list[Piece], list[Piece]]:
    """Return the pieces of residuals and codec state. They are read into the store, or else into scratch memory for
    their checksums alone. Local.

    ``on_host`` returns the host array to fill in place of an array.

    Returns:
        The pieces of this rank, and the pieces read by every rank.
    """
    if not header.compression:
        return [], []
    rank, size = exchange.transport.rank, exchange.transport.size
    residuals, kept = list(_list_extras(header, "residual")), list(_list_extras(header, "codec"))
    if not restores_residuals(exchange, header):
        if rank == 0:
            log(
                "the checkpoint has the residuals of %d ranks with compression %s, and this store has %d with %s: "
                "they are dropped, and residuals start at zero",
                header.ranks,
                header.compression,
                size,
                "none" if exchange.compression is None else exchange.compression.codec.settings(),
            )
        # Every rank reads its share of the unused arrays: the checksums need all bytes.
        return [piece for column, _ in [*residuals, *kept][rank::size] for piece in _cut_unused(column)], []
    make_room(exchange, header)
    entries, own, shared = exchange.values.table.find(header.keys), list[Piece](), list[Piece]()
    for column, at in residuals:
        saved, position = map(int, at.split("/"))
        # A residual is what one rank has left out of its own gradients: it returns to the rank of that number.
        for item, begin in _list_arrays(column) if saved == rank else ():
            own += cut_array(begin, on_host(entries[item].residuals()[position]))
    for column, name in kept:
        for item, begin in _list_arrays(column):
            array = np.empty(column.shapes[header.kind_of[item]], parse_dtype(column.dtype))
            entries[item].codec_state[name] = array
            shared += cut_array(begin, array)
    return own, shared


def _cut_unused(column: Column) -> Iterator[Piece]:
    """Yield the pieces of unused arrays. All chunks share one buffer; pieces of one chunk do not overlap in it."""
    begin, end = column.edges[[0, -1]].tolist()
    memory = np.empty(CHUNK, np.uint8).data
    for low, high in cut(begin, end, CHUNK):
        at = low % CHUNK
        yield Piece(low, memory[at : at + high - low])


def _pair(exchange: Exchange, header: Header) -> list[tuple[Kind, Entry]]:
    return [(kind, exchange.values.table[key]) for key, kind in header.pairs]


def _list_extras(header: Header, kind: str) -> Iterator[tuple[Column, str]]:
    """Yield the columns of residuals or of codec state, in file order, with the rest of their slots' names."""
    for column in header.columns:
        prefix, _, rest = column.slot.partition("/")
        if rest and prefix == kind:
            yield column, rest


def _list_arrays(column: Column) -> Iterator[tuple[int, int]]:
    """Yield the key's position and the byte offset of each array."""
    return zip(column.items.tolist(), column.edges[:-1].tolist(), strict=True)
