"""The machine that measures: what it is, whether it is idle, and its cores."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["describe", "idle_share", "one_per_core"]


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
    """Return the share of all cores' time that was idle, in [0, 1], over so many seconds; None where it is not told.

    To be called while the ranks sleep: one that waits in MPI is not idle.
    """
    try:
        before = _cpu_times()
        time.sleep(seconds)
        after = _cpu_times()
    except OSError:
        return None
    spent = [late - early for early, late in zip(before, after, strict=True)]
    # The fourth and the fifth: idle, and idle with a disk at work. The last two are in the first two as well.
    return sum(spent[3:5]) / max(1, sum(spent[:8]))


def _cpu_times() -> list[int]:
    return [int(field) for field in Path("/proc/stat").read_text().partition("\n")[0].split()[1:]]


def one_per_core(processors: Collection[int]) -> list[int]:
    """Return the first of the processors of each physical core."""
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    first: dict[str, int] = {}
    for cpu in sorted(processors):
        try:
            core = Path(topology.format(cpu)).read_text()
        except OSError:  # some containers hide it
            core = str(cpu)
        first.setdefault(core, cpu)
    return list(first.values())
