"""How a process finds the ranks of its launch, and the obstacles it reports."""

from __future__ import annotations

import os
import sys
from typing import Any

from ..config import Config
from ..errors import ConfigError, TransportUnavailable, Unsupported
from .environment import (
    FILES,
    Launch,
    advise_start,
    forgo_single_copy,
    free_port,
    has_one_thread,
    has_rank_variables,
    launch_by_mpi,
    launch_of,
    place_on_host,
    run_directory,
    set_rank_variables,
    tasks_set_aside,
)
from .mpi_library import (
    check_world,
    find_mapped_files,
    load_mpi,
    may_read_processes,
    name_library,
    start_mpi,
    why_no_room,
)
from .printing import log
from .process_group import ProcessGroup, warn_once
from .runtime import SHARED, present
from .shutdown import abort_on_exception, wait_or_abandon, was_forked

# Seconds that ranks wait for each other to import mpikv.torch; bytes of the first rank's address.
_TIMEOUT, _ADDRESS = 60.0, 300


def connect(comm: Any, config: Config) -> ProcessGroup:
    """Return a new group of the launch's ranks, or of ``comm``; may start MPI, set sys.excepthook, warn. Collective.

    It also writes the names of shared files for ``mpikv run``.

    Raises:
        TransportUnavailable: the process was launched as one of several ranks but no MPI library can be loaded, or this
            host has too little shared memory for it to start.
        ConfigError: the launcher and the MPI library are of different makes, so every process believes it is alone.
        Unsupported: the process was forked from a rank that had a store, or started by multiprocessing in a rank.
        TypeError: ``comm`` is no communicator.
        Stalled: not all ranks have come.
    """
    if present().world is not None or hasattr(comm, "library"):
        return ProcessGroup(_find_simulated(comm), config.simulate_ranks_per_host, config.timeout)
    if comm is not None:
        _check_communicator(comm)
    launch = launch_of()
    if comm is None:
        # Before MPI is loaded: a worker of a rank must not start it.
        _check_worker(launch)
        if (launch is None or launch.size == 1) and "mpi4py.MPI" not in sys.modules:
            # A warning, no error: a batch script has the variable too, and may start a program of one rank.
            if launch is None and (tasks := tasks_set_aside()) > 1:
                text = "the store has one rank in a Slurm job of %d tasks; to start all ranks, use  %s"
                log(text, tasks, advise_start(tasks))
            return ProcessGroup()
    if launch is not None and launch.size != 1:
        _check_container()
    mpi = load_mpi() if launch is None else start_mpi(launch)
    if launch is not None and comm != mpi.COMM_SELF:  # a store on COMM_SELF needs no other rank
        check_world(launch, mpi)
    world = mpi.COMM_WORLD if comm is None else comm
    if world.size > 1:
        if was_forked():
            raise Unsupported(
                "create: this process was forked from a rank and cannot use MPI: it would receive the rank's "
                "messages; start processes by the 'spawn' method, or before the first store is created"
            )
        if config.abort:
            abort_on_exception(mpi)
    group = ProcessGroup(world, config.simulate_ranks_per_host, config.timeout)
    if mpi.COMM_WORLD.rank == 0 and not config.simulate_ranks_per_host and (text := _describe_crowd(group)):
        warn_once(text)
    if launch is not None and (directory := run_directory()):
        # A killed rank cannot remove its shared files; the launcher finds their names here.
        (directory / f"{FILES}{launch.rank}").write_text("\n".join(find_mapped_files(rf"{SHARED}/\S+")))
    return group


def set_rank_variables_of_mpiexec() -> None:
    """If mpiexec alone started several ranks, start MPI and set PyTorch's rank variables; else nothing. Collective.

    The first rank tells the others its address. Elsewhere, as under ``mpikv run``, it does nothing.

    Raises:
        Stalled: not all ranks have come.
    """
    launch = launch_by_mpi()
    if launch is None or launch.size == 1 or has_rank_variables() or was_forked() or _is_worker():
        return
    comm = start_mpi(launch).COMM_WORLD
    place, address = place_on_host(), bytearray(_ADDRESS)
    host = "127.0.0.1" if place and place[1] == comm.size else present().host
    if comm.rank == 0:
        text = f"{host},{free_port()}".encode()
        address[: len(text)] = text
    wait_or_abandon(comm.Ibcast(address, 0), comm, _TIMEOUT)
    set_rank_variables(launch, address.rstrip(b"\0").decode())


def _is_worker() -> bool:
    """Return whether multiprocessing has started this process. Local."""
    processes = sys.modules.get("multiprocessing.process")
    return processes is not None and processes.parent_process() is not None


def _describe_crowd(group: ProcessGroup) -> str:
    """Return advice if this host has more ranks than cores; otherwise "". Local."""
    ranks, cores = len(group.host_ranks), group.host_cores
    if ranks <= cores:
        return ""
    threads = "" if has_one_thread() else ", and set OMP_NUM_THREADS=1, as each rank starts threads of its own"
    return (
        f"{ranks} ranks share {cores} core{'s' * (cores > 1)} of {group.hosts[0]}, so that calls wait for ranks that "
        f"have no core; start no more than {cores} there{threads}"
    )


def _find_simulated(comm: Any) -> Any:
    """In a simulated rank, return ``comm``, or the communicator of all ranks if ``comm`` is None; ConfigError if
    ``comm`` is not of this rank. Local.

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
    """Raise TypeError or ConfigError unless ``comm`` is one of mpi4py that joins one group of ranks. Local."""
    if "mpi4py.MPI" not in sys.modules or not isinstance(comm, (mpi := load_mpi()).Comm):
        raise TypeError(f"create: comm={comm!r} is not an mpi4py.MPI.Intracomm; leave it out for all ranks")
    if comm == mpi.COMM_NULL:
        raise ConfigError(
            "create: comm is MPI.COMM_NULL, so this rank belongs to no part of the split; create the store only on "
            "members of a communicator"
        )
    if comm.Is_inter():
        raise ConfigError("create: comm is an intercommunicator, which joins two groups of ranks; pass comm.Merge()")


def _check_container() -> None:
    """If MPICH is denied single copies, turn them off or warn; TransportUnavailable if /dev/shm is short. Local."""
    mpi = load_mpi(start=False)
    library, started, place = name_library(mpi.Get_library_version()), mpi.Is_initialized(), place_on_host()
    if library.startswith("MPICH") and not may_read_processes() and not forgo_single_copy(started):
        warn_once(
            "this container forbids process_vm_readv, by which MPICH sends large messages, so that they fail; set "
            "MPIR_CVAR_CH4_CMA_ENABLE=0 on all ranks, or start them by mpikv run"
        )
    if place and not started and (problem := why_no_room(library, place[1], as_if_empty=True)):
        raise TransportUnavailable(f"create: {problem}")


def _check_worker(launch: Launch | None) -> None:
    """In a process started by multiprocessing: raise Unsupported if its parent is a rank, else warn. Local."""
    if not _is_worker():
        return
    # It has its parent's rank: as a second process of that rank it would wait in MPI's start for ever.
    if launch is not None and launch.size != 1:
        raise Unsupported(
            f"create: multiprocessing started this process in rank {launch.rank} of {launch.size}, and it is not a "
            "rank itself; use the store in the rank, or start one process per rank by mpikv run"
        )
    warn_once(
        f"multiprocessing started process {os.getpid()}, whose store has one rank and shares nothing with the stores "
        "of other processes; to share one store, start N ranks by  mpikv run -n N SCRIPT"
    )
