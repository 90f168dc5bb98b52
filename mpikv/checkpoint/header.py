"""The header of a checkpoint: its keys, their counts, the updater, the place of each array, and checksums.

The format is safetensors (https://github.com/huggingface/safetensors): the length of the header in 8 bytes, the header
in JSON, and the arrays without gaps, little-endian. A JSON text in the metadata holds everything that safetensors has
no field for. The places of the arrays follow from this text; a header with other places is invalid. So overlaps, gaps
and sizes need no checks of their own. No size counts before the length of the file has confirmed it.
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from json.encoder import encode_basestring_ascii as _escape
from typing import Any, NamedTuple

import numpy as np

from ..arrays.arrays import bfloat16
from ..errors import CheckpointError, Unsupported, brief
from ..protocols import Array, Key

CHUNK = 1 << 20
"""Bytes of the arrays per checksum."""
LARGEST_HEADER = 100_000_000
"""Bytes; safetensors' own limit."""
VALUE = ""
"""The slot of the value itself; other slots are names of states."""
RESIDUALS = "mpikv.residuals"
"""The name of what compressed pushes have left out; a program cannot give it to a state of its own."""
VERSION = 7
"""Of the format of checkpoints, and of the states and options in commits."""

_ALIGNMENT = 64
# The beginning of every header written by this module.
_BEGIN = '{"__metadata__":'
_MOST_DIMENSIONS = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32
_LARGEST = (1 << 63) - 1
_MOST_UPDATES = 1 << 62
# The fields of each kind of updater.
_UPDATERS: dict[str, dict[str, Any]] = {
    "assign": {},
    "function": {"settings": str},
    "optimizer": {"settings": str, "name": str, "options": (dict, type(None))},
}

# numpy's name: safetensors' name, and bytes per element. safetensors has no complex numbers; the file has pairs.
_STORED = {
    "bool": ("BOOL", 1),
    **{f"int{8 * size}": (f"I{8 * size}", size) for size in (1, 2, 4, 8)},
    **{f"uint{8 * size}": (f"U{8 * size}", size) for size in (1, 2, 4, 8)},
    **{f"float{8 * size}": (f"F{8 * size}", size) for size in (2, 4, 8)},
    "bfloat16": ("BF16", 2),
    "complex64": ("F32", 4),
    "complex128": ("F64", 8),
}


class Column(NamedTuple):
    """The arrays of one slot and dtype, one behind the other in the order of their keys."""

    slot: str
    """The name of a state, or :data:`VALUE`."""
    dtype: str
    """numpy's name."""
    shapes: Mapping[int, tuple[int, ...]]
    """The shape of the arrays of each kind of keys, if the kind has one."""
    items: Array
    """The positions of these keys, ascending, int64."""
    edges: Array
    """The first byte of each array, counted from the first array of the file, and the end of the last, int64."""

    @property
    def name(self) -> str:
        """The beginning of each array's name; the key follows."""
        return f"state/{self.slot}/" if self.slot else "value/"


class Kind(NamedTuple):
    """The description of a key without its name; most keys share few kinds. A file has the same field names."""

    dtype: str
    """numpy's name."""
    shape: tuple[int, ...]
    updates: int
    """Number of updates made by the updater."""
    earlier: int
    """Number of pushes before those; negative if the state has seen more updates than the value."""
    state: Mapping[str, str]
    """The optimizer's state arrays: names, and numpy's names of their dtypes."""
    row_sparse: bool = False
    """Whether the key is row-sparse; the file holds all its rows."""


@dataclass(frozen=True, eq=False)
class Header:
    """The whole content of a checkpoint but its arrays and their checksums. The same on all ranks."""

    keys: tuple[Key, ...]
    kinds: tuple[Kind, ...]
    kind_of: tuple[int, ...]
    """The position of each key's kind in ``kinds``."""
    values: bool
    """Whether the file holds the values, too, or the optimizer's state alone."""
    updater: Mapping[str, Any]
    """The result of :func:`~mpikv.checkpoint.compatibility.describe_updater`."""
    program: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """For each name in the program's state its bytes: one number, or one for each rank."""

    @property
    def pairs(self) -> Iterator[tuple[Key, Kind]]:
        """A new iterator over pairs of a key and its kind."""
        return zip(self.keys, map(self.kinds.__getitem__, self.kind_of), strict=True)

    @cached_property
    def text(self) -> str:
        """The description in the metadata: JSON of all fields."""
        tree = {"version": VERSION, "values": self.values, "updater": self.updater, "program": self.program}
        tree |= {"keys": self.keys, "kind_of": self.kind_of}
        return json.dumps(tree | {"kinds": [one._asdict() for one in self.kinds]}, default=dict)

    @cached_property
    def checksum(self) -> int:
        """The CRC-32 of :attr:`text`."""
        return zlib.crc32(self.text.encode())

    @property
    def parts(self) -> list[str]:
        """Texts of single facts, of the updater and of each key, to show the first that differs between two ranks."""
        # Single options first: a difference in one is shown before the long text of all.
        updater = {**(self.updater.get("options") or {}), **self.updater}
        texts = [f"{name}={brief(repr(value), 300)}" for name, value in updater.items()]
        return texts + [brief(f"{key!r}: {kind}", 300) for key, kind in self.pairs]

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """The arrays by slot and dtype, in file order: largest elements first, so that every array is aligned."""
        shapes: dict[tuple[str, str], dict[int, tuple[int, ...]]] = {}
        for number, kind in enumerate(self.kinds):
            for column in self._slots(kind).items():
                shapes.setdefault(column, {})[number] = kind.shape
        kind_of, begin, columns = np.array(self.kind_of, np.int64), 0, list[Column]()
        for (slot, dtype), shape_of in sorted(shapes.items(), key=lambda column: -_STORED[column[0][1]][1]):
            # -1 where a kind has no array in this column: an empty array has 0 bytes, and a place.
            nbytes = np.full(len(self.kinds), -1, np.int64)
            for number, shape in shape_of.items():
                nbytes[number] = _nbytes(dtype, shape)
            items = np.flatnonzero(nbytes[kind_of] >= 0)
            edges = begin + np.concatenate(([0], np.cumsum(nbytes[kind_of[items]])))
            columns.append(Column(slot, dtype, shape_of, items, edges))
            begin = int(edges[-1])
        return tuple(columns)

    @cached_property
    def blobs(self) -> Mapping[str, Array]:
        """By name in the program's state: byte offsets of its parts and their end, from the first array on."""
        edges, end = {}, self.nbytes_of_arrays
        for name, sizes in self.program.items():
            edges[name] = end + np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
            end = int(edges[name][-1])
        return edges

    @property
    def nbytes_of_arrays(self) -> int:
        """Bytes of values and states, which the program's state follows."""
        return self.nbytes - sum(map(sum, self.program.values()))

    def _slots(self, kind: Kind) -> dict[str, str]:
        """Return the arrays that the file has for a key of this kind: a dict from slots to names of dtypes."""
        return ({VALUE: kind.dtype} if self.values else {}) | dict(kind.state)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all arrays and the program's state. Not from their places: a forged header may claim any shapes."""
        of_kind = [sum(_nbytes(dtype, kind.shape) for dtype in self._slots(kind).values()) for kind in self.kinds]
        return sum(of_kind[kind] for kind in self.kind_of) + sum(map(sum, self.program.values()))

    @property
    def chunks(self) -> int:
        """Number of chunks of the arrays and the program's state; each has a checksum."""
        return -(-self.nbytes // CHUNK)

    def names_between(self, begin: int, end: int) -> Iterator[str]:
        """Yield the names of the arrays in a range of bytes."""
        for column in self.columns:
            low, high = np.searchsorted(column.edges[1:], begin, "right"), np.searchsorted(column.edges[:-1], end)
            for item in column.items[low:high].tolist():
                yield f"{column.name}{self.keys[item]}"
        yield from (f"program/{name}" for name, edges in self.blobs.items() if edges[0] < end and begin < edges[-1])

    @cached_property
    def end(self) -> str:
        """The text after the metadata: the place of each array. Joined from few texts; json is slow for many keys."""
        names, texts = [_escape(str(key))[1:] for key in self.keys], list[str]()
        for column in self.columns:
            begin, middle = f",{_escape(column.name)[:-1]}", {}
            for kind, shape_of in column.shapes.items():
                # safetensors has no complex numbers: the file has pairs.
                pairs = [2] * column.dtype.startswith("complex")
                shape = _dump([*shape_of, *pairs])
                middle[kind] = f':{{"dtype":"{_STORED[column.dtype][0]}","shape":{shape},"data_offsets":['
            edges = list(map(str, column.edges.tolist()))
            texts += [
                f"{begin}{names[item]}{middle[self.kind_of[item]]}{low},{high}]}}"
                for item, low, high in zip(column.items.tolist(), edges[:-1], edges[1:], strict=True)
            ]
        for name, blob in self.blobs.items():
            for rank, (low, high) in enumerate(pairwise(blob.tolist())):
                begin = f',{_escape(f"program/{rank}/{name}")}:{{"dtype":"U8","shape":[{high - low}],"data_offsets":['
                texts.append(f"{begin}{low},{high}]}}")
        return "".join([*texts, "}"])

    @cached_property
    def start(self) -> int:
        """Byte offset of the arrays in the file, whatever the checksums; Unsupported if the header is too long.

        Raises:
            Unsupported: the header is too long.
        """
        length = len(self._text_before_end(np.zeros(self.chunks, np.uint32))) + len(self.end)  # it is ASCII
        # The arrays begin at a multiple of it, so that a mapped file can be used where it lies.
        length += -(8 + length) % _ALIGNMENT
        if length > LARGEST_HEADER:
            raise Unsupported(
                f"a header of {length} bytes for {len(self.keys)} keys is more than safetensors' {LARGEST_HEADER}; "
                "use fewer, larger arrays"
            )
        return 8 + length

    def encode(self, sums: Array) -> bytes:
        """Return the file's bytes before the arrays: the header, with these checksums."""
        text = f"{self._text_before_end(sums)}{self.end}"
        return (self.start - 8).to_bytes(8, "little") + text.ljust(self.start - 8).encode()

    def _text_before_end(self, sums: Array) -> str:
        """Return the JSON before the places of the arrays: the description and the checksums."""
        checksums = f"{self.checksum:08x}" + sums.astype(">u4").tobytes().hex()
        return f"{_BEGIN}{_dump({'mpikv_checkpoint': self.text, 'mpikv_crc32': checksums})}"


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the number of bytes of an array in the file."""
    return math.prod(shape) * _STORED[dtype][1] * (2 if dtype.startswith("complex") else 1)


def _dump(tree: Any) -> str:
    """Return a tree as JSON without spaces."""
    return json.dumps(tree, separators=(",", ":"))


def parse_dtype(name: str) -> np.dtype[Any]:
    """Return numpy's dtype of this name; Unsupported if it is bfloat16, and ml_dtypes is missing.

    Raises:
        Unsupported: it is bfloat16, and ml_dtypes is not installed.
    """
    return bfloat16() if name == "bfloat16" else np.dtype(name)


def check_byte_order() -> None:
    """Raise Unsupported on a big-endian processor."""
    if sys.byteorder != "little":
        raise Unsupported("checkpoints are little-endian, and this processor is not")


def check_writable(header: Header) -> None:
    """Raise Unsupported if no reader would accept a file with this header."""
    check_byte_order()
    try:
        _parse_description(_parse_tree(header.text))
    except ValueError as error:  # CheckpointError is one; json raises one for numbers of too many digits
        raise Unsupported(f"no checkpoint can hold this store: {brief(str(error), 300)}") from None
    _ = header.start  # which raises where the header is too long


def parse_header(text: bytes, size: int) -> tuple[Header, Array]:
    """Return the header of a file of ``size`` bytes, and the CRC-32 of each chunk; CheckpointError if damaged.

    A chunk is :data:`CHUNK` bytes of the arrays.

    Raises:
        CheckpointError: the text is no header of a whole checkpoint.
    """
    try:
        whole = text.decode()
        metadata, end = json.JSONDecoder().raw_decode(whole, len(_BEGIN)) if whole.startswith(_BEGIN) else (None, 0)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"its header is not JSON: {error}") from None
    if not isinstance(metadata, dict) or not {"mpikv_checkpoint", "mpikv_crc32"} <= metadata.keys():
        raise CheckpointError("it is not a checkpoint of mpikv, or another program has written its header anew")
    described, checksums = (_check_type(metadata[name], str) for name in ("mpikv_checkpoint", "mpikv_crc32"))
    # Before anything else of the description is believed.
    if f"{zlib.crc32(described.encode(errors='replace')):08x}" != checksums[:8]:
        raise CheckpointError("the checksum of its description does not match: the file is damaged")
    try:
        header = _parse_description(_parse_tree(described))
    except KeyError as error:
        raise CheckpointError(f"the description of its contents lacks {error}") from None
    # Before the sizes count for anything: a forged header fails here. First their sum, as places would overflow.
    if header.nbytes > _LARGEST:
        raise CheckpointError(f"its arrays need {brief(header.nbytes, 40)} bytes")
    # As text: to parse the places of thousands of arrays would take longer. Each save writes them in this form.
    if whole[end:].rstrip(" ") != header.end:
        raise CheckpointError("its arrays lie elsewhere than its description says: has another program written it?")
    if size != (needed := 8 + len(text) + header.nbytes):
        raise CheckpointError(f"it has {size} bytes, but its arrays need {needed}")
    return header, _parse_sums(checksums, header.chunks)


def _parse_sums(text: str, chunks: int) -> Array:
    """Return checksums from hexadecimal digits, as uint32, without the first; CheckpointError unless one per chunk."""
    try:
        sums = np.frombuffer(bytes.fromhex(text), ">u4")[1:].astype(np.uint32)
    except ValueError:
        sums = np.empty(0, np.uint32)
    if len(sums) != chunks:
        raise CheckpointError(f"its checksums are not {chunks} numbers of 8 digits")
    return sums


def _parse_tree(text: str) -> dict[str, Any]:
    """Return the dict of a JSON text; CheckpointError if it is none."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"its header is not JSON: {error}") from None
    found: dict[str, Any] = _check_type(tree, dict)
    return found


def _parse_description(tree: Mapping[str, Any]) -> Header:
    """Return the header that a tree describes; CheckpointError if it has a fault, KeyError if an entry is missing."""
    if tree["version"] != VERSION:
        raise CheckpointError(
            f"it has version {brief(tree['version'], 40)} of the format; this mpikv reads version {VERSION}"
        )
    keys: tuple[Key, ...] = tuple(_check_type(tree["keys"], list))
    # The types of all at once: a check per key would take longer than parsing.
    if not set(map(type, keys)) <= {int, str}:
        for key in keys:
            _check_type(key, (int, str))
    if len(set(keys)) < len(keys) or len(set(map(type, keys))) > 1:
        raise CheckpointError("its keys are not all different and all numbers or all strings")
    kinds, kind_of = _parse_kinds(_check_type(tree["kinds"], list), _check_type(tree["kind_of"], list), keys)
    updater, values = _parse_updater(tree["updater"]), _check_type(tree["values"], bool)
    program = {name: _parse_shape(sizes) for name, sizes in _check_type(tree["program"], dict).items()}
    return Header(keys, kinds, kind_of, values, updater, program)


def _parse_kinds(
    trees: Sequence[Any], kind_of: Sequence[Any], keys: Sequence[Key]
) -> tuple[tuple[Kind, ...], tuple[int, ...]]:
    """Return the kinds of keys, and the number of each key's kind; CheckpointError, or KeyError for a missing field, if
    they are invalid.
    """
    if len(kind_of) != len(keys) or not set(map(type, kind_of)) <= {int} or set(kind_of) != set(range(len(trees))):
        raise CheckpointError(f"it does not say of each of {len(keys)} keys which of {len(trees)} kinds it is of")
    # Reversed, so that the first key of each kind stays, and is named in an error.
    first = dict(zip(reversed(kind_of), reversed(keys), strict=True))
    kinds = tuple(_parse_kind(first[number], _check_type(tree, dict)) for number, tree in enumerate(trees))
    return kinds, tuple(kind_of)


def _parse_updater(value: Any) -> dict[str, Any]:
    """Return a file's description of an updater; CheckpointError, or KeyError, if it is none."""
    updater: dict[str, Any] = _check_type(value, dict)
    if updater["kind"] not in list(_UPDATERS):
        raise CheckpointError(f"its updater is of an unknown kind {brief(repr(updater['kind']), 40)}")
    for name, kinds in _UPDATERS[updater["kind"]].items():
        _check_type(updater[name], kinds)
    _check_count(updater.get("divides_by_ranks", 1))
    return updater


def _parse_kind(key: Key, tree: Mapping[str, Any]) -> Kind:
    """Return a kind; CheckpointError, or KeyError, if it is impossible. ``key`` is one of its keys, for errors."""
    state: dict[str, str] = _check_type(tree["state"], dict)
    # Texts first: a list as a name would fail in a look-up, with an error that names no key.
    dtypes = [_check_type(name, str) for name in (tree["dtype"], *state.values())]
    shape = _parse_shape(tree["shape"])
    updates, earlier = (_check_type(tree[name], int) for name in ("updates", "earlier"))
    row_sparse: bool = _check_type(tree["row_sparse"], bool)
    fault = ""
    if unknown := [name for name in dtypes if name not in _STORED]:
        fault = f"has an unknown dtype {brief(repr(unknown[0]), 40)}"
    # numpy could not hold such an array, zeros not counted.
    if len(shape) > _MOST_DIMENSIONS or math.prod(length or 1 for length in shape) > _LARGEST // 16:
        fault = f"has an impossible shape {brief([*shape])}"
    if any("/" in slot or not slot for slot in state):
        fault = f"has an invalid state name among {brief([*state])}"
    if not 0 <= updates <= _MOST_UPDATES or not 0 <= updates + earlier <= _MOST_UPDATES:
        fault = f"has impossible update counts {brief(updates, 40)} and {brief(earlier, 40)}"
    if row_sparse and not shape:
        fault = "is row-sparse, but a single number"
    if fault:
        raise CheckpointError(f"key {brief(repr(key), 40)} {fault}")
    return Kind(dtypes[0], shape, updates, earlier, state, row_sparse)


def _parse_shape(value: Any) -> tuple[int, ...]:
    """Return a list of lengths as a tuple; CheckpointError if it is none."""
    return tuple(map(_check_count, _check_type(value, list)))


def _check_count(value: Any) -> int:
    """Return the value if it is a length, else raise CheckpointError."""
    number: int = _check_type(value, int)
    if not 0 <= number <= _LARGEST:
        raise CheckpointError(f"{brief(number, 40)} is not a length")
    return number


def _check_type(value: Any, kinds: type[Any] | tuple[type[Any], ...]) -> Any:
    """Return the value if it has one of the types, else raise CheckpointError; a bool is no int."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise CheckpointError(f"its header has {brief(repr(value), 40)}, a value of the wrong type")
    return value
