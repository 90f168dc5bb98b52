"""Adam and LAMB by hand, beside the rule of ``mpikv bench``, and the bytes that each rule must move.

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

import math
from collections.abc import Mapping, Sequence

import numpy as np

from mpikv.cli.bench.rules import SGD, Rule, split_blocks
from mpikv.protocols import Array

LAMB_NOTE = "12 more where a value does not stay in the cache until its norm"


def floor(rule: Rule, size: int, *, private: bool) -> int:
    """Return the bytes per element that must move at ``size`` ranks; see the top of this module."""
    return 4 * size + 8 * (1 + rule.states) + (4 * size if private else 0)


# With a tiny epsilon Adam gives the same result for all multiples of a gradient: a mean would pass for a sum.
_ADAM = {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 0.1}
_LAMB = {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6}


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
    for g, w, mean, variance, spare in split_blocks(total, weight, *states):
        _averages(g, mean, variance, spare, _ADAM)
        _direction(count, mean, variance, spare, _ADAM)
        np.multiply(spare, _ADAM["learning_rate"], out=spare)
        np.subtract(w, spare, out=w)


def _lamb(count: int, total: Array, weight: Array, states: Sequence[Array]) -> None:
    weights = directions = 0.0
    for g, w, mean, variance, spare in split_blocks(total, weight, *states):
        _averages(g, mean, variance, spare, _LAMB)
        # The direction takes the gradient's memory, until its norm is known.
        _direction(count, mean, variance, g, _LAMB)
        weights += float(np.dot(w, w))
        directions += float(np.dot(g, g))
    trust = math.sqrt(weights / directions) if weights and directions else 1.0
    for g, w, _ in split_blocks(total, weight):
        np.multiply(g, _LAMB["learning_rate"] * trust, out=g)
        np.subtract(w, g, out=w)


RULES = {
    rule.name: rule for rule in (SGD, Rule("adam", "Adam", _ADAM, 2, _adam), Rule("lamb", "LAMB", _LAMB, 2, _lamb))
}
"""The optimizers of the key sets, by their names."""
