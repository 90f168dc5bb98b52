"""ASSIGN of half precision as compiled loops: widen two addends, add and round them in one pass over memory.

The bits are those of :mod:`mpikv.arrays.float16`; only sign and payload of a NaN are arbitrary. The loops work on the
bits as integers, and no compiler reorders integers. Only additions and one multiplication by a power of two are floats.

The module imports numba; only ``kernels="numba"`` imports the module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from ...arrays.float16 import add_widened, subnormals_vanish, widen
from ...codecs.options import Scratch
from ...optimizers.optimizer import LANE_BLOCK
from ...protocols import Array
from .compiling import compile_cached, inner

_HALF, _SINGLE = numba.types.uint16, numba.types.float32
_READ_HALVES, _READ_SINGLES = (numba.types.Array(kind, 1, "C", readonly=True) for kind in (_HALF, _SINGLE))
_ROUND = numba.void(_READ_SINGLES, _HALF[::1])
_ADD = numba.void(_READ_HALVES, _READ_HALVES, _HALF[::1])
# Elements per step: the scratch memory of a loop stays in the L1 cache.
_CHUNK = 1024
# The exponent of a float16 starts at 1, that of its power of two at 126; the difference, in a float16's place.
_BIAS = -(126 << 10) & 0xFFFF
# Memory for the sum of a part, one per thread.
_total = Scratch(LANE_BLOCK, np.float32)


def is_half(dtype: np.dtype[Any]) -> bool:
    """Return whether the module has loops for values of a dtype."""
    return dtype.name in _LOOPS


def bind_rounding(total: Array, value: Array) -> Callable[[Any], None]:
    """Compile a loop; return a function of a step that overwrites the value by the float32 total, rounded."""
    loop, singles, halves = compile_cached(_LOOPS[value.dtype.name][0], _ROUND), total.reshape(-1), _bits(value)
    return lambda step: loop(singles, halves)


def bind_adding(value: Array) -> Callable[[Array, Array, Any], None]:
    """Compile loops; return a function of two addends and a step that overwrites the value by their rounded sum."""
    rounding, adding = _LOOPS[value.dtype.name]
    round_singles, add_halves = compile_cached(rounding, _ROUND), compile_cached(adding, _ADD)
    halves, dtype = _bits(value), value.dtype
    moves = dtype == np.float16

    def add(first: Array, second: Array, step: Any) -> None:
        if first.dtype == dtype == second.dtype and not (moves and subnormals_vanish()):
            add_halves(first.view(np.uint16), second.view(np.uint16), halves)
            return
        # More than two ranks: the first addend is a float32 sum of all but the last.
        total = _total.array[: halves.size]
        np.copyto(total, first) if first.dtype == total.dtype else widen(first, total)
        np.add(total, second, out=total) if second.dtype == total.dtype else add_widened(total, second)
        round_singles(total, halves)

    return add


def _bits(value: Array) -> Array:
    return value.reshape(-1).view(np.uint16)


# --- Functions of one element. All numbers are uint32: with a Python number, numba would compute in int64.


@inner
def _power_of(word: Any) -> Any:
    """Return, as bits, the power of two whose ulp equals the ulp of the rounded float16."""
    u = np.uint32
    exponent = word & u(0x7F800000)
    return (exponent if exponent > u(0x38800000) else u(0x38800000)) + u(13 << 23)


@inner
def _float16_of(word: Any, significand: Any, power: Any) -> Any:
    """Return the bits of a float32 rounded to float16.

    ``significand`` holds the bits of magnitude plus power; that addition has rounded. See
    :func:`mpikv.arrays.float16.narrow`.
    """
    u = np.uint32
    magnitude = word & u(0x7FFFFFFF)
    half = significand + (power >> u(13)) + u(_BIAS) & u(0xFFFF)
    # From 65520 on, halfway to 2**16, a number rounds to infinity.
    half = u(0x7C00) if magnitude >= u(0x477FF000) else half
    half = u(0x7E00) if magnitude > u(0x7F800000) else half
    return half | word >> u(16) & u(0x8000)


@inner
def _bfloat16_of(word: Any) -> Any:
    u = np.uint32
    half = (word + u(0x7FFF) + (word >> u(16) & u(1))) >> u(16)
    # A NaN keeps its top bits and becomes quiet: rounding could carry it into an infinity.
    return word >> u(16) | u(0x40) if word & u(0x7FFFFFFF) > u(0x7F800000) else half


@inner
def _moved(half: Any) -> Any:
    """Return a float16's bits moved to a float32's places: 2**-112 times the number, while inf and NaN stay."""
    u = np.uint32
    magnitude = u(half) & u(0x7FFF)
    sign = (u(half) & u(0x8000)) << u(16)
    return sign | magnitude << u(13) | (u(0x7F800000) if magnitude >= u(0x7C00) else u(0))


# --- Loops


def _round_float16(singles: Any, halves: Any) -> None:
    """Write float32 numbers to ``halves``, as bits of float16."""
    sums, powers = np.empty(_CHUNK, np.uint32), np.empty(_CHUNK, np.uint32)
    for low in range(0, halves.size, _CHUNK):
        part = singles[low : low + _CHUNK]
        _round_chunk(part, part.view(np.uint32), sums, powers, halves[low : low + _CHUNK])


def _add_float16(first: Any, second: Any, halves: Any) -> None:
    """Write the sums of two arrays to ``halves``, all three as bits of float16."""
    left, right = np.empty(_CHUNK, np.uint32), np.empty(_CHUNK, np.uint32)
    sums, powers = np.empty(_CHUNK, np.uint32), np.empty(_CHUNK, np.uint32)
    total, term, scale = left.view(np.float32), right.view(np.float32), np.float32(2.0**112)
    for low in range(0, halves.size, _CHUNK):
        one, other, out = first[low : low + _CHUNK], second[low : low + _CHUNK], halves[low : low + _CHUNK]
        for i in range(out.size):
            left[i] = _moved(one[i])
            right[i] = _moved(other[i])
        for i in range(out.size):
            # Exact: both are multiples of the smallest float16, so adding before scaling loses no bit.
            total[i] = (total[i] + term[i]) * scale
        _round_chunk(total, left, sums, powers, out)


@inner
def _round_chunk(singles: Any, words: Any, sums: Any, powers: Any, halves: Any) -> None:
    """Write float32 numbers, with the bits ``words``, to ``halves`` as float16; ``sums`` and ``powers`` are scratch."""
    total, power = sums.view(np.float32), powers.view(np.float32)
    for i in range(halves.size):
        powers[i] = _power_of(words[i])
    for i in range(halves.size):
        total[i] = abs(singles[i]) + power[i]
    for i in range(halves.size):
        halves[i] = _float16_of(words[i], sums[i], powers[i])


def _round_bfloat16(singles: Any, halves: Any) -> None:
    words = singles.view(np.uint32)
    for i in range(halves.size):
        halves[i] = _bfloat16_of(words[i])


def _add_bfloat16(first: Any, second: Any, halves: Any) -> None:
    """Write the sums of two arrays to ``halves``, all three as bits of bfloat16."""
    left, right = np.empty(_CHUNK, np.uint32), np.empty(_CHUNK, np.uint32)
    total, term = left.view(np.float32), right.view(np.float32)
    for low in range(0, halves.size, _CHUNK):
        one, other, out = first[low : low + _CHUNK], second[low : low + _CHUNK], halves[low : low + _CHUNK]
        for i in range(out.size):
            left[i] = np.uint32(one[i]) << np.uint32(16)
            right[i] = np.uint32(other[i]) << np.uint32(16)
        for i in range(out.size):
            total[i] = total[i] + term[i]
        for i in range(out.size):
            out[i] = _bfloat16_of(left[i])


_LOOPS = {"float16": (_round_float16, _add_float16), "bfloat16": (_round_bfloat16, _add_bfloat16)}
