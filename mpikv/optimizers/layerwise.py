"""Rates per layer, from norms of the whole value: large batches. Not element-wise, so a value must lie in one place.

Norms are summed in float64, block by block in order: the same on every machine, and no float32 overflows.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..options import flag, number
from ..protocols import Array, Key
from .adam import Moments
from .optimizer import Block, Optimizer, Step
from .options import rate, suffixes
from .parts import descend, descend_with_momentum, sum_of_squares
from .sgd import WithMomentum

WIDE = np.dtype(np.float64)


@dataclass(kw_only=True, eq=False, repr=False)
class Layerwise(Optimizer):
    """The common part of rules with a rate per layer: two passes over a value, for its norms and for the descent."""

    elementwise = False

    def update(self, step: Step, total: Array, value: Array, state: Mapping[str, Array]) -> None:
        """Change value and state in place: norms of the whole value, then the rule. ``total`` is overwritten. Local."""
        with np.errstate(all="ignore"):
            blocks = self.blocks(total, value, state)
            step = Step(self.adapt(step, *self.norms(step, blocks)), step.wd, step.correction)
            for block in blocks:
                # Again: blocks of half precision share one float32 weight array, which the last block has now.
                block.load()
                self.rule(step, block)
                block.store()

    def norms(self, step: Step, blocks: Sequence[Block]) -> tuple[float, float]:
        """Run :meth:`direct` on all blocks, in place; return the norms of the weight and of the changed gradient."""
        wide = self.scratch(WIDE, 1)[0]
        weights = gradients = 0.0
        for block in blocks:
            block.load()
            self.direct(step, block)
            weights += sum_of_squares(block.weight, wide)
            gradients += sum_of_squares(block.gradient, wide)
        return math.sqrt(weights), math.sqrt(gradients)

    def direct(self, step: Step, block: Block) -> None:
        """Change gradient and state, not the weight, before norms are computed. Here nothing; subclasses may."""

    @abstractmethod
    def adapt(self, step: Step, weight_norm: float, gradient_norm: float) -> float:
        """Return the rate of the layer, for :meth:`rule` to find in its step."""


@dataclass(kw_only=True, eq=False, repr=False)
class LARS(WithMomentum, Layerwise):
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

    learning_rate: float | None = rate(0.1)
    """In [0, inf), default 0.1."""
    eta: float = number(0.001, "(0, inf)")
    """How far a layer may move relative to its norm, in (0, inf), default 0.001."""
    epsilon: float = number(1e-8, "(0, inf)")
    """Added to the gradient's norm, in (0, inf), default 1e-8."""
    skip: tuple[str, ...] = suffixes("gamma", "beta", "bias")
    """Keys with these endings have a trust of 1: biases and the scales of normalisation, as in MXNet."""

    def correction(self, count: int) -> tuple[float, ...]:
        """Return ``(0.0,)``, the mark of a key that is not skipped."""
        return (0.0,)

    def step(self, key: Key, count: int) -> Step:
        """Return one update's numbers; their correction is ``(1.0,)`` for a key that ends as one of ``skip``."""
        step = super().step(key, count)
        return replace(step, correction=(1.0,)) if str(key).endswith(self.skip) else step

    def norms(self, step: Step, blocks: Sequence[Block]) -> tuple[float, float]:
        """Return the norms of weight and sum; zeros at once, without reading a block, for a skipped key."""
        return (0.0, 0.0) if step.correction[0] else super().norms(step, blocks)  # a skipped key saves the pass

    def adapt(self, step: Step, weight_norm: float, gradient_norm: float) -> float:
        """Return the rate times the trust ratio; the rate alone for a skipped key, or if a norm is 0. The gradient's
        norm is that of the sum before rescaling.
        """
        # The norm of the rescaled sum: one multiplication here saves a pass over the gradient.
        gradient_norm = gradient_norm * abs(self.rescale)
        if step.correction[0] or not weight_norm or not gradient_norm:
            return step.rate
        return step.rate * (self.eta * weight_norm / (gradient_norm + step.wd * weight_norm + self.epsilon))

    def rule(self, step: Step, block: Block) -> None:
        """Turn the sum into the gradient, overwrite it, change weight and momentum of a block in place. Local."""
        self.prepare(step, block)
        if self.momentum:
            (velocity,) = block.state
            descend_with_momentum(block.weight, block.gradient, velocity, step.rate, self.momentum)
        else:
            descend(block.weight, block.gradient, step.rate)


@dataclass(kw_only=True, eq=False, repr=False)
class LAMB(Moments, Layerwise):  # in this order: the default rate is that of Moments
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
        """Return the two corrections of :class:`Moments`; (1.0, 1.0) without ``bias_correction``."""
        return super().correction(count) if self.bias_correction else (1.0, 1.0)

    def direct(self, step: Step, block: Block) -> None:
        """Overwrite the sum in ``block.gradient`` by the step's direction, and update both averages. Local.

        The norm is known only after the last block.
        """
        self.prepare(step, block)
        (spare,), (first, second), direction = block.spare, step.correction, block.gradient
        np.divide(self.update_averages(block), self.root(step, block), out=direction)
        np.multiply(direction, second / first, out=direction)
        if step.wd:
            np.multiply(block.weight, step.wd, out=spare)
            np.add(direction, spare, out=direction)

    def adapt(self, step: Step, weight_norm: float, direction_norm: float) -> float:
        """Return the rate times the weight's bounded norm over that of the direction; the rate alone if one is 0."""
        if self.lower_bound is not None:
            weight_norm = max(weight_norm, self.lower_bound)
        if self.upper_bound is not None:
            weight_norm = min(weight_norm, self.upper_bound)
        return step.rate * (weight_norm / direction_norm) if weight_norm and direction_norm else step.rate

    def rule(self, step: Step, block: Block) -> None:
        """Subtract the rate times ``block.gradient``, the direction, from the weight; overwrite both in place."""
        descend(block.weight, block.gradient, step.rate)
