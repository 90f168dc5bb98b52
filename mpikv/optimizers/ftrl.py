"""Follow the regularised leader, for sparse linear models."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..options import number
from .optimizer import Block, Optimizer, Step
from .options import rate


@dataclass(kw_only=True, eq=False, repr=False)
class FTRL(Optimizer):
    """FTRL-Proximal: a rate per element, and weights that are exactly zero where the evidence is small.

    The rule, with ``g`` without weight decay::

        sigma  = (sqrt(n + g²) - sqrt(n)) / lr
        z      = z + g - sigma * weight
        n      = n + g²
        weight = (clip(z, -lamda1, lamda1) - z) / ((beta + sqrt(n)) / lr + wd)

    The weight follows from ``z`` and ``n`` alone: the first update forgets the initial weight, so initialise it to
    zero. With a rate of zero nothing changes.

    Reference: McMahan et al., Ad Click Prediction: a View from the Trenches, KDD 2013,
    https://doi.org/10.1145/2487575.2488200.

    >>> import numpy as np
    >>> optimizer = FTRL(lamda1=1.0)
    >>> weight, state = np.zeros(2), {"z": np.zeros(2), "n": np.zeros(2)}
    >>> optimizer.update(optimizer.step("w", 1), np.array([3.0, -0.5]), weight, state)
    >>> weight
    array([-0.05,  0.  ])
    """

    coupled = False
    spares = 2
    states = ("z", "n")

    learning_rate: float | None = rate(0.1)
    """Alpha of the paper, in [0, inf), default 0.1."""
    lamda1: float = number(0.01, "[0, inf)")
    """L1 penalty, in [0, inf), default 0.01. Spelled as in MXNet. The L2 penalty is ``wd``."""
    beta: float = number(1.0, "(0, inf)")
    """Slows the first steps, in (0, inf), default 1."""

    def rule(self, step: Step, block: Block) -> None:
        if not step.rate:  # the rule divides by it
            return
        (z, n), (sigma, root) = block.state, block.spare
        np.sqrt(n, out=sigma)  # of the old n, before the next lines change it
        np.multiply(block.gradient, block.gradient, out=root)
        np.add(n, root, out=n)
        np.sqrt(n, out=root)
        np.subtract(root, sigma, out=sigma)
        np.divide(sigma, step.rate, out=sigma)
        np.multiply(sigma, block.weight, out=sigma)
        np.subtract(block.gradient, sigma, out=sigma)
        np.add(z, sigma, out=z)
        np.add(root, self.beta, out=root)
        np.divide(root, step.rate, out=root)
        np.add(root, step.wd, out=root)
        np.clip(z, -self.lamda1, self.lamda1, out=block.weight)
        np.subtract(block.weight, z, out=block.weight)
        np.divide(block.weight, root, out=block.weight)
