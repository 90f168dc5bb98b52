"""Rates per layer, from norms of the whole value: large batches. Not element-wise, so a value must lie in one place.

Norms are summed in float64, block by block in order: the same on every machine, and no float32 overflows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..options import flag, number
from ..protocols import Array, Key
from .adam import Moments
from .optimizer import Block, Optimizer, Step
from .options import rate, suffixes
from .parts import descend, descend_with_momentum, sum_of_squares

WIDE = np.dtype(np.float64)


@dataclass(kw_only=True, eq=False, repr=False)
class LARS(Optimizer):
    """Momentum descent with a rate scaled by the ratio of a layer's norm to its gradient's norm.

    The rule, with ``s`` the rescaled sum before clipping and ``g`` the gradient with weight decay::

        trust     = eta * |weight| / (|s| + wd * |weight| + epsilon), or 1 where one of both norms is 0
        momentum_ = momentum * momentum_ - lr * trust * g
        weight    = weight + momentum_

    MXNet's fused form also divides the velocity by the change of the rate; its plain form and the paper do not.

    Reference: You, Gitman, Ginsburg, Large Batch Training of Convolutional Networks, 2017,
    https://arxiv.org/abs/1708.03888.

    >>> import numpy as np
    >>> optimizer = LARS(learning_rate=1.0, eta=0.1)
    >>> weight = np.array([3.0, 4.0])
    >>> optimizer.update(optimizer.step("w", 1), np.array([0.0, 0.01]), weight, {})
    >>> weight.round(3)
    array([3. , 3.5])
    """

    elementwise = False

    learning_rate: float | None = rate(0.1)
    """In [0, inf), default 0.1."""
    momentum: float = number(0.0, "[0, 1)")
    """Share of the velocity that is kept, in [0, 1), default 0: no velocity."""
    eta: float = number(0.001, "(0, inf)")
    """How far a layer may move relative to its norm, in (0, inf), default 0.001."""
    epsilon: float = number(1e-8, "(0, inf)")
    """Added to the gradient's norm, in (0, inf), default 1e-8."""
    skip: tuple[str, ...] = suffixes("gamma", "beta", "bias")
    """Keys with these endings have a trust of 1: biases and the scales of normalisation, as in MXNet."""

    @property
    def states(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def step(self, key: Key, count: int) -> Step:
        step = super().step(key, count)
        return replace(step, correction=(1.0,)) if str(key).endswith(self.skip) else step

    def update(self, step: Step, total: Array, value: Array, state: Mapping[str, Array]) -> None:
        # A skipped key brings its trust of 1 as a correction, and saves the pass for the norms.
        trust = step.correction[0] if step.correction else self._trust(step, total, value, state)
        super().update(replace(step, rate=step.rate * trust), total, value, state)

    def rule(self, step: Step, block: Block) -> None:
        if self.momentum:
            (velocity,) = block.state
            descend_with_momentum(block.weight, block.gradient, velocity, step.rate, self.momentum)
        else:
            descend(block.weight, block.gradient, step.rate)

    def _trust(self, step: Step, total: Array, value: Array, state: Mapping[str, Array]) -> float:
        wide = self.scratch(WIDE, 1)[0]
        weights = gradients = 0.0
        for block in self.blocks(total, value, state):
            block.load()
            weights += sum_of_squares(block.weight, wide)
            gradients += sum_of_squares(block.gradient, wide)
        # The norm of the rescaled sum: one multiplication here saves a pass over the gradient.
        weight_norm, gradient_norm = math.sqrt(weights), math.sqrt(gradients) * abs(self.rescale)
        if not weight_norm or not gradient_norm:
            return 1.0
        return self.eta * weight_norm / (gradient_norm + step.wd * weight_norm + self.epsilon)


@dataclass(kw_only=True, eq=False, repr=False)
class LAMB(Moments):
    """Adam with a step scaled to the norm of the layer.

    The rule, with ``mean`` and ``variance`` as in :class:`~mpikv.optimizers.Adam` from a ``g`` without weight decay::

        u      = (mean / (1 - beta1^t)) / (sqrt(variance / (1 - beta2^t)) + epsilon) + wd * weight
        trust  = clip(|weight|, lower_bound, upper_bound) / |u|, or 1 where one of both is 0
        weight = weight - lr * trust * u

    Reference: You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, ICLR 2020,
    https://arxiv.org/abs/1904.00962.

    >>> import numpy as np
    >>> optimizer = LAMB(learning_rate=0.1)
    >>> weight = np.array([3.0, 4.0])
    >>> state = {"mean": np.zeros(2), "variance": np.zeros(2)}
    >>> optimizer.update(optimizer.step("w", 1), np.array([0.0, 0.01]), weight, state)
    >>> weight.round(3)
    array([3. , 3.5])
    """

    elementwise = False
    coupled = False

    epsilon: float = number(1e-6, "(0, inf)")
    """Added to the corrected root against division by zero, in (0, inf), default 1e-6."""
    lower_bound: float | None = number(None, "(0, inf)")
    """Least norm of the weight that counts, in (0, inf); None: no bound."""
    upper_bound: float | None = number(None, "(0, inf)")
    """Largest norm of the weight that counts, in (0, inf); None: no bound."""
    bias_correction: bool = flag(True)
    """False leaves out both divisions by 1 - beta^t."""

    def correction(self, count: int) -> tuple[float, ...]:
        return super().correction(count) if self.bias_correction else (1.0, 1.0)

    def update(self, step: Step, total: Array, value: Array, state: Mapping[str, Array]) -> None:
        wide = self.scratch(WIDE, 1)[0]
        weights = directions = 0.0
        with np.errstate(all="ignore"):
            blocks = self.blocks(total, value, state)
            for block in blocks:
                block.load()
                self.prepare(step, block)
                self.rule(step, block)
                weights += sum_of_squares(block.weight, wide)
                directions += sum_of_squares(block.gradient, wide)
            rate = step.rate * self._trust(math.sqrt(weights), math.sqrt(directions))
            for block in blocks:
                # Again: blocks of half precision share one float32 weight array, which the last block has now.
                block.load()
                descend(block.weight, block.gradient, rate)
                block.store()

    def rule(self, step: Step, block: Block) -> None:
        """Put the direction in the place of the gradient: its norm is known only after the last block."""
        (spare,), (first, second), direction = block.spare, step.correction, block.gradient
        np.divide(self.update_averages(block), self.root(step, block), out=direction)
        np.multiply(direction, second / first, out=direction)
        if step.wd:
            np.multiply(block.weight, step.wd, out=spare)
            np.add(direction, spare, out=direction)

    def _trust(self, weight_norm: float, direction_norm: float) -> float:
        if self.lower_bound is not None:
            weight_norm = max(weight_norm, self.lower_bound)
        if self.upper_bound is not None:
            weight_norm = min(weight_norm, self.upper_bound)
        return weight_norm / direction_norm if weight_norm and direction_norm else 1.0
