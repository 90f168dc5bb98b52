"""A rate per element, from its gradients so far."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..options import flag, number
from .optimizer import Block, Optimizer, Step
from .options import rate
from .parts import average, average_squares, descend, descend_with_momentum


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
        """Change weight and history of a block in place. Local."""
        (history,), (spare,) = block.state, block.spare
        np.multiply(block.gradient, block.gradient, out=spare)
        np.add(history, spare, out=history)
        np.sqrt(history, out=spare)
        np.add(spare, self.epsilon, out=spare)
        np.divide(block.gradient, spare, out=spare)
        descend(block.weight, spare, step.rate)


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
        """Change weight and both averages of a block in place. It overwrites the gradient. Local."""
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
        """The names of the state arrays: the variance; with ``centered`` also mean and momentum."""
        return ("mean", "variance", "momentum") if self.centered else ("variance",)

    def rule(self, step: Step, block: Block) -> None:
        """Change weight and averages of a block in place; with ``clip_weights`` bound the weight, too. Local."""
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
        """Compute z, n and from these the weight of a block, in place; a rate of zero changes nothing. Local."""
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
