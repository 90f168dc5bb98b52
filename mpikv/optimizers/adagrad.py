"""A rate per element, from the sum of its squared gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..options import number
from .optimizer import Block, Optimizer, Step
from .options import rate
from .parts import descend


@dataclass(kw_only=True, eq=False, repr=False)
class AdaGrad(Optimizer):
    """Elements with large or frequent gradients get smaller steps.

    The rule::

        history = history + g²
        weight  = weight - lr * g / (sqrt(history) + epsilon)

    Reference: Duchi, Hazan, Singer, Adaptive Subgradient Methods for Online Learning and Stochastic Optimization,
    JMLR 12, 2011, https://jmlr.org/papers/v12/duchi11a.html.

    >>> import numpy as np
    >>> optimizer = AdaGrad(learning_rate=0.5)
    >>> weight, state = np.zeros(2), {"history": np.zeros(2)}
    >>> optimizer.update(optimizer.step("w", 1), np.array([3.0, -0.5]), weight, state)
    >>> weight.round(3)
    array([-0.5,  0.5])
    """

    states = ("history",)

    learning_rate: float | None = rate(0.01)
    """In [0, inf), default 0.01."""
    epsilon: float = number(1e-6, "(0, inf)")
    """Added to the root against division by zero, in (0, inf), default 1e-6."""

    def rule(self, step: Step, block: Block) -> None:
        (history,), (spare,) = block.state, block.spare
        np.multiply(block.gradient, block.gradient, out=spare)
        np.add(history, spare, out=history)
        np.sqrt(history, out=spare)
        np.add(spare, self.epsilon, out=spare)
        np.divide(block.gradient, spare, out=spare)
        descend(block.weight, spare, step.rate)
