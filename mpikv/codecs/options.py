"""What codecs have in common: memory to work in, and the checks of what they are made of, each of which returns what is
kept or says what is wrong.
"""

from __future__ import annotations

import math
import numbers
import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from ..errors import ConfigError, a_kind
from ..typing import Array, Codec, RangeCodec

__all__ = ["BLOCK", "SamePayloads", "Scratch", "checked", "real", "single", "whole"]

# Elements that are worked on at once, so that the temporary arrays stay in the cache. Whole words of any payload.
BLOCK = 1 << 14

_METHODS: Mapping[Any, Sequence[str]] = {
    True: ("settings", "nbytes", "encode", "decode_add"),
    False: ("settings", "state", "exchange"),
}


class Scratch(threading.local):
    """Memory that a call of a codec writes to. Each thread has its own, so that one codec can work in several stores at
    once.
    """

    def __init__(self, shape: int | tuple[int, ...], dtype: Any) -> None:
        self.array: Array = np.empty(shape, dtype)


class SamePayloads:
    """A part of a codec of ranges that does the work of another one by other means."""

    elementwise: ClassVar[Literal[True]] = True
    codec: RangeCodec

    def settings(self) -> str:
        """Describe the codec, whose payloads are the same."""
        return self.codec.settings()

    def nbytes(self, count: int) -> int:
        """Return what the codec needs."""
        return self.codec.nbytes(count)

    def __repr__(self) -> str:
        return repr(self.codec)


def checked(codec: Any, wanted: str, advice: str = "") -> Codec:
    """Return what has all that a codec has. ``wanted`` says what is taken where it was given.

    >>> checked("2bit", "ErrorFeedback takes a codec")
    Traceback (most recent call last):
    TypeError: ErrorFeedback takes a codec, not '2bit'
    """
    methods = _METHODS.get(getattr(codec, "elementwise", None))
    missing = [name for name in methods or () if not callable(getattr(codec, name, None))]
    if isinstance(codec, type) or methods is None or missing or not isinstance(getattr(codec, "feedback", None), bool):
        lack = f" without {', '.join(missing)}" if missing else ""
        raise TypeError(f"{wanted}, not {codec!r}{lack}{advice}")
    # What was looked at above is all that the type promises.
    return codec  # type: ignore[no-any-return]


def real(where: str, value: Any, low: float, high: float) -> float:
    """Return a number in ``(low, high]`` as a float.

    >>> real("topk: ratio", 2, 0, 1)
    Traceback (most recent call last):
    mpikv.errors.ConfigError: topk: ratio=2 is not a number above 0 and up to 1
    """
    number = _number(where, value)
    if not low < number <= high:
        raise ConfigError(f"{where}={value!r} is not a number above {low:g} and up to {high:g}")
    return number


def single(where: str, value: Any, *, positive: bool) -> float:
    """Return a number that is finite, and perhaps above 0, in float32 too.

    >>> single("2bit: threshold", 1e-50, positive=True)
    Traceback (most recent call last):
    mpikv.errors.ConfigError: 2bit: threshold=1e-50 is not a finite number above 0 in float32
    """
    number = _number(where, value)
    with np.errstate(over="ignore"):
        rounded = float(np.float32(number))
    if not math.isfinite(rounded) or (positive and rounded <= 0):
        kind = "finite number above 0" if positive else "finite number"
        raise ConfigError(f"{where}={value!r} is not a {kind} in float32")
    return number


def whole(where: str, value: Any, low: int = 1) -> int:
    """Return a whole number that is not below ``low``.

    >>> whole("lowrank: rank", 0)
    Traceback (most recent call last):
    mpikv.errors.ConfigError: lowrank: rank=0 is not a whole number from 1
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{where} is a whole number, not {a_kind(value)}: {value!r}")
    if value < low:
        raise ConfigError(f"{where}={value!r} is not a whole number from {low}")
    return int(value)


def _number(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{where} is a number, not {a_kind(value)}: {value!r}")
    try:
        return float(value)
    except OverflowError:  # of a long int, whose digits may be too many to print
        raise ConfigError(f"{where} is too large for a float") from None
