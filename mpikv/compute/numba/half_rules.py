"""ASSIGN of half precision as compiled loops: widen two addends, add and round them in one pass over memory.

The processor converts float16 itself, so a loop takes a fraction of numpy's time. The bits are numpy's; only sign and
payload of a NaN are arbitrary.

The module imports numba; only ``kernels="numba"`` imports the module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
import numba
import numpy as np
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from ...protocols import Array
from .compiling import compile_cached, inner

_HALF, _SINGLE = numba.types.uint16, numba.types.float32
_READ_HALVES, _READ_SINGLES = (numba.types.Array(kind, 1, "C", readonly=True) for kind in (_HALF, _SINGLE))
_ROUND = numba.void(_READ_SINGLES, _HALF[::1])
_ADD = numba.void(_READ_HALVES, _READ_HALVES, _HALF[::1])
CONVERTS = bool({"+f16c", "+neon"} & set(cpu_target.target_context.codegen().magic_tuple()[2].split(",")))
"""Whether the processor converts float16. If not, LLVM would call a function that is not there, and crash."""


def has_loops(dtype: np.dtype[Any]) -> bool:
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

    def add(first: Array, second: Array, step: Any) -> None:
        """Overwrite the value by the rounded sum of two addends; the step is unused."""
        if first.dtype == dtype == second.dtype:
            add_halves(first.view(np.uint16), second.view(np.uint16), halves)
        else:
            # More than two ranks: the first addend is a float32 sum of all but the last.
            round_singles(np.add(first, second, dtype=np.float32), halves)

    return add


def _bits(value: Array) -> Array:
    """Return a contiguous array of half precision as flat uint16, a view."""
    return value.reshape(-1).view(np.uint16)


# --- Functions of one element, for loops. Halves are uint16.


def _converting(given: Any, wanted: Any, build: Callable[[Any, Any], Any]) -> Any:
    """Return a function for compiled loops: it converts a number of numba's type ``given`` to ``wanted``, by the
    instructions that ``build(builder, number)`` emits.
    """

    def convert(_: Any, number: Any) -> Any:
        """Return the conversion's signature and code generator, as numba's ``intrinsic`` asks for."""
        return wanted(given), lambda context, builder, signature, arguments: build(builder, arguments[0])

    return intrinsic(convert)


_WORD = ir.IntType(32)
float16_as_single = _converting(
    _HALF, _SINGLE, lambda builder, bits: builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())
)
float16_of = _converting(
    _SINGLE, _HALF, lambda builder, number: builder.bitcast(builder.fptrunc(number, ir.HalfType()), ir.IntType(16))
)
# A bfloat16 is the upper half of a float32.
bfloat16_as_single = _converting(
    _HALF,
    _SINGLE,
    lambda builder, bits: builder.bitcast(builder.shl(builder.zext(bits, _WORD), _WORD(16)), ir.FloatType()),
)
_word_of = _converting(_SINGLE, numba.types.uint32, lambda builder, number: builder.bitcast(number, _WORD))


@inner
def bfloat16_of(number: Any) -> Any:
    """Return a float32 as the bits of a bfloat16, rounded to nearest, ties to even; a NaN stays one."""
    # All numbers are uint32: with a Python number, numba would compute in int64.
    u, word = np.uint32, _word_of(number)
    half = (word + u(0x7FFF) + (word >> u(16) & u(1))) >> u(16)
    # A NaN keeps its top bits and becomes quiet: rounding could carry it into an infinity.
    return word >> u(16) | u(0x40) if word & u(0x7FFFFFFF) > u(0x7F800000) else half


# --- Loops


def _round_float16(singles: Any, halves: Any) -> None:
    """Write float32 numbers, rounded to float16, into ``halves``."""
    for i in range(halves.size):
        halves[i] = float16_of(singles[i])


def _add_float16(first: Any, second: Any, halves: Any) -> None:
    """Write the sums of two arrays of float16, rounded to float16, into ``halves``."""
    for i in range(halves.size):
        halves[i] = float16_of(float16_as_single(first[i]) + float16_as_single(second[i]))


def _round_bfloat16(singles: Any, halves: Any) -> None:
    """Write float32 numbers, rounded to bfloat16, into ``halves``."""
    for i in range(halves.size):
        halves[i] = bfloat16_of(singles[i])


def _add_bfloat16(first: Any, second: Any, halves: Any) -> None:
    """Write the sums of two arrays of bfloat16, rounded to bfloat16, into ``halves``."""
    for i in range(halves.size):
        halves[i] = bfloat16_of(bfloat16_as_single(first[i]) + bfloat16_as_single(second[i]))


_LOOPS = {"bfloat16": (_round_bfloat16, _add_bfloat16)}
if CONVERTS:
    _LOOPS["float16"] = _round_float16, _add_float16
