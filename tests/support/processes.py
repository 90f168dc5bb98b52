"""The processes of a job, some of which may have been left."""

import contextlib
import os
from pathlib import Path


def find_processes(mark: str, where: str = "environ") -> list[int]:
    """Return the processes, this one left out, whose environment has a text, or with "cmdline" their command."""
    found = []
    for file in Path("/proc").glob(f"[0-9]*/{where}"):
        # Processes end meanwhile; others belong to other users.
        with contextlib.suppress(OSError):
            if mark.encode() in file.read_bytes() and file.parent.name != str(os.getpid()):
                found.append(int(file.parent.name))
    return found


def is_running(process: int | str) -> bool:
    """Return whether a process has not ended. Its parent may not know it yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
