"""The form of an optimizer's rule for its present options, with its numbers: the common part of all compiled code.

A form is a rule without choices, for one element. numba's loops (``compute/numba/rules.py``) and the kernels of a GPU
(``compute/cuda``) have one body for each, under the form's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from .adadelta import AdaDelta
from .adagrad import AdaGrad
from .adam import Adam, Adamax, AdamW, Moments, Nadam
from .ftrl import FTRL
from .optimizer import Optimizer, Step
from .rmsprop import RMSProp
from .sgd import SGD, Test
from .signum import Signum

__all__ = ["FORMS", "call_of"]

Call: TypeAlias = "tuple[str, tuple[float, ...]]"
"""The name of a form and its numbers."""

Form: TypeAlias = Callable[[Any, Step], Call]
"""Returns the call for an optimizer's present options, without the numbers that begin every form."""


def call_of(optimizer: Optimizer, step: Step) -> Call:
    """Return the form for the present options and all its numbers.

    The first three numbers are ``scale``, ``bound`` and ``wd``: ``clip(scale * total, -bound, bound)`` is the gradient
    before weight decay.

    The optimizer's class is in :data:`FORMS`.

    >>> call_of(SGD(momentum=0.5), Step(0.25, 0.0))
    ('momentum', (1.0, inf, 0.0, 0.25, 0.5))
    """
    form, numbers = FORMS[type(optimizer)](optimizer, step)
    bound = math.inf if optimizer.clip_gradient is None else optimizer.clip_gradient
    return form, (optimizer.rescale, bound, step.wd, *numbers)


def _of_sgd(optimizer: SGD, step: Step) -> Call:
    if not optimizer.momentum:
        return "descent", (step.rate,)
    return "nesterov" if optimizer.nesterov else "momentum", (step.rate, optimizer.momentum)


def _of_signum(optimizer: Signum, step: Step) -> Call:
    if not optimizer.momentum:
        return "sign", (step.rate, optimizer.wd_lh)
    return "signum", (step.rate, optimizer.wd_lh, optimizer.momentum, 1.0 - optimizer.momentum)


def _of_rmsprop(optimizer: RMSProp, step: Step) -> Call:
    # An infinite bound stands for none, so a form needs no branch.
    largest = math.inf if optimizer.clip_weights is None else optimizer.clip_weights
    numbers = step.rate, optimizer.epsilon, largest, optimizer.rho, 1.0 - optimizer.rho
    return ("rmsprop_centered", (*numbers, optimizer.momentum)) if optimizer.centered else ("rmsprop", numbers)


def _of_adam(optimizer: Adam, step: Step) -> Call:
    # As in Moments.root: both corrections and epsilon are numbers of the step, not operations on elements.
    first, second = step.correction
    return "adam", (step.rate * second / first, optimizer.epsilon * second, *_shares(optimizer))


def _of_adamw(optimizer: AdamW, step: Step) -> Call:
    first, second = step.correction
    rate, epsilon = step.rate * second / first, optimizer.epsilon * second
    return "adamw", (rate, epsilon, *_shares(optimizer), step.rate * step.wd)


def _of_nadam(optimizer: Nadam, step: Step) -> Call:
    of_gradient, of_mean, second = step.correction
    return "nadam", (step.rate * second, optimizer.epsilon * second, *_shares(optimizer), of_gradient, of_mean)


def _of_adamax(optimizer: Adamax, step: Step) -> Call:
    (first,) = step.correction
    return "adamax", (step.rate / first, optimizer.epsilon, optimizer.beta1, 1.0 - optimizer.beta1, optimizer.beta2)


def _shares(optimizer: Moments) -> tuple[float, float, float, float]:
    """Return the shares that both averages keep, and the shares that they take from the gradient."""
    return optimizer.beta1, 1.0 - optimizer.beta1, optimizer.beta2, 1.0 - optimizer.beta2


FORMS: Mapping[type[Optimizer], Form] = {
    SGD: _of_sgd,
    Test: lambda optimizer, step: ("descent", (step.rate,)),
    Signum: _of_signum,
    AdaGrad: lambda optimizer, step: ("adagrad", (step.rate, optimizer.epsilon)),
    RMSProp: _of_rmsprop,
    AdaDelta: lambda optimizer, step: ("adadelta", (step.rate, optimizer.epsilon, optimizer.rho, 1.0 - optimizer.rho)),
    Adam: _of_adam,
    AdamW: _of_adamw,
    Nadam: _of_nadam,
    Adamax: _of_adamax,
    FTRL: lambda optimizer, step: ("ftrl", (step.rate, optimizer.lamda1, optimizer.beta)),
}
"""The optimizers that have a compiled form."""
