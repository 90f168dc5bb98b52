"""What a rank holds in memory, as Linux counts it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Memory", "forget_peak", "free_bytes", "release_freed"]


@dataclass(frozen=True)
class Memory:
    """Resident memory of this process, in bytes; zeros where the system does not tell."""

    peak: int
    """The most that was resident at one time (VmHWM) since the start or since :func:`forget_peak`."""
    resident: int
    private: int
    """Of it, what is this process's own (RssAnon)."""
    shared: int
    """Of it, pages of shared memory (RssShmem), which every rank that has touched them counts."""
    proportional: int
    """Resident, where a page that k processes share counts 1/k in each (Pss): the sum over ranks is what the job
    holds."""

    @classmethod
    def now(cls) -> Memory:
        """Return what is resident at this moment."""
        found = _fields("status") | _fields("smaps_rollup")
        peak, resident, private, shared, proportional = (
            found.get(name, 0) for name in ("VmHWM", "VmRSS", "RssAnon", "RssShmem", "Pss")
        )
        return cls(peak, resident, private, shared, proportional)


def forget_peak() -> None:
    """Let the peak begin anew, where the system allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def release_freed() -> None:
    """Give back to the system the arrays of earlier cases, and what the allocator keeps of them (glibc), which would
    hide new ones.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def free_bytes() -> int:
    """Return the bytes that new arrays may take before the host swaps or kills; without bound if it does not tell."""
    with contextlib.suppress(OSError, KeyError):
        return _read(Path("/proc/meminfo"))["MemAvailable"]
    return 1 << 62


def _fields(name: str) -> dict[str, int]:
    try:
        return _read(Path("/proc/self") / name)
    except OSError:
        return {}


def _read(path: Path) -> dict[str, int]:
    """Return the fields of a file that are in kB, in bytes."""
    rows = [line.split() for line in path.read_text().splitlines() if line.endswith(" kB")]
    return {row[0].rstrip(":"): 1024 * int(row[1]) for row in rows}
