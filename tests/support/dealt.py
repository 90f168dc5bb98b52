"""Ranks that a launcher has dealt to two hosts in turn, on one machine; and the shared memory of this one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mpikv.cluster.mpi_library import find_mapped_files
from mpikv.cluster.runtime import present


@contextmanager
def dealt(comm: Any) -> Iterator[None]:
    """In a with block, stores and groups find ranks 0, 2, … on one host and ranks 1, 3, … on another."""
    here = present()
    real = here.machine
    here.machine = f"{real} {comm.rank % 2}"
    try:
        yield
    finally:
        here.machine = real


def shared_files() -> set[str]:
    """Return the files of shared memory that this process has mapped."""
    return set(find_mapped_files(r"/dev/shm/mpikv-\S+"))
