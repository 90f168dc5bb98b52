"""The checks and conversions of what a caller passed: what can be wrong on one rank is found before data move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from .arrays import castable
from .errors import ConfigError, ValueMismatch
from .keys import Entry, Form, KeyTable, parse
from .optimizers import Optimizer, create
from .plan import Plan, label
from .typing import Array, Key, Memory

__all__ = [
    "in_form",
    "like",
    "new_arrays",
    "optimizer_of",
    "outs_of",
    "plain",
    "priorities",
    "singles",
    "sources",
    "targets",
    "updater_function",
    "writable",
]


_shape_of, _dtype_of = attrgetter("shape"), attrgetter("dtype")
_can_be_written, _is_contiguous = attrgetter("flags.writeable"), attrgetter("flags.c_contiguous")
_LISTS, _NUMPYS = (list, tuple), {np.ndarray}


def plain(plan: Plan, key: Any, given: Any, writable: bool = False) -> Sequence[Any] | None:
    """Return the one array per key if that is what was given: numpy's, of the values' shapes and dtypes.

    That is how training calls the store, thousands of times; None sends all else to where more forms are known.
    """
    arrays: Sequence[Any]
    if not plan.on_host:
        return None
    if not isinstance(key, (list, tuple)):
        if type(given) is not np.ndarray or given.shape != plan.shapes[0] or given.dtype != plan.dtypes[0]:
            return None
        arrays = (given,)
    else:
        if type(given) not in _LISTS or len(given) != len(plan.keys) or set(map(type, given)) != _NUMPYS:
            return None
        if len(key) != len(given):  # some keys are named twice
            return None
        if list(map(_shape_of, given)) != plan.shapes or list(map(_dtype_of, given)) != plan.dtypes:
            return None
        arrays = given
    if plan.cut and not all(map(_is_contiguous, arrays)):
        return None
    # Arrays that cannot be written may be views of values, which a push changes bucket by bucket.
    if (writable or len(plan.buckets) > 1) and not all(map(_can_be_written, arrays)):
        return None
    return arrays


def sources(entries: Sequence[Entry], groups: Sequence[Sequence[Any]]) -> list[tuple[Array, ...]]:
    """Return the arrays that a push brings for each key, as flat numpy arrays that fit the stored values."""
    return [
        tuple(_readable(array, entry).reshape(-1) for array in _some(group, entry.key))
        for entry, group in zip(entries, groups, strict=True)
    ]


def singles(form: Form, table: KeyTable | None, memory: Memory) -> list[Array]:
    """Return the one array of each key, in this memory; it fits the value of a key that the table has."""
    arrays = []
    for key, group in zip(form.keys, form.groups, strict=True):
        if len(_some(group, key)) > 1:
            raise ValueMismatch(f"{len(group)} values for key {key!r}; a stored value is one array")
        entry = table[key] if table is not None and key in table else None
        arrays.append(_readable(group[0], entry) if entry else memory.source(group[0]))
    return arrays


def targets(entries: Sequence[Entry], groups: Sequence[Sequence[Any]]) -> list[tuple[Array, ...]]:
    """Return the arrays that a pull fills for each key, as numpy arrays that fit the stored values.

    A value's own view is passed on: there is nothing to fill.
    """
    return [
        tuple(
            array
            if array is entry.view
            else writable(array, entry.key, entry.shape, entry.dtype, entry.place.block.memory)
            for array in group
        )
        for entry, group in zip(entries, groups, strict=True)
    ]


def writable(out: Any, key: Key, shape: tuple[int, ...], dtype: np.dtype[Any], memory: Memory) -> Array:
    """Return ``out`` as an array to which a value of this shape and dtype, in this memory, can be written."""
    array = memory.target(out)
    if array.shape != shape:
        raise ValueMismatch(
            f"out of key {key!r} has shape {array.shape} and the stored value {shape}; pass one of that shape"
        )
    if array.dtype != dtype and not castable(dtype, array.dtype):
        raise ValueMismatch(_kinds(f"out of key {key!r}", array.dtype, dtype))
    return array


def outs_of(key: Any, out: Any, keys: tuple[Key, ...]) -> Form:
    """Return the arrays to fill in the order of ``keys``, which ``key`` named."""
    both_dicts = isinstance(key, Mapping) and isinstance(out, Mapping)
    form = parse(out, None, "out") if both_dicts else parse(key, out, "out")
    if form.keys == keys:
        return form
    groups = dict(zip(form.keys, form.groups, strict=True))
    if groups.keys() != set(keys):
        raise ValueMismatch(f"out has keys {label(form.keys)} and the call {label(keys)}")
    return Form(keys, tuple(groups[name] for name in keys))


def in_form(key: Any, plan: Plan, arrays: Sequence[Array]) -> Any:
    """Return the arrays of a plan in the form of the keys of which it was made."""
    if not isinstance(key, (list, tuple)):
        return arrays[0]
    if len(key) == len(plan.keys):
        return list(arrays)
    known = dict(zip(plan.keys, arrays, strict=True))  # some keys are named twice
    return [known[name] for each in key for name in parse(each, None).keys]


def new_arrays(key: Any, plan: Plan, memory: Memory) -> Any:
    """Return new arrays for the values of a plan, in the form of the keys of which it was made."""
    if not isinstance(key, (list, tuple)):
        return memory.empty(plan.shapes[0], plan.dtypes[0])
    if len(key) == len(plan.keys):
        return list(map(memory.empty, plan.shapes, plan.dtypes))
    entries = dict(zip(plan.keys, plan.entries, strict=True))  # some keys are named twice
    return [memory.empty(entries[name].shape, entries[name].dtype) for each in key for name in parse(each, None).keys]


def like(key: Any, form: Form, stored: Sequence[tuple[tuple[int, ...], np.dtype[Any]]], memory: Memory) -> Any:
    """Return new arrays of the shapes and dtypes that are stored, or will be, in the form of the call."""
    new = {name: memory.empty(shape, dtype) for name, (shape, dtype) in zip(form.keys, stored, strict=True)}
    if isinstance(key, Mapping):
        return new
    return list(new.values()) if isinstance(key, (list, tuple)) else new[form.keys[0]]


def priorities(priority: Any, keys: Sequence[Key]) -> list[int]:
    """Return one priority per key."""
    wishes = list(priority) if isinstance(priority, (list, tuple)) else [priority] * len(keys)
    if len(wishes) != len(keys) or not all(isinstance(wish, (int, np.integer)) for wish in wishes):
        raise ValueMismatch(f"priority is an int or a list of one int per key, not {priority!r}")
    return [int(wish) for wish in wishes]


def optimizer_of(optimizer: Any, arguments: Mapping[str, Any]) -> Optimizer:
    """Return the optimizer that an object, or a name with its arguments, stands for."""
    if isinstance(optimizer, str):
        return create(optimizer, **arguments)
    if arguments:
        raise ConfigError(f"arguments {sorted(arguments)} go with an optimizer's name, not with an object")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"expected an optimizer or its name, got {type(optimizer).__name__}; for a function use KVStore.set_updater"
        )
    return optimizer


def updater_function(updater: Any) -> Callable[[Any, Array, Array], Any]:
    """Return the updater if it can be called."""
    if not callable(updater):
        raise TypeError(f"an updater is a function f(key, input, stored), not a {type(updater).__name__}")
    return updater  # type: ignore[no-any-return]


def _readable(value: Any, entry: Entry) -> Array:
    memory = entry.place.block.memory
    usual = type(value) is np.ndarray and value.dtype is entry.dtype and memory.on_host
    array = value if usual else memory.source(value)
    if array.shape != entry.shape:
        raise ValueMismatch(
            f"value of key {entry.key!r} has shape {array.shape} and the stored value {entry.shape}; "
            "reshape it, or init the key anew with overwrite=True"
        )
    if array.dtype != entry.dtype and not castable(array.dtype, entry.dtype):
        raise ValueMismatch(_kinds(f"value of key {entry.key!r}", array.dtype, entry.dtype))
    return array


def _kinds(what: str, given: np.dtype[Any], stored: np.dtype[Any]) -> str:
    return f"{what} has dtype {given.name} and the stored value {stored.name}; only one kind is cast, use astype"


def _some(group: Sequence[Any], key: Key) -> Sequence[Any]:
    if not group:
        raise ValueMismatch(f"no value for key {key!r}")
    return group
