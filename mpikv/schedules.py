"""Learning rates as pure functions of the number of updates.

A store calls a schedule with a key's number of updates, 1 at the first, and gets the rate of that update. Schedules
hold settings only: ranks agree on the rate without a message, and a resumed run continues with the right rate. Any
callable will do; these have a complete ``repr``, which ranks compare.

The options have MXNet's names. Its classes are FactorScheduler, MultiFactorScheduler, PolyScheduler and
CosineScheduler.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from .errors import ConfigError, no_attribute
from .options import check_whole, choice, count, number, store_checked_fields

__all__ = ["Cosine", "Factor", "MultiFactor", "Polynomial", "Schedule"]

if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> NoReturn:
        """Raise AttributeError with the known names, and the nearest one, also for a class name of MXNet's."""
        near = [own for own in __all__ if name.endswith("Scheduler") and own.startswith(name[: -len("Scheduler")])]
        hint = f"did you mean {near[0]!r}?" if near else ""
        raise no_attribute("schedule", name, __all__, hint)


def beginning_with(scheduler: Any, base_lr: float) -> Any:
    """Return a copy of a scheduler, a user's or one of these, with another ``base_lr``; ConfigError if it forbids that.

    >>> beginning_with(Factor(10), 0.5).base_lr
    0.5

    Raises:
        ConfigError: it is a user's, and its ``base_lr`` cannot be set.
    """
    if isinstance(scheduler, Schedule):
        return replace(scheduler, base_lr=base_lr)
    other = copy.copy(scheduler)
    try:
        other.base_lr = base_lr
    except AttributeError as error:
        raise ConfigError(f"base_lr of {scheduler!r} cannot be set; leave learning_rate out") from error
    return other


@dataclass(frozen=True)
class Schedule:
    """A constant rate after a warm-up; the base of the others, which define :meth:`~Schedule.decayed`.

    >>> schedule = Schedule(base_lr=0.5, warmup_steps=5, warmup_begin_lr=0.0)
    >>> [schedule(number) for number in (1, 2, 4, 5, 100)]
    [0.1, 0.2, 0.4, 0.5, 0.5]
    """

    _: KW_ONLY
    base_lr: float = number(0.01, "[0, inf)")
    """Rate after the warm-up, in [0, inf)."""
    warmup_steps: int = count(0)
    """The warm-up is over at this number of updates, in [0, inf); 0: no warm-up."""
    warmup_begin_lr: float = number(0.0, "[0, inf)")
    """Rate at which the warm-up begins, in [0, base_lr]."""
    warmup_mode: Literal["constant", "linear"] = choice("linear", ("constant", "linear"))
    """``linear``: rise evenly to ``base_lr``. ``constant``: stay at ``warmup_begin_lr``, then jump."""

    def __post_init__(self) -> None:
        """Check the options and store them as plain numbers; ConfigError for a bad one."""
        # Numbers as floats, so that Factor(10, factor=1) and Factor(10, factor=1.0) have one repr.
        store_checked_fields(self, f"{type(self).__name__}: ")
        self._require(self.warmup_begin_lr <= self.base_lr, "warmup_begin_lr", f"above base_lr={self.base_lr!r}")

    def __call__(self, num_update: int) -> float:
        """Return the rate of an update, given its number; the first update is number 1."""
        if num_update >= self.warmup_steps:
            return self.decayed(num_update)
        if self.warmup_mode == "constant":
            return self.warmup_begin_lr
        return self.warmup_begin_lr + (self.base_lr - self.warmup_begin_lr) * num_update / self.warmup_steps

    def decayed(self, num_update: int) -> float:
        """Return the rate of an update after the warm-up: ``base_lr``, unless a subclass lowers it."""
        return self.base_lr

    def _require(self, condition: bool, name: str, fault: str) -> None:
        """Raise ConfigError about the option of this name unless the condition holds."""
        if not condition:
            raise ConfigError(f"{type(self).__name__}: {name}={getattr(self, name)!r} is {fault}")


@dataclass(frozen=True)
class Factor(Schedule):
    """Multiply the rate by a factor after every ``step`` updates.

    >>> schedule = Factor(100, factor=0.5, base_lr=1.0)
    >>> [schedule(number) for number in (1, 100, 101, 200, 201)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """

    step: int = count(low=1)
    """Updates between two changes, in [1, inf). Those of the warm-up count."""
    _: KW_ONLY
    factor: float = number(1.0, "(0, 1]")
    """In (0, 1]."""
    stop_factor_lr: float = number(1e-8, "[0, inf)")
    """The rate does not fall below this, in [0, inf)."""

    def decayed(self, num_update: int) -> float:
        # The rate of update ``step`` itself is not reduced yet, as in MXNet. The floor holds only after a change, so a
        # base_lr below it stays.
        """Return the rate after the warm-up: cut by ``factor`` every ``step`` updates, down to ``stop_factor_lr``."""
        changes = max(num_update - 1, 0) // self.step
        return max(self.base_lr * self.factor**changes, self.stop_factor_lr) if changes else self.base_lr


@dataclass(frozen=True)
class MultiFactor(Schedule):
    """Multiply the rate by a factor after each of the given numbers of updates.

    >>> schedule = MultiFactor([100, 150], factor=0.5, base_lr=1.0)
    >>> [schedule(number) for number in (100, 101, 150, 151)]
    [1.0, 0.5, 0.5, 0.25]
    """

    step: Sequence[int] = field(
        metadata={"check": lambda where, value: tuple(check_whole(where, one, low=1) for one in value)}
    )
    """Numbers of updates, rising, each in [1, inf)."""
    _: KW_ONLY
    factor: float = number(1.0, "(0, 1]")
    """In (0, 1]."""

    def __post_init__(self) -> None:
        """Check as the base class does; ConfigError, too, if ``step`` is empty or does not rise."""
        super().__post_init__()
        self._require(bool(self.step), "step", "empty")
        self._require(all(a < b for a, b in pairwise(self.step)), "step", "not rising")

    def decayed(self, num_update: int) -> float:
        """Return the rate after the warm-up: ``base_lr``, times ``factor`` for each passed number of ``step``."""
        return self.base_lr * self.factor ** sum(num_update > boundary for boundary in self.step)


@dataclass(frozen=True)
class _Falling(Schedule):
    """Fall to ``final_lr`` along the curve of a subclass."""

    max_update: int = count()
    """Number of updates at which ``final_lr`` is reached, in (warmup_steps, inf)."""
    _: KW_ONLY
    final_lr: float = number(0.0, "[0, inf)")
    """In [0, inf)."""

    def __post_init__(self) -> None:
        """Check as the base class does; ConfigError, too, if ``max_update`` is within the warm-up."""
        super().__post_init__()
        self._require(self.max_update > self.warmup_steps, "max_update", f"not above warmup_steps={self.warmup_steps}")

    def decayed(self, num_update: int) -> float:
        """Return the rate of an update after the warm-up, on the curve from ``base_lr`` to ``final_lr``."""
        if num_update >= self.max_update:
            return self.final_lr
        left = self._left(num_update - self.warmup_steps, self.max_update - self.warmup_steps)
        return self.final_lr + (self.base_lr - self.final_lr) * left

    @abstractmethod
    def _left(self, done: int, every: int) -> float:
        """Return the remaining share of the fall, in [0, 1], after ``done`` of ``every`` updates."""


@dataclass(frozen=True)
class Polynomial(_Falling):
    """Fall to ``final_lr`` along a power of the share of updates that remain.

    >>> schedule = Polynomial(100, base_lr=1.0, pwr=2)
    >>> [schedule(number) for number in (0, 50, 100, 200)]
    [1.0, 0.25, 0.0, 0.0]
    """

    _: KW_ONLY
    pwr: float = number(2.0, "[0, inf)")
    """The power, in [0, inf); 1: a straight line."""

    def _left(self, done: int, every: int) -> float:
        """Return the share of updates that remain, to the power ``pwr``."""
        return math.pow((every - done) / every, self.pwr)


@dataclass(frozen=True)
class Cosine(_Falling):
    """Fall to ``final_lr`` along half a period of the cosine.

    Reference: Loshchilov and Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, ICLR 2017,
    https://arxiv.org/abs/1608.03983.

    >>> schedule = Cosine(110, base_lr=1.0, warmup_steps=10)
    >>> [round(schedule(number), 6) for number in (5, 10, 60, 110, 200)]
    [0.5, 1.0, 0.5, 0.0, 0.0]
    """

    def _left(self, done: int, every: int) -> float:
        """Return the remaining share of the fall along half a period of the cosine."""
        return (1.0 + math.cos(math.pi * (done / every))) / 2.0
