"""The folder of commits, as ``mpikv run`` sees it. Without numpy, whose import would delay each start of a job."""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

HEADER = struct.Struct("<QQQQQI")
"""The begin of a file: the numbers of a commit, and their CRC-32. No kill leaves half of it: it is in one page."""
FORM = 2
"""The form of a commit. Older versions have the length of a text there, which is larger."""
# The number of steps that have begun, and the process that holds the lock; in the first file of a rank and loop.
_NOTE, NOTE_AT = struct.Struct("<qq"), 1024
BRIEFING = "start.json"
_NAME = re.compile(r"(\d+)\.(\d+)\.[01]")


class Commit(NamedTuple):
    """A whole commit in a file. Epoch 0: there is none."""

    epoch: int = 0
    step: int = 0
    """The next step to make."""
    form: int = FORM
    end: int = 0
    """Where its state ends in the file."""
    crc: int = 0
    """CRC-32 of the state, begun with the rank."""


def seal(commit: Commit) -> bytes:
    """Return a commit's header as bytes, with their CRC-32."""
    return HEADER.pack(*commit, zlib.crc32(str(tuple(commit)).encode()))


def read_header(file: int) -> Commit:
    """Return an open file's header, or one of epoch 0 if its CRC-32 is wrong; that of the state is not checked."""
    text = os.pread(file, HEADER.size, 0)
    commit = Commit(*HEADER.unpack(text)[:-1]) if len(text) == HEADER.size else Commit()
    return commit if text == seal(commit) else Commit()


def read_note(file: int) -> tuple[int, int]:
    """Return from a rank's open first file the number after the highest step begun by any start, and the process of the
    last start; (0, 0) if the file is new.
    """
    text = os.pread(file, _NOTE.size, NOTE_AT)
    return _NOTE.unpack(text) if len(text) == _NOTE.size else (0, 0)


def read_progress(folder: Path) -> tuple[int, int]:
    """Return the number of commits that all ranks have, summed over a folder's loops, and the next step of the last
    loop with one, or 0.
    """
    newest: dict[int, dict[int, Commit]] = {}
    for path in folder.iterdir():
        if found := _NAME.fullmatch(path.name):
            ranks, rank = newest.setdefault(int(found[1]), {}), int(found[2])
            with path.open("rb") as file:
                ranks[rank] = max(read_header(file.fileno()), ranks.get(rank, Commit()))
    # All ranks have files before the first of them commits.
    common = [min(newest[loop].values()) for loop in sorted(newest)]
    steps = [commit.step for commit in common if commit.epoch]
    return sum(commit.epoch for commit in common), steps[-1] if steps else 0


class Briefing(NamedTuple):
    """What ``mpikv run`` tells the ranks that it starts."""

    attempt: int = 0
    """How often it has restarted them."""
    why: str = ""
    """Why it has, the last time."""
    boot: str = ""
    """The boot of the host that made the commits; "" if they are flushed, and outlive it."""
    stays: bool = False
    """Whether the folder outlives the job."""
    other_step: int = 0
    """The step after the newest commit of another number of ranks; 0 if there is none."""
    other_folder: str = ""
    """Where that commit is."""


def write_briefing(folder: Path, briefing: Briefing) -> None:
    """Write to a file of the folder the briefing that ranks read when they start. Local."""
    (folder / BRIEFING).write_text(json.dumps(briefing))


def read_briefing(folder: Path) -> Briefing:
    """Read the briefing from its file in the folder; return an empty one if there is none. Local."""
    path = folder / BRIEFING
    return Briefing(*json.loads(path.read_text())) if path.exists() else Briefing()
