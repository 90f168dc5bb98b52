"""Memory that the ranks of a host share: windows of MPI, the ranks that still use them, and their release."""

from __future__ import annotations

import gc
import os
import platform
import time
import weakref
from collections.abc import Callable, Sequence
from mmap import mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..arrays.arrays import zeros
from ..errors import Closed, TransportError, settled
from ..protocols import Array
from .mpi_library import TranslatedErrors, library_of
from .runtime import owned

__all__ = ["SHARED", "SharedWindows", "forget_windows", "free_leftovers"]

SHARED = "/dev/shm"
# Two cache lines: processors fetch lines in pairs, so flags of two ranks in one pair would slow each other down.
_ALIGNMENT = 128
# The live windows of this process in the order of their making, those of abandoned stores too. Kept windows outlive
# their store, because one of their ranks still has an array over them.
_LIVE, _KEPT = "live windows", "kept windows"


class _Window(NamedTuple):
    """Memory that the ranks of a host share."""

    members: tuple[tuple[int, int], ...]
    """World rank and process number of each of its ranks."""
    handle: Any
    memory: weakref.ref[Array]
    """Lives as long as any array over the window: each array holds it."""
    promised: int
    """Bytes that the system may not have made pages for yet, so it still reports them as free."""


class SharedWindows:
    """The windows of one group of ranks on one host."""

    def __init__(
        self,
        comm: Any = None,
        rank: int = 0,
        members: tuple[tuple[int, int], ...] = (),
        division: str = "",
        complete: Callable[[Any], None] = lambda request: None,
    ) -> None:
        """``comm`` has the ranks of the host, ``members``; None if this process, ``rank``, is alone.

        ``complete`` waits for an operation of theirs. If MPI puts ranks that shall share memory on several hosts,
        ``division`` is its text, and windows are files.
        """
        self._comm, self._rank, self._members, self._division = comm, rank, members, division
        self._complete = complete
        self._mpi: Any = library_of(comm) if comm is not None else None
        self._windows: list[_Window] = []

    def allocate(self, nbytes: int, zeroed: bool = True) -> Array:
        """Return memory that all ranks of this host share, aligned to 128 bytes. Freed by :meth:`close`.

        Collective over the host. It holds zeros. With ``zeroed=False`` it holds anything, and the system makes each
        page at first use: a millisecond per megabyte.

        Raises:
            MemoryError: on every rank of the host, if its shared memory is too small.
            Closed: after :meth:`close`.
        """
        if self._comm is None and self._members:
            raise Closed("the windows of these ranks are closed; memory of this rank alone would not be shared")
        if self._comm is None:
            return zeros(nbytes, _ALIGNMENT)
        # Writing to a window beyond the free space raises SIGBUS, which kills the process without a message.
        free = self._comm.bcast(_free_bytes() - sum(window.promised for window in owned(_LIVE)))
        if free < nbytes:
            text = f"{nbytes} bytes of shared memory are needed and {SHARED} has {max(free, 0)} free"
            raise settled(MemoryError(f"{text}; enlarge it (a container: --shm-size), or set MPIKV_TRANSPORT=mpi"))
        with TranslatedErrors(self._mpi, "allocating shared memory"):
            return self._open(nbytes, zeroed)

    def _open(self, nbytes: int, zeroed: bool) -> Array:
        """Make a window. Collective over the host."""
        mpi, size = self._mpi, nbytes + _ALIGNMENT
        if self._division:
            buffer = self._map_file(size)
            window = mpi.Win.Create(buffer, 1, comm=mpi.COMM_SELF)
        else:
            window = mpi.Win.Allocate_shared(0 if self._comm.rank else size, 1, comm=self._comm)
            buffer = window.Shared_query(0)[0]
        # Plain loads and stores to a window are defined inside an access epoch only; this one lasts until close.
        window.Lock_all(mpi.MODE_NOCHECK)
        memory = np.frombuffer(buffer, np.uint8)
        promised = 0 if zeroed else nbytes
        self._windows.append(_Window(self._members, window, weakref.ref(memory), promised))
        owned(_LIVE).append(self._windows[-1])
        start = -memory.ctypes.data % _ALIGNMENT
        memory = memory[start : start + nbytes]
        if zeroed:
            # Each rank writes its part, so the ranks make the pages in parallel; that takes longer than the writes.
            first, last = (nbytes * part // self._comm.size for part in (self._comm.rank, self._comm.rank + 1))
            memory[first:last] = 0
        self._comm.Barrier()  # no rank may use a part before its zeros are written
        return memory

    def _map_file(self, nbytes: int) -> mmap:
        """Return memory of a file, since MPI makes no window across hosts. Collective over the host.

        Raises:
            TransportError: on every rank of the host, if one cannot open it.
        """
        path = self._comm.bcast(f"{SHARED}/mpikv-{os.getpid()}-{time.monotonic_ns()}")
        memory, problem = mmap(-1, nbytes), ""
        # The first rank makes the file, then the others open it; the exchange of problems is the barrier between.
        for turn in (True, False):
            if turn == (self._comm.rank == 0):
                try:
                    memory = _open_memory(path, nbytes, new=turn)
                except OSError as error:
                    problem = f"rank {self._rank} cannot share memory with other ranks of this machine: {error}"
            problems = "; ".join(filter(None, self._comm.allgather(problem)))
        if self._comm.rank == 0:
            # All have mapped it. Without a name, the memory ends with the last process, even if all are killed.
            Path(path).unlink(missing_ok=True)
        if problems:
            raise TransportError(f"{problems}. {self._division}")
        return memory

    def free_last(self) -> None:
        """Free the memory of the last :meth:`allocate`; no array may use it any more. Collective over the host."""
        with TranslatedErrors(self._mpi, "freeing shared memory"):
            _free(self._windows.pop())

    def reclaim(self) -> None:
        """Free allocated memory without arrays on any rank of the host. Collective over the host."""
        if self._comm is not None:
            with TranslatedErrors(self._mpi, "freeing shared memory"):
                self._windows = self._free_unseen(self._windows)

    def ordering(self) -> Callable[[], None] | None:
        """Return a function that orders memory accesses on processors that reorder them, else None. Local.

        x86-64 keeps the order among stores and among loads; flags in shared memory need no more. Call it after
        :meth:`allocate`.
        """
        if not self._windows or platform.machine().lower() in ("x86_64", "amd64"):
            return None
        sync: Callable[[], None] = self._windows[-1].handle.Sync
        return sync

    def close(self) -> None:
        """Free unused windows: these, and the kept ones of earlier groups with the same ranks. Collective over the
        host.

        A window with an array on any rank stays, since reading freed memory would kill the process. A later close of
        the same ranks frees it once no array is left.
        """
        kept: list[_Window] = owned(_KEPT)
        windows = [*(window for window in kept if window.members == self._members), *self._windows]
        kept[:] = [window for window in kept if window.members != self._members]
        self._windows.clear()
        if any(window.memory() is not None for window in windows):
            gc.collect()  # a caught error may hold the last array in a cycle of its traceback
        kept.extend(self._free_unseen(windows))
        self._comm = None

    def _free_unseen(self, windows: Sequence[_Window]) -> list[_Window]:
        """Free the windows without arrays on any rank; return the others. Collective over the host."""
        looked_at = np.array([window.memory() is not None for window in windows], np.bool_)
        # All ranks must free the same windows in the same order: Win_free is collective.
        self._complete(self._comm.Iallreduce(self._mpi.IN_PLACE, looked_at, self._mpi.LOR))
        for window, stays in zip(windows, looked_at, strict=True):
            if not stays:
                _free(window)
        return [window for window, stays in zip(windows, looked_at, strict=True) if stays]


def _free(window: _Window) -> None:
    """Free a window. Collective over its ranks."""
    window.handle.Unlock_all()
    window.handle.Free()
    live = owned(_LIVE)
    live[:] = [other for other in live if other is not window]


def _open_memory(path: str, nbytes: int, *, new: bool) -> mmap:
    """Return the memory of a file; with ``new``, make the file. Local."""
    file = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if new else 0), 0o600)
    try:
        if new:
            os.ftruncate(file, nbytes)
        return mmap(file, nbytes)
    finally:
        os.close(file)


def _free_bytes() -> int:
    try:
        space = os.statvfs(SHARED)
    except FileNotFoundError:
        return 1 << 62  # the MPI library keeps its shared memory elsewhere
    return space.f_bavail * space.f_frsize


def free_leftovers() -> None:
    """Free shared memory that outlived its store. For the end of the program; collective.

    At its own end Open MPI frees the remaining windows in the order of their handles, and waits in each for its ranks.
    If some ranks had windows that others did not, as on several hosts, handles are used again and that order differs
    between ranks: they would wait for each other for ever. The order of making is the same on all ranks.
    """
    while live := owned(_LIVE):
        _free(live[0])


def forget_windows() -> None:
    """Leave the windows to the parent process, after a fork. Local."""
    owned(_LIVE).clear()
