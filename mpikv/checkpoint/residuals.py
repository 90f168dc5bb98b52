"""What compressed pushes have left out, in a checkpoint: every rank's residuals, and what codecs keep for a value.

A residual is a gradient that was not sent yet, so that any codec with feedback can send it, and any rank: of a file of
other ranks each rank takes the residuals of those whose number, modulo the number of ranks, is its own, added up in
their order. What all ranks have left out together stays the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..arena import Block
from ..compression import ensure_residuals
from ..exchange import Exchange
from ..keys import Entry
from ..typing import Array, Transport
from .contents import CHUNK, CodecArray, Contents, SavedKey, codec_slot, dtype_named, residual_slot
from .pieces import Piece, cut

__all__ = ["Targets", "held", "make_room", "positions_of", "taken", "targeted", "whole", "with_residuals"]

_log = logging.getLogger("mpikv")

Memory = Mapping[str, Array]
"""Memory of the arrays of one key, by their slots."""


def with_residuals(exchange: Exchange, contents: Contents) -> Contents:
    """Return the contents of a checkpoint with the residuals of all ranks, if there are any. Collective."""
    if exchange.compression is None:
        return contents
    transport, entries = exchange.transport.control, [exchange.table[one.key] for one in contents.keys]
    # Ranks may have pushed lists of different lengths.
    positions = _largest(transport, np.array([len(entry.residuals()) for entry in entries], np.int64))
    if not positions.any() and not any(entry.codec_state for entry in entries):
        return contents
    keys = tuple(
        replace(
            one,
            positions=count,
            codec={name: CodecArray(array.dtype.name, array.shape) for name, array in entry.codec_state.items()},
        )
        for one, entry, count in zip(contents.keys, entries, positions.tolist(), strict=True)
    )
    return replace(contents, keys=keys, compression=exchange.compression.codec.settings(), ranks=transport.size)


def held(exchange: Exchange, contents: Contents) -> Sequence[Memory]:
    """Return what this rank writes for each key: its residuals, and at the first rank what codecs keep. Local."""
    mine = exchange.transport.rank
    return [
        _residuals_of(entry, one.positions, mine) | (_codec_state_of(entry) if mine == 0 else {})
        for one, entry in _pairs(exchange, contents)
    ]


def _residuals_of(entry: Entry, positions: int, rank: int) -> dict[str, Array]:
    """Return a rank's residuals, on the host; where it has pushed shorter lists than others, zeros."""
    there = [entry.place.block.memory.to_host(array) for array in entry.residuals()]
    there += [np.zeros(entry.place.size, np.float32)] * (positions - len(there))
    return {residual_slot(rank, position): array for position, array in enumerate(there)}


def _codec_state_of(entry: Entry) -> dict[str, Array]:
    return {codec_slot(name): array.reshape(-1) for name, array in entry.codec_state.items()}


class Target(NamedTuple):
    """Where an array of the file goes."""

    array: Array | None
    """Nowhere, where it is read for its checksum alone."""
    adds: bool = False
    """Whether it is added to what the array holds."""


Targets = Sequence[Mapping[str, Target]]
"""For each key, where its arrays go, by their slots."""


def positions_of(exchange: Exchange, contents: Contents) -> dict[Block, int]:
    """Return for each block how many residuals its keys have in a checkpoint that the store can send. Local."""
    codec = None if exchange.compression is None else exchange.compression.codec
    positions: dict[Block, int] = {}
    if codec is None or not codec.feedback:
        return positions
    for one, entry in _pairs(exchange, contents):
        most = one.positions if codec.elementwise else min(one.positions, 1)
        positions[entry.place.block] = max(positions.get(entry.place.block, 0), most)
    return positions


def make_room(exchange: Exchange, contents: Contents) -> None:
    """Have memory for the residuals of a checkpoint, whose keys the store has. Local.

    Raises:
        MemoryError: there is too little; nothing has changed but what memory there is.
    """
    for block, positions in positions_of(exchange, contents).items():
        assert exchange.compression is not None
        if positions:
            ensure_residuals(exchange.compression.codec, block, positions)


def taken(exchange: Exchange, contents: Contents, on_host: Callable[[Array], Array]) -> tuple[Targets, Targets]:
    """Make room for what this rank takes of a checkpoint's residuals; those of the store are zeros. Local.

    ``on_host`` returns what is to be filled in place of an array, of zeros as that is.

    Returns:
        What no other rank reads, and what every rank does.
    """
    codec = None if exchange.compression is None else exchange.compression.codec
    own, common = [], []
    if codec is None or not codec.feedback:
        _warn_of_loss(exchange, contents)
    for one, entry in _pairs(exchange, contents):
        room: Sequence[Array] = ()
        if codec is not None and codec.feedback and one.positions:
            ensure_residuals(codec, entry.place.block, one.positions)
            room = [on_host(array) for array in entry.residuals()]
        own.append(dict(_residuals_for(exchange.transport, contents.ranks, one.positions, room)))
        kept = {name: np.empty(shape, dtype_named(dtype)) for name, (dtype, shape) in one.codec.items()}
        if codec is not None and codec.settings() == contents.compression:
            entry.codec_state.update(kept)
        common.append({codec_slot(name): Target(array.reshape(-1)) for name, array in kept.items()})
    return own, common


def _residuals_for(
    transport: Transport, ranks: int, positions: int, room: Sequence[Array]
) -> Iterator[tuple[str, Target]]:
    """Yield the slots of a value's residuals that this rank reads, in the order of the file, and where they go."""
    begun: set[int] = set()
    for rank in range(transport.rank, ranks, transport.size) if positions else ():
        for position in range(positions):
            to = min(position, len(room) - 1)
            yield residual_slot(rank, position), Target(room[to] if room else None, to in begun)
            begun.add(to)


def _warn_of_loss(exchange: Exchange, contents: Contents) -> None:
    if any(one.positions for one in contents.keys) and exchange.transport.rank == 0:
        _log.warning(
            "the checkpoint has what compressed pushes (%s) have left out, which this store cannot send: it is "
            "dropped; set_gradient_compression before load keeps it",
            contents.compression,
        )


def whole(contents: Contents, memory: Sequence[Memory]) -> Iterator[Piece]:
    """Yield the pieces of arrays that one rank has whole, by key and slot."""
    for tensor in contents.tensors if memory else ():
        if (array := memory[tensor.item].get(tensor.slot)) is not None:
            yield from cut(tensor.begin, array.view(np.uint8).data)


def targeted(contents: Contents, targets: Targets) -> Iterator[Piece]:
    """Yield the pieces of arrays that go to targets."""
    spare = np.empty(CHUNK if targets else 0, np.uint8)
    for tensor in contents.tensors if targets else ():
        if (target := targets[tensor.item].get(tensor.slot)) is None:
            continue
        if target.array is not None and not target.adds:
            yield from cut(tensor.begin, target.array.view(np.uint8).data)
            continue
        offset = tensor.begin
        while offset < tensor.end:
            end = min(offset // CHUNK * CHUNK + CHUNK, tensor.end)
            low, high = offset - tensor.begin, end - tensor.begin
            total = None if target.array is None else target.array.view(np.uint8)[low:high].view(target.array.dtype)
            yield Piece(offset, spare[: end - offset].data, total)
            offset = end


def _pairs(exchange: Exchange, contents: Contents) -> list[tuple[SavedKey, Entry]]:
    return [(one, exchange.table[one.key]) for one in contents.keys]


def _largest(transport: Transport, mine: Array) -> Array:
    numbers = np.empty((transport.size, mine.size), np.int64)
    numbers[transport.rank] = mine
    transport.all_gather(numbers.reshape(-1), [mine.size] * transport.size)
    largest: Array = numbers.max(axis=0, initial=0)
    return largest
