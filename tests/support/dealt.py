"""Ranks that a launcher has dealt to two hosts in turn, on one machine; and the shared memory of this one."""

from typing import Any

from mpikv.cluster.mpi_library import find_mapped_files


def Dealt(comm: Any) -> Any:  # noqa: N802
    """Return the communicator, of which ranks 0, 2, … are on one host and ranks 1, 3, … on another."""
    from mpi4py import MPI  # not where one rank runs the tests, which load no library

    class Divided(MPI.Intracomm):
        def Split_type(self, split_type: int, key: int = 0, info: Any = None) -> Any:  # noqa: N802
            return self.Split(self.rank % 2, key)

    return Divided(comm)


def shared_files() -> set[str]:
    """Return the files of shared memory that this process has mapped."""
    return set(find_mapped_files(r"/dev/shm/mpikv-\S+"))
