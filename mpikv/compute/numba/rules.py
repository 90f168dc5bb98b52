"""The rules of the optimizers as compiled loops, which pass over memory once. A :class:`~mpikv.protocols.Kernels`.

A rule in numpy reads and writes its arrays a dozen times, from the cache where it can; a loop here reads each element
once, makes all of the update of it, and writes it once. Both give the same bits (a NaN is a NaN: its sign and payload
are as it happens). So each loop makes the operations of the rule in the rule's order and in the dtype of the arrays,
numbers are rounded to that dtype first, as numpy does, and the compiler may not reorder or fuse: no ``fastmath``.

Compiled are the rules of ``forms.py`` for float32 and float64, and ASSIGN for half precision (``half_rules.py``).
All else is left to the updater: optimizers of half precision, updaters of whole values, and classes that are not in the
table, subclasses among them, whose rule may be another.

A loop can make the sum of a push, too, or the last addition of several: it then reads two arrays instead of their sum,
which is never written.

This module imports numba, and is imported when numba's kernels are asked for.
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
from .compiling import inner, kept
from .half_rules import adding as adding_halves
from .half_rules import is_half, rounding
from .lists import bind_list

__all__ = ["LOOPS", "bind", "bind_adding", "bind_list", "prepare", "rules"]

Loop: TypeAlias = Callable[..., None]
"""``loop(total, term, weight, *state, scale, bound, wd, *numbers)``: numbers are float64 and rounded inside. The
gradient is ``clip(scale * (total + term), -bound, bound)``, where ``term`` may be None, plus ``wd * weight`` where that
is part of it. ``total`` and ``term`` are not written."""

_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
# Division by zero gives inf or nan, as in numpy, instead of raising.


def prepare(updater: Updater, dtype: np.dtype[Any], adding: bool) -> None:
    """Compile, or load, what the updater's present options need for values of this dtype. Local."""
    nothing = np.empty(0, dtype)
    if updater.assigns and is_half(dtype):
        with suppress(OSError):
            rounding(np.empty(0, np.float32), nothing)
            adding_halves(nothing)
        return
    state = dict.fromkeys(updater.slots(dtype), nothing)
    if not _is_compiled(updater, nothing, *state.values()):
        return
    # That what was compiled cannot be kept, on a full disk, is found out when it is ready to be used.
    with suppress(OSError):
        _bound(updater, nothing, state)(nothing, nothing if adding else None, Step(1.0, 0.0, updater.correction(1)))


def bind(updater: Updater, total: Array, value: Array, state: Mapping[str, Array]) -> Callable[[Any], None]:
    """Return what ``updater.bind`` does, compiled where there is a compiled form for these arrays."""
    if updater.assigns and is_half(value.dtype):
        return rounding(total, value)
    if not _is_compiled(updater, total, value, *state.values()):
        return updater.bind(total, value, state)
    return partial(_bound(updater, value, state), total.reshape(-1), None)


def bind_adding(
    updater: Updater, value: Array, state: Mapping[str, Array]
) -> Callable[[Array, Array, Any], None] | None:
    """Return what does the same to the sum of two arrays, where there is a compiled form for these."""
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
    """Return the loop, to be compiled at its first call, for arrays of a dtype, with a second term or without."""
    return kept(loop, kind=f"{dtype.name}-{'adding-' * adding}")


# --- Parts, for one element


def _cast(_: Any, array: Any, numbers: Any) -> Any:
    """Tell numba how to round a tuple of numbers to the dtype of an array."""
    rounded = numba.types.UniTuple(array.dtype, len(numbers))

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.cast(builder, arguments[1], numbers, rounded)

    return rounded(array, numbers), build


_rounded: Any = intrinsic(_cast)


@inner
def _clipped(number: Any, bound: Any) -> Any:
    """``numpy.clip(number, -bound, bound)``, which keeps NaN and the sign of zero."""
    return -bound if number < -bound else bound if number > bound else number


@inner
def _decayed(gradient: Any, weight: Any, wd: Any, decays: bool) -> Any:
    # Adding zero would make NaN of a weight that is inf.
    return gradient + weight * wd if decays else gradient


@inner
def _received(total: Any, term: Any, weight: Any, i: int, numbers: Any) -> Any:
    """The gradient without weight decay."""
    scale, bound = _rounded(weight, numbers[:2])
    # Which of the two it is, is decided when a loop is compiled.
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
    """``numpy.maximum(left, right)``, which keeps NaN; of two zeros it is the right one."""
    return right if left <= right or right != right else left


@inner
def _signed(number: Any) -> Any:
    """``numpy.sign(number)``, which keeps NaN and makes zero positive."""
    zero, one = type(number)(0), type(number)(1)
    return one if number > zero else -one if number < zero else zero if number == zero else number


# --- Loops
#
# Numbers are rounded to the dtype of the arrays first: an operation with a float64 would be made in float64. Whether
# one is zero is asked before that, as the rules in numpy do.


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
