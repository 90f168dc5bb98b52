"""A rate per element, from the average of its squared gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..options import flag, number
from .optimizer import Block, Optimizer, Step
from .options import rate
from .parts import average, average_squares, descend, descend_with_momentum


@dataclass(kw_only=True, eq=False, repr=False)
class RMSProp(Optimizer):
    """Gradients divided by the root of their averaged squares.

    The rule of Tieleman and Hinton, without momentum::

        variance = rho * variance + (1 - rho) * g²
        weight   = weight - lr * g / (sqrt(variance) + epsilon)

    and with ``centered=True`` that of Graves::

        mean      = rho * mean + (1 - rho) * g
        variance  = rho * variance + (1 - rho) * g²
        momentum_ = momentum * momentum_ - lr * g / sqrt(max(variance - mean², 0) + epsilon)
        weight    = weight + momentum_

    The maximum is not in the paper: rounding can make the difference negative.

    References: Tieleman and Hinton, Lecture 6.5 of Neural Networks for Machine Learning, 2012. Graves, Generating
    Sequences With Recurrent Neural Networks, equations 38 to 45, 2013, https://arxiv.org/abs/1308.0850.

    >>> import numpy as np
    >>> optimizer = RMSProp(learning_rate=0.1)
    >>> weight, state = np.zeros(2), {"variance": np.zeros(2)}
    >>> optimizer.update(optimizer.step("w", 1), np.array([3.0, -0.5]), weight, state)
    >>> weight.round(3)
    array([-0.316,  0.316])
    """

    learning_rate: float | None = rate(0.001)
    """In [0, inf), default 0.001."""
    rho: float = number(0.9, "[0, 1)")
    """Share of the averages that is kept, in [0, 1), default 0.9 (gamma1 of old MXNet)."""
    momentum: float = number(0.9, "[0, 1)")
    """Share of the velocity that is kept, in [0, 1), default 0.9 (gamma2 of old MXNet). Used with ``centered`` only."""
    epsilon: float = number(1e-8, "(0, inf)")
    """Against division by zero, in (0, inf), default 1e-8."""
    centered: bool = flag(False)
    """Divide by the deviation from the mean gradient, as Graves does."""
    clip_weights: float | None = number(None, "(0, inf)")
    """Bound of each weight after the update, in (0, inf); None: no bound."""

    @property
    def states(self) -> tuple[str, ...]:
        return ("mean", "variance", "momentum") if self.centered else ("variance",)

    def rule(self, step: Step, block: Block) -> None:
        (spare,) = block.spare
        if self.centered:
            mean, variance, velocity = block.state
            average(mean, block.gradient, self.rho, spare)
            average_squares(variance, block.gradient, self.rho, spare)
            np.multiply(mean, mean, out=spare)
            np.subtract(variance, spare, out=spare)
            np.maximum(spare, 0.0, out=spare)  # rounding can make it negative, and its root NaN
            np.add(spare, self.epsilon, out=spare)
            np.sqrt(spare, out=spare)
            np.divide(block.gradient, spare, out=spare)
            descend_with_momentum(block.weight, spare, velocity, step.rate, self.momentum)
        else:
            (variance,) = block.state
            average_squares(variance, block.gradient, self.rho, spare)
            np.sqrt(variance, out=spare)
            np.add(spare, self.epsilon, out=spare)
            np.divide(block.gradient, spare, out=spare)
            descend(block.weight, spare, step.rate)
        if self.clip_weights is not None:
            np.clip(block.weight, -self.clip_weights, self.clip_weights, out=block.weight)
