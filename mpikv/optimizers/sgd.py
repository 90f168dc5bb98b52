"""Descent along the gradient, along its sign, and the rule that tests use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..options import flag, number
from .optimizer import Block, Optimizer, Step
from .options import rate
from .parts import average, descend, descend_with_momentum


@dataclass(kw_only=True, eq=False, repr=False)
class WithMomentum(Optimizer):
    """The common part of rules with the state ``momentum``, kept only if the option of that name is above 0."""

    momentum: float = number(0.0, "[0, 1)")
    """Share of the velocity that is kept, in [0, 1), default 0: no velocity."""

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the state arrays: the momentum, unless that option is 0."""
        return ("momentum",) if self.momentum else ()


@dataclass(kw_only=True, eq=False, repr=False)
class SGD(WithMomentum):
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
    nesterov: bool = flag(False)
    """Look ahead along the velocity (MXNet: the optimizer NAG). Without momentum it changes nothing."""

    def rule(self, step: Step, block: Block) -> None:
        """Change weight and momentum of a block in place. It may overwrite the gradient. Local."""
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
class Signum(WithMomentum):
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

    def rule(self, step: Step, block: Block) -> None:
        """Change weight and momentum of a block in place. It may overwrite the gradient. Local."""
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
        """Subtract the rate times the gradient from the weight, in place; overwrite the gradient. Local."""
        descend(block.weight, block.gradient, step.rate)
