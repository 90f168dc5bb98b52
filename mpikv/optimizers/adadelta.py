"""A rate per element that has the unit of the weight."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..options import number
from .optimizer import Block, Optimizer, Step
from .options import rate
from .parts import average_squares, descend


@dataclass(kw_only=True, eq=False, repr=False)
class AdaDelta(Optimizer):
    """Steps scaled by the ratio of recent steps to recent gradients.

    The rule::

        gradient_ = rho * gradient_ + (1 - rho) * g²
        d         = g * sqrt(delta_ + epsilon) / sqrt(gradient_ + epsilon)
        delta_    = rho * delta_ + (1 - rho) * d²
        weight    = weight - lr * d

    Reference: Zeiler, ADADELTA: An Adaptive Learning Rate Method, 2012, https://arxiv.org/abs/1212.5701.

    >>> import numpy as np
    >>> optimizer = AdaDelta()
    >>> weight, state = np.ones(1), {"gradient": np.zeros(1), "delta": np.zeros(1)}
    >>> optimizer.update(optimizer.step("w", 1), np.array([2.0]), weight, state)
    >>> weight.round(5)
    array([0.99684])
    """

    states = ("gradient", "delta")

    learning_rate: float | None = rate(1.0)
    """Factor of the step, in [0, inf), default 1 as in the paper."""
    rho: float = number(0.9, "[0, 1)")
    """Share of both averages that is kept, in [0, 1), default 0.9."""
    epsilon: float = number(1e-6, "(0, inf)")
    """Added under both roots; it makes the first step possible. In (0, inf), default 1e-6."""

    def rule(self, step: Step, block: Block) -> None:
        (squares, delta_squares), (spare,) = block.state, block.spare
        delta = block.gradient  # overwritten by the step, to save a second spare array
        average_squares(squares, block.gradient, self.rho, spare)
        np.add(squares, self.epsilon, out=spare)
        np.sqrt(spare, out=spare)
        np.divide(delta, spare, out=delta)
        np.add(delta_squares, self.epsilon, out=spare)
        np.sqrt(spare, out=spare)
        np.multiply(delta, spare, out=delta)
        average_squares(delta_squares, delta, self.rho, spare)
        descend(block.weight, delta, step.rate)
