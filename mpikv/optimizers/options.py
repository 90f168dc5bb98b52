"""The options of an optimizer, checked at each assignment.

An option is a dataclass field with a check in its metadata. A check converts the given value into the stored one (an
int into a float, a dict into a read-only copy), so equal settings have equal descriptions. For a bad value it raises
:class:`~mpikv.errors.ConfigError`.
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from ..errors import ConfigError, known_names
from ..options import check_number, number

Multipliers: TypeAlias = Mapping[Any, float]
"""A factor for some keys; the others have 1. (``Any``: the type of a mapping's keys is invariant.)"""

# The address in an object's repr. It differs between ranks, and ranks compare descriptions.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# Names of options in PyTorch and in MXNet, and the names here.
_RENAMED: Mapping[str, Sequence[str]] = {
    "lr": ("learning_rate",),
    "weight_decay": ("wd",),
    "betas": ("beta1", "beta2"),
    "eps": ("epsilon",),
    "alpha": ("rho",),
    "gamma1": ("rho",),
    "gamma2": ("momentum",),
    "momentum_decay": ("schedule_decay",),
    "param_dict": ("lr_mult", "wd_mult"),
    "param_idx2name": ("lr_mult", "wd_mult"),
}
# Options without a counterpart here, with advice.
_ELSEWHERE = {
    "lazy_update": "leave it out: a push of RowSparse updates its rows, and any other push the whole value",
    "use_fused_step": "leave it out: every update is one step",
    "aggregate_num": "leave it out: a call updates all of its keys together",
    "sym": "leave it out: lr_mult and wd_mult are dicts of keys",
    "nesterov": "SGD has it, and Nadam is Adam with it",
}


def rate(default: float) -> Any:
    """Return a dataclass field for ``learning_rate``, a non-negative number. None stands for the default."""
    return field(default=None, metadata={**number(None, "[0, inf)").metadata, "default": default})


def suffixes(*default: str) -> Any:
    """Return a dataclass field for endings of keys, a tuple of strings."""
    return field(default=default, metadata={"check": _check_strings})


def unknown_option(kind: str, name: str, known: Collection[str]) -> str:
    """Return the error text for an unknown option; for another library's option it tells the name here.

    >>> unknown_option("SGD", "lr", ["learning_rate", "momentum"])
    "unknown option of SGD 'lr' (known: learning_rate, momentum); did you mean 'learning_rate'?"
    """
    here = [repr(option) for option in _RENAMED.get(name, ()) if option in known]
    hint = f"did you mean {' and '.join(here)}?" if here else _ELSEWHERE.get(name, "")
    return known_names(f"option of {kind}", name, known, hint)


def describe(value: Any) -> str:
    """Return an option's repr, equal on every rank: of its :func:`plain` form, and objects without their address.

    >>> describe(MappingProxyType({"b": np.float64(0.5), "a": 2}))
    "{'a': 2, 'b': 0.5}"
    """
    return _ADDRESS.sub("", repr(plain(value)))


def plain(value: Any) -> Any:
    """Return an option in Python's own types: numpy's numbers as Python's, and mappings as dicts in one order.

    >>> plain([np.int64(3), {"b": 1, "a": 2}])
    [3, {'a': 2, 'b': 1}]
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (tuple, list)):
        return (list if isinstance(value, list) else tuple)(map(plain, value))
    if isinstance(value, Mapping):
        # By their text: any two keys have an order, and ranks compare them.
        return dict(sorted(((plain(key), plain(one)) for key, one in value.items()), key=repr))
    return value


def _check_multipliers(where: str, value: Any) -> Multipliers:
    """Return a read-only copy of a mapping of keys to factors; ConfigError if a key or a factor is bad."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}={value!r} is not a mapping of keys to factors")
    for key in value:
        if not isinstance(key, (numbers.Integral, str)):
            raise ConfigError(f"{where} has the key {key!r}, and the keys of a store are integers or strings")
    checked = {key: check_number(f"{where}[{key!r}]", factor, "[0, inf)") for key, factor in plain(value).items()}
    return MappingProxyType(checked)  # read-only: the store would not notice a factor changed in place


def _check_callable(where: str, value: Any) -> Any:
    """Return the value; ConfigError if it is a class, or neither None nor callable."""
    if value is not None and not callable(value):
        raise ConfigError(f"{where}={value!r} cannot be called with the number of updates; see mpikv.schedules")
    if isinstance(value, type):
        raise ConfigError(f"{where} is the class {value.__name__}; pass an object, {value.__name__}(...)")
    return value


def _check_strings(where: str, value: Any) -> tuple[str, ...]:
    """Return a sequence of strings as a tuple; ConfigError for a single string, or other items."""
    if isinstance(value, str) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{where}={value!r} is not a sequence of strings")
    return tuple(value)


MULTIPLIERS = {"check": _check_multipliers, "default": {}}
"""Metadata of the field of a factor per key."""

SCHEDULER = {"check": _check_callable}
"""Metadata of the field of a callable from the number of updates to a rate."""
