"""What a process holds, and whether it grows: memory, open files, shared mappings, MPI's communicators and windows."""

import gc
import os
from pathlib import Path
from typing import Any

import mpikv

FEWEST = 4
"""Samples of which growth is told."""
WARM = 100
"""Samples from which on the growth of memory counts."""
ROOM = 4096
"""KiB that an allocator may keep."""
WINDOWS = 16
"""More windows than a program has at once."""
COMMUNICATORS = 100
"""More communicators than a program has at once, and so many windows with those that MPI makes for each."""
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "32768", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Makes glibc give memory back that is free. Else it keeps more and more of it for hundreds of programs."""


class Resources:
    """Samples of what this process holds."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.samples = comm, list[dict[str, int]]()

    def sample(self) -> None:
        gc.collect()
        if self.comm:
            # Memory over which the program kept an array goes with the next close of a store.
            mpikv.create("dist_sync", comm=self.comm).close()
        status = Path("/proc/self/status").read_text()
        (resident,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
        maps = Path("/proc/self/maps").read_text().splitlines()
        found = {
            "resident KiB": resident,
            "open files": len(os.listdir("/proc/self/fd")),
            "shared mappings": sum(line.split()[1].endswith("s") for line in maps),
        }
        self.samples.append(found | (self.handles() if self.comm else {}))

    def handles(self) -> dict[str, int]:
        """Return the highest of many numbers that MPI gives to new communicators and windows: older ones raise it.

        Not the next number: MPICH gives the one that was freed last, and programs free them in any order.
        """
        from mpi4py import MPI

        comms = [self.comm.Dup() for _ in range(COMMUNICATORS)]
        highest = {"highest communicator": max(comm.py2f() for comm in comms)}
        for comm in comms:
            comm.Free()
        # With memory: MPICH 5.0 keeps 300 bytes of every shared window that is freed, until one of this kind is made.
        windows = [MPI.Win.Allocate(8, comm=self.comm) for _ in range(WINDOWS)]
        highest["highest window"] = max(window.py2f() for window in windows)
        for window in windows:
            window.Free()
        return highest

    def growth(self) -> list[str]:
        """Return what rose between the second quarter of the run and its end."""
        count = len(self.samples)
        early, late = self.samples[count // 4 : count // 2], self.samples[-max(1, count // 4) :]
        if count < FEWEST:
            return []
        grown = []
        for name in self.samples[0]:
            before, after = max(sample[name] for sample in early), min(sample[name] for sample in late)
            memory = name == "resident KiB"
            if after > before + ROOM * memory and (not memory or count >= WARM):
                grown.append(f"{name} rose from {before} to {after}")
        return grown
