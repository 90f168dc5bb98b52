"""The header of a checkpoint: its keys, their counts, the updater, where each array lies, and checksums.

The form is that of safetensors (https://github.com/huggingface/safetensors): the length of the header in 8 bytes, the
header in JSON, and the arrays without gaps, little-endian. What safetensors has no place for is a JSON text in its
metadata. Where the arrays lie follows from that text, so that a header is either the one that this text has or no
header: overlaps, gaps and sizes need no check of their own. No size is believed before the length of the file has
confirmed it.
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..arrays.arrays import bfloat16
from ..errors import CheckpointError, Unsupported, brief
from ..protocols import Array, Key

__all__ = [
    "CHUNK",
    "LARGEST_HEADER",
    "VALUE",
    "CodecArray",
    "Header",
    "SavedKey",
    "Tensor",
    "check_byte_order",
    "check_writable",
    "parse_dtype",
    "parse_header",
]

CHUNK = 1 << 20
"""Bytes of the arrays that have a checksum together."""
LARGEST_HEADER = 100_000_000
"""Bytes; safetensors' own limit."""
VALUE = ""
"""Stands in the place of the name of a state for the value itself."""

_VERSION = 3
_ALIGNMENT = 64
_MOST_DIMENSIONS = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32
_LARGEST = (1 << 63) - 1
_MOST_UPDATES = 1 << 62
# What is said of each kind of updater.
_UPDATERS: dict[str, dict[str, Any]] = {
    "assign": {},
    "function": {"settings": str},
    "optimizer": {"settings": str, "name": str, "options": (dict, type(None))},
}

# numpy's name: safetensors' name and the bytes of its elements. It has no complex numbers, which are pairs here.
_STORED = {
    "bool": ("BOOL", 1),
    **{f"int{8 * size}": (f"I{8 * size}", size) for size in (1, 2, 4, 8)},
    **{f"uint{8 * size}": (f"U{8 * size}", size) for size in (1, 2, 4, 8)},
    **{f"float{8 * size}": (f"F{8 * size}", size) for size in (2, 4, 8)},
    "bfloat16": ("BF16", 2),
    "complex64": ("F32", 4),
    "complex128": ("F64", 8),
}


class Tensor(NamedTuple):
    """One array of the file."""

    item: int
    """The position of its key."""
    slot: str
    """The name of a state, :data:`VALUE`, ``residual/RANK/POSITION``, or ``codec/NAME`` for what a codec keeps."""
    name: str
    dtype: str
    """safetensors' name."""
    shape: tuple[int, ...]
    """As safetensors sees it: complex numbers have one more dimension."""
    begin: int
    """Its first byte, counted from the first array."""
    end: int


class CodecArray(NamedTuple):
    """One array that a codec keeps for a value."""

    dtype: str
    """numpy's name."""
    shape: tuple[int, ...]


class SavedKey(NamedTuple):
    """One key of the store. The names of the fields are those in the file."""

    key: Key
    dtype: str
    """numpy's name."""
    shape: tuple[int, ...]
    updates: int
    """How many updates the updater has made."""
    earlier: int
    """How many pushes came before those; negative for state of more updates than the value has seen."""
    state: dict[str, str]
    """The optimizer's state arrays: their names and numpy's names of their dtypes."""
    row_sparse: bool = False
    """Whether the key takes and clears rows; the file has all of them."""
    positions: int = 0
    """How many residuals every rank has, one for each position in the lists that were pushed."""
    codec: Mapping[str, CodecArray] = MappingProxyType({})
    """What the codec keeps between pushes, by its names."""


@dataclass(frozen=True)
class Header:
    """All that a checkpoint holds but the arrays and their checksums. Equal on all ranks."""

    keys: tuple[SavedKey, ...]
    values: bool
    """Whether the values are there, or the optimizer's state alone."""
    updater: Mapping[str, Any]
    """What :func:`~mpikv.checkpoint.compatibility.describe_updater` returned."""
    compression: str | None = None
    """The settings of the codec that left residuals; None where none are in the file."""
    ranks: int = 0
    """How many ranks have left them."""

    @cached_property
    def text(self) -> str:
        """The description in the metadata: JSON of everything here."""
        tree = {"version": _VERSION, "values": self.values, "updater": self.updater}
        tree |= {"compression": self.compression, "ranks": self.ranks, "keys": [one._asdict() for one in self.keys]}
        return json.dumps(tree, default=dict)

    @cached_property
    def checksum(self) -> int:
        """The CRC-32 of :attr:`text`."""
        return zlib.crc32(self.text.encode())

    @property
    def parts(self) -> list[str]:
        """What :attr:`text` is made of, in texts that can be shown where those of two ranks differ."""
        # Option by option, before the texts that have all of them.
        updater = {**(self.updater.get("options") or {}), **self.updater}
        texts = [f"{name}={brief(repr(value), 300)}" for name, value in updater.items()]
        return texts + [brief(repr(one), 300) for one in self.keys]

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The arrays in the order of the file: those of large elements first, so that all are aligned."""
        tensors, begin = [], 0
        for item, slot, dtype, shape in sorted(self._list_arrays(), key=lambda array: -_STORED[array[2]][1]):
            name, itemsize = _STORED[dtype]
            shape = (*shape, 2) if dtype.startswith("complex") else shape
            end = begin + math.prod(shape) * itemsize
            title = f"{slot if '/' in slot else f'state/{slot}' if slot else 'value'}/{self.keys[item].key}"
            tensors.append(Tensor(item, slot, title, name, shape, begin, end))
            begin = end
        return tuple(tensors)

    def _list_arrays(self) -> Iterator[tuple[int, str, str, tuple[int, ...]]]:
        """Yield the item, the slot, numpy's dtype and the shape of each array."""
        for item, one in enumerate(self.keys):
            for slot, dtype in (({VALUE: one.dtype} if self.values else {}) | one.state).items():
                yield item, slot, dtype, one.shape
        # Of ranks that have left nothing there may be any number.
        left = [(item, one) for item, one in enumerate(self.keys) if one.positions]
        for rank in range(self.ranks if left else 0):
            for item, one in left:
                for position in range(one.positions):
                    yield item, f"residual/{rank}/{position}", "float32", one.shape
        for item, one in enumerate(self.keys):
            for name, (dtype, shape) in one.codec.items():
                yield item, f"codec/{name}", dtype, shape

    @property
    def count(self) -> int:
        """How many arrays there are."""
        return sum(self.values + len(one.state) + self.ranks * one.positions + len(one.codec) for one in self.keys)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return self.tensors[-1].end if self.tensors else 0

    @property
    def chunks(self) -> int:
        """The number of checksums."""
        return -(-self.nbytes // CHUNK)

    @property
    def places(self) -> dict[str, Any]:
        """Where each array lies, as JSON has it."""
        return {
            one.name: {"dtype": one.dtype, "shape": [*one.shape], "data_offsets": [one.begin, one.end]}
            for one in self.tensors
        }

    @cached_property
    def _end(self) -> str:
        """What follows the metadata: it has no checksums, so that it is made once."""
        return f",{_dump(self.places)[1:]}" if self.tensors else "}"

    def encode(self, sums: Array) -> bytes:
        """Return all that stands before the arrays: of one length, whatever the checksums are."""
        checksums = f"{self.checksum:08x}" + sums.astype(">u4").tobytes().hex()
        metadata = _dump({"__metadata__": {"mpikv_checkpoint": self.text, "mpikv_crc32": checksums}})
        text = (metadata[:-1] + self._end).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        if len(text) > LARGEST_HEADER:
            raise Unsupported(
                f"a header of {len(text)} bytes for {len(self.keys)} keys is more than safetensors' {LARGEST_HEADER}; "
                "use fewer, larger arrays"
            )
        return len(text).to_bytes(8, "little") + text


def _dump(tree: Mapping[str, Any]) -> str:
    return json.dumps(tree, separators=(",", ":"))


def parse_dtype(name: str) -> np.dtype[Any]:
    """Return numpy's dtype.

    Raises:
        Unsupported: it is bfloat16, and ml_dtypes is not installed.
    """
    return bfloat16() if name == "bfloat16" else np.dtype(name)


def check_byte_order() -> None:
    """Raise Unsupported where memory is not as the file is."""
    if sys.byteorder != "little":
        raise Unsupported("checkpoints are little-endian, and this processor is not")


def check_writable(header: Header) -> int:
    """Return where the arrays begin in a file with this header; raise Unsupported if no reader would take it."""
    check_byte_order()
    try:
        _parse_description(_parse_tree(header.text))
    except ValueError as error:  # CheckpointError is one; so is what JSON says of numbers of too many digits
        raise Unsupported(f"no checkpoint can hold this store: {brief(str(error), 300)}") from None
    return len(header.encode(np.zeros(header.chunks, np.uint32)))


def parse_header(text: bytes, size: int) -> tuple[Header, Array]:
    """Return what a header of a file of so many bytes says, and the CRC-32 of each :data:`CHUNK` of the arrays.

    Raises:
        CheckpointError: it is no header of a whole checkpoint.
    """
    tree = _parse_tree(text)
    metadata = tree.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not {"mpikv_checkpoint", "mpikv_crc32"} <= metadata.keys():
        raise CheckpointError(
            "it is a safetensors file, but not a checkpoint of mpikv: its metadata lack mpikv's entries"
        )
    described, checksums = (_check_type(metadata[name], str) for name in ("mpikv_checkpoint", "mpikv_crc32"))
    if f"{zlib.crc32(described.encode(errors='replace')):08x}" != checksums[:8]:
        raise CheckpointError("the checksum of its description does not match: the file is damaged")
    try:
        header = _parse_description(_parse_tree(described))
    except KeyError as error:
        raise CheckpointError(f"the description of its contents lacks {error}") from None
    _check_places(header, tree)
    whole = 8 + len(text) + header.nbytes
    if whole != size:
        raise CheckpointError(f"it has {size} bytes, but its arrays need {whole}")
    return header, _parse_sums(checksums, header.chunks)


def _check_places(header: Header, tree: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the arrays of a file lie where its description says."""
    if header.ranks and len(tree) != header.count:  # before they are listed, as it may be any number
        raise CheckpointError(f"it has {len(tree)} arrays and its description says {brief(header.count, 40)}")
    if tree != (expected := header.places):
        name = next((name for name in (*tree, *expected) if tree.get(name) != expected.get(name)), "")
        found, described = brief(tree.get(name)), brief(expected.get(name))
        raise CheckpointError(f"array {brief(name, 40)!r} is {found} and its description says {described}")


def _parse_sums(text: str, chunks: int) -> Array:
    try:
        sums = np.frombuffer(bytes.fromhex(text), ">u4")[1:].astype(np.uint32)
    except ValueError:
        sums = np.empty(0, np.uint32)
    if len(sums) != chunks:
        raise CheckpointError(f"its checksums are not {chunks} numbers of 8 digits")
    return sums


def _parse_tree(text: bytes | str) -> dict[str, Any]:
    try:
        tree = json.loads(text if isinstance(text, str) else text.decode(), object_pairs_hook=_refuse_twins)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"its header is not JSON: {error}") from None
    found: dict[str, Any] = _check_type(tree, dict)
    return found


def _refuse_twins(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{brief(twice, 40)!r} occurs twice")
    return tree


def _parse_description(tree: Mapping[str, Any]) -> Header:
    if tree["version"] != _VERSION:
        raise CheckpointError(
            f"it has version {brief(tree['version'], 40)} of the format; this mpikv reads version {_VERSION}"
        )
    keys = tuple(_parse_key(_check_type(one, dict)) for one in _check_type(tree["keys"], list))
    if len({one.key for one in keys}) < len(keys) or len({type(one.key) for one in keys}) > 1:
        raise CheckpointError("its keys are not all different and all numbers or all strings")
    updater, values = _parse_updater(tree["updater"]), _check_type(tree["values"], bool)
    compression: str | None = _check_type(tree["compression"], (str, type(None)))
    ranks = _check_count(tree["ranks"])
    # What numbers say has to be there, as arrays, which are counted before anybody counts up to the numbers.
    arrays = sum(one.positions > 0 or bool(one.codec) for one in keys)
    if len({compression is not None, ranks > 0, arrays > 0}) > 1:
        raise CheckpointError(
            f"it contradicts itself about residuals: compression {brief(repr(compression), 40)}, {ranks} ranks, "
            f"{arrays} keys with residuals"
        )
    return Header(keys, values, updater, compression, ranks)


def _parse_updater(value: Any) -> dict[str, Any]:
    updater: dict[str, Any] = _check_type(value, dict)
    if updater["kind"] not in list(_UPDATERS):
        raise CheckpointError(f"its updater is of an unknown kind {brief(repr(updater['kind']), 40)}")
    for name, kinds in _UPDATERS[updater["kind"]].items():
        _check_type(updater[name], kinds)
    _check_count(updater.get("divides_by_ranks", 1))
    return updater


def _parse_key(tree: Mapping[str, Any]) -> SavedKey:
    key: Key = _check_type(tree["key"], (int, str))
    state: dict[str, str] = _check_type(tree["state"], dict)
    dtypes = [_check_type(name, str) for name in (tree["dtype"], *state.values())]
    shape = _parse_shape(tree["shape"])
    updates, earlier = (_check_type(tree[name], int) for name in ("updates", "earlier"))
    row_sparse: bool = _check_type(tree["row_sparse"], bool)
    fault = ""
    if unknown := [name for name in dtypes if name not in _STORED]:
        fault = f"has an unknown dtype {brief(repr(unknown[0]), 40)}"
    if _is_too_large(shape):
        fault = f"has an impossible shape {brief([*shape])}"
    if any("/" in slot or not slot for slot in state):
        fault = f"has an invalid state name among {brief([*state])}"
    if not 0 <= updates <= _MOST_UPDATES or not 0 <= updates + earlier <= _MOST_UPDATES:
        fault = f"has impossible update counts {brief(updates, 40)} and {brief(earlier, 40)}"
    if row_sparse and not shape:
        fault = "is row-sparse, but a single number"
    if fault:
        raise CheckpointError(f"key {brief(repr(key), 40)} {fault}")
    positions = _check_count(tree["positions"])
    codec = {name: _parse_codec_array(name, one) for name, one in _check_type(tree["codec"], dict).items()}
    return SavedKey(key, dtypes[0], shape, updates, earlier, state, row_sparse, positions, codec)


def _parse_codec_array(name: str, tree: Any) -> CodecArray:
    if len(_check_type(tree, list)) != 2:
        raise CheckpointError(f"a codec keeps {brief(name, 40)!r} with an invalid description {brief(repr(tree), 40)}")
    dtype, shape = _check_type(tree[0], str), _parse_shape(tree[1])
    if dtype not in _STORED or dtype.startswith("complex") or "/" in name or not name:
        raise CheckpointError(f"a codec keeps {brief(name, 40)!r} of dtype {brief(repr(dtype), 40)}")
    if _is_too_large(shape):
        raise CheckpointError(f"a codec keeps {brief(name, 40)!r} of an impossible shape {brief([*shape])}")
    return CodecArray(dtype, shape)


def _parse_shape(value: Any) -> tuple[int, ...]:
    return tuple(map(_check_count, _check_type(value, list)))


def _is_too_large(shape: tuple[int, ...]) -> bool:
    """Return whether this numpy could not even name an array of a shape, as it is counted without the zeros."""
    return len(shape) > _MOST_DIMENSIONS or math.prod(length or 1 for length in shape) > _LARGEST // 16


def _check_count(value: Any) -> int:
    number: int = _check_type(value, int)
    if not 0 <= number <= _LARGEST:
        raise CheckpointError(f"{brief(number, 40)} is not a length")
    return number


def _check_type(value: Any, kinds: type[Any] | tuple[type[Any], ...]) -> Any:
    """Return the value if it is of one of the types; a truth value is no number."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise CheckpointError(f"its header has {brief(repr(value), 40)}, a value of the wrong type")
    return value
