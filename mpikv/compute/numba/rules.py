"""The optimizers' rules as compiled loops, with one pass over memory. A :class:`~mpikv.protocols.Kernels`.

A rule in numpy reads and writes its arrays a dozen times, at best from the cache. A loop here reads each element once,
updates it, and writes it once. It is printed from the rule's record (``optimizers/recording.py``), so both give the
same bits; only sign and payload of a NaN are arbitrary. The compiler may not reorder or fuse operations: no
``fastmath``.

The module has loops for recorded rules in float32 and float64, and for ASSIGN in half precision (``half_rules.py``).
The updater itself runs for all others: optimizers of half precision, and updaters of whole values.

A loop can also make the sum of a push, or the last addition of several. It then reads two arrays; their sum is never
written.

The module imports numba; only ``kernels="numba"`` imports the module.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from textwrap import indent
from typing import Any, TypeGuard

import numpy as np

from ...optimizers.optimizer import Optimizer, Step
from ...optimizers.recording import Rule, call_of, is_recordable, rule_of
from ...protocols import Array, Updater
from .codecs import codec as codec
from .compiling import compile_cached, inner
from .half_rules import bind_adding as bind_adding_halves
from .half_rules import bind_rounding, has_loops
from .lists import bind_list as bind_list


def prepare(updater: Updater, dtype: np.dtype[Any], adding: bool) -> None:
    """Compile, or load from disk, the updater's loop for its present options and this dtype, if it has one. Local."""
    nothing = np.empty(0, dtype)
    # numba writes its cache after compiling; on a full disk the loop is usable nevertheless.
    with suppress(OSError):
        if updater.assigns and has_loops(dtype):
            bind_rounding(np.empty(0, np.float32), nothing)
            bind_adding_halves(nothing)
        elif _has_loop(updater, nothing):
            rule = rule_of(updater)
            arrays = nothing, nothing if adding else None, *[nothing] * (1 + len(rule.states))
            loop_of(rule, dtype, adding)(*arrays, 0, *[0.0] * len(rule.numbers))


def bind(updater: Updater, total: Array, value: Array, state: Mapping[str, Array]) -> Callable[[Any], None]:
    """Return a compiled function of a step that updates these arrays; without a loop ``updater.bind``'s. Local."""
    if updater.assigns and has_loops(value.dtype):
        return bind_rounding(total, value)
    if not _has_loop(updater, total, value, *state.values()):
        return updater.bind(total, value, state)
    return partial(_bind_loop(updater, value, state), total.reshape(-1), None)


def bind_adding(
    updater: Updater, value: Array, state: Mapping[str, Array]
) -> Callable[[Array, Array, Any], None] | None:
    """Return a function (a, b, step) that updates by a + b in a compiled loop; None if no loop fits. Local."""
    if updater.assigns and has_loops(value.dtype):
        return bind_adding_halves(value)
    return _bind_loop(updater, value, state) if _has_loop(updater, value, *state.values()) else None


def _has_loop(updater: Updater, *arrays: Array) -> TypeGuard[Optimizer]:
    """Return whether a loop can update such arrays: contiguous, all float32 or all float64, by a recordable rule."""
    dtype = arrays[0].dtype
    fits = all(array.flags.carray and array.dtype == dtype for array in arrays)
    return fits and dtype.name in ("float32", "float64") and is_recordable(updater)


def _bind_loop(
    optimizer: Optimizer, value: Array, state: Mapping[str, Array]
) -> Callable[[Array, Array | None, Step], None]:
    """Return a function of a sum, a second addend or None, and a step; it updates value and state in place. Local."""
    dtype = value.dtype
    arrays_of = cache(lambda rule: [array.reshape(-1) for array in (value, *map(state.__getitem__, rule.states))])

    def update(total: Array, term: Array | None, step: Step) -> None:
        """Update value and state by ``total``, plus ``term`` if given, with the optimizer's options of now."""
        # Options may have changed since the last call.
        rule, numbers = call_of(optimizer, step)
        loop_of(rule, dtype, term is not None)(total, term, *arrays_of(rule), *numbers)

    return update


@cache
def loop_of(rule: Rule, dtype: np.dtype[Any], adding: bool) -> Callable[..., None]:
    """Return a rule's loop for a dtype, with or without a second addend; its first call compiles it. Local."""
    text, names = print_loop(rule), dict(globals())
    exec(compile(text, __file__, "exec"), names)  # numba caches it beside the file of this name
    return compile_cached(names[rule.name], kind=f"{dtype.name}-{'adding-' * adding}{zlib.crc32(text.encode()):08x}")


def print_loop(rule: Rule) -> str:
    """Return the Python source, for numba, of a function that runs a rule over arrays in one loop. Local.

    Its arguments are the sum, or two addends (``term`` may be None), the arrays to update, and what
    :func:`~mpikv.optimizers.recording.call_of` returns: float64, which it rounds. It does not write ``total`` and
    ``term``.
    """
    states = range(len(rule.states))
    lines = [f"state{place} = states{place}[i]" for place in states]
    lines += [re.sub(r"\n *}|;", "", rule.code).replace(") {", "):")]
    lines += [f"states{place}[i] = state{place}" for place in states]
    return f"""\
def {rule.name}(total, term, weights, {"".join(f"states{place}, " for place in states)}bits, *numbers):
    n = ({"".join(f"weights.dtype.type(numbers[{place}]), " for place in range(len(rule.numbers)))})
    for i in range(weights.size):
        gradient = total[i] if term is None else total[i] + term[i]
        weight = weights[i]
{indent(chr(10).join(lines), "        ")}
        weights[i] = weight
"""


# --- What loops call, by the names in records. With error_model="numpy" a division by zero gives inf or nan.

root, magnitude_of = math.sqrt, abs


@inner
def clipped(number: Any, low: Any, high: Any) -> Any:
    """Compute ``numpy.clip(number, low, high)``: NaN stays, and of two equal zeros the number."""
    raised = low if number < low or low != low else number
    return high if raised > high or high != high else raised


@inner
def larger(left: Any, right: Any) -> Any:
    """Compute ``numpy.maximum(left, right)``: NaN stays, and of two equal zeros the right one."""
    return right if left <= right or right != right else left


@inner
def smaller(left: Any, right: Any) -> Any:
    """Compute ``numpy.minimum(left, right)``, as :func:`larger` does."""
    return right if left >= right or right != right else left


@inner
def sign_of(number: Any) -> Any:
    """Compute ``numpy.sign(number)``: NaN stays, and a zero becomes positive."""
    zero, one = type(number)(0), type(number)(1)
    return one if number > zero else -one if number < zero else zero if number == zero else number
