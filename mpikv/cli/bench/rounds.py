"""The timing of cases: in turns within one run, so that the machine's other work meets all cases alike."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ...protocols import Array

SHORT, TURN = 1e-3, 2e-3
"""In seconds: a case shorter than the first is repeated within a turn, until the turn takes at least the second.

Ranks leave the barrier before a turn tens of microseconds apart, and the first step finds cold caches. In a turn of one
short step, these are most of its time.
"""

# A case longer than this many times SHORT needs no repetition; one test is enough to know.
_SURELY_LONG = 15


class Contender(Protocol):
    """Does the work of a case. Its constructor may be collective."""

    @property
    def exact(self) -> bool | None:
        """Whether its results have the oracle's bits, or only close values; None if nothing is checked."""
        ...

    def step(self) -> object:
        """Do the work once. Collective."""
        ...

    def results(self) -> Iterable[Array]:
        """Return this rank's result of each key, in order. May be collective."""
        ...

    def close(self) -> None:
        """Free what the garbage collector does not. Collective."""
        ...


@runtime_checkable
class Prepared(Contender, Protocol):
    """A contender with untimed work before each turn."""

    def prepare(self) -> None:
        """Do this work. May be collective."""
        ...


@dataclass
class Case:
    """A contender and its measurements."""

    name: str
    contender: Contender
    repeats: int = 1
    """Steps per turn."""
    steps: int = 0
    """All steps so far."""
    seconds: list[float] = field(default_factory=list)
    """The slowest rank's seconds per step, for each round."""

    def run(self) -> None:
        """Run the steps of one turn."""
        step = self.contender.step
        for _ in range(self.repeats):
            step()
        self.steps += self.repeats

    def prepare(self) -> None:
        """Do the untimed work before a turn."""
        if isinstance(self.contender, Prepared):
            self.contender.prepare()

    def run_once(self) -> None:
        """Run one step, outside of the turns."""
        self.prepare()
        self.contender.step()
        self.steps += 1


def measure(comm: Any, cases: Sequence[Case], rounds: int) -> None:
    """Time every case once per round; each round begins with another case. Collective.

    The rotation is fair: a case right after one that left its data in the cache would win falsely. Run each case once
    before, as a warm-up.
    """
    for case in cases:
        _calibrate(comm, case)
    for turn in range(rounds):
        first = turn % len(cases)
        for case in (*cases[first:], *cases[:first]):
            case.seconds.append(_timed(comm, case) / case.repeats)


def _calibrate(comm: Any, case: Case) -> None:
    """Choose the repetitions of a short case. All ranks choose alike, since all know the slowest rank's time."""
    took = _timed(comm, case)
    while took < _SURELY_LONG * SHORT:
        took = min(took, _timed(comm, case), _timed(comm, case))
        if took >= (SHORT if case.repeats == 1 else TURN):
            return
        # A margin of 30 %, since turns differ; and at least twice as many, so that the loop ends.
        case.repeats = max(2 * case.repeats, math.ceil(1.3 * case.repeats * TURN / max(took, 1e-9)))
        took = _timed(comm, case)


def _timed(comm: Any, case: Case) -> float:
    """Return the slowest rank's seconds for a turn."""
    case.prepare()
    comm.Barrier()
    began = time.perf_counter()
    case.run()
    return float(max(comm.allgather(time.perf_counter() - began)))
