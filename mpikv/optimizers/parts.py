"""The small parts of rules. All work in place, and may overwrite ``spare``."""

from __future__ import annotations

import numpy as np

from ..protocols import Array


def average(mean: Array, sample: Array, decay: float, spare: Array) -> None:
    """Set ``mean = decay * mean + (1 - decay) * sample``, in place; overwrite ``spare``."""
    np.multiply(mean, decay, out=mean)
    np.multiply(sample, 1.0 - decay, out=spare)
    np.add(mean, spare, out=mean)


def average_squares(mean: Array, sample: Array, decay: float, spare: Array) -> None:
    """Set ``mean = decay * mean + (1 - decay) * sample**2``, in place; overwrite ``spare``."""
    np.multiply(mean, decay, out=mean)
    np.multiply(sample, sample, out=spare)
    np.multiply(spare, 1.0 - decay, out=spare)
    np.add(mean, spare, out=mean)


def descend(weight: Array, direction: Array, rate: float) -> None:
    """Set ``weight = weight - rate * direction``, in place; overwrite the direction."""
    np.multiply(direction, rate, direction)
    np.subtract(weight, direction, weight)


def descend_with_momentum(weight: Array, direction: Array, velocity: Array, rate: float, momentum: float) -> None:
    """Set ``velocity = momentum * velocity - rate * direction``, ``weight += velocity``; overwrite the direction."""
    # A name for the last argument, out, would cost a sixth of the time of a small array.
    np.multiply(velocity, momentum, velocity)
    np.multiply(direction, rate, direction)
    np.subtract(velocity, direction, velocity)
    np.add(weight, velocity, weight)


def sum_of_squares(array: Array, wide: Array) -> float:
    """Return the sum of squares in float64, so no float32 overflows; overwrite ``wide``.

    ``wide`` is float64 and not shorter than the array.
    """
    squares = wide[: array.size]
    # add.reduce of a float64 array adds in pairs, in numpy's order; GPU kernels repeat that order bit by bit.
    np.copyto(squares, array)
    np.multiply(squares, squares, out=squares)
    return float(np.add.reduce(squares))
