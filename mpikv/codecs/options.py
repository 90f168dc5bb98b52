"""What codecs have in common: the checks of their options, each of which returns what is kept or says what is wrong."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from ..errors import ConfigError

__all__ = ["BLOCK", "real", "single", "whole"]

# Elements that are worked on at once, so that the temporary arrays stay in the cache. Whole words of any payload.
BLOCK = 1 << 14


def real(where: str, value: Any, low: float, high: float) -> float:
    """Return a number in ``(low, high]`` as a float.

    >>> real("topk: ratio", 2, 0, 1)
    Traceback (most recent call last):
    mpikv.errors.ConfigError: topk: ratio=2 is not a number above 0 and up to 1
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{where} is a number, not a {type(value).__name__}: {value!r}")
    if not low < float(value) <= high:
        raise ConfigError(f"{where}={value!r} is not a number above {low:g} and up to {high:g}")
    return float(value)


def single(where: str, value: Any, *, positive: bool) -> float:
    """Return a number that is finite, and perhaps above 0, in float32 too.

    >>> single("2bit: threshold", 1e-50, positive=True)
    Traceback (most recent call last):
    mpikv.errors.ConfigError: 2bit: threshold=1e-50 is not a finite number above 0 in float32
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{where} is a number, not a {type(value).__name__}: {value!r}")
    with np.errstate(over="ignore"):
        rounded = float(np.float32(float(value)))
    if not math.isfinite(rounded) or (positive and rounded <= 0):
        kind = "finite number above 0" if positive else "finite number"
        raise ConfigError(f"{where}={value!r} is not a {kind} in float32")
    return float(value)


def whole(where: str, value: Any, low: int = 1) -> int:
    """Return a whole number that is not below ``low``.

    >>> whole("lowrank: rank", 0)
    Traceback (most recent call last):
    mpikv.errors.ConfigError: lowrank: rank=0 is not a whole number from 1
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{where} is a whole number, not a {type(value).__name__}: {value!r}")
    if value < low:
        raise ConfigError(f"{where}={value!r} is not a whole number from {low}")
    return int(value)
