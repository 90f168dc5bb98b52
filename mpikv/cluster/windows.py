"""Memory that the ranks of a host share: windows of MPI, who still looks at them, and when they are freed."""

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
# A pair of cache lines, which processors fetch together.
_ALIGNMENT = 128
# The windows of this process that are not freed, in the order of their making: those of abandoned stores, too. Some are
# kept, as their ranks could not free them because one of them still looked at them.
_LIVE, _KEPT = "live windows", "kept windows"


class _Window(NamedTuple):
    """Memory that the ranks of a host share."""

    members: tuple[tuple[int, int], ...]
    """Their ranks in the world, and the numbers of their processes."""
    handle: Any
    memory: weakref.ref[Array]
    """Lives as long as any array over the window, each of which holds it."""
    promised: int
    """Bytes of which the system may not have made pages yet, so that it still calls them free."""


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
        """``comm`` has the ranks of the host, which are ``members``; None where this process, ``rank``, is alone.
        ``complete`` waits for an operation of theirs.

        Where MPI takes ranks that shall share memory for ranks of several hosts, ``division`` says so: windows are
        then files.
        """
        self._comm, self._rank, self._members, self._division = comm, rank, members, division
        self._complete = complete
        self._mpi: Any = library_of(comm) if comm is not None else None
        self._windows: list[_Window] = []

    def allocate(self, nbytes: int, zeroed: bool = True) -> Array:
        """Return memory that all ranks of this host share, aligned to 128 bytes. Freed by :meth:`close`.

        Collective over the host. It holds zeros, or with ``zeroed=False`` anything: the system then makes each page
        when it is first used, which takes a millisecond per megabyte.

        Raises:
            MemoryError: on every rank of the host, if its shared memory is too small.
            Closed: after :meth:`close`.
        """
        if self._comm is None and self._members:
            raise Closed("the windows of these ranks are closed; memory of this rank alone would not be shared")
        if self._comm is None:
            return zeros(nbytes, _ALIGNMENT)
        # Writing to a window that does not fit would kill the process without a word.
        free = self._comm.bcast(_free_bytes() - sum(window.promised for window in owned(_LIVE)))
        if free < nbytes:
            text = f"{nbytes} bytes of shared memory are needed and {SHARED} has {max(free, 0)} free"
            raise settled(MemoryError(f"{text}; enlarge it (a container: --shm-size), or set MPIKV_TRANSPORT=mpi"))
        with TranslatedErrors(self._mpi, "allocating shared memory"):
            return self._open(nbytes, zeroed)

    def _open(self, nbytes: int, zeroed: bool) -> Array:
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
            # A part on each rank: to make pages takes longer than to write to them.
            first, last = (nbytes * part // self._comm.size for part in (self._comm.rank, self._comm.rank + 1))
            memory[first:last] = 0
        self._comm.Barrier()
        return memory

    def _map_file(self, nbytes: int) -> mmap:
        """Return memory of a file: MPI makes no window for ranks that it takes for ranks of several hosts.

        Raises:
            TransportError: on every rank of the host, if one cannot open it.
        """
        path = self._comm.bcast(f"{SHARED}/mpikv-{os.getpid()}-{time.monotonic_ns()}")
        memory, problem = mmap(-1, nbytes), ""
        for turn in (True, False):
            if turn == (self._comm.rank == 0):
                try:
                    memory = _open_memory(path, nbytes, new=turn)
                except OSError as error:
                    problem = f"rank {self._rank} cannot share memory with other ranks of this machine: {error}"
            problems = "; ".join(filter(None, self._comm.allgather(problem)))
        if self._comm.rank == 0:
            Path(path).unlink(missing_ok=True)
        if problems:
            raise TransportError(f"{problems}. {self._division}")
        return memory

    def free_last(self) -> None:
        """Free what the last :meth:`allocate` returned, over which no array may be used any more. As collective."""
        with TranslatedErrors(self._mpi, "freeing shared memory"):
            _free(self._windows.pop())

    def reclaim(self) -> None:
        """Free what :meth:`allocate` has returned and no rank of the host looks at any more. As collective."""
        if self._comm is not None:
            with TranslatedErrors(self._mpi, "freeing shared memory"):
                self._windows = self._free_unseen(self._windows)

    def ordering(self) -> Callable[[], None] | None:
        """Return a function that orders memory accesses on processors that reorder them, else None.

        x86-64 keeps stores in order and loads in order, which is all that flags in shared memory need. Call it after
        :meth:`allocate`.
        """
        if not self._windows or platform.machine().lower() in ("x86_64", "amd64"):
            return None
        sync: Callable[[], None] = self._windows[-1].handle.Sync
        return sync

    def close(self) -> None:
        """Free what no rank looks at: these windows, and those that earlier groups of the same ranks kept. Collective.

        Memory over which a rank has kept an array stays, as reading it would kill the process; a later close of the
        same ranks frees it once no array is left.
        """
        kept: list[_Window] = owned(_KEPT)
        windows = [*(window for window in kept if window.members == self._members), *self._windows]
        kept[:] = [window for window in kept if window.members != self._members]
        self._windows.clear()
        if any(window.memory() is not None for window in windows):
            gc.collect()  # perhaps only an error that was caught looks at it, which is part of a cycle
        kept.extend(self._free_unseen(windows))
        self._comm = None

    def _free_unseen(self, windows: Sequence[_Window]) -> list[_Window]:
        """Free the windows that no rank looks at; return the others."""
        looked_at = np.array([window.memory() is not None for window in windows], np.bool_)
        self._complete(self._comm.Iallreduce(self._mpi.IN_PLACE, looked_at, self._mpi.LOR))
        for window, stays in zip(windows, looked_at, strict=True):
            if not stays:
                _free(window)
        return [window for window, stays in zip(windows, looked_at, strict=True) if stays]


def _free(window: _Window) -> None:
    window.handle.Unlock_all()
    window.handle.Free()
    live = owned(_LIVE)
    live[:] = [other for other in live if other is not window]


def _open_memory(path: str, nbytes: int, *, new: bool) -> mmap:
    """Return the memory of a file, which is made where it is to be new."""
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
    """Free the shared memory that was not freed with its store. For the end of the program; collective.

    Open MPI frees at its own end what it still has, in the order of its handles, and waits in each for the ranks that
    share it. Where ranks had windows that others had not, as on several hosts, whose numbers are used again, that order
    differs between ranks, and they would wait for each other for ever. The order of making is the same for all.
    """
    while live := owned(_LIVE):
        _free(live[0])


def forget_windows() -> None:
    """Leave the windows to the process that this one was forked from. Local."""
    owned(_LIVE).clear()
