"""Checks of named options.

An option is a dataclass field with a check in its metadata. A check takes the place of a value, as ``"SGD: wd"``, and
the value. It returns the stored value, so equal settings have equal descriptions, or raises
:class:`~mpikv.errors.ConfigError`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Iterable, Sequence
from dataclasses import MISSING, field, fields
from functools import partial
from typing import Any

import numpy as np

from .errors import ConfigError, brief, known_names, text_of


def number(default: Any, interval: str) -> Any:
    """Return a dataclass field, checked later, for a number in an interval as ``"[0, 1)"``; None is allowed only if it
    is the default.
    """

    def check(where: str, value: Any) -> float | None:
        """Return the number as a float, or None if that is the default; raise ConfigError for other values."""
        if value is None and default is None:
            return None
        return check_number(where, value, interval, " or None" if default is None else "")

    return field(default=default, metadata={"check": check})


def flag(default: bool) -> Any:
    """Return a dataclass field, checked later, for a truth value."""
    return field(default=default, metadata={"check": check_switch})


def count(default: Any = MISSING, low: int = 0) -> Any:
    """Return a dataclass field, checked later, for a whole number that is not below ``low``."""
    return field(default=default, metadata={"check": partial(check_whole, low=low)})


def choice(default: str, known: Sequence[str]) -> Any:
    """Return a dataclass field, checked later, for one of the known words."""
    return field(default=default, metadata={"check": lambda where, value: check_choice(where, value, known)})


def store_checked_fields(options: Any, where: str = "") -> None:
    """Check a dataclass's fields, frozen or not, and store the checked values; ConfigError for the first bad one."""
    for option in fields(options):
        if check := option.metadata.get("check"):
            # The dataclass may be frozen.
            object.__setattr__(options, option.name, check(where + option.name, getattr(options, option.name)))


def check_names(what: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise ConfigError about the first of the names that is not known; its message lists the known ones.

    >>> check_names("option of topk", ["ration"], ["ratio"])
    Traceback (most recent call last):
    mpikv.errors.ConfigError: unknown option of topk 'ration' (known: ratio); did you mean 'ratio'?
    """
    for name in names:
        if name not in known:
            raise ConfigError(known_names(what, name, known))


def check_choice(where: str, value: Any, known: Sequence[str]) -> str:
    """Return the word if it is known; else raise ConfigError.

    >>> check_choice("placement", "shard", ["root", "sharded"])
    Traceback (most recent call last):
    mpikv.errors.ConfigError: unknown placement 'shard' (known: root, sharded); did you mean 'sharded'?
    """
    if not isinstance(value, str) or value not in known:
        raise ConfigError(known_names(where.rpartition(" ")[2], value, known))
    return value


def check_switch(where: str, value: Any) -> bool:
    """Return a truth value as a bool; raise ConfigError for others, numbers too.

    >>> check_switch("average", 1)
    Traceback (most recent call last):
    mpikv.errors.ConfigError: average=1 is neither True nor False
    """
    if not isinstance(value, (bool, np.bool_)):
        raise _describe(where, value, "neither True nor False")
    return bool(value)


def check_number(where: str, value: Any, interval: str, extra: str = "") -> float:
    """Return a number in an interval as a float; raise ConfigError for others. ``extra`` ends the message.

    >>> check_number("topk: ratio", 2, "(0, 1]")
    Traceback (most recent call last):
    mpikv.errors.ConfigError: topk: ratio=2 is not a number in (0, 1]
    """
    number = _read(value)
    if not _contains(interval, number):
        raise _describe(where, value, f"not a number in {interval}{extra}")
    return number


def check_float32(where: str, value: Any, interval: str) -> float:
    """Return a number as a float, not rounded; raise ConfigError unless it and its float32 lie in the interval.

    >>> check_float32("2bit: threshold", 1e-50, "(0, inf)")
    Traceback (most recent call last):
    mpikv.errors.ConfigError: 2bit: threshold=1e-50 is not a number in (0, inf) in float32
    """
    number = _read(value)
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.float32(number))
    if not (_contains(interval, number) and _contains(interval, rounded)):
        raise _describe(where, value, f"not a number in {interval} in float32")
    return number


def check_whole(where: str, value: Any, low: int = 0) -> int:
    """Return a whole number from ``low`` up to the largest of int64; raise ConfigError for others.

    >>> check_whole("lowrank: rank", 0, low=1)
    Traceback (most recent call last):
    mpikv.errors.ConfigError: lowrank: rank=0 is not a whole number in [1, 2**63)
    """
    # A bool is an Integral in Python, but True is no count.
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) < 1 << 63:
        raise _describe(where, value, f"not a whole number in [{low}, 2**63)")
    return int(value)


def _read(value: Any) -> float:
    """Return a number as a float; NaN, in no interval, for other values and for numbers beyond float64."""
    # True is a Real in Python, and no learning rate.
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _contains(interval: str, number: float) -> bool:
    """Return whether a number lies in an interval as ``"[0, 1)"``; NaN lies in none."""
    # NaN is in no interval: it compares as False with both bounds.
    low, high = map(float, interval[1:-1].split(","))
    return low < number < high or (number == low and interval[0] == "[") or (number == high and interval[-1] == "]")


def _describe(where: str, value: Any, fault: str) -> ConfigError:
    """Return, not raise, a ConfigError that says where the option is, its value, shortened, and the fault."""
    # Python refuses to print an int of more than 4300 digits (sys.set_int_max_str_digits): text_of reports that.
    return ConfigError(f"{where}={brief(text_of(value, repr))} is {fault}")
