"""Faults of a simulated cluster: a seed can draw them, and the scheduler carries them out."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = [
    "Cut",
    "Delay",
    "Differ",
    "Fault",
    "FullDisk",
    "Kill",
    "Leave",
    "Missed",
    "Pause",
    "Raise",
    "arrival",
    "check_fault",
    "draw_faults",
]


@dataclass(frozen=True)
class Kill:
    """A rank ends as by SIGKILL, at its ``at``-th scheduling point; none of its code runs any more."""

    rank: int
    at: int


@dataclass(frozen=True)
class Pause:
    """A rank does nothing for some seconds, from its ``at``-th scheduling point on: stopped, or late."""

    rank: int
    at: int
    seconds: float


@dataclass(frozen=True)
class Raise:
    """A rank's program meets an error at its ``at``-th scheduling point, or at the next one if another thread of the
    rank is there. A program may catch the error, :class:`Planted`; then it is no failure of the run.
    """

    rank: int
    at: int


@dataclass(frozen=True)
class Leave:
    """A rank's program calls ``sys.exit()`` at its ``at``-th scheduling point, or at the next one as for
    :class:`Raise`. It leaves while the others continue.
    """

    rank: int
    at: int


@dataclass(frozen=True)
class Differ:
    """A rank calls ``barrier()`` instead of a store's collective call of this number, from 1."""

    rank: int
    call: int


@dataclass(frozen=True)
class FullDisk:
    """The disk of a rank's host is full, from the rank's ``at``-th scheduling point on. ``os.pwrite``, ``os.pwritev``,
    ``os.rename`` and ``os.replace`` fail there, and so do checkpoints. Python's own file objects still write.
    """

    rank: int
    at: int


@dataclass(frozen=True)
class Delay:
    """Everything from one host to another takes some seconds longer: messages and collective operations."""

    source: int
    target: int
    seconds: float


@dataclass(frozen=True)
class Cut:
    """Nothing passes between some hosts and the others, from one second to another. Messages and parts of collective
    operations arrive afterwards.
    """

    hosts: tuple[int, ...]
    start: float = 0.0
    end: float = math.inf

    def separates(self, source: int, target: int) -> bool:
        """Return whether two hosts are on different sides."""
        return (source in self.hosts) != (target in self.hosts)


Timed: TypeAlias = Kill | Pause | Raise | Leave | FullDisk
"""The faults that strike at a scheduling point of a rank."""
Fault: TypeAlias = Timed | Differ | Delay | Cut


class Missed(UserWarning):
    """A run has ended before a planned fault could strike."""


def draw_faults(seed: int, size: int, hosts: int = 1, most: int = 200) -> tuple[Fault, ...]:
    """Draw one fault for a cluster, at a scheduling point up to ``most``.

    >>> draw_faults(1, size=4)
    (Kill(rank=0, at=64),)
    """
    draw = random.Random(f"{seed} faults")
    rank, at = draw.randrange(size), draw.randint(1, most)
    faults: list[Fault] = [Kill(rank, at), Pause(rank, at, round(draw.uniform(0.1, 2), 2))]
    faults += [Raise(rank, at), Leave(rank, at), FullDisk(rank, at), Differ(rank, 1 + at % 20)]
    if hosts > 1:
        source, target = draw.sample(range(hosts), 2)
        faults += [Delay(source, target, 0.01), Cut((draw.randrange(hosts),), 0.0, 0.5)]
    return (draw.choice(faults),)


def check_fault(fault: Fault, size: int, hosts: int) -> None:
    """Refuse a fault that cannot strike a cluster with these ranks and hosts.

    Raises:
        TypeError: it is no fault.
        ValueError: it names other ranks or hosts, or moments that never come.
    """
    if not isinstance(fault, Fault):
        raise TypeError(f"faults: {fault!r} is no fault; pass a list of Kill(...), Pause(...) and others")
    given, end = vars(fault), sys.maxsize
    limits = {"rank": (0, size), "source": (0, hosts), "target": (0, hosts), "at": (1, end), "call": (1, end)}
    numbers = [(given[name], range(*limits[name])) for name in given if name in limits]
    possible = all(isinstance(number, int) and number in limit for number, limit in numbers)
    if isinstance(fault, (Pause, Delay)):
        possible &= fault.seconds >= 0
    elif isinstance(fault, Cut):
        named: Any = fault.hosts
        apart = isinstance(named, Collection) and set() < {*named} <= {*range(hosts)}
        possible = apart and 0 <= fault.start <= fault.end
    if not possible:
        raise ValueError(
            f"{fault!r} cannot strike {size} ranks on {hosts} hosts: these are numbered from 0, scheduling points and "
            "calls from 1, and times are 0 or more seconds"
        )


def arrival(faults: Sequence[Fault], source: int, target: int, moment: float) -> float:
    """Return the arrival of a message under the faults; ``moment`` is its arrival without them."""
    for fault in faults:
        if isinstance(fault, Delay) and (fault.source, fault.target) == (source, target):
            moment += fault.seconds
    cuts = [fault for fault in faults if isinstance(fault, Cut) and fault.separates(source, target)]
    for cut in sorted(cuts, key=lambda cut: cut.start):
        if cut.start <= moment < cut.end:
            moment = cut.end
    return moment
