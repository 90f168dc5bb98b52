"""Descent along the sign of the momentum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..options import number
from .optimizer import Block, Optimizer, Step
from .options import rate
from .parts import average, descend


@dataclass(kw_only=True, eq=False, repr=False)
class Signum(Optimizer):
    """Descent by steps of one size, in the direction of the sign of the averaged gradient.

    The rule; without momentum, ``momentum_`` is ``g``::

        momentum_ = momentum * momentum_ + (1 - momentum) * g
        weight    = weight - lr * (sign(momentum_) + wd_lh * weight)

    MXNet leaves ``rescale_grad`` and ``clip_gradient`` out, and takes ``wd`` for ``wd_lh``, when momentum is 0; here
    nothing changes with the momentum.

    Reference: Bernstein, Wang, Azizzadenesheli, Anandkumar, signSGD: Compressed Optimisation for Non-Convex Problems,
    ICML 2018, https://arxiv.org/abs/1802.04434.

    >>> import numpy as np
    >>> optimizer = Signum(learning_rate=0.25)
    >>> weight, state = np.zeros(3), {"momentum": np.zeros(3)}
    >>> optimizer.update(optimizer.step("w", 1), np.array([7.0, 0.0, -0.1]), weight, state)
    >>> weight
    array([-0.25,  0.  ,  0.25])
    """

    learning_rate: float | None = rate(0.01)
    """Size of a step, in [0, inf), default 0.01."""
    momentum: float = number(0.9, "[0, 1)")
    """Share of the average that is kept, in [0, 1), default 0.9; 0: no state."""
    wd_lh: float = number(0.0, "[0, inf)")
    """Weight decay apart from the gradient, in [0, inf), default 0."""

    @property
    def states(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def rule(self, step: Step, block: Block) -> None:
        (direction,) = block.spare
        mean = block.gradient
        if self.momentum:
            (mean,) = block.state
            average(mean, block.gradient, self.momentum, direction)
        np.sign(mean, out=direction)
        if self.wd_lh:
            # The sign is taken: the gradient's memory is free for the second term.
            np.multiply(block.weight, self.wd_lh, out=block.gradient)
            np.add(direction, block.gradient, out=direction)
        descend(block.weight, direction, step.rate)
