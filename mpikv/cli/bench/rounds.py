"""The timing of cases: in turns within one run, so that the machine's other work meets all cases alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
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


Clock = Callable[[Callable[[], object]], "tuple[float, float]"]
"""Does the work of a rank and waits for its end; returns the seconds to the end, and the seconds to its return."""


def time_host(work: Callable[[], object]) -> tuple[float, float]:
    """Time work that ends before it returns."""
    began = time.perf_counter()
    work()
    took = time.perf_counter() - began
    return took, took


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
    returned: list[float] = field(default_factory=list)
    """The same until the calls returned; that is sooner if work is only queued."""

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


def measure(comm: Any, cases: Sequence[Case], rounds: int, clock: Clock = time_host) -> None:
    """Time every case once per round; each round begins with another case. Collective.

    The rotation is fair: a case right after one that left its data in the cache would win falsely. Run each case once
    before, as a warm-up.
    """
    for case in cases:
        _calibrate(comm, case, clock)
    for turn in range(rounds):
        first = turn % len(cases)
        for case in (*cases[first:], *cases[:first]):
            took, returned = _timed(comm, case, clock)
            case.seconds.append(took / case.repeats)
            case.returned.append(returned / case.repeats)


def _calibrate(comm: Any, case: Case, clock: Clock) -> None:
    """Choose the repetitions of a short case. All ranks choose alike, since all know the slowest rank's time."""
    took, _ = _timed(comm, case, clock)
    while took < _SURELY_LONG * SHORT:
        took = min(took, _timed(comm, case, clock)[0], _timed(comm, case, clock)[0])
        if took >= (SHORT if case.repeats == 1 else TURN):
            return
        # A margin of 30 %, since turns differ; and at least twice as many, so that the loop ends.
        case.repeats = max(2 * case.repeats, math.ceil(1.3 * case.repeats * TURN / max(took, 1e-9)))
        took, _ = _timed(comm, case, clock)


def _timed(comm: Any, case: Case, clock: Clock) -> tuple[float, float]:
    """Return the slowest rank's seconds for a turn, and until its calls have returned."""
    case.prepare()
    comm.Barrier()
    of_ranks = comm.allgather(clock(case.run))
    return float(max(took for took, _ in of_ranks)), float(max(returned for _, returned in of_ranks))
