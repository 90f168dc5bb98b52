"""Memory that the ranks of a host share: files of the kernel's memory, without a name once all ranks have mapped them.

A rank keeps such memory as long as it has an array over it, and the kernel as long as a process has mapped it. So the
memory needs no release, not even after all ranks are killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import secrets
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from mmap import mmap
from typing import Any

import numpy as np

from ..arrays.arrays import zeros
from ..errors import TransportError, mark
from ..protocols import Array, Group
from .runtime import SHARED, owned, system_function

BOARD = ".board"
"""Ends the name of a status board's file. Other processes find it among the open files of a rank, after its name is
gone: Python's ``mmap`` keeps it open.
"""
# Two cache lines: processors fetch lines in pairs, so flags of two ranks in one pair would slow each other down.
_ALIGNMENT = 128
# Memory for which the system may not have made the pages yet, so it still reports them as free; and its bytes.
_PROMISED = "promised memory"
# The numbers of membarrier(2) and futex(2), then their commands MEMBARRIER_CMD_GLOBAL_EXPEDITED, WAIT and WAKE.
_MEMBARRIER = {"aarch64": 283, "loongarch64": 283, "ppc64le": 365, "riscv64": 283, "s390x": 356, "x86_64": 324}
_FUTEX = {"aarch64": 98, "loongarch64": 98, "ppc64le": 221, "riscv64": 98, "s390x": 238, "x86_64": 202}
_GLOBAL_EXPEDITED, _WAIT, _WAKE = 2, 0, 1
_ADVICE = "enlarge it (a container: --shm-size), or start the ranks by MPI and set MPIKV_TRANSPORT=mpi"


def allocate_shared(group: Group, nbytes: int, pages_now: bool = True, ending: str = "") -> Array:
    """Return ``nbytes`` zeros that this host's ranks share, private ones if it has one rank; ``ending`` ends the name
    of their file. On failure raise on all. Collective over the host.

    With ``pages_now`` the system makes its pages now, else each at first use: a millisecond per megabyte.

    Raises:
        MemoryError: on every rank of the host, if its shared memory is too small.
        TransportError: on every rank of the host, if one cannot open it.
    """
    place, size = group.local_rank, len(group.host_ranks)
    if size == 1:
        return zeros(nbytes, _ALIGNMENT)[:]  # its base is an array, as below
    path, free, problem, pages = f"{SHARED}/mpikv-{os.getpid()}-{secrets.token_hex(8)}{ending}", 0, "", mmap(-1, 1)
    promised: list[tuple[Any, int]] = owned(_PROMISED)
    promised[:] = [(memory, amount) for memory, amount in promised if memory() is not None]
    try:
        if place == 0:
            # A write beyond the free space raises SIGBUS, which kills the process without a message.
            free = _free_bytes() - sum(amount for _, amount in promised)
            if free >= nbytes:
                pages, problem = _map(group, path, nbytes, new=True)
        first, free, failed = json.loads(group.exchange(json.dumps([path, free, problem]))[0])
        if free < nbytes:
            text = f"{nbytes} bytes of shared memory are needed and {SHARED} has {max(free, 0)} free"
            raise mark(MemoryError(f"{text}; {_ADVICE}"), "settled")
        if place and not failed:
            pages, problem = _map(group, first, nbytes, new=False)
        memory = np.frombuffer(pages, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        memory = memory[start : start + nbytes]
        if pages_now:
            # Each rank writes its part, so the ranks make the pages in parallel; that takes longer than the writes.
            memory[nbytes * place // size : nbytes * (place + 1) // size] = 0
        else:
            promised.append((weakref.ref(memory.base), nbytes))
        # The last exchange: all have mapped the file, and no rank uses a part before its zeros are written.
        problems = "; ".join(filter(None, group.exchange(problem)))
    finally:
        if place == 0:
            with suppress(FileNotFoundError):
                os.unlink(path)
    if problems:
        raise TransportError(f"{problems}; MPIKV_SIMULATE_RANKS_PER_HOST=1 lets ranks share none")
    return memory


def _map(group: Group, path: str, nbytes: int, *, new: bool) -> tuple[mmap, str]:
    """Map a file, made if ``new``, and return (map, ""); on failure (private memory, the reason). The map has some
    bytes more than ``nbytes``, for the caller to align, and reserves no memory: see :func:`_free_bytes`. Local.
    """
    try:
        return _open_memory(path, nbytes + _ALIGNMENT, new=new), ""
    except OSError as error:
        problem = f"rank {group.rank} cannot share memory with other ranks of this machine: {error}"
        return mmap(-1, nbytes + _ALIGNMENT), problem


def _open_memory(path: str, nbytes: int, *, new: bool) -> mmap:
    """Map ``nbytes`` of a file, and return the map; with ``new`` first make the file, an error if it exists. Reserves
    no memory. Raises OSError. Local.
    """
    with open(path, "x+b" if new else "r+b", 0, opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        if new:
            file.truncate(nbytes)
        return mmap(file.fileno(), nbytes)


def _free_bytes() -> int:
    """Return the free bytes of the host's shared memory, 0 if it has none; pages mapped but not yet made count as free.
    Local.
    """
    with suppress(OSError):  # there is none; all ranks of the host learn it
        space = os.statvfs(SHARED)
        return space.f_bavail * space.f_frsize
    return 0


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def sleep_on(address: int, value: int, seconds: float) -> None:
    """Sleep while a 32-bit word has a value: until :func:`wake_sleepers`, ``seconds`` at most, maybe less. Local."""
    if (number := _FUTEX.get(platform.machine())) is None:
        time.sleep(1e-4)
        return
    limit = ctypes.byref(_Timespec(int(seconds), int(seconds % 1 * 1e9)))
    system_function("syscall")(number, ctypes.c_void_p(address), _WAIT, value, limit, None, 0)


def wake_sleepers(address: int) -> None:
    """Wake those who sleep on a word, in any process, to look at it again. Local."""
    if (number := _FUTEX.get(platform.machine())) is not None:
        system_function("syscall")(number, ctypes.c_void_p(address), _WAKE, 0x7FFFFFFF, None, None, 0)


def find_flag_fence(machine: str = platform.machine()) -> Callable[[], object] | None:
    """Return the function that orders the calling thread's accesses to flags in shared memory; None on x86-64, as none
    is needed there. TransportError if the system has none. Local.

    x86-64 keeps the order among stores and among loads, as flags need.

    Raises:
        TransportError: the system offers none for this processor.
    """
    return None if machine in ("x86_64", "AMD64") else find_membarrier_call(machine)


def find_membarrier_call(machine: str) -> Callable[[], object]:
    """Return a function that orders this thread's memory accesses, by membarrier(2); TransportError without it. Local.

    Raises:
        TransportError: the call is unknown for this processor, or fails.
    """
    call, number = system_function("syscall"), _MEMBARRIER.get(machine)
    # The kernel itself makes a full barrier in the caller, before and after it looks for processes that asked for one.
    if number is None or call(number, _GLOBAL_EXPEDITED, 0, 0) != 0:
        raise TransportError(
            f"the system offers no memory barrier (membarrier) on {machine}, so ranks of a host cannot share memory; "
            "set MPIKV_TRANSPORT=mpi"
        )
    return lambda: call(number, _GLOBAL_EXPEDITED, 0, 0)
