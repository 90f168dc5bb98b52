"""Compatibility of a checkpoint with a store or a Trainer: keys, state, and the described updater.

A file holds all options of the optimizers in :mod:`mpikv.optimizers`, of registered ones, and of the schedules in
:mod:`mpikv.schedules`. It cannot hold functions. For a user's function, an optimizer with one, or an optimizer that is
not registered, it holds only the description by which ranks compare updaters. Before a load, the store must be given
the same updater again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NoReturn

from .. import optimizers
from ..cluster.printing import log
from ..errors import CheckpointError, Unsupported, ValueMismatch, brief, text_of
from ..optimizers import Optimizer
from ..optimizers.options import plain
from ..optimizers.updaters import Assign
from ..protocols import Array, Key, Slots, Updater
from .files import Source, inspect
from .header import Header, check_byte_order, parse_dtype
from .trees import decode, encode


def find_values(path: Any, present: Mapping[Key, Any], updater: Updater) -> tuple[Source, Updater]:
    """Read a file's header, return it as a source, and the updater to use; raise if keys or updater do not fit. If
    ``present`` is empty, all keys fit. Local.

    Raises:
        CheckpointError: the file is no such checkpoint, or has another updater.
        ValueMismatch: the store has keys, and the file has others.
    """
    source = _find_source(path, values=True)
    if present:
        _check_keys(source.header, present, "store")
    restored = restore_updater(source.header.updater, updater)
    _check_slots(source, restored)
    return source, restored


def find_states(
    path: Any, present: Mapping[Key, Any], optimizer: Optimizer, what: str = "store"
) -> tuple[Source, Optimizer]:
    """Read a file's header; return it as a source, and the optimizer to use; raise if keys or kind do not fit. Local.

    The optimizer is a new one if the file has its options, else the present one.

    Raises:
        CheckpointError: the file is no such checkpoint, has an optimizer of another kind, or one that cannot be made.
        ValueMismatch: the file has other keys.
    """
    source = _find_source(path, values=False)
    _check_keys(source.header, present, what)
    saved = source.header.updater
    # By name, not by the states: two optimizers may keep states of the same names, with another meaning.
    if saved.get("name") != type(optimizer).__name__:
        raise CheckpointError(
            f"{source.path!r} holds the state of {brief(saved.get('name', 'no optimizer'))} and the {what} has "
            f"{optimizer.settings()}; give it an optimizer of that kind first"
        )
    restored = optimizer if saved.get("options") is None else restore_updater(saved, optimizer)
    _check_slots(source, restored)
    assert isinstance(restored, Optimizer)
    return source, restored


def _find_source(path: Any, values: bool) -> Source:
    """Read a file's header, return a Source; CheckpointError unless it has values, or states alone, as asked. Local."""
    # First: a big-endian host would find a header of another length, and call the file damaged.
    check_byte_order()
    source = inspect(os.fsdecode(path))
    if source.header.values != values:
        held, verb = ("values", "load") if not values else ("the state of an optimizer alone", "load_optimizer_states")
        raise CheckpointError(f"{source.path!r} holds {held}; {verb} loads it")
    return source


def slot_names(slots: Slots) -> dict[str, str]:
    """Return slots as a file has them: a dict from state names to numpy's names of their dtypes. Local."""
    return {name: dtype.name for name, dtype in slots.items()}


def _check_keys(header: Header, present: Mapping[Key, Any], what: str) -> None:
    """Raise ValueMismatch unless a checkpoint has exactly the present keys, with their shapes and dtypes. Local."""
    # Both ways: a key that is only here would keep the values of another training.
    saved = set(header.keys)
    strange = [f"{brief(repr(key))} is not in the {what}" for key in header.keys if key not in present]
    strange += [f"{key!r} is not in the checkpoint" for key in present if key not in saved]
    if strange:
        raise ValueMismatch(
            f"the checkpoint has {len(saved)} keys and the {what} {len(present)}: {strange[0]}; load into a {what} "
            f"that has the same keys{', or none' if what == 'store' else ''}"
        )
    dtypes = {one.dtype: parse_dtype(one.dtype) for one in header.kinds}
    for key, kind in header.pairs:
        entry = present[key]
        if entry.shape != kind.shape or entry.dtype != dtypes[kind.dtype]:
            remedy = "; delete it, or load into a store without keys" if what == "store" else ""
            raise ValueMismatch(
                f"key {key!r} is {kind.dtype}{list(kind.shape)} in the checkpoint and "
                f"{entry.dtype.name}{list(entry.shape)} in the {what}{remedy}"
            )


def _check_slots(source: Source, updater: Updater) -> None:
    """Raise CheckpointError unless a checkpoint has exactly the state names and dtypes of the updater. Local."""
    header = source.header
    for number, kind in enumerate(header.kinds):
        if kind.state != (wanted := slot_names(updater.slots(parse_dtype(kind.dtype)))):
            key = header.keys[header.kind_of.index(number)]
            raise CheckpointError(
                f"{source.path!r} has the states {brief(kind.state)} for key {brief(repr(key))}, and "
                f"{brief(updater.settings(), 500)} needs {wanted}"
            )


def describe_updater(updater: Updater, options: bool = True, ranks: int = 1) -> dict[str, Any]:
    """Return a dict that describes an updater in a file, with its ``options``, if wanted and JSON holds them. Local.

    ``ranks`` is the store's number of ranks; its ``rescale_grad`` may divide by it.

    >>> describe_updater(optimizers.SGD(momentum=0.5))["options"]["momentum"]
    0.5
    """
    if isinstance(updater, Assign):
        return {"kind": "assign"}
    if not isinstance(updater, Optimizer):
        return {"kind": "function", "settings": updater.settings()}
    tree: dict[str, Any] = {"kind": "optimizer", "name": type(updater).__name__, "settings": updater.settings()}
    tree["options"] = _describe_options(updater) if options else None
    # Local updates have one rank: there the Trainer scales the gradients, and rescale_grad says nothing of ranks.
    if ranks > 1 and updater.rescale_grad == 1 / ranks and not updater.average and updater._user is None:
        tree["divides_by_ranks"] = ranks
    return tree


def warn_of_other_mean(saved: Mapping[str, Any], made: Updater, ranks: int) -> None:
    """Log a warning if a restored optimizer still divides by the old job's number of ranks. Local."""
    # It is written only where the rate was one over the number of ranks: another factor is the program's choice.
    before = saved.get("divides_by_ranks", ranks)
    if before != ranks and saved.get("options") is not None:
        log(
            "the optimizer of the checkpoint, %r, divides by the %d ranks of the job that saved it, and this store "
            "has %d: on every rank, set kv.optimizer.rescale_grad = 1 / kv.size, or set kv.optimizer.average = True "
            "to follow the number of ranks",
            made,
            before,
            ranks,
        )


def is_dumpable(optimizer: Optimizer) -> bool:
    """Return whether a file can hold the optimizer's settings. Local."""
    return _describe_options(optimizer) is not None


def check_dumpable(optimizer: Optimizer) -> None:
    """Raise Unsupported if no file can hold the optimizer itself. Local."""
    if not is_dumpable(optimizer):
        raise Unsupported(
            f"{optimizer.settings()} cannot be written to a file: it is not registered, or an option is an object of "
            "your own; register the class, use a schedule of mpikv.schedules, or save without dump_optimizer"
        )


def restore_updater(saved: Mapping[str, Any], present: Updater) -> Updater:
    """Return a new updater if the file has its options, else the present one; CheckpointError if the kind of the
    present one does not fit. Local.

    Raises:
        CheckpointError: the store has an updater of another kind, or lacks one that a file cannot hold.
    """
    # An updater of the file's own kind is not needed: without one, the store takes the file's.
    text, restored = saved.get("settings", "no updater"), present
    if saved["kind"] == "assign":
        fits = isinstance(present, Assign)
    elif saved["kind"] == "optimizer" and saved["options"] is not None:
        restored = _make_optimizer(saved["name"], saved["options"])
        # Another optimizer was set on purpose. To replace it without a word would hide the program's mistake.
        fits = isinstance(present, Assign) or type(present) is type(restored)
    elif not (fits := present.settings() == text):
        raise CheckpointError(
            f"the checkpoint was made with {brief(text, 500)}, and the store has {present.settings()}; a file holds no "
            "functions, so set the same updater before you load it"
        )
    if not fits:
        raise CheckpointError(
            f"the checkpoint was made with {brief(text, 500)} and the store has {present.settings()}; load into a "
            "store without updater, or with one of that kind, and set another afterwards"
        )
    return restored


def _describe_options(optimizer: Optimizer) -> dict[str, Any] | None:
    """Return all options in JSON's types; None for an unregistered class, or if JSON cannot hold them. Local."""
    # A load makes the optimizer by its name: an unregistered class would not be found, or another one would.
    if optimizers.kind_of(type(optimizer).__name__) is not type(optimizer):
        return None
    arrays: list[Array] = []
    try:
        options = {name: encode(plain(value), arrays, name) for name, value in optimizer.chosen().items()}
    except TypeError:
        return None
    return None if arrays else options


def _make_optimizer(name: str, options: Mapping[str, Any]) -> Optimizer:
    """Make an optimizer of a file's name and options; CheckpointError if it cannot be made here. Local."""
    try:
        return optimizers.create(name, **{option: decode(value, _refuse_array) for option, value in options.items()})
    except Exception as error:  # a class of the user's own may raise any error
        raise CheckpointError(
            f"the optimizer {brief(name)!r} of the checkpoint cannot be made here: {type(error).__name__}: "
            f"{brief(text_of(error), 500)}; register an optimizer of your own first, as a class that its options make"
        ) from error


def _refuse_array(*_: object) -> NoReturn:
    """Raise ValueError: an optimizer's option cannot be an array. Local."""
    raise ValueError("no option is an array")
