"""Checks and conversions of a caller's arguments: a mistake on one rank is found before data move."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays.arrays import aligned, castable, is_array, is_immutable, is_read_only, lies_on_host, source
from ..engine.keys import Entry, Form, KeyTable, flatten, parse
from ..engine.plan import Plan, label
from ..errors import ConfigError, ValueMismatch, a_kind
from ..optimizers import Optimizer, create
from ..protocols import Array, Key, Memory
from .renewed import make_sequence

_SEVERAL = "it is in a list, which holds several arrays of this rank, each of the stored shape; numpy.stack makes one"


def checked_sources(entries: Sequence[Entry], groups: Sequence[Sequence[Any]]) -> list[tuple[Array, ...]]:
    """Return for each key a tuple of its arrays to push: flat, in the store's memory, uncast; raise if unfit. Local."""
    return [
        tuple(_fitting(array, entry, len(group)).reshape(-1) for array in _check_some(group, entry.key))
        for entry, group in zip(entries, groups, strict=True)
    ]


def checked_singles(form: Form, table: KeyTable | None, memory: Memory) -> list[Array]:
    """Return each key's one array, in this memory, uncast; raise for several, or one unfit for a known key. Local."""
    arrays = []
    for key, group in zip(form.keys, form.groups, strict=True):
        if len(_check_some(group, key)) > 1:
            raise ValueMismatch(
                f"{len(group)} values for key {key!r}; a stored value is one array, and a list holds several of this "
                "rank, one for each device; give one of them, or a key to each"
            )
        entry = table[key] if table is not None and key in table else None
        arrays.append(_fitting(group[0], entry) if entry else memory.source(group[0]))
    return arrays


def checked_out(entry: Entry, out: Any) -> Array:
    """Return ``out`` itself if it is the value's own view, else what :func:`checked_target` makes of it. Local."""
    memory = entry.place.block.memory
    return out if out is entry.view else checked_target(out, entry.key, entry.shape, entry.dtype, memory)


def checked_target(out: Any, key: Key, shape: tuple[int, ...], dtype: np.dtype[Any], memory: Memory) -> Array:
    """Return the array over ``out``, or a new one noted to be copied there after the call; raise if unfit. Local."""
    array = memory.target(out)
    if array.shape != shape:
        raise ValueMismatch(
            f"the array to fill of key {key!r} has shape {array.shape} and the stored value {shape}; pass an out of "
            "that shape"
        )
    if array.dtype != dtype and not castable(dtype, array.dtype):
        raise ValueMismatch(
            f"{cast_fault(f'the array to fill of key {key!r}', array.dtype, dtype)}; pass an out of {dtype.name}"
        )
    return array


def outs_of(key: Any, out: Any, keys: tuple[Key, ...]) -> Form:
    """Return a :class:`Form` of ``keys`` and their arrays to fill, unchecked; raise if ``out`` has other keys. Local.

    ``key`` is the form of the keys that the caller passed.
    """
    # A dict of keys has arrays to push: its out is a dict, too, or none.
    if isinstance(key, Mapping):
        if not isinstance(out, Mapping):
            raise TypeError(f"out of a dict of arrays is a dict with the same keys, not {a_kind(out)}")
        key, out = flatten(out)
    form = parse(key, out, "out")
    if form.keys == keys:
        return form
    # The out may be a dict in another order than the keys.
    groups = dict(zip(form.keys, form.groups, strict=True))
    if groups.keys() != set(keys):
        raise ValueMismatch(f"out has keys {label(form.keys)} and the call {label(keys)}")
    return Form(keys, tuple(groups[name] for name in keys))


def in_form(key: Any, plan: Plan, arrays: Sequence[Any]) -> Any:
    """Return arrays, one per key of a plan, in the form of ``key``: the only one itself, a list or a tuple. Local."""
    if not isinstance(key, (list, tuple)):
        return arrays[0]
    if len(key) == len(plan.keys):
        return make_sequence(key, list(arrays))
    known = dict(zip(plan.keys, arrays, strict=True))  # some keys are named twice
    return make_sequence(key, [known[name] for each in key for name in parse(each, None).keys])


def new_arrays(key: Any, plan: Plan, memory: Memory) -> Any:
    """Return new arrays of any content for the values of a plan, in the form of the caller's ``key``. Local."""
    if not isinstance(key, (list, tuple)):
        return memory.empty(plan.shapes[0], plan.dtypes[0])
    entries = in_form(list(key), plan, plan.entries)
    return make_sequence(key, [memory.empty(entry.shape, entry.dtype) for entry in entries])


def stand_in(array: Any, implied: bool, memory: Memory) -> Array | None:
    """Return a new host array that a call fills and returns instead of an immutable one, or, if ``implied``, a
    read-only one; else None. Local.

    A read-only array of numpy is replaced only if it was given to be pushed (``implied``): as ``out`` it is a mistake.
    """
    if not is_array(array) or not _is_replaced(array, implied, memory):
        return None
    if isinstance(array, (np.ndarray, np.generic)):
        return np.empty(array.shape, array.dtype)
    if not hasattr(array, "__array_namespace__"):
        return None
    like = source(array) if lies_on_host(array) else array
    return aligned(like.shape, np.dtype(like.dtype))


def _is_replaced(array: Any, implied: bool, memory: Memory) -> bool:
    """Return whether a new host array replaces one to fill: an immutable, or, if ``implied``, read-only one. Local."""
    immutable = is_immutable(array)
    if not lies_on_host(array):
        return immutable and memory.is_host
    return immutable or (implied and is_read_only(array))


def priorities(priority: Any, keys: Sequence[Key]) -> list[int]:
    """Return a list of one int per key, from an int for all or a list of one each; else ValueMismatch. Local."""
    wishes = list(priority) if isinstance(priority, (list, tuple)) else [priority] * len(keys)
    if len(wishes) != len(keys) or not all(isinstance(wish, (int, np.integer)) for wish in wishes):
        raise ValueMismatch(f"priority is an int or a list of one int per key, not {priority!r}")
    return [int(wish) for wish in wishes]


def optimizer_of(optimizer: Any, arguments: Mapping[str, Any]) -> Optimizer:
    """Return a new optimizer for a name; or the given object itself, its ``average`` changed if that is in
    ``arguments``. Raise for other arguments, and for anything else than a name or an optimizer. Local.
    """
    if isinstance(optimizer, str):
        return create(optimizer, **arguments)
    if not isinstance(optimizer, Optimizer):
        if isinstance(optimizer, type):
            name = optimizer.__name__
            raise TypeError(f"expected an optimizer or its name, got the class {name}; make one, as {name}(...)")
        raise TypeError(f"expected an optimizer or its name, got {a_kind(optimizer)}; for a function use set_updater")
    if others := sorted(arguments.keys() - {"average"}):
        raise ConfigError(f"arguments {others} go with an optimizer's name, not with an object")
    if arguments:
        optimizer.average = arguments["average"]
    return optimizer


def updater_function(updater: Any) -> Callable[[Any, Array, Array], Any]:
    """Return the updater; TypeError if not callable, or if its signature, where known, takes no 3 arguments. Local."""
    if not callable(updater):
        raise TypeError(f"an updater is a function f(key, input, stored), not {a_kind(updater)}")
    try:
        signature = inspect.signature(updater)
    except ValueError:  # of a function in C, which has none to show
        return updater  # type: ignore[no-any-return]
    try:
        # Now, on every rank, and not in the first push, at the root alone.
        signature.bind("key", "input", "stored")
    except TypeError as error:
        raise TypeError(f"an updater is called as f(key, input, stored); this one is f{signature}: {error}") from None
    return updater  # type: ignore[no-any-return]


def _fitting(value: Any, entry: Entry, group_size: int = 1) -> Array:
    """Return the value as an array in the store's memory, without a copy if it is there; neither cast nor reshaped.
    Raise if unfit; ``group_size`` is for the error's text. Local.
    """
    memory = entry.place.block.memory
    # By identity: dtypes of one kind are one object, and comparing them takes longer than the rest.
    usual = type(value) is np.ndarray and value.dtype is entry.dtype and memory.is_host
    array = value if usual else memory.source(value)
    if array.shape != entry.shape:
        raise ValueMismatch(
            f"value of key {entry.key!r} has shape {array.shape} and the stored value {entry.shape}; "
            + ("reshape it, or init the key anew with overwrite=True" if group_size == 1 else _SEVERAL)
        )
    if array.dtype != entry.dtype and not castable(array.dtype, entry.dtype):
        raise ValueMismatch(f"{cast_fault(f'value of key {entry.key!r}', array.dtype, entry.dtype)}; use astype")
    return array


def cast_fault(what: str, given: np.dtype[Any], stored: np.dtype[Any]) -> str:
    """Return an error's text: ``what`` has the ``given`` dtype, not cast to or from the ``stored`` one. Local."""
    rule = "only dtypes of one kind are cast, and integers to wider ones alone"
    return f"{what} has dtype {given.name} and the stored value {stored.name}; {rule}"


def _check_some(group: Sequence[Any], key: Key) -> Sequence[Any]:
    """Return the group of a key's arrays itself; raise ValueMismatch if it is empty. Local."""
    if not group:
        raise ValueMismatch(f"no value for key {key!r}")
    return group
