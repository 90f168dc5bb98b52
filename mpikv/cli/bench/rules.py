"""Update rules written by hand with numpy, for peers and for the oracle, and the bytes that each must move.

**Bytes that must move** per float32 element, over all n ranks, if values do not fit the caches and nothing is written
to memory twice. An owner reads the gradients of all ranks, 4n. It reads and writes the weight and each of its states
once, 8 each:

=============  =================  ================================================================================
rule           zero copy          because
=============  =================  ================================================================================
SGD-momentum   4n + 16            weight, momentum
Adam           4n + 24            weight, mean, variance
LAMB           4n + 24 (+ 12)     as Adam. The rate depends on the norm of the whole direction: a value that does
                                  not stay in the cache until its norm is known has its weight read once more (4),
                                  and its direction either kept (write 4, read 4) or computed again (read 8, and
                                  then nothing is written): at least 12 more, which smaller values do not need
=============  =================  ================================================================================

With private arrays every rank also writes its outputs, 4n. Its gradients are read once all the same: the staging copy
stays in the cache. (Processors that read a line before they write it move 4n more; memcpy does not show it either.)
The memcpy yardstick reads and writes 4 on every rank: 8n. So at n = 2 SGD-momentum moves 24 bytes zero copy, 32 with
private arrays, and memcpy 16.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...protocols import Array

__all__ = ["BLOCK", "EPSILON", "RULES", "Rule"]

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
    note: str = ""

    def floor(self, size: int, *, private: bool) -> int:
        """Return the bytes per element that must move at ``size`` ranks; see the top of this module."""
        return 4 * size + 8 * (1 + self.states) + (4 * size if private else 0)

    def tolerance(self, steps: int, total: float, weight: float) -> float:
        """Return the absolute tolerance between results of other orders of summing and rounding.

        ``total`` and ``weight`` are the largest magnitudes of the sum and of the weights. The momentum of SGD tends to
        rate / (1 - momentum) = 0.1 times the sum, with the rounding of some ten operations. A step of the other rules
        is at most about the rate times the weight or 1; a thousandth of it is allowed.
        """
        if self.name == "sgd":
            return steps * EPSILON * (weight + 8 * total)
        return steps * (2 * EPSILON * weight + 1e-3 * self.options["learning_rate"] * max(1.0, weight))


def _blocks(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Yield parts of flat arrays, each of at most one block, and scratch memory of the part's size."""
    for start in range(0, arrays[0].size, BLOCK):
        parts = [array[start : start + BLOCK] for array in arrays]
        yield (*parts, _scratch()[: parts[0].size])


@functools.cache
def _scratch() -> Array:
    return np.empty(BLOCK, np.float32)


_SGD = {"learning_rate": 0.01, "momentum": 0.9}
# With a tiny epsilon Adam gives the same result for all multiples of a gradient: a mean would pass for a sum.
_ADAM = {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 0.1}
_LAMB = {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6}


def _sgd(count: int, total: Array, weight: Array, states: Sequence[Array]) -> None:
    for g, w, m, spare in _blocks(total, weight, *states):
        np.multiply(m, _SGD["momentum"], out=m)
        np.multiply(g, _SGD["learning_rate"], out=spare)
        np.subtract(m, spare, out=m)
        np.add(w, m, out=w)


def _averages(g: Array, mean: Array, variance: Array, spare: Array, options: Mapping[str, float]) -> None:
    np.multiply(mean, options["beta1"], out=mean)
    np.multiply(g, 1 - options["beta1"], out=spare)
    np.add(mean, spare, out=mean)
    np.multiply(variance, options["beta2"], out=variance)
    np.multiply(g, g, out=spare)
    np.multiply(spare, 1 - options["beta2"], out=spare)
    np.add(variance, spare, out=variance)


def _direction(count: int, mean: Array, variance: Array, out: Array, options: Mapping[str, float]) -> None:
    np.divide(variance, 1 - options["beta2"] ** count, out=out)
    np.sqrt(out, out=out)
    np.add(out, options["epsilon"], out=out)
    np.divide(mean, out, out=out)
    np.divide(out, 1 - options["beta1"] ** count, out=out)


def _adam(count: int, total: Array, weight: Array, states: Sequence[Array]) -> None:
    for g, w, mean, variance, spare in _blocks(total, weight, *states):
        _averages(g, mean, variance, spare, _ADAM)
        _direction(count, mean, variance, spare, _ADAM)
        np.multiply(spare, _ADAM["learning_rate"], out=spare)
        np.subtract(w, spare, out=w)


def _lamb(count: int, total: Array, weight: Array, states: Sequence[Array]) -> None:
    weights = directions = 0.0
    for g, w, mean, variance, spare in _blocks(total, weight, *states):
        _averages(g, mean, variance, spare, _LAMB)
        # The direction takes the gradient's memory, until its norm is known.
        _direction(count, mean, variance, g, _LAMB)
        weights += float(np.dot(w, w))
        directions += float(np.dot(g, g))
    trust = math.sqrt(weights / directions) if weights and directions else 1.0
    for g, w, _ in _blocks(total, weight):
        np.multiply(g, _LAMB["learning_rate"] * trust, out=g)
        np.subtract(w, g, out=w)


RULES = {
    rule.name: rule
    for rule in (
        Rule("sgd", "SGD-momentum", _SGD, 1, _sgd),
        Rule("adam", "Adam", _ADAM, 2, _adam),
        Rule("lamb", "LAMB", _LAMB, 2, _lamb, note="12 more where a value does not stay in the cache until its norm"),
    )
}
"""The optimizers of the key sets, by their names."""
