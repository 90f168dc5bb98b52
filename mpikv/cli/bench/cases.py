"""Groups of cases with the same work, their initial arrays, and the ratios of their times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...protocols import Array
from .keysets import KeySet, gradients
from .rounds import Contender
from .rules import Rule

Factory = Callable[[], Callable[[], Contender]]
"""Checks whether a case can run here, and makes its arrays; returns a function that makes the contender, perhaps
collectively. So an error of one rank alone, such as lack of memory, comes before any rank waits for it."""


class Skipped(Exception):
    """A case cannot run here; the message says why."""


@dataclass(frozen=True)
class Comparison:
    """The ratio of the median times of two cases of a group."""

    goal: str
    ours: str
    peer: str
    bound: float | None = None
    """The highest wanted ratio; None if the project has no aim for these circumstances."""
    beyond: str | None = None
    """A case with work common to both: only the times beyond its time are compared."""


@dataclass
class Group:
    """Cases that do the same work on the same keys."""

    name: str
    """``--only`` selects by the part before a slash."""
    title: str
    keys: KeySet
    rule: Rule | None
    """None: the values are sums."""
    rounds: int
    factories: Mapping[str, Factory]
    """By the names of the cases, in the order of their making. They may raise :class:`Skipped`."""
    comparisons: Sequence[Comparison] = ()
    needed_bytes: int = 0
    """Approximate memory of all cases on this host."""
    floors: Mapping[str, int] = field(default_factory=dict)
    """Bytes per element that a case must move, over all ranks, where they are known."""


class Inputs:
    """A rank's private gradients and outputs, made at first use."""

    def __init__(self, rank: int, keys: KeySet) -> None:
        self._rank, self._keys = rank, keys
        self._gradients: list[Array] = []
        self._outs: list[Array] = []

    @property
    def gradients(self) -> list[Array]:
        """The gradients of all keys; read only."""
        self._gradients = self._gradients or list(gradients(self._rank, self._keys.shapes))
        return self._gradients

    @property
    def outs(self) -> list[Array]:
        """Arrays for all values."""
        self._outs = self._outs or self.new_outs()
        return self._outs

    def new_outs(self) -> list[Array]:
        """Return more arrays for all values, filled once, since the first touch of memory is slow."""
        return [np.ones(shape, np.float32) for shape in self._keys.shapes]


def unless(problem: Callable[[], str], factory: Factory) -> Factory:
    """Return a factory that raises :class:`Skipped` if there is a problem."""

    def prepare() -> Callable[[], Contender]:
        if why := problem():
            raise Skipped(why)
        return factory()

    return prepare
