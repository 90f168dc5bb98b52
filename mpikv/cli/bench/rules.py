"""Update rules written by hand with numpy, for peers and for the oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...protocols import Array

BLOCK = 1 << 16
"""Elements per block: all passes of a rule but the first find the block in the cache."""

EPSILON = 2.0**-23
"""The distance from 1 to the next float32."""


@dataclass(frozen=True)
class Rule:
    """An optimizer: its name and options for the store, and the same rule by hand."""

    name: str
    title: str
    options: Mapping[str, float]
    states: int
    """Number of state arrays per value, all zero at first."""
    apply: Callable[[int, Array, Array, Sequence[Array]], None]
    """``apply(count, total, weight, states)`` changes flat float32 weight and states in place; ``count`` is 1 in the
    first update. It may overwrite ``total``."""

    def tolerance(self, steps: int, total: float, weight: float) -> float:
        """Return the absolute tolerance between results of other orders of summing and rounding.

        ``total`` and ``weight`` are the largest magnitudes of the sum and of the weights. The momentum of SGD tends to
        rate / (1 - momentum) = 0.1 times the sum, with the rounding of some ten operations. A step of other rules is at
        most about the rate times the weight or 1; a thousandth of it is allowed.
        """
        if self.name == "sgd":
            return steps * EPSILON * (weight + 8 * total)
        return steps * (2 * EPSILON * weight + 1e-3 * self.options["learning_rate"] * max(1.0, weight))


def split_blocks(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Yield parts of flat arrays, each of at most one block, and scratch memory of the part's size."""
    for start in range(0, arrays[0].size, BLOCK):
        parts = [array[start : start + BLOCK] for array in arrays]
        yield (*parts, _scratch()[: parts[0].size])


@functools.cache
def _scratch() -> Array:
    return np.empty(BLOCK, np.float32)


_SGD = {"learning_rate": 0.01, "momentum": 0.9}


def _sgd(count: int, total: Array, weight: Array, states: Sequence[Array]) -> None:
    for g, w, m, spare in split_blocks(total, weight, *states):
        np.multiply(m, _SGD["momentum"], out=m)
        np.multiply(g, _SGD["learning_rate"], out=spare)
        np.subtract(m, spare, out=m)
        np.add(w, m, out=w)


SGD = Rule("sgd", "SGD-momentum", _SGD, 1, _sgd)
