"""Adam and its kin: averages of the gradient and of its square, corrected for their start from zero."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..options import flag, number
from ..protocols import Array
from .optimizer import Block, Optimizer, Step
from .options import rate
from .parts import average, average_squares, descend


@dataclass(kw_only=True, eq=False, repr=False)
class Moments(Optimizer):
    """The common part of Adam and its kin: averages of the gradient and of its square, or its maximum; the options."""

    states = ("mean", "variance")

    learning_rate: float | None = rate(0.001)
    """In [0, inf), default 0.001."""
    beta1: float = number(0.9, "[0, 1)")
    """Share of the mean that is kept, in [0, 1), default 0.9."""
    beta2: float = number(0.999, "[0, 1)")
    """Share of the variance, or of the maximum, that is kept, in [0, 1), default 0.999."""
    epsilon: float = number(1e-8, "(0, inf)")
    """Added to the divisor, as the rule says, against division by zero, in (0, inf), default 1e-8."""

    def correction(self, count: int) -> tuple[float, ...]:
        """Return ``1 - beta1**count`` and ``sqrt(1 - beta2**count)``."""
        return 1.0 - self.beta1**count, math.sqrt(1.0 - self.beta2**count)

    def update_averages(self, block: Block) -> Array:
        """Update both averages by the gradient, in place; overwrite the spare array; return the state's mean itself."""
        (mean, variance), (spare,) = block.state, block.spare
        average(mean, block.gradient, self.beta1, spare)
        average_squares(variance, block.gradient, self.beta2, spare)
        return mean

    def root(self, step: Step, block: Block) -> Array:
        """Write ``sqrt(variance)`` plus the corrected epsilon to the spare memory, and return that."""
        (_, variance), (root,) = block.state, block.spare
        # The corrections go into scalars, epsilon with them: that saves two passes over the arrays.
        np.sqrt(variance, out=root)
        np.add(root, self.epsilon * step.correction[-1], out=root)
        return root


@dataclass(kw_only=True, eq=False, repr=False)
class Adam(Moments):
    """The gradient's average divided by the root of its squares' average.

    The rule of the paper's Algorithm 1, at the update number t::

        mean     = beta1 * mean + (1 - beta1) * g
        variance = beta2 * variance + (1 - beta2) * g²
        weight   = weight - lr * (mean / (1 - beta1^t)) / (sqrt(variance / (1 - beta2^t)) + epsilon)

    MXNet has the shortened form at the end of the paper's section 2. It does not correct epsilon: the effect in the
    first updates is larger by 1 / sqrt(1 - beta2^t). PyTorch has Algorithm 1.

    Reference: Kingma and Ba, Adam: A Method for Stochastic Optimization, ICLR 2015, https://arxiv.org/abs/1412.6980.

    >>> import numpy as np
    >>> optimizer = Adam(learning_rate=0.1)
    >>> weight, state = np.zeros(2), {"mean": np.zeros(2), "variance": np.zeros(2)}
    >>> optimizer.update(optimizer.step("w", 1), np.array([3.0, -0.5]), weight, state)
    >>> weight.round(6)
    array([-0.1,  0.1])
    """

    def rule(self, step: Step, block: Block) -> None:
        """Change weight, mean and variance of a block in place. Local."""
        first, second = step.correction
        mean, direction = self.update_averages(block), self.root(step, block)
        np.divide(mean, direction, out=direction)
        descend(block.weight, direction, step.rate * second / first)


@dataclass(kw_only=True, eq=False, repr=False)
class AdamW(Moments):
    """Adam with weight decay outside of the gradient.

    The rule, with ``mean`` and ``variance`` as in :class:`Adam` from a ``g`` without weight decay::

        weight = weight - lr * ((mean / (1 - beta1^t)) / (sqrt(variance / (1 - beta2^t)) + epsilon) + wd * weight)

    As in PyTorch, the decay is ``lr * wd`` at every update. MXNet multiplies it by the bias correction as well, so it
    is smaller in the first updates.

    Reference: Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019,
    https://arxiv.org/abs/1711.05101.

    >>> import numpy as np
    >>> optimizer = AdamW(learning_rate=0.1, wd=0.5)
    >>> weight, state = np.ones(2), {"mean": np.zeros(2), "variance": np.zeros(2)}
    >>> optimizer.update(optimizer.step("w", 1), np.array([3.0, 0.0]), weight, state)
    >>> weight.round(6)
    array([0.85, 0.95])
    """

    coupled = False

    epsilon: float = number(1e-6, "(0, inf)")
    """Added to the corrected root against division by zero, in (0, inf), default 1e-6 as in MXNet (PyTorch: 1e-8)."""
    correct_bias: bool = flag(True)
    """False leaves out both divisions by 1 - beta^t, as the first BERT did."""

    def correction(self, count: int) -> tuple[float, ...]:
        """Return the two corrections of :class:`Moments`; (1.0, 1.0) without ``correct_bias``."""
        return super().correction(count) if self.correct_bias else (1.0, 1.0)

    def rule(self, step: Step, block: Block) -> None:
        """Change weight, mean and variance of a block in place. It may overwrite the gradient. Local."""
        first, second = step.correction
        mean, direction = self.update_averages(block), self.root(step, block)
        np.divide(mean, direction, out=direction)
        np.multiply(direction, step.rate * second / first, out=direction)
        if step.wd:
            # Multiplying the weight by 1 - rate * wd would round a small decay away in float32.
            np.multiply(block.weight, step.rate * step.wd, out=block.gradient)
            np.add(direction, block.gradient, out=direction)
        np.subtract(block.weight, direction, out=block.weight)


@dataclass(kw_only=True, eq=False, repr=False)
class Nadam(Moments):
    """Adam with Nesterov's look ahead.

    The rule, with ``mean`` and ``variance`` as in :class:`Adam` and a momentum that grows to beta1::

        mu(t)  = beta1 * (1 - 0.96^(t * schedule_decay) / 2)
        M(t)   = mu(1) * ... * mu(t)
        d      = g * (1 - mu(t)) / (1 - M(t)) + mean * mu(t+1) / (1 - M(t+1))
        weight = weight - lr * d / (sqrt(variance / (1 - beta2^t)) + epsilon)

    MXNet keeps one product M for all keys, so its updates depend on the number of keys; here each key has its own.

    Reference: Dozat, Incorporating Nesterov Momentum into Adam, ICLR workshop 2016,
    https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ.

    >>> import numpy as np
    >>> optimizer = Nadam(learning_rate=0.1)
    >>> weight, state = np.zeros(2), {"mean": np.zeros(2), "variance": np.zeros(2)}
    >>> optimizer.update(optimizer.step("w", 1), np.array([3.0, -0.5]), weight, state)
    >>> weight.round(3)
    array([-0.106,  0.106])
    """

    schedule_decay: float = number(0.004, "[0, inf)")
    """How fast the momentum grows, in [0, inf), default 0.004."""

    def correction(self, count: int) -> tuple[float, ...]:
        """Return the factors of the gradient and of the mean, and the root of the variance's correction."""
        product = 1.0
        for update in range(1, count + 1):
            product *= self._momentum(update)
            # 1 - product is 1 from here on; a long run must not make steps slow.
            if product < 1e-20:
                break
        current, following = self._momentum(count), self._momentum(count + 1)
        of_gradient = (1.0 - current) / (1.0 - product)
        of_mean = following / (1.0 - product * following)
        return of_gradient, of_mean, math.sqrt(1.0 - self.beta2**count)

    def _momentum(self, count: int) -> float:
        """Return the momentum of an update: about half of ``beta1`` at first, it rises with the count to all of it."""
        return self.beta1 * (1.0 - 0.5 * math.pow(0.96, count * self.schedule_decay))

    def rule(self, step: Step, block: Block) -> None:
        """Change weight, mean and variance of a block in place. It overwrites the gradient. Local."""
        (of_gradient, of_mean, second), direction = step.correction, block.gradient
        mean, (spare,) = self.update_averages(block), block.spare
        np.multiply(direction, of_gradient, out=direction)
        np.multiply(mean, of_mean, out=spare)
        np.add(direction, spare, out=direction)
        np.divide(direction, self.root(step, block), out=direction)
        descend(block.weight, direction, step.rate * second)


@dataclass(kw_only=True, eq=False, repr=False)
class Adamax(Moments):
    """Adam with the maximum in place of the root of squares.

    The rule, with ``mean`` as in :class:`Adam`::

        largest = max(beta2 * largest, abs(g) + epsilon)
        weight  = weight - lr / (1 - beta1^t) * mean / largest

    MXNet has no epsilon and divides zero by zero where a gradient has been zero so far. PyTorch has it at the same
    place.

    Reference: Kingma and Ba, Adam: A Method for Stochastic Optimization, section 7.1, ICLR 2015,
    https://arxiv.org/abs/1412.6980.

    >>> import numpy as np
    >>> optimizer = Adamax(learning_rate=0.1)
    >>> weight, state = np.zeros(2), {"mean": np.zeros(2), "largest": np.zeros(2)}
    >>> optimizer.update(optimizer.step("w", 1), np.array([3.0, 0.0]), weight, state)
    >>> weight.round(6)
    array([-0.1,  0. ])
    """

    states = ("mean", "largest")

    learning_rate: float | None = rate(0.002)
    """In [0, inf), default 0.002."""

    def correction(self, count: int) -> tuple[float, ...]:
        """Return ``(1 - beta1**count,)``."""
        return (1.0 - self.beta1**count,)

    def rule(self, step: Step, block: Block) -> None:
        """Change weight, mean and largest magnitudes of a block in place. Local."""
        (mean, largest), (spare,), (first,) = block.state, block.spare, step.correction
        average(mean, block.gradient, self.beta1, spare)
        np.abs(block.gradient, out=spare)
        np.add(spare, self.epsilon, out=spare)  # inside the maximum: it can then never be zero
        np.multiply(largest, self.beta2, out=largest)
        np.maximum(largest, spare, out=largest)
        np.divide(mean, largest, out=spare)
        descend(block.weight, spare, step.rate / first)
