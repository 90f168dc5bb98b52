"""The measuring machine: its facts, its idle time, and its cores."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np


def describe() -> dict[str, Any]:
    """Return the facts about this host that figures depend on."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": _cpu_model(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def idle_share(seconds: float) -> float | None:
    """Return the idle share of all cores' time, in [0, 1], over some seconds; None if the system does not tell.

    Call it while the ranks sleep: a rank waiting in MPI is not idle.
    """
    try:
        before = _cpu_times()
        time.sleep(seconds)
        after = _cpu_times()
    except OSError:
        return None
    spent = [late - early for early, late in zip(before, after, strict=True)]
    # Fields 4 and 5: idle, and idle with a disk at work. Fields 9 and 10 are counted in the first two already.
    return sum(spent[3:5]) / max(1, sum(spent[:8]))


def _cpu_times() -> list[int]:
    return [int(field) for field in Path("/proc/stat").read_text().partition("\n")[0].split()[1:]]


def one_per_core(processors: Collection[int]) -> list[int]:
    """Return the first processor of each physical core."""
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    first: dict[str, int] = {}
    for cpu in sorted(processors):
        try:
            core = Path(topology.format(cpu)).read_text()
        except OSError:  # some containers hide it
            core = str(cpu)
        first.setdefault(core, cpu)
    return list(first.values())


def free_bytes() -> int:
    """Return the bytes for new arrays before the host swaps or kills; 2**62 if it does not tell."""
    with contextlib.suppress(OSError, KeyError):
        return read_fields("/proc/meminfo")["MemAvailable"]
    return 1 << 62


def read_fields(path: str) -> dict[str, int]:
    """Return a file's fields in kB, converted to bytes."""
    rows = [line.split() for line in Path(path).read_text().splitlines() if line.endswith(" kB")]
    return {row[0].rstrip(":"): 1024 * int(row[1]) for row in rows}
