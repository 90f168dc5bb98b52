"""Files of optimizer state that every rank has all of, as a Trainer that updates on each rank: rank 0 writes, all read.

They have the form of the store's ``save_optimizer_states``, and either loads what the other has saved. Writing and
reading are generators that yield before each part that takes time, on every rank as often; what they yield is to be
compared with the other ranks, who learn in this way how this one fares. Nothing of the caller's changes before the last
of them.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import brief
from ..optimizers import Optimizer
from ..typing import Array, Key
from .contents import Contents, SavedKey, check_byte_order, check_readable
from .files import NONCE, Draft, Reader
from .fits import check_keys, check_slots, found, restored_for_states, slot_names
from .pieces import Piece, check_sums, contributed, cut, read_pieces, windows, write_pieces
from .settings import described

__all__ = ["KeptState", "is_dumpable", "load_states", "save_states"]

_HOLDER = "Trainer"


@dataclass
class KeptState:
    """What an optimizer keeps of one value."""

    state: dict[str, Array]
    count: int = 0
    """How many updates it has made."""


def is_dumpable(optimizer: Optimizer) -> bool:
    """Return whether a file can hold the optimizer's settings."""
    return described(optimizer)["options"] is not None


def save_states(
    path: Any, optimizer: Optimizer, values: Mapping[Key, Array], kept: Mapping[Key, KeptState], writes: bool
) -> Generator[str]:
    """Write the state of each value to a file, with the optimizer's settings if a file can hold them.

    Args:
        path: the same on every rank.
        optimizer: what the state is of.
        values: give shapes and dtypes.
        kept: the state of each, the same on every rank.
        writes: True on one rank, which writes the file. The others only yield as often.

    Raises:
        OSError, CheckpointError: the file cannot be written.
        Unsupported: no reader would take it.
    """
    check_byte_order()
    path = os.fsdecode(path)
    keys = tuple(_saved_key(key, value, kept[key], optimizer) for key, value in values.items())
    contents = Contents(keys, False, described(optimizer))
    check_readable(contents)
    sums = np.zeros(contents.chunks, np.uint32)
    start = len(contents.header(sums))
    yield _text(path, contents)
    draft = Draft(path)
    try:
        if writes:
            draft.create(np.zeros(NONCE, np.uint8))
        for chunks, (pieces,) in windows(contents.nbytes, _pieces(contents, kept)):
            yield _text(path, contents, chunks)
            if writes:
                sums[chunks] = contributed(write_pieces(draft, pieces, start), pieces, chunks, contents.nbytes)
        if writes:
            draft.commit(contents, sums)
        yield f"{path!r} is in its place"
    finally:
        draft.close()


def load_states(
    path: Any,
    present: Optimizer,
    values: Mapping[Key, Array],
    place: Callable[[Key, KeptState], KeptState],
    adopt: Callable[[Optimizer, dict[Key, KeptState]], None],
) -> Generator[str]:
    """Read the state of each value from a file.

    Args:
        path: the same on every rank, each of which reads all of it.
        present: the optimizer that goes on, unless the file has one of its kind with all its settings.
        values: give keys, shapes and dtypes, which have to be those of the file.
        place: returns the state of a value, which it is given in numpy's arrays, where it belongs. It may fail.
        adopt: is given the optimizer and what ``place`` has returned for each value, when all ranks have read the file,
            found it good, and had room for it. It only assigns.

    Raises:
        OSError: the file cannot be read.
        CheckpointError: it is damaged, or of another optimizer.
        ValueMismatch: it has other keys.
    """
    check_byte_order()
    source = found(path, values=False)
    contents = source.header.contents
    check_keys(contents, values, _HOLDER)
    optimizer = restored_for_states(source, present, _HOLDER)
    check_slots(source, optimizer)
    assert isinstance(optimizer, Optimizer)
    kept = {
        one.key: KeptState(
            {slot: np.empty(one.shape, dtype) for slot, dtype in optimizer.slots(values[one.key].dtype).items()},
            one.updates,
        )
        for one in contents.keys
    }
    said = f"checksums {zlib.crc32(source.header.sums.data):08x}"
    yield f"{_text(source.path, contents)}, {said}"
    reader = Reader(source)
    try:
        reader.open()
        for chunks, (pieces,) in windows(contents.nbytes, _pieces(contents, kept)):
            yield _text(source.path, contents, chunks)
            read = read_pieces(reader, pieces)
            check_sums(contributed(read, pieces, chunks, contents.nbytes), source.header, chunks)
    finally:
        reader.close()
    placed = {key: place(key, state) for key, state in kept.items()}
    yield f"{source.path!r} was read"
    adopt(optimizer, placed)


def _saved_key(key: Key, value: Array, kept: KeptState, optimizer: Optimizer) -> SavedKey:
    return SavedKey(key, value.dtype.name, value.shape, kept.count, 0, slot_names(optimizer.slots(value.dtype)))


def _pieces(contents: Contents, kept: Mapping[Key, KeptState]) -> Iterator[Piece]:
    for tensor in contents.tensors:
        array = kept[contents.keys[tensor.item].key].state[tensor.slot]
        yield from cut(tensor.begin, array.reshape(-1).view(np.uint8).data)


def _text(path: str, contents: Contents, chunks: slice | None = None) -> str:
    part = "" if chunks is None else f", chunks {chunks.start} to {chunks.stop}"
    return f"{brief(repr(path), 300)}, contents {contents.checksum:08x}{part}"
