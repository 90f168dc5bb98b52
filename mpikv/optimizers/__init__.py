"""Update rules as array code: they know no ranks and no store, and keep nothing of a value.

An optimizer implements :class:`mpikv.protocols.Updater`. Its options are its attributes, with MXNet's names. Its state
lives with the caller, in arrays that :meth:`~Optimizer.slots` names. :meth:`~Optimizer.step` computes the numbers that
depend on the key or on its count of updates. :class:`Optimizer` has the common options. Here too: updaters that are
Python functions. It imports ``schedules``, ``memory`` and ``arrays``.

>>> import numpy as np
>>> optimizer = create("adam", learning_rate=0.1, lr_mult={"bias": 0.0})
>>> weight = np.ones(4, np.float32)
>>> state = {name: np.zeros(4, dtype) for name, dtype in optimizer.slots(weight.dtype).items()}
>>> optimizer.update(optimizer.step("weight", 1), np.full(4, 3.0, np.float32), weight, state)
>>> weight
array([0.9, 0.9, 0.9, 0.9], dtype=float32)

**A rule of your own** is a dataclass with its options, the names of its state, and a rule for one block::

    from dataclasses import dataclass

    import numpy as np
    from mpikv.optimizers import Optimizer, number, rate, register

    @register
    @dataclass(kw_only=True, eq=False, repr=False)
    class Lion(Optimizer):
        coupled = False
        spares = 2
        states = ("mean",)
        learning_rate: float | None = rate(1e-4)
        beta1: float = number(0.9, "[0, 1)")
        beta2: float = number(0.99, "[0, 1)")

        def rule(self, step, block):
            (mean,), (direction, term) = block.state, block.spare
            np.multiply(mean, self.beta1, out=direction)
            np.multiply(block.gradient, 1 - self.beta1, out=term)
            direction += term
            np.sign(direction, out=direction)
            np.multiply(block.weight, step.wd, out=term)
            direction += term
            direction *= step.rate
            block.weight -= direction
            mean *= self.beta2
            block.gradient *= 1 - self.beta2
            mean += block.gradient

Every operation writes to memory that is there already. :class:`mpikv.testing.UpdaterContract` tests it. An updater that
shares nothing with these needs the methods of :class:`~mpikv.protocols.Updater` alone.
"""

from __future__ import annotations

from importlib import import_module
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ConfigError, known_names, no_attribute
from ..options import count, flag, number
from .optimizer import BLOCK, Block, Optimizer, Step
from .options import rate, unknown_option

if TYPE_CHECKING:
    from .adam import Adam, Adamax, AdamW, Nadam
    from .adaptive import FTRL, AdaDelta, AdaGrad, RMSProp
    from .layerwise import LAMB, LARS
    from .sgd import SGD, Signum, Test

__all__ = [
    "BLOCK",
    "FTRL",
    "LAMB",
    "LARS",
    "SGD",
    "AdaDelta",
    "AdaGrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Block",
    "Nadam",
    "Optimizer",
    "RMSProp",
    "Signum",
    "Step",
    "Test",
    "count",
    "create",
    "flag",
    "kind_of",
    "number",
    "rate",
    "register",
]

_Kind = TypeVar("_Kind", bound=type[Optimizer])

# Loaded at first use: a program needs one or two, and each costs import time.
_MODULES = {
    "adam": ("Adam", "AdamW", "Adamax", "Nadam"),
    "adaptive": ("AdaDelta", "AdaGrad", "FTRL", "RMSProp"),
    "layerwise": ("LAMB", "LARS"),
    "sgd": ("SGD", "Signum", "Test"),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}
_OWN = {name.lower(): name for name in _PLACES}
_REGISTERED: dict[str, type[Optimizer]] = {}

# MXNet's optimizers without a class of that name here, with advice.
_ELSEWHERE = {
    "nag": "write 'sgd' with nesterov=True, momentum=0.9",
    "ccsgd": "write 'sgd'",
    "lbsgd": "write 'lars', or 'sgd' with a schedule that has warmup_steps",
} | dict.fromkeys(
    ("adabelief", "dcasgd", "ftml", "groupadagrad", "lans", "sgld"),
    "mpikv lacks this optimizer of MXNet; write its rule as a class of your own, see help(mpikv.optimizers)",
)


def __getattr__(name: str) -> Any:
    """Import an optimizer class at its first use, keep it here, and return it; AttributeError for other names."""
    if name not in _PLACES:
        raise no_attribute("name in mpikv.optimizers", name, __all__)
    found = globals()[name] = getattr(import_module(f".{_PLACES[name]}", __name__), name)
    return found


def register(kind: _Kind) -> _Kind:
    """Register a class for :func:`create` by its lower-case name; return the class. ConfigError if the name is taken,
    or if it adds options and is no dataclass.

    Without the decorator of a dataclass, defaults of its options would not count.
    """
    name = kind.__name__.lower()
    if "__annotations__" in vars(kind) and "__dataclass_fields__" not in vars(kind):
        raise ConfigError(f"put @dataclass(kw_only=True, eq=False, repr=False) between @register and {kind.__name__}")
    if (kind_of(name) or kind) is not kind:
        raise ConfigError(f"an optimizer {name!r} exists already; give the class another name")
    _REGISTERED[name] = kind
    return kind


def kind_of(name: str) -> type[Optimizer] | None:
    """Return the optimizer class of that name, in any case, its module imported; None without one.

    >>> kind_of("lamb")
    <class 'mpikv.optimizers.layerwise.LAMB'>
    """
    own = _OWN.get(name.lower())
    return _REGISTERED.get(name.lower()) if own is None else __getattr__(own)


def create(name: str, **options: Any) -> Optimizer:
    """Make an optimizer from its name, in any case, and its options; ConfigError if one is unknown or bad.

    >>> create("SGD", momentum=0.9)
    SGD(momentum=0.9)
    """
    kind = kind_of(name)
    if kind is None:
        raise ConfigError(known_names("optimizer", name, {*_OWN, *_REGISTERED}, _ELSEWHERE.get(name.lower(), "")))
    taken = signature(kind).parameters  # a user's own __init__ may take others than the options
    unknown = [option for option in options if option not in taken]
    if unknown and not any(each.kind is Parameter.VAR_KEYWORD for each in taken.values()):
        raise ConfigError(unknown_option(kind.__name__, unknown[0], kind.options()))
    return kind(**options)
