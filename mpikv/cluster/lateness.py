"""Where the time of each rank goes, and which rank makes the others wait.

A call has three moments: a rank arrives, all ranks have agreed, and the rank leaves. So its time is divided into four
phases: two between calls, when its main thread computes or waits for something else, its *input*; the wait for other
ranks; and the exchange of data. A rank keeps its last calls on the board. The last rank to arrive waits least: this
compares durations alone, and needs no common clock of several hosts.

Processor time tells the first two phases apart. To ask the system for it takes longer than all else here. So a rank
asks only after a long phase, and takes the short phases since the last answer for busy ones.
"""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..protocols import Array, Group
from .calls import NOTE_BYTES
from .printing import log
from .runtime import present

# Calls on the board, twice as many as between two sums of them: other ranks still read the older half.
_WINDOW = 512
RING = 2 * _WINDOW
LABELS = 64
"""The calls that keep their texts."""
PHASES = ("input", "computing", "waiting", "moving")
SIGNS = ("collecting", "delayed", "faults", "reads")
"""Nanoseconds in the garbage collector, and ready without a core; pages and blocks that were read from a disk."""
_MOMENTS = ("free", "began", "met", "left")
RECORD = np.dtype([(name, "i8") for name in ("call", *_MOMENTS, "input")])
"""A call: the moments when the one before ended, when it began, when all ranks had come, when it ended; its input."""
COLUMNS = ("last", "held_up", *PHASES, *SIGNS)
"""The sums for a rank: how often it came last, and nanoseconds that it held up the others; then as above."""
SUMS = np.dtype(("i8", (2, len(COLUMNS) + 1)))
"""The last two versions of them, each with the number of its last call."""
# What a rank tells others about a window: how long it waited in each call, NaN if it has no record; sums of the rest.
_TOLD = np.dtype([("waits", "f4", _WINDOW), ("phases", "i8", len(PHASES)), ("signs", "i8", len(SIGNS))])
# Nanoseconds: a phase to ask for processor time after, and how seldom to read the other signs.
_LONG, _SELDOM = 400_000, 25_000_000
# Pages or blocks from a disk that tell.
_PAGES = 10
# For each cause, its figure, and what the late rank does.
_WHY = {
    "compute": ("computing", "computes{0}"),
    "collector": ("collecting", "collects garbage{0}, for {1}"),
    "cores": ("delayed", "was ready to run without a core for {1}: more threads than cores"),
    "input": ("input", "waits between calls{0}: for a loader, a lock, a GPU"),
    "disk": ("reads", "reads from a disk between calls"),
    "swap": ("faults", "reads its pages back from a disk, as from swap"),
    "exchange": ("moving", "exchanges data{0}: look at the network to its host"),
}
# Not "q", the same on 64-bit Linux: Python takes twice as long to convert a moment to that.
_PACK, _BYTES = struct.Struct(f"{len(RECORD.descr)}l").pack_into, RECORD.itemsize
_PACK_NOTE = struct.Struct(f"{NOTE_BYTES}s").pack_into


class Recorder:
    """Shows this rank's calls and their times in its slot of the board. Local; one thread at a time calls it."""

    def __init__(self, slot: Array, timed: bool) -> None:
        """Show later calls in ``slot``, an array of one; write nothing yet. Without ``timed`` the clock stands at 0."""
        # Looked up here: simulated ranks have their own.
        here = present()
        self.clock, self._processor, self._read_signs = time.monotonic_ns if timed else int, here.busy, here.signs
        self.calls = 0
        """How many calls this rank has begun."""
        self._notes = [bytes(NOTE_BYTES)] * LABELS
        self._views: tuple[memoryview, ...] = ()
        self.use(slot)
        self._first = here.signs() if timed else [0] * len(SIGNS)
        self._left = self._sampled = self._read = self.clock()
        self._busy = self._processor()
        # When the present call began, 0 outside of one; the input before it, if that was long.
        self._began = self._input = 0
        self.met = 0
        """When all ranks had come to the call, by :attr:`clock`; set by whoever finds so."""

    def use(self, slot: Array) -> None:
        """Write later calls to another slot, an array of one; copy nothing there, and release the old one. Local."""
        for view in self._views:
            view.release()
        self._views = slot["call"].data, slot["ring"][0].view(np.uint8).data, slot["labels"].reshape(-1).data
        self._number, self._ring, self._labels = self._views
        self._signs = slot["signs"][0]

    def begin(self, noted: bytes) -> None:
        """Count a call, start its clock, and show it on the board; ends one that an error left. Local."""
        if self._began:  # the call before was left by an error
            self.leave()
        clock = self.clock
        self._began = self.met = now = clock()
        if (outside := now - self._left) > _LONG:
            self._input = outside - self._sample(now, outside)
        self.calls = number = self.calls + 1
        # A training repeats a few calls: often their texts stand there already.
        if self._notes[place := number % LABELS] is not noted:
            self._notes[place] = noted
            _PACK_NOTE(self._labels, place * NOTE_BYTES, noted)
        # Last: a reader that sees the new number finds its text (on x86-64, which keeps the order of stores).
        self._number[0] = number

    def leave(self) -> None:
        """End the call's clock, and write its times to the board; without a call do nothing. Local."""
        if began := self._began:
            now, number = self.clock(), self.calls
            if now - began > _LONG:
                self._sample(now, now - began)
            _PACK(self._ring, number % RING * _BYTES, number, self._left, began, self.met, now, self._input)
            self._began, self._left, self._input = 0, now, 0

    def rewrite(self, noted: bytes) -> None:
        """Show another text for the last call on the board. Local."""
        place = self.calls % LABELS
        self._notes[place] = noted
        _PACK_NOTE(self._labels, place * NOTE_BYTES, noted)

    def note_of(self, number: int) -> bytes:
        """Return the note, as bytes, of one of the last 64 calls. Local."""
        return self._notes[number % LABELS]

    def _sample(self, now: int, length: int) -> int:
        """Return about how many of the ``length`` ns up to ``now`` the main thread ran; may write the board's signs."""
        busy = self._processor()
        ran = busy - self._busy - (now - self._sampled - length)
        self._busy, self._sampled = busy, now
        if now - self._read > _SELDOM:
            self._read = now
            self._signs[:] = np.subtract(self._read_signs(), self._first)
        return min(max(ran, 0), length)


class Lateness:
    """Adds up the calls of all ranks."""

    def __init__(self, group: Group, slots: Callable[[], Array], report: float) -> None:
        """Keep the arguments; ``slots()`` returns this host's slots. If ``report`` is not 0, :meth:`fold` on rank 0
        logs a line every so many seconds. Local.
        """
        self._group, self._slots = group, slots
        # On one host the first rank adds up for all, on the board. A rank that is alone waits for nobody.
        self.fold_at = 8 if group.size > 1 and (group.rank == 0 or not group.one_host) else sys.maxsize
        """The number of the call at which to call :meth:`fold` again."""
        self._apart = np.zeros((group.size, *SUMS.shape), np.int64)
        self._every = report if group.rank == 0 and group.size > 1 else 0.0
        self._started = self._reported = present().now()
        self._before = self._apart[:, 0, :-1].copy()

    def fold(self, number: int, all_gather: Callable[[Array, Sequence[int]], None]) -> None:
        """Add the calls before ``number`` to the sums, and set ``fold_at``, the number of the call to fold at next. May
        log a report. Collective if on several hosts.
        """
        # Other hosts are known as of the last sum alone: slow steps must not make that old.
        self.fold_at = min(2 * self.fold_at, self.fold_at + (_WINDOW if self._group.one_host else _WINDOW // 4))
        sums, memory = self._sum(number - 1, all_gather)
        # Last, and never in the newest version: other ranks may be reading that, and know it by this number.
        memory[:, :-1] = sums
        memory[:, -1] = number - 1
        if self._every:
            now = present().now()
            if now - self._reported >= self._every:
                self._report(sums, now)
            if self._group.one_host:  # a program may make few calls in the time of a report
                rate = number / max(now - self._started, 1e-3)
                self.fold_at = min(self.fold_at, number + max(1, int(rate * self._every / 8)))

    def statistics(self, number: int) -> dict[str, Any]:
        """Return a dict with ``ranks``, the times last and seconds by phase of each rank in the calls before
        ``number``, and ``late``, a dict or None. On several hosts both are as of the last :meth:`fold`. Local.
        """
        (sums, _), shown = self._sum(number - 1), COLUMNS[1 : len(PHASES) + 2]
        seconds = (sums[:, 1 : len(shown) + 1] / 1e9).tolist()
        ranks = [
            {"last": last, **dict(zip(shown, each, strict=True))}
            for last, each in zip(sums[:, 0].tolist(), seconds, strict=True)
        ]
        late = find_late(sums, present().now() - self._started)
        return {"ranks": ranks, "late": late and late._asdict()}

    def _sum(self, last: int, all_gather: Callable[[Array, Sequence[int]], None] | None = None) -> tuple[Array, Array]:
        """Return (sums up to the call ``last``, the array to store them in); store nothing. On several hosts it is
        collective with ``all_gather``, and without it returns the sums of the last :meth:`fold`.
        """
        slots, told = self._slots(), np.zeros(self._group.size, _TOLD)
        versions = slots["sums"] if self._group.one_host else self._apart
        newest = int(versions[0, :, -1].argmax())
        known = versions[:, newest].copy()
        sums, begin = known[:, :-1], int(known[0, -1])
        if self._group.one_host:
            told = condense(slots, begin, last)
        elif all_gather:
            mine = condense(slots[self._group.local_rank :][:1], begin, last)
            told[self._group.rank] = mine[0]
            all_gather(told.view(np.int32), (told.itemsize // 4,) * len(told))
        else:
            last = begin
        if last > begin:
            sums = sums + sums_of(told, sums[:, -len(SIGNS) :])
        return sums, versions[:, 1 - newest]

    def _report(self, sums: Array, now: float) -> None:
        """Log the rank that made the others wait since the last report, or that none did; begin a new period. Local."""
        added, seconds = sums - self._before, now - self._reported
        self._reported, self._before = now, sums
        late = find_late(added, seconds)
        log("%s", late.text if late else f"no rank made the others wait in the last {seconds:.0f} s")


def window(slots: Array, begin: int, last: int) -> Array:
    """Return records, slots x calls, of those calls after ``begin`` to ``last``, the newest 512 at most, that all slots
    have. Local.
    """
    calls = np.arange(max(begin, last - _WINDOW) + 1, last + 1)
    # As numbers: numpy takes records one field at a time, which is four times as slow.
    ring: Array = slots["ring"].view(np.int64).reshape(len(slots), RING, -1)
    rows = ring.take(calls % RING, axis=1).view(RECORD)[..., 0]
    return rows.compress((rows["call"] == calls).all(axis=0), axis=1)


def phases_of(records: Array) -> Array:
    """Return the nanoseconds of some records in each of :data:`PHASES`, along a new last axis. Local."""
    free, began, met, left = (records[name] for name in _MOMENTS)
    return np.stack([records["input"], began - free - records["input"], met - began, left - met], axis=-1)


def condense(slots: Array, begin: int, last: int) -> Array:
    """Return a record for each slot: its wait in each call after ``begin`` to ``last``, the sums of its phases over
    these calls, and its signs so far. Local.
    """
    rows, told = window(slots, begin, last), np.zeros(len(slots), _TOLD)
    told["waits"] = np.nan
    told["waits"][:, rows["call"][0] % _WINDOW] = rows["met"] - rows["began"]
    numbers: Array = rows.view(np.int64).reshape(*rows.shape, RECORD.itemsize // 8)
    # Sums of moments may pass the end of int64, and their differences are right all the same.
    told["phases"] = phases_of(np.einsum("ijk->ik", numbers).view(RECORD)[..., 0])
    told["signs"] = slots["signs"]
    return told


def sums_of(told: Array, signs: Array) -> Array:
    """Return the sums over some calls, a row of :data:`COLUMNS` for each rank, from its record of :func:`condense`.
    ``signs`` are the signs before those calls, subtracted. Local.
    """
    # A call that failed on one rank has no record there.
    waits = told["waits"].compress(~np.isnan(told["waits"]).any(axis=0), axis=1).astype(np.int64)
    size, last = len(waits), waits.argmin(axis=0)
    # The mean of the time that the others waited longer than the last rank.
    more = (waits.sum(axis=0) - size * waits.min(axis=0)) // max(size - 1, 1)
    counts = [np.bincount(last, weights, size).astype(np.int64) for weights in (None, more)]
    return np.hstack([*(each[:, None] for each in counts), told["phases"], told["signs"] - signs])


class Late(NamedTuple):
    """The rank that made the others wait."""

    rank: int
    share: float
    """Of the time, how much the others waited for it."""
    cause: str
    """``compute``, ``collector``, ``cores``, ``input``, ``disk``, ``swap`` or ``exchange``."""
    text: str


def find_late(added: Array, seconds: float, ranks: Sequence[int] | None = None) -> Late | None:
    """Return the rank that held up others for 1 % of ``seconds`` or more, and the likely cause; or None. Local.

    ``added`` has the sums over that time for each rank, or for each of these ``ranks``.
    """
    worst = int(added[:, 1].argmax())
    share = float(added[worst, 1]) / max(1e9 * seconds, 1)
    if share < 0.01 or len(added) == 1:
        return None
    others = np.delete(added, worst, 0)
    # Not over the median: with a slow link all ranks but few exchange data for long.
    figures = added[worst], np.median(others, axis=0), added[worst] - others.mean(axis=0)
    own, usual, more = (dict(zip(COLUMNS, each.tolist(), strict=True)) for each in figures)
    # Without a core a thread neither runs nor waits for anything else: this time is in its input.
    delayed = max(min(more["delayed"], more["input"]), 0)
    excess = {
        "compute": more["computing"] - max(more["collecting"], 0),
        "collector": more["collecting"],
        "cores": delayed,
        "input": more["input"] - delayed,
        "exchange": more["moving"],
    }
    cause = max(excess, key=lambda name: excess[name])
    if cause == "input" and max(more["faults"], more["reads"]) >= _PAGES:
        cause = "swap" if more["faults"] >= more["reads"] / 100 else "disk"
    phase, why = _WHY[cause]
    times = own[phase] / usual[phase] if usual[phase] else 0
    often = f" {times:.1f} times as long as the median" if 1 < times < 100 else ""
    rank = worst if ranks is None else ranks[worst]
    text = f"rank {rank} made the others wait {share:.0%} of the last {seconds:.0f} s; it {why}"
    return Late(rank, share, cause, text.format(often, f"{own[phase] / 1e9:.1f} s"))
