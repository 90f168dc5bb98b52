"""Rank 0's messages during a measurement, on stderr: a live table on a terminal, else a line per group.

It prints between rounds only, while the other ranks wait for it; so it disturbs no measurement.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from statistics import median
from typing import Any, Protocol

from .cases import Group
from .rounds import Case

__all__ = ["Progress", "open_progress", "seconds_text"]

# Seconds between two looks of the live table.
_REFRESH = 0.25


class Progress(Protocol):
    """Shows the progress of a measurement."""

    def begin(self, group: Group) -> None:
        """A group begins."""
        ...

    def after_round(self, done: int, cases: Sequence[Case]) -> None:
        """The group has completed ``done`` rounds."""
        ...

    def end(self) -> None:
        """The group has been measured and checked."""
        ...


@contextmanager
def open_progress(rank: int, columns: int) -> Iterator[Progress]:
    """Return the display of progress: none on ranks but 0, lines without a terminal."""
    if rank:
        yield Silent()
    elif not columns:
        yield Lines()
    else:
        with _live(columns) as table:
            yield table


class Silent:
    """Shows nothing."""

    def begin(self, group: Group) -> None:
        pass

    def after_round(self, done: int, cases: Sequence[Case]) -> None:
        pass

    def end(self) -> None:
        pass


class Lines:
    """A line when a group ends."""

    def begin(self, group: Group) -> None:
        self._title, self._began = group.title, time.monotonic()

    def after_round(self, done: int, cases: Sequence[Case]) -> None:
        pass

    def end(self) -> None:
        print(f"measured: {self._title} ({time.monotonic() - self._began:.1f} s)", file=sys.stderr, flush=True)


@contextmanager
def _live(columns: int) -> Iterator[Progress]:
    # Rank 0 writes through the launcher, and cannot see the terminal itself.
    console = import_module("rich.console").Console(stderr=True, force_terminal=True, width=columns)
    with import_module("rich.live").Live(console=console, auto_refresh=False, transient=True) as live:
        yield Table(live)


class Table:
    """A live table of the medians so far."""

    def __init__(self, live: Any) -> None:
        self._live, self._shown = live, 0.0

    def begin(self, group: Group) -> None:
        self._group = group
        self._live.update(f"{group.title}: making arrays and stores", refresh=True)

    def after_round(self, done: int, cases: Sequence[Case]) -> None:
        if time.monotonic() - self._shown < _REFRESH:
            return
        table = import_module("rich.table").Table(title=f"{self._group.title}, round {done} of {self._group.rounds}")
        table.add_column("case")
        table.add_column("median", justify="right")
        for case in cases:
            table.add_row(case.name, seconds_text(median(case.seconds)))
        self._live.update(table, refresh=True)
        self._shown = time.monotonic()

    def end(self) -> None:
        self._live.update("", refresh=True)


def seconds_text(seconds: float) -> str:
    """Return a time with three digits and its unit.

    >>> seconds_text(0.0000123), seconds_text(0.0456), seconds_text(2.5)
    ('12.3 µs', '45.6 ms', '2.50 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        value = seconds * factor
        if value >= 1 or unit == "µs":
            break
    return f"{value:.{max(0, 2 - (value >= 10) - (value >= 100))}f} {unit}"
