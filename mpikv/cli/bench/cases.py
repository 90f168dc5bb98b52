"""Groups of cases that do the same work, the arrays they start from, and the ratios that are wanted of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...protocols import Array
from .keysets import KeySet, gradients
from .rounds import Contender
from .rules import Rule

__all__ = ["Comparison", "Factory", "Group", "Inputs", "Skipped", "unless"]

Factory = Callable[[], Callable[[], Contender]]
"""Looks whether a case can be had and makes its arrays; returns what makes the contender, which may be collective. So
what fails on one rank alone, as memory that is short, fails before any rank waits for it."""


class Skipped(Exception):
    """A case cannot be had here; the message says why."""


@dataclass(frozen=True)
class Comparison:
    """The ratio of the median times of two cases of a group."""

    goal: str
    ours: str
    peer: str
    bound: float | None = None
    """The ratio that is wanted at most, where this project has set itself one for these circumstances."""
    beyond: str | None = None
    """A case whose work both do, too, where the times beyond its time are compared."""


@dataclass
class Group:
    """Cases that do the same work on the same keys."""

    name: str
    """The part before a slash is what ``--only`` selects."""
    title: str
    keys: KeySet
    rule: Rule | None
    """None: the values are sums."""
    rounds: int
    factories: Mapping[str, Factory]
    """By the names of the cases, in the order of their making. They may raise :class:`Skipped`."""
    comparisons: Sequence[Comparison] = ()
    floors: Mapping[str, int] = field(default_factory=dict)
    """Bytes per element that a case must move, over all ranks, where that is known."""
    inputs: Inputs | None = None
    """Given where the memory of the ranks is to be measured."""
    needed_bytes: int = 0
    """About how much memory all cases take on this host."""
    collectives: Mapping[str, str] = field(default_factory=dict)
    """Which of NCCL's collectives a case makes of all bytes, where it is on GPUs: names, with commas."""
    summed: int = 0
    """Of how many ranks the sums are; 0: of all."""
    tiles: int = 1
    """How often the arrays repeat what the keys have: the oracle need not be as fast as what is measured."""


class Inputs:
    """A rank's private gradients and outputs, made when they are first asked for."""

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

    def make(self) -> None:
        """Make all arrays now."""
        self._gradients, self._outs = self.gradients, self.outs

    def new_outs(self) -> list[Array]:
        """Return more arrays for all values, written once, as the first touch of memory is slow."""
        return [np.ones(shape, np.float32) for shape in self._keys.shapes]


def unless(problem: Callable[[], str], factory: Factory) -> Factory:
    """Return a factory that raises :class:`Skipped` where there is a problem."""

    def prepare() -> Callable[[], Contender]:
        if why := problem():
            raise Skipped(why)
        return factory()

    return prepare
