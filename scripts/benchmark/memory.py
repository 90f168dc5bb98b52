"""A rank's memory, as Linux counts it."""

from __future__ import annotations

from dataclasses import dataclass

from mpikv.cli.bench.machine import read_fields


@dataclass(frozen=True)
class Memory:
    """Resident memory of this process in bytes."""

    private: int
    """This process's own part of it (RssAnon)."""
    shared: int
    """Its pages of shared memory (RssShmem); every rank that has touched a page counts it."""

    @classmethod
    def now(cls) -> Memory:
        """Return the memory at this moment."""
        found = read_fields("/proc/self/status")
        return cls(found["RssAnon"], found["RssShmem"])
