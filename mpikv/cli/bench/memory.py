"""A rank's memory, as Linux counts it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Memory", "forget_peak", "free_bytes", "release_freed"]


@dataclass(frozen=True)
class Memory:
    """Resident memory of this process in bytes; zeros if the system does not tell."""

    peak: int
    """The most resident bytes at one time (VmHWM) since the start or since :func:`forget_peak`."""
    resident: int
    private: int
    """This process's own part of it (RssAnon)."""
    shared: int
    """Its pages of shared memory (RssShmem); every rank that has touched a page counts it."""
    proportional: int
    """Resident bytes, with 1/k of a page shared by k processes (Pss): the sum over ranks is the job's memory."""

    @classmethod
    def now(cls) -> Memory:
        """Return the memory at this moment."""
        found = _fields("status") | _fields("smaps_rollup")
        peak, resident, private, shared, proportional = (
            found.get(name, 0) for name in ("VmHWM", "VmRSS", "RssAnon", "RssShmem", "Pss")
        )
        return cls(peak, resident, private, shared, proportional)


def forget_peak() -> None:
    """Start the peak anew, if the system allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def release_freed() -> None:
    """Return freed memory to the system: arrays of earlier cases, and the allocator's reserve (glibc). Otherwise new
    arrays would reuse it, and not show.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def free_bytes() -> int:
    """Return the bytes for new arrays before the host swaps or kills; 2**62 if it does not tell."""
    with contextlib.suppress(OSError, KeyError):
        return _read(Path("/proc/meminfo"))["MemAvailable"]
    return 1 << 62


def _fields(name: str) -> dict[str, int]:
    try:
        return _read(Path("/proc/self") / name)
    except OSError:
        return {}


def _read(path: Path) -> dict[str, int]:
    """Return a file's fields in kB, converted to bytes."""
    rows = [line.split() for line in path.read_text().splitlines() if line.endswith(" kB")]
    return {row[0].rstrip(":"): 1024 * int(row[1]) for row in rows}
