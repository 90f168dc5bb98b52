"""Whether a checkpoint fits what it is loaded into."""

from __future__ import annotations

import os
from typing import Any, Protocol

from ..errors import CheckpointError, ValueMismatch, brief
from ..optimizers import Optimizer
from ..typing import Key, Slots, Updater
from .contents import Contents, dtype_named
from .files import Source, inspect
from .settings import restored

__all__ = ["check_keys", "check_slots", "found", "restored_for_states", "slot_names"]


class Holder(Protocol):
    """Keys, and arrays or entries of these shapes and dtypes: a table of a store, or a dict of arrays."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Any: ...

    def __contains__(self, key: object, /) -> bool: ...

    def __getitem__(self, key: Any, /) -> Any: ...


def found(path: Any, values: bool) -> Source:
    """Return the checkpoint at a path; raise CheckpointError unless it holds values, or states alone, as is wanted."""
    source = inspect(os.fsdecode(path))
    if source.header.contents.values != values:
        held, verb = ("values", "load") if not values else ("the state of an optimizer alone", "load_optimizer_states")
        raise CheckpointError(f"{source.path!r} holds {held}; {verb} loads it")
    return source


def slot_names(slots: Slots) -> dict[str, str]:
    """Return the names of states and numpy's names of their dtypes, as a file has them."""
    return {name: dtype.name for name, dtype in slots.items()}


def check_keys(contents: Contents, present: Holder, what: str = "store") -> None:
    """Raise ValueMismatch unless a checkpoint has exactly the keys that are present, in shape and dtype, too."""
    saved: dict[Key, Any] = {one.key: one for one in contents.keys}
    strange = [f"{brief(repr(key))} is not in the {what}" for key in saved if key not in present]
    strange += [f"{key!r} is not in the checkpoint" for key in present if key not in saved]
    if strange:
        raise ValueMismatch(
            f"the checkpoint has {len(saved)} keys and the {what} {len(present)}: {strange[0]}; load into a {what} "
            f"that has the same keys{', or none' if what == 'store' else ''}"
        )
    for one in contents.keys:
        entry = present[one.key]
        if (entry.shape, entry.dtype) != (one.shape, dtype_named(one.dtype)):
            remedy = "; delete it, or load into a store without keys" if what == "store" else ""
            raise ValueMismatch(
                f"key {one.key!r} is {one.dtype}{list(one.shape)} in the checkpoint and "
                f"{entry.dtype.name}{list(entry.shape)} in the {what}{remedy}"
            )


def check_slots(source: Source, updater: Updater) -> None:
    """Raise CheckpointError unless a checkpoint has the state arrays that an updater needs."""
    keys = source.header.contents.keys
    wanted = {name: slot_names(updater.slots(dtype_named(name))) for name in {one.dtype for one in keys}}
    for one in keys:
        if one.state != wanted[one.dtype]:
            raise CheckpointError(
                f"{source.path!r} has the states {brief(dict(one.state))} for key {brief(repr(one.key))}, and "
                f"{brief(updater.settings(), 500)} needs {wanted[one.dtype]}"
            )


def restored_for_states(source: Source, present: Optimizer, what: str = "store") -> Updater:
    """Return the optimizer of which a checkpoint of states is: a new one if its options are there, or the present one.

    Raises:
        CheckpointError: it is of another kind than the present one, or cannot be made.
    """
    saved = source.header.contents.updater
    if saved.get("name") != type(present).__name__:
        raise CheckpointError(
            f"{source.path!r} holds the state of {brief(saved.get('name', 'no optimizer'))} and the {what} has "
            f"{present.settings()}; give it an optimizer of that kind first"
        )
    return present if saved["options"] is None else restored(saved, present)
