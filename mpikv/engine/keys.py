"""The key table, and the forms of keys and arrays that a call takes.

Forms: one key with one array or a list of arrays; a list of keys with a list of either; a list with repeated keys, the
same as a nested list; a dict of arrays, where the keys of nested dicts are joined with ``/``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from ..arrays.arrays import is_array, is_immutable
from ..errors import KeyAlreadyInitialized, KeyNotInitialized, ValueMismatch, a_kind
from ..memory.row_sparse import RowSparse
from ..protocols import Array, Key
from .arena import Place

_KINDS = ({str}, {int})


@dataclass(eq=False)
class Entry:
    """The store's record of one key. The block owns its memory."""

    key: Key
    index: int
    """The row of this key in the table's ``counts``, ``earlier``, ``stale`` and ``buffered``."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    place: Place
    value: Array
    """This rank's memory of the value, in its shape."""
    row_sparse: bool = False
    nonzero: Array | None = None
    """Numbers of the rows of a row-sparse value that may be nonzero on this rank: a push without an updater clears
    these only. None: any row may be. They hold only while the store has no updater; whoever removes one sets None."""
    codec_state: dict[str, Array] = field(default_factory=dict)
    """The state of a codec of tensors between pushes."""

    @cached_property
    def view(self) -> Array:
        """This rank's memory of the value, in its shape: read-only on the host, writable on a GPU."""
        view: Array = self.value.view()
        if self.place.block.memory.is_host:
            view.flags.writeable = False
        return view

    def buffer(self, place: int) -> Array:
        """Return a view of the key's push buffer of rank ``place`` among the ranks that share memory. Local."""
        assert self.place.block.buffers is not None
        row: Array = self.place.block.buffers[place]
        return row[self.place.start : self.place.start + self.place.size].reshape(self.shape)

    def residuals(self) -> list[Array]:
        """Return flat views of this rank's residuals of the value, one for each position in pushed lists. Local."""
        low, high = self.place.start, self.place.start + self.place.size
        return [residual[low:high] for residual in self.place.block.residuals]

    @property
    def keeps_all(self) -> bool:
        """Whether this rank keeps optimizer state of all elements of the value, as one range."""
        return self.place.block.kept.have(self.place.start, self.place.start + self.place.size)

    def state_of(self, begin: int, end: int) -> dict[str, Array]:
        """Return views of the optimizer state of the value's elements ``[begin, end)``, kept by this rank. Local."""
        return self.place.block.state_of(self.place.start + begin, self.place.start + end)

    @property
    def state(self) -> dict[str, Array]:
        """Views of the optimizer state of the value, in its shape. Only where this rank keeps all of it."""
        return {name: array.reshape(self.shape) for name, array in self.state_of(0, self.place.size).items()}


class KeyTable:
    """Maps keys to entries.

    Numbers that change with every push are in arrays, so that a list of keys takes one numpy operation.
    """

    def __init__(self) -> None:
        self._entries: dict[Key, Entry] = {}
        self._rows = 0
        self._free_rows: list[int] = []
        self.counts = np.zeros(64, np.int64)
        """Updates of each value by the current updater: one per push."""
        self.tally = self.counts.data
        """The same memory: a change of one number takes a quarter of the time here."""
        self.earlier = np.zeros(64, np.int64)
        """Pushes of each value before the current updater was set."""
        self.stale = np.zeros(64, np.bool_)
        """Whether only the owners have the newest value."""
        self.buffered = np.zeros(64, np.bool_)
        """Whether a user asked for the key's buffers. Its block may have them because of another key."""
        self.summed = dict[Key, object]()
        """The keys of sums of gradients, and of what else lasts one step, with their owners, which keep the weights: a
        Trainer's token, or the prefix of a torch model's keys. Checkpoints leave them out."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __getitem__(self, key: Key) -> Entry:
        """Return the entry of a key; raise KeyNotInitialized if it is unknown. Local."""
        return self.find((key,))[0]

    def entries(self) -> Iterator[Entry]:
        """Return an iterator over all entries, in the order in which keys were added. Local."""
        return iter(self._entries.values())

    def list_lasting(self) -> list[Entry]:
        """Return the entries, in the same order, without those of sums of gradients, which last one step. Local."""
        return [entry for entry in self._entries.values() if entry.key not in self.summed]

    def find(self, keys: Sequence[Key]) -> list[Entry]:
        """Return the entries of keys, in their order; raise KeyNotInitialized for an unknown one. Local."""
        try:
            return [self._entries[key] for key in keys]
        except KeyError as error:
            raise KeyNotInitialized(self._unknown(error.args[0])) from None

    def add(
        self, key: Key, shape: tuple[int, ...], dtype: np.dtype[Any], place: Place, row_sparse: bool = False
    ) -> Entry:
        """Enter a new key with zero counts, in a removed key's row if there is one; return its entry. Local.

        All ranks reuse rows in one order.
        """
        low, high = place.start, place.start + place.size
        # Rows are used again, in the same order on all ranks: owners are asked by these numbers.
        if self._free_rows:
            row = self._free_rows.pop()
            self.counts[row] = self.earlier[row] = self.stale[row] = self.buffered[row] = 0
        else:
            row, self._rows = self._rows, self._rows + 1
            if self._rows > (more := self.counts.size):
                for name in ("counts", "earlier", "stale", "buffered"):
                    setattr(self, name, np.pad(getattr(self, name), (0, more)))
                self.tally = self.counts.data
        entry = Entry(key, row, shape, dtype, place, place.block.values[low:high].reshape(shape), row_sparse)
        self._entries[key] = entry
        return entry

    def version(self, key: Key) -> int:
        """Return the number of pushes of a value; raise KeyNotInitialized if the key is unknown. Local."""
        row = self[key].index
        return int(self.counts[row] + self.earlier[row])

    def start_counts(self) -> None:
        """Set all keys' update counts to zero, for a new updater; add them to the earlier pushes. Local."""
        self.earlier += self.counts
        self.counts[:] = 0

    def remove(self, key: Key) -> Place:
        """Remove a key, and free its row for a later one; return the place of its value, still allocated. Local."""
        entry = self._entries.pop(key)
        self.summed.pop(key, None)
        self._free_rows.append(entry.index)
        return entry.place

    def check_kind(self, keys: Sequence[Key]) -> None:
        """Raise TypeError unless the keys are all int or all str, as those of the table are. Local."""
        # Exactly int or str by now. In one store 3 and '3' would be two keys that look alike in every message.
        kind = type(next(chain(self._entries, keys), None))
        for key in keys:
            if type(key) is not kind:
                given, known = type(key).__name__, kind.__name__
                raise TypeError(f"key {key!r} is of type {given}; the store's keys are all {known}")

    def check_new(self, keys: Sequence[Key]) -> None:
        """Raise KeyAlreadyInitialized if one of the keys is known. Local."""
        known = [key for key in keys if key in self._entries]
        if known:
            raise KeyAlreadyInitialized(
                f"key {known[0]!r} was initialized before, with shape {self._entries[known[0]].shape}; "
                "use set() to change its value, or init(..., overwrite=True) to start anew"
            )

    def _unknown(self, key: Key) -> str:
        """Return the message for an unknown key, with the nearest known ones. Local."""
        import difflib  # loaded only after a mistake

        names = {str(known): repr(known) for known in self._entries}
        near = difflib.get_close_matches(str(key), names, n=3, cutoff=0.5) or list(names)[:3]
        known = f"nearest known keys: {', '.join(names[name] for name in near)}" if near else "no key was"
        return f"key {key!r} was never initialized ({known}); call init({key!r}, value) on every rank first"


class Form(NamedTuple):
    """A call's keys without repetition, in the order of the call, and the arrays of each."""

    keys: tuple[Key, ...]
    groups: tuple[tuple[Any, ...], ...]


def parse(key: Any, value: Any, what: str = "value") -> Form:
    """Return a :class:`Form`: each key of a call once, with a tuple of its arrays; those of a repeated key are merged.
    ``key`` may be a dict of arrays. Raise if keys and arrays do not match. Local.

    ``value`` may be None where arrays are optional; then every group is empty.

    >>> parse(["a", "b", "a"], [1, 2, 3], "value")
    Traceback (most recent call last):
    TypeError: value of key 'a' is an int, not an array; numpy.asarray(value) makes one
    >>> parse(("a", "b"), None).keys
    ('a', 'b')
    """
    if isinstance(key, Mapping):
        key, value = flatten(key, value, what)
    if not isinstance(key, (list, tuple)):
        single = _key(key)
        return Form((single,), ((),) if value is None else (_group(single, value, what),))
    names = _keys(key)
    # In the order of the call, which is that of the updater's calls.
    unique = tuple(dict.fromkeys(names))
    if value is None:
        return Form(unique, ((),) * len(unique))
    if not isinstance(value, (list, tuple)):
        raise ValueMismatch(f"{len(names)} keys need a list of as many {what}s, not {a_kind(value)}")
    if len(value) != len(names):
        raise ValueMismatch(f"{len(names)} keys and {len(value)} {what}s; give one {what}, or a list of them, per key")
    if len(unique) == len(names) and set(map(type, value)) == {np.ndarray}:
        return Form(unique, tuple(zip(value, strict=True)))
    groups: dict[Key, tuple[Any, ...]] = {}
    for name, each in zip(names, value, strict=True):
        group = _group(name, each, what)
        groups[name] = groups[name] + group if name in groups else group
    return Form(unique, tuple(groups.values()))


def flatten(tree: Mapping[Any, Any], value: Any = None, what: str = "value") -> tuple[list[Key], list[Any]]:
    """Return a dict's keys and values, nested keys joined by ``/``; raise for equal keys, or with ``value`` given.
    Local.

    >>> flatten({"w": 1, "layer": {"b": 2}})
    (['w', 'layer/b'], [1, 2])
    """
    if value is not None:
        raise TypeError(f"a dict of keys has the arrays for {what}; leave {what}= out")
    leaves: list[Any] = list(tree.values())
    # A flat one, and lists of plain keys below, are the hot path: looked at without a Python loop.
    if set(map(type, leaves)) == {np.ndarray}:
        return list(_keys(list(tree))), leaves
    names: list[Key] = []
    leaves = []
    for key, leaf in tree.items():
        if isinstance(leaf, Mapping):
            below, values = flatten(leaf)
            names += _joined(_key(key), tuple(below))
            leaves += values
        else:
            names.append(_key(key))
            leaves.append(leaf)
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise ValueMismatch(f"the dict names key {double!r} twice; a nested dict's keys are joined with '/'")
    return names, leaves


@lru_cache(maxsize=256)
def _joined(name: Key, below: tuple[Key, ...]) -> list[str]:
    """Return the keys of a nested dict, each after the key of that dict and ``/``. Cached. Local."""
    return [f"{name}/{each}" for each in below]


def _keys(keys: Sequence[Any]) -> Sequence[Key]:
    """Return keys as Python's int or str, the same sequence if they are; raise TypeError for other types. Local."""
    return keys if set(map(type, keys)) in _KINDS else [_key(key) for key in keys]


def _key(key: Any) -> Key:
    """Return a key as Python's int or str; raise TypeError for other types. Local."""
    # Converted: two ranks may pass an int and numpy's, and must compare and print the same key.
    if isinstance(key, str):
        return str(key)
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        return int(key)
    raise TypeError(f"a key is an int or a str, not {a_kind(key)}: {key!r}")


def _advice(value: Any, what: str, listed: bool) -> str:
    """Return the advice of an error about a value that is no array. Local."""
    if type(value).__module__.startswith("scipy.sparse"):
        return f"mpikv.RowSparse.from_scipy({what}) makes one"
    if value is None:
        return f"no {what} was given for this key"
    if is_immutable(value):
        return "it is traced; call the store outside of functions that jax.jit compiles"
    if what == "out":
        return "pass one to fill and keep it, as out=numpy.empty(shape, dtype)"
    if listed:
        return (
            "a list holds several arrays of this rank, one for each device; numpy.asarray(list, dtype) makes one of "
            "numbers"
        )
    return f"numpy.asarray({what}) makes one"


def _group(key: Key, value: Any, what: str) -> tuple[Any, ...]:
    """Return a key's arrays as a tuple; raise if the list is empty, or an item is no array. Local."""
    listed = isinstance(value, (list, tuple))
    group = tuple(value) if listed else (value,)
    if not group:
        raise ValueMismatch(f"an empty list of {what}s for key {key!r}")
    for each in group:
        if not is_array(each) and not isinstance(each, RowSparse):
            raise TypeError(f"{what} of key {key!r} is {a_kind(each)}, not an array; {_advice(each, what, listed)}")
    return group
