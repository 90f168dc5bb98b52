"""Status boards of running jobs, read by another process of the same user on the same host.

The file of a board has no name any more, but each of its ranks has it open. It is read as it is, without a lock: a
record is taken only if its number fits.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..cluster.calls import text_of_note
from ..cluster.lateness import COLUMNS, LABELS, PHASES, RING, Late, condense, find_late, phases_of, sums_of, window
from ..cluster.runtime import SHARED
from ..cluster.shared_memory import BOARD
from ..cluster.status_board import LAYOUT, SLOT, call_of

CALLS = "mpikv-calls-"
"""Begins the name of a file with the last calls of a job that ended badly, in the folder of temporary files."""
# Boards kept open: each keeps memory that its ranks may have given back, as in a program that makes stores in a loop.
_MOST = 16
Slots: TypeAlias = "np.ndarray[Any, Any]"
"""A copy of a board: the slots of the ranks of this host."""


class Boards:
    """The boards found so far. They stay readable when their ranks have been killed."""

    def __init__(self) -> None:
        self._handles: dict[tuple[int, int], int] = {}

    def look(self, pid: int) -> None:
        """Open the boards among a process's open files, as far as this user may see them."""
        with suppress(OSError):  # it ended meanwhile, or is another user's
            for link in os.scandir(f"/proc/{pid}/fd"):
                with suppress(OSError):  # closed meanwhile
                    if _is_board(os.readlink(link.path)):
                        state = os.stat(link.path)
                        key = state.st_dev, state.st_ino
                        if key not in self._handles:
                            self._handles[key] = os.open(link.path, os.O_RDONLY | os.O_CLOEXEC)
        while len(self._handles) > _MOST:
            closed = (key for key, slots in self.read().items() if slots["closed"].all())
            os.close(self._handles.pop(next(closed, next(iter(self._handles)))))

    def read(self) -> dict[tuple[int, int], Slots]:
        """Return copies of the boards with ranks; boards of other versions of mpikv are left out."""
        copies = {}
        for key, handle in self._handles.items():
            data = os.pread(handle, os.fstat(handle).st_size, 0)
            slots = np.frombuffer(data, SLOT, len(data) // SLOT.itemsize)
            if len(slots) and (slots["layout"] == LAYOUT).all() and (slots["pid"] > 0).all():
                copies[key] = slots
        return copies

    def close(self) -> None:
        """Close their files."""
        while self._handles:
            os.close(self._handles.popitem()[1])


def _is_board(path: str) -> bool:
    return path.startswith(f"{SHARED}/mpikv-") and path.removesuffix(" (deleted)").endswith(BOARD)


def find_ranks() -> Iterator[int]:
    """Yield the numbers of this user's processes."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            if process.stat().st_uid == os.getuid():
                yield int(process.name)


def sums_since(slots: Slots, begin: int, signs: Any) -> tuple[Any, float]:
    """Return the sums for each rank over the known calls after call ``begin``, when the signs were others, and the
    seconds from the begin of the first to the end of the last.
    """
    last = int(slots["call"].min())
    rows = window(slots, begin, last)
    seconds = (rows["left"].max() - rows["free"].min()) / 1e9 if rows.size else 0.0
    return sums_of(condense(slots, begin, last), signs), seconds


def by_name(sums: Any) -> dict[str, int]:
    """Return the sums of one rank by their names."""
    return dict(zip(COLUMNS, sums.tolist(), strict=True))


def late_of(slots: Slots, sums: Any, seconds: float) -> Late | None:
    """Return the late rank of a host, by sums of these slots."""
    return find_late(sums, seconds, slots["rank"].tolist())


def describe(boards: Mapping[tuple[int, int], Slots], why: str) -> dict[str, Any]:
    """Return the last calls of each rank, for a file that outlives them."""
    stores = [[_describe_rank(slot) for slot in slots] for slots in boards.values()]
    return {"mpikv": "calls", "host": os.uname().nodename, "why": why, "stores": stores}


def _describe_rank(slot: Any) -> dict[str, Any]:
    now, number = time.monotonic_ns(), int(slot["call"])
    records = [slot["ring"][call % RING] for call in range(max(number - LABELS, 0) + 1, number + 1)]
    calls = [
        {
            "call": int(record["call"]),
            "text": text_of_note(bytes(slot["labels"][record["call"] % LABELS])),
            "seconds_ago": (now - int(record["began"])) / 1e9,
            **dict(zip(PHASES, (phases_of(record) / 1e9).tolist(), strict=True)),
        }
        for at, record in enumerate(records, number - len(records) + 1)
        if record["call"] == at  # not that of a call before, as of a rank that is in this one
    ]
    inside = number > 0 and records[-1]["call"] != number
    about = {name: int(slot[name]) for name in ("rank", "size", "pid")}
    return {**about, "begun": call_of(slot), "is_in_it": bool(inside), "calls": calls}


def roll_call(dump: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines about the last calls of each rank, of a dict of :func:`describe`."""
    yield f"{dump['why']}, on {dump['host']}"
    for ranks in dump["stores"]:
        places = {rank["rank"]: f"{'in' if rank['is_in_it'] else 'after'} {rank['begun']}" for rank in ranks}
        (usual, count), *_ = Counter(places.values()).most_common(1)
        yield ""
        yield f"{count} of {len(ranks)} ranks: {usual}"
        yield from (f"rank {rank}: {place}" for rank, place in places.items() if place != usual)
        rows: list[tuple[object, ...]] = [("rank", *PHASES, "in the last calls")]
        for rank in ranks:
            sums = (f"{sum(call[name] for call in rank['calls']):.3f} s" for name in PHASES)
            rows.append((rank["rank"], *sums, len(rank["calls"])))
        yield from table(rows)


def table(rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """Yield the lines of a table; all but the last column are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "  ".join([*(cell.rjust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)), row[-1]])
