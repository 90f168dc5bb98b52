"""The optimizers' rules as compiled loops, with one pass over memory. A :class:`~mpikv.protocols.Kernels`.

A rule in numpy reads and writes its arrays a dozen times, at best from the cache. A loop here reads each element once,
updates it, and writes it once. Both give the same bits; only sign and payload of a NaN are arbitrary. So each loop
makes the rule's operations, in the rule's order and in the dtype of the arrays. It first rounds numbers to that dtype,
as numpy does. The compiler may not reorder or fuse operations: no ``fastmath``.

The module has loops for the rules of ``forms.py`` in float32 and float64, and for ASSIGN in half precision
(``half_rules.py``). The updater itself runs for all others: optimizers of half precision, updaters of whole values, and
classes outside of the table. A subclass is outside, too, since its rule may differ.

A loop can also make the sum of a push, or the last addition of several. It then reads two arrays; their sum is never
written.

The module imports numba; only ``kernels="numba"`` imports the module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from typing import Any, TypeAlias, TypeGuard

import numba
import numpy as np
from numba.extending import intrinsic

from ...optimizers.forms import FORMS, call_of
from ...optimizers.optimizer import Optimizer, Step
from ...protocols import Array, Updater
from .compiling import compile_cached, inner
from .half_rules import adding as adding_halves
from .half_rules import is_half, rounding
from .lists import bind_list

__all__ = ["LOOPS", "bind", "bind_adding", "bind_list", "prepare", "rules"]

Loop: TypeAlias = Callable[..., None]
"""``loop(total, term, weight, *state, scale, bound, wd, *numbers)``; numbers are float64, and rounded inside. The
gradient is ``clip(scale * (total + term), -bound, bound)``, plus ``wd * weight`` if the rule has it there. ``term`` may
be None. The loop does not write ``total`` and ``term``."""

_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
# error_model="numpy": a division by zero gives inf or nan, as in numpy, and does not raise.


def prepare(updater: Updater, dtype: np.dtype[Any], adding: bool) -> None:
    """Compile, or load, the loop for the updater's current options and values of this dtype. Local."""
    nothing = np.empty(0, dtype)
    if updater.assigns and is_half(dtype):
        with suppress(OSError):
            rounding(np.empty(0, np.float32), nothing)
            adding_halves(nothing)
        return
    state = dict.fromkeys(updater.slots(dtype), nothing)
    if not _is_compiled(updater, nothing, *state.values()):
        return
    # numba writes its cache after compiling; on a full disk the loop is usable nevertheless.
    with suppress(OSError):
        _bound(updater, nothing, state)(nothing, nothing if adding else None, Step(1.0, 0.0, updater.correction(1)))


def bind(updater: Updater, total: Array, value: Array, state: Mapping[str, Array]) -> Callable[[Any], None]:
    """Return ``updater.bind`` compiled, or ``updater.bind`` itself if these arrays have no loop."""
    if updater.assigns and is_half(value.dtype):
        return rounding(total, value)
    if not _is_compiled(updater, total, value, *state.values()):
        return updater.bind(total, value, state)
    return partial(_bound(updater, value, state), total.reshape(-1), None)


def bind_adding(
    updater: Updater, value: Array, state: Mapping[str, Array]
) -> Callable[[Array, Array, Any], None] | None:
    """Return a compiled update by the sum of two arrays; None if these arrays have no loop."""
    if updater.assigns and is_half(value.dtype):
        return adding_halves(value)
    return _bound(updater, value, state) if _is_compiled(updater, value, *state.values()) else None


def _is_compiled(updater: Updater, *arrays: Array) -> TypeGuard[Optimizer]:
    dtype = arrays[0].dtype
    known = type(updater) in FORMS and dtype in _DTYPES
    return known and all(array.flags.carray and array.dtype == dtype for array in arrays)


def _bound(
    optimizer: Optimizer, value: Array, state: Mapping[str, Array]
) -> Callable[[Array, Array | None, Step], None]:
    dtype = value.dtype
    weight, arrays = value.reshape(-1), {name: array.reshape(-1) for name, array in state.items()}

    def update(total: Array, term: Array | None, step: Step) -> None:
        # Options may have changed since the last call.
        form, numbers = call_of(optimizer, step)
        states = [arrays[name] for name in optimizer.states]
        _compiled(LOOPS[form], dtype, term is not None)(total, term, weight, *states, *numbers)

    return update


@cache
def _compiled(loop: Loop, dtype: np.dtype[Any], adding: bool) -> Loop:
    """Return the loop for a dtype, with or without a second addend; its first call compiles it."""
    return compile_cached(loop, kind=f"{dtype.name}-{'adding-' * adding}")


# --- Functions of one element


def _cast(_: Any, array: Any, numbers: Any) -> Any:
    """Generate numba's code for rounding a tuple of numbers to an array's dtype."""
    rounded = numba.types.UniTuple(array.dtype, len(numbers))

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.cast(builder, arguments[1], numbers, rounded)

    return rounded(array, numbers), build


_rounded: Any = intrinsic(_cast)


@inner
def _clipped(number: Any, bound: Any) -> Any:
    """Compute ``numpy.clip(number, -bound, bound)``; keep NaN and the sign of zero."""
    return -bound if number < -bound else bound if number > bound else number


@inner
def _decayed(gradient: Any, weight: Any, wd: Any, decays: bool) -> Any:
    # Without decay nothing may be added: 0 * inf would make the weight NaN.
    return gradient + weight * wd if decays else gradient


@inner
def _received(total: Any, term: Any, weight: Any, i: int, numbers: Any) -> Any:
    """Return the gradient without weight decay."""
    scale, bound = _rounded(weight, numbers[:2])
    # Decided at compile time: ``term`` has the type None or an array.
    return _clipped((total[i] if term is None else total[i] + term[i]) * scale, bound)


@inner
def _gradient(total: Any, term: Any, weight: Any, i: int, numbers: Any) -> Any:
    (wd,) = _rounded(weight, numbers[2:3])
    return _decayed(_received(total, term, weight, i, numbers), weight[i], wd, numbers[2] != 0)


@inner
def _averaged(mean: Any, sample: Any, kept: Any, taken: Any) -> Any:
    return mean * kept + sample * taken


@inner
def _maximum(left: Any, right: Any) -> Any:
    """Compute ``numpy.maximum(left, right)``: NaN stays, and of two equal zeros the right one."""
    return right if left <= right or right != right else left


@inner
def _signed(number: Any) -> Any:
    """Compute ``numpy.sign(number)``: NaN stays, and a zero becomes positive."""
    zero, one = type(number)(0), type(number)(1)
    return one if number > zero else -one if number < zero else zero if number == zero else number


# --- Loops
#
# Numbers are rounded to the arrays' dtype first: an operation with a float64 would be computed in float64. Tests for
# zero come before the rounding, as in the rules of numpy.


def _descent(total: Array, term: Array | None, weight: Array, *numbers: float) -> None:
    (rate,) = _rounded(weight, numbers[3:])
    for i in range(weight.size):
        g = _gradient(total, term, weight, i, numbers)
        weight[i] = weight[i] - g * rate


def _momentum(total: Array, term: Array | None, weight: Array, velocity: Array, *numbers: float) -> None:
    rate, momentum = _rounded(weight, numbers[3:])
    for i in range(weight.size):
        g = _gradient(total, term, weight, i, numbers)
        v = velocity[i] * momentum - g * rate
        velocity[i] = v
        weight[i] = weight[i] + v


def _nesterov(total: Array, term: Array | None, weight: Array, velocity: Array, *numbers: float) -> None:
    rate, momentum = _rounded(weight, numbers[3:])
    for i in range(weight.size):
        g = _gradient(total, term, weight, i, numbers) * rate
        v = velocity[i] * momentum - g
        velocity[i] = v
        weight[i] = weight[i] + (v * momentum - g)


def _sign(total: Array, term: Array | None, weight: Array, *numbers: float) -> None:
    rate, decay = _rounded(weight, numbers[3:])
    decays = numbers[4] != 0
    for i in range(weight.size):
        w = weight[i]
        g = _gradient(total, term, weight, i, numbers)
        weight[i] = w - _decayed(_signed(g), w, decay, decays) * rate


def _signum(total: Array, term: Array | None, weight: Array, mean: Array, *numbers: float) -> None:
    rate, decay, kept, taken = _rounded(weight, numbers[3:])
    decays = numbers[4] != 0
    for i in range(weight.size):
        w = weight[i]
        g = _gradient(total, term, weight, i, numbers)
        m = _averaged(mean[i], g, kept, taken)
        mean[i] = m
        weight[i] = w - _decayed(_signed(m), w, decay, decays) * rate


def _adagrad(total: Array, term: Array | None, weight: Array, history: Array, *numbers: float) -> None:
    rate, epsilon = _rounded(weight, numbers[3:])
    for i in range(weight.size):
        g = _gradient(total, term, weight, i, numbers)
        h = history[i] + g * g
        history[i] = h
        weight[i] = weight[i] - g / (math.sqrt(h) + epsilon) * rate


def _rmsprop(total: Array, term: Array | None, weight: Array, variance: Array, *numbers: float) -> None:
    rate, epsilon, largest, kept, taken = _rounded(weight, numbers[3:])
    for i in range(weight.size):
        g = _gradient(total, term, weight, i, numbers)
        v = _averaged(variance[i], g * g, kept, taken)
        variance[i] = v
        weight[i] = _clipped(weight[i] - g / (math.sqrt(v) + epsilon) * rate, largest)


def _rmsprop_centered(
    total: Array, term: Array | None, weight: Array, mean: Array, variance: Array, velocity: Array, *numbers: float
) -> None:
    rate, epsilon, largest, kept, taken, momentum = _rounded(weight, numbers[3:])
    zero = weight.dtype.type(0)
    for i in range(weight.size):
        g = _gradient(total, term, weight, i, numbers)
        m = _averaged(mean[i], g, kept, taken)
        s = _averaged(variance[i], g * g, kept, taken)
        v = velocity[i] * momentum - g / math.sqrt(_maximum(s - m * m, zero) + epsilon) * rate
        mean[i], variance[i], velocity[i] = m, s, v
        weight[i] = _clipped(weight[i] + v, largest)


def _adadelta(total: Array, term: Array | None, weight: Array, squares: Array, deltas: Array, *numbers: float) -> None:
    rate, epsilon, kept, taken = _rounded(weight, numbers[3:])
    for i in range(weight.size):
        g = _gradient(total, term, weight, i, numbers)
        s = _averaged(squares[i], g * g, kept, taken)
        d = g / math.sqrt(s + epsilon) * math.sqrt(deltas[i] + epsilon)
        squares[i], deltas[i] = s, _averaged(deltas[i], d * d, kept, taken)
        weight[i] = weight[i] - d * rate


def _adam(total: Array, term: Array | None, weight: Array, mean: Array, variance: Array, *numbers: float) -> None:
    rate, epsilon, kept, taken, kept_squares, taken_squares = _rounded(weight, numbers[3:])
    for i in range(weight.size):
        g = _gradient(total, term, weight, i, numbers)
        m = _averaged(mean[i], g, kept, taken)
        v = _averaged(variance[i], g * g, kept_squares, taken_squares)
        mean[i], variance[i] = m, v
        weight[i] = weight[i] - m / (math.sqrt(v) + epsilon) * rate


def _adamw(total: Array, term: Array | None, weight: Array, mean: Array, variance: Array, *numbers: float) -> None:
    rate, epsilon, kept, taken, kept_squares, taken_squares, decay = _rounded(weight, numbers[3:])
    decays = numbers[2] != 0
    for i in range(weight.size):
        g = _received(total, term, weight, i, numbers)
        m = _averaged(mean[i], g, kept, taken)
        v = _averaged(variance[i], g * g, kept_squares, taken_squares)
        mean[i], variance[i] = m, v
        weight[i] = weight[i] - _decayed(m / (math.sqrt(v) + epsilon) * rate, weight[i], decay, decays)


def _nadam(total: Array, term: Array | None, weight: Array, mean: Array, variance: Array, *numbers: float) -> None:
    rate, epsilon, kept, taken, kept_squares, taken_squares, of_gradient, of_mean = _rounded(weight, numbers[3:])
    for i in range(weight.size):
        g = _gradient(total, term, weight, i, numbers)
        m = _averaged(mean[i], g, kept, taken)
        v = _averaged(variance[i], g * g, kept_squares, taken_squares)
        mean[i], variance[i] = m, v
        weight[i] = weight[i] - (g * of_gradient + m * of_mean) / (math.sqrt(v) + epsilon) * rate


def _adamax(total: Array, term: Array | None, weight: Array, mean: Array, largest: Array, *numbers: float) -> None:
    rate, epsilon, kept, taken, kept_largest = _rounded(weight, numbers[3:])
    for i in range(weight.size):
        g = _gradient(total, term, weight, i, numbers)
        m = _averaged(mean[i], g, kept, taken)
        u = _maximum(largest[i] * kept_largest, abs(g) + epsilon)
        mean[i], largest[i] = m, u
        weight[i] = weight[i] - m / u * rate


def _ftrl(total: Array, term: Array | None, weight: Array, z: Array, n: Array, *numbers: float) -> None:
    wd, rate, lamda1, beta = _rounded(weight, numbers[2:])
    if numbers[3] == 0:
        return
    for i in range(weight.size):
        g = _received(total, term, weight, i, numbers)
        before, squares = math.sqrt(n[i]), n[i] + g * g
        root = math.sqrt(squares)
        evidence = z[i] + (g - (root - before) / rate * weight[i])
        z[i], n[i] = evidence, squares
        weight[i] = (_clipped(evidence, lamda1) - evidence) / ((root + beta) / rate + wd)


LOOPS: Mapping[str, Loop] = {
    loop.__name__[1:]: loop
    for loop in (
        *(_descent, _momentum, _nesterov, _sign, _signum, _adagrad, _rmsprop, _rmsprop_centered, _adadelta),
        *(_adam, _adamw, _nadam, _adamax, _ftrl),
    )
}
"""The loops by the names of their forms."""

rules = tuple(sorted(kind.__name__.lower() for kind in FORMS))
