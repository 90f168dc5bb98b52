"""The needs of MPICH that containers withhold. Its ranks would end or fail without a message."""

from __future__ import annotations

import os
from contextlib import suppress

from .runtime import system_function
from .shared_memory import SHARED

# Bytes of shared memory that MPICH 5 takes for each rank of a host in its start. Measured; linear from 1 to 32 ranks.
_PER_RANK = 5_400_000


def may_read_processes() -> bool:
    """Return whether this process may call ``process_vm_readv``. Local."""
    with suppress(OSError):  # not Linux
        return bool(system_function("process_vm_readv")(os.getpid(), None, 0, None, 0, 0) == 0)
    return False


def why_no_room(library: str, ranks: int, others: bool) -> str:
    """Return why so many ranks cannot start on this host, or "". Local.

    With ``others``, some may have started already: their memory counts as free.
    """
    if not library.startswith("MPICH 5.") or not os.path.exists(SHARED):
        return ""
    # MPICH maps without asking, and the first write beyond the room ends the process by SIGBUS.
    space, needed = os.statvfs(SHARED), _PER_RANK * ranks
    free = (space.f_blocks if others else space.f_bavail) * space.f_frsize
    if free >= needed:
        return ""
    return (
        f"{library} needs {needed} bytes of shared memory to start {ranks} ranks, and {SHARED} has {free}; enlarge it "
        f"(a container: --shm-size={needed // 10**9 + 1}g), or start fewer ranks"
    )
