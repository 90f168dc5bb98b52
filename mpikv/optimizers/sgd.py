"""Stochastic gradient descent, and the rule that tests use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..options import flag, number
from .optimizer import Block, Optimizer, Step
from .options import rate
from .parts import descend, descend_with_momentum


@dataclass(kw_only=True, eq=False, repr=False)
class SGD(Optimizer):
    """Stochastic gradient descent, with momentum if asked for.

    Without momentum (no state), with it, and with ``nesterov=True``::

        weight = weight - lr * g

        momentum_ = momentum * momentum_ - lr * g
        weight    = weight + momentum_

        momentum_ = momentum * momentum_ - lr * g
        weight    = weight + momentum * momentum_ - lr * g

    The rate is inside the velocity, so a change of rate acts on new gradients only. PyTorch has it outside; with a
    constant rate both give the same weights.

    References: Polyak, Some methods of speeding up the convergence of iteration methods, 1964. Nesterov, A method of
    solving a convex programming problem with convergence rate O(1/k²), 1983. Sutskever et al., On the importance of
    initialization and momentum in deep learning, ICML 2013.

    >>> import numpy as np
    >>> optimizer = SGD(learning_rate=0.5, momentum=0.9)
    >>> weight, state = np.ones(2), {"momentum": np.zeros(2)}
    >>> for count in (1, 2):
    ...     optimizer.update(optimizer.step("w", count), np.array([1.0, 2.0]), weight, state)
    >>> weight
    array([-0.45, -1.9 ])
    """

    learning_rate: float | None = rate(0.1)
    """In [0, inf), default 0.1."""
    momentum: float = number(0.0, "[0, 1)")
    """Share of the velocity that is kept, in [0, 1), default 0: no velocity."""
    nesterov: bool = flag(False)
    """Look ahead along the velocity (MXNet: the optimizer NAG). Without momentum it changes nothing."""

    @property
    def states(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def rule(self, step: Step, block: Block) -> None:
        if not self.momentum:
            np.multiply(block.gradient, step.rate, out=block.gradient)  # may be overwritten, so no spare is needed
            np.subtract(block.weight, block.gradient, out=block.weight)
            return
        (velocity,) = block.state
        if not self.nesterov:
            descend_with_momentum(block.weight, block.gradient, velocity, step.rate, self.momentum)
            return
        (ahead,) = block.spare
        np.multiply(block.gradient, step.rate, out=block.gradient)
        np.multiply(velocity, self.momentum, out=velocity)
        np.subtract(velocity, block.gradient, out=velocity)
        np.multiply(velocity, self.momentum, out=ahead)
        np.subtract(ahead, block.gradient, out=ahead)
        np.add(block.weight, ahead, out=block.weight)


@dataclass(kw_only=True, eq=False, repr=False)
class Test(Optimizer):
    """The plainest rule, for tests of the code around it: ``weight - lr * (rescale_grad * grad + wd * weight)``.

    >>> import numpy as np
    >>> optimizer = Test(learning_rate=1.0, rescale_grad=0.5)
    >>> weight = np.ones(3)
    >>> optimizer.update(optimizer.step(3, 1), np.full(3, 4.0), weight, {})
    >>> weight
    array([-1., -1., -1.])
    """

    def rule(self, step: Step, block: Block) -> None:
        descend(block.weight, block.gradient, step.rate)
