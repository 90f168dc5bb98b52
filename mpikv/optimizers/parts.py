"""The small parts of rules. All work in place, and may overwrite ``spare``."""

from __future__ import annotations

from numpy import add, copyto, multiply, subtract

from ..protocols import Array


def average(mean: Array, sample: Array, decay: float, spare: Array) -> None:
    """Set ``mean = decay * mean + (1 - decay) * sample``, in place; overwrite ``spare``."""
    multiply(mean, decay, out=mean)
    multiply(sample, 1.0 - decay, out=spare)
    add(mean, spare, out=mean)


def average_squares(mean: Array, sample: Array, decay: float, spare: Array) -> None:
    """Set ``mean = decay * mean + (1 - decay) * sample**2``, in place; overwrite ``spare``."""
    multiply(mean, decay, out=mean)
    multiply(sample, sample, out=spare)
    multiply(spare, 1.0 - decay, out=spare)
    add(mean, spare, out=mean)


def descend(weight: Array, direction: Array, rate: float) -> None:
    """Set ``weight = weight - rate * direction``, in place; overwrite the direction."""
    multiply(direction, rate, direction)
    subtract(weight, direction, weight)


def descend_with_momentum(weight: Array, direction: Array, velocity: Array, rate: float, momentum: float) -> None:
    """Set ``velocity = momentum * velocity - rate * direction``, ``weight += velocity``; overwrite the direction."""
    # A name for the last argument, out, would cost a sixth of the time of a small array.
    multiply(velocity, momentum, velocity)
    multiply(direction, rate, direction)
    subtract(velocity, direction, velocity)
    add(weight, velocity, weight)


def sum_of_squares(array: Array, wide: Array) -> float:
    """Return the sum of squares in float64, so no float32 overflows; overwrite ``wide``, float64 and not shorter than
    the array.
    """
    squares = wide[: array.size]
    # add.reduce of a float64 array adds in pairs, in numpy's order; GPU kernels repeat that order bit by bit.
    copyto(squares, array)
    multiply(squares, squares, out=squares)
    return float(add.reduce(squares))
