"""How cases are timed: in turns within one run, so that what the machine does meanwhile meets all of them alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ...protocols import Array

__all__ = ["Case", "Clock", "Contender", "HostClock", "Prepared", "measure"]

SHORT, TURN = 150e-6, 300e-6
"""A case that takes less than the first, in seconds, is repeated within a turn until that takes at least the second."""

# Beyond that many times SHORT one look at a case is enough to know that it needs no repetition.
_SURELY_LONG = 100


class Contender(Protocol):
    """Something that does the work of a case. Its constructor may be collective."""

    @property
    def exact(self) -> bool | None:
        """Whether its results have the bits of the oracle, or only its values; None where there is nothing to check."""
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
    """A contender that has something to do before each turn, which is not timed."""

    def prepare(self) -> None:
        """Do it. May be collective."""
        ...


class Clock(Protocol):
    """What times the work of a rank."""

    def time(self, work: Callable[[], object]) -> tuple[float, float]:
        """Do the work, wait until it is done, and return the seconds that it took, and those until it had returned."""
        ...


class HostClock:
    """The clock of work that is done when it returns."""

    def time(self, work: Callable[[], object]) -> tuple[float, float]:
        began = time.perf_counter()
        work()
        took = time.perf_counter() - began
        return took, took


@dataclass
class Case:
    """A contender and what was measured of it."""

    name: str
    contender: Contender
    repeats: int = 1
    """How often a turn does the work."""
    steps: int = 0
    """How often the work was done in all."""
    seconds: list[float] = field(default_factory=list)
    """Of each round, per step: those of the slowest rank."""
    returned: list[float] = field(default_factory=list)
    """The same until the calls had returned, which is sooner where work is only queued."""

    def run(self) -> None:
        """Do the work of one turn."""
        step = self.contender.step
        for _ in range(self.repeats):
            step()
        self.steps += self.repeats

    def prepare(self) -> None:
        """Do what comes before a turn and is not timed."""
        if isinstance(self.contender, Prepared):
            self.contender.prepare()

    def run_once(self) -> None:
        """Do the work once, outside of the turns."""
        self.prepare()
        self.contender.step()
        self.steps += 1


def measure(
    comm: Any, cases: Sequence[Case], rounds: int, after_round: Callable[[int], None], clock: Clock | None = None
) -> None:
    """Time every case once a round, each round beginning with another one. Collective.

    A case that follows one which left its data in the cache would win falsely, hence the rotation. The cases must have
    been run once, as a warm-up. ``after_round`` is given the number of rounds done. ``clock`` is the host's by default.
    """
    clock = clock or HostClock()
    for case in cases:
        _calibrate(comm, case, clock)
    for turn in range(rounds):
        first = turn % len(cases)
        for case in (*cases[first:], *cases[:first]):
            took, returned = _timed(comm, case, clock)
            case.seconds.append(took / case.repeats)
            case.returned.append(returned / case.repeats)
        after_round(turn + 1)


def _calibrate(comm: Any, case: Case, clock: Clock) -> None:
    """Find how often a short case must be repeated. The ranks agree, since all know the time of the slowest."""
    took, _ = _timed(comm, case, clock)
    while took < _SURELY_LONG * SHORT:
        took = min(took, _timed(comm, case, clock)[0], _timed(comm, case, clock)[0])
        if took >= (SHORT if case.repeats == 1 else TURN):
            return
        # A little more than what seems enough, as turns differ; at least twice, to come to an end.
        case.repeats = max(2 * case.repeats, math.ceil(1.3 * case.repeats * TURN / max(took, 1e-9)))
        took, _ = _timed(comm, case, clock)


def _timed(comm: Any, case: Case, clock: Clock) -> tuple[float, float]:
    """Return the seconds that the slowest rank takes for a turn, and until its calls have returned."""
    case.prepare()
    comm.Barrier()
    of_ranks = comm.allgather(clock.time(case.run))
    return float(max(took for took, _ in of_ranks)), float(max(returned for _, returned in of_ranks))
