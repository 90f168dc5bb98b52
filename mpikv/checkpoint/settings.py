"""What a checkpoint says of the store's updater, and the updater that is made of it again.

Optimizers of :mod:`mpikv.optimizers`, registered ones too, and schedules of :mod:`mpikv.schedules` are written with all
their options. Of a function of the user's, and of an optimizer that has one or is not registered, no file can hold more
than the description by which ranks compare updaters; to be loaded, the store must have been given the same before.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from .. import optimizers, schedules
from ..errors import CheckpointError, Unsupported, brief
from ..optimizers import Optimizer
from ..optimizers.options import in_order
from ..schedules import Schedule
from ..typing import Updater
from ..updaters import Assign

__all__ = ["check_dumpable", "described", "other_mean", "restored"]


class _Unwritable(Exception):
    """A value that JSON cannot hold."""


def described(updater: Updater, options: bool = True, ranks: int = 1) -> dict[str, Any]:
    """Return what a file says of an updater; ``options``: with all that is needed to make it again, if it can be;
    ``ranks``: how many a store has, by which its ``rescale_grad`` may divide.

    >>> described(optimizers.SGD(momentum=0.5))["options"]["momentum"]
    0.5
    """
    if isinstance(updater, Assign):
        return {"kind": "assign"}
    if not isinstance(updater, Optimizer):
        return {"kind": "function", "settings": updater.settings()}
    found: dict[str, Any] = {"kind": "optimizer", "name": type(updater).__name__, "settings": updater.settings()}
    # A Trainer's gradients have the scale of the Trainer.
    divides = ranks > 1 and updater.rescale_grad == 1 / ranks and not updater.average and updater._user is None
    return (
        found | {"options": _options(updater) if options else None} | ({"divides_by_ranks": ranks} if divides else {})
    )


def other_mean(saved: Mapping[str, Any], made: Updater, ranks: int) -> str:
    """Return what to say of an optimizer that still divides by the number of ranks that have saved it, if it does."""
    before = saved.get("divides_by_ranks", ranks)
    if before == ranks or saved.get("options") is None:
        return ""
    return (
        f"the optimizer of the checkpoint, {made!r}, divides by the {before} ranks that have saved it, and this store "
        f"has {ranks}: set kv.optimizer.rescale_grad = 1 / kv.size, on every rank, or leave it out and set "
        "kv.optimizer.average = True, which follows the number of ranks"
    )


def check_dumpable(updater: Updater) -> None:
    """Raise Unsupported if no file can hold the optimizer itself."""
    if described(updater)["options"] is None:
        raise Unsupported(
            f"{updater.settings()} cannot be written to a file: it is not registered, or an option is an object of "
            "your own; register the class, use a schedule of mpikv.schedules, or save without dump_optimizer"
        )


def restored(saved: Mapping[str, Any], present: Updater) -> Updater:
    """Return the updater that a checkpoint asks for: a new object, or the store's present one.

    Raises:
        CheckpointError: the store has an updater of another kind, or lacks one that no file can hold.
    """
    kind, text = saved["kind"], saved.get("settings", "no updater")
    if kind == "assign":
        return _same_kind(text, present, isinstance(present, Assign))
    if kind == "optimizer" and saved["options"] is not None:
        made = _made(saved["name"], saved["options"])
        _same_kind(text, present, isinstance(present, Assign) or type(present) is type(made))
        return made
    if present.settings() != text:
        raise CheckpointError(
            f"the checkpoint was made with {brief(text, 500)}, of which a file holds the description only, and the "
            f"store has {present.settings()}; give the store the same updater before it is loaded"
        )
    return present


def _same_kind(text: str, present: Updater, fits: bool) -> Updater:
    if not fits:
        raise CheckpointError(
            f"the checkpoint was made with {brief(text, 500)} and the store has {present.settings()}; load into a "
            "store without updater, or with one of that kind, and set another afterwards"
        )
    return present


def _options(optimizer: Optimizer) -> dict[str, Any] | None:
    """Return all options as JSON holds them, or None where it cannot."""
    if optimizers.kind_of(type(optimizer).__name__) is not type(optimizer):
        return None
    try:
        return {name: _written(value) for name, value in optimizer.chosen().items()}
    except _Unwritable:
        return None


def _made(name: str, options: Mapping[str, Any]) -> Optimizer:
    try:
        return optimizers.create(name, **{option: _read(value) for option, value in options.items()})
    except (TypeError, ValueError, ArithmeticError, AttributeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"the optimizer {brief(name)!r} of the checkpoint cannot be made here: {brief(str(error), 500)}; an "
            "optimizer of your own must be registered before"
        ) from error


def _written(value: Any) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Mapping):
        return {"by_key": [[_written(key), _written(factor)] for key, factor in in_order(value)]}
    if isinstance(value, (tuple, list)):
        return {"items": [_written(item) for item in value]}
    if isinstance(value, Schedule) and getattr(schedules, type(value).__name__, None) is type(value):
        arguments = {field.name: _written(getattr(value, field.name)) for field in fields(value)}
        return {"schedule": type(value).__name__, "arguments": arguments}
    raise _Unwritable


def _read(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if "by_key" in value:
        return {_read(key): _read(factor) for key, factor in value["by_key"]}
    if "items" in value:
        return tuple(_read(item) for item in value["items"])
    name = value["schedule"]
    if name not in schedules.__all__:
        raise ValueError(f"no schedule is called {name!r}")
    return getattr(schedules, name)(**{key: _read(argument) for key, argument in value["arguments"].items()})
