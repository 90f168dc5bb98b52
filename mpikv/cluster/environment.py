"""Variables that launchers, MPI, CUDA and NCCL set or read. The settings of a store are in ``config.py``."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError

# Files in the directory MPIKV_RUN. The prefix of a rank's list of its shared files, which mpikv run removes if the rank
# is killed.
FILES = "files."
# The prefix of a rank's mark that its script has ended well without starting MPI.
UNSTARTED = "unstarted."
# A rank's reason for ending the job.
GIVEN_UP = "given-up"


def run_directory(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the directory in which ``mpikv run`` on this host reads its ranks' files, or None."""
    directory = Path(environ.get("MPIKV_RUN", ""))
    return directory if directory.is_absolute() and directory.is_dir() else None


def keep_directory(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the directory where ``mpikv run --restarts`` has its ranks keep their commits, or None."""
    return Path(environ["MPIKV_KEEP"]) if "MPIKV_KEEP" in environ else None


class Launch(NamedTuple):
    """A launcher's message to this process, from its environment."""

    launcher: str
    size: int
    rank: int


# The size and rank variables of launchers. An inner launcher comes before the outer one that may have started it.
# MPICH's hydra, Intel MPI and Slurm speak PMI. The last two start processes, but no MPI.
_LAUNCHERS = (
    ("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI (MPICH, Intel MPI or Slurm)", "PMI_SIZE", "PMI_RANK"),
    ("PMIx", "SLURM_STEP_NUM_TASKS", "PMIX_RANK"),
    ("PMIx", "", "PMIX_RANK"),
    ("srun without PMI", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("torchrun", "WORLD_SIZE", "RANK"),
)


def launch_of(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """Return launcher, size and rank from the environment; None without a launcher. Size 0: it does not say.

    >>> launch_of({"PMI_SIZE": "4", "PMI_RANK": "1"}).size
    4
    """
    for launcher, size, rank in _LAUNCHERS:
        if rank in environ and (not size or size in environ):
            # A PMIx launcher sets the rank but not always the size.
            return Launch(launcher, _number(environ, size) if size in environ else 0, _number(environ, rank))
    return None


def launch_by_mpi(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """Return the launch if MPI can join its ranks, of size 0 if the launcher does not say; None without one, under
    torchrun and under srun without PMI; ConfigError for a malformed variable.

    >>> launch_by_mpi({"PMI_SIZE": "4", "PMI_RANK": "1"}).rank
    1
    >>> launch_by_mpi({"PMI_SIZE": "1", "PMI_RANK": "0", "WORLD_SIZE": "2", "RANK": "1", "TORCHELASTIC_RUN_ID": "none"})
    """
    launch = launch_of(environ)
    starts_none = {launcher for launcher, _, _ in _LAUNCHERS[-2:]}
    by_mpi = launch is not None and launch.launcher not in starts_none and "TORCHELASTIC_RUN_ID" not in environ
    return launch if by_mpi else None


# The launchers' variables of the local rank and the number of local ranks.
_LOCAL_RANKS = (("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"), ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"))


def place_on_host(environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Return (local rank, number of local ranks) as Open MPI's or MPICH's launcher set them; None without those.

    >>> place_on_host({"MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"})
    (2, 4)
    """
    for rank, size in _LOCAL_RANKS:
        if rank in environ and size in environ:
            return _number(environ, rank), _number(environ, size)
    return None


def set_rank_variables(launch: Launch | None, master: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set those of PyTorch's RANK, WORLD_SIZE, LOCAL_* and MASTER_* that are known and missing in ``environ``. The
    launch None is rank 0 of 1; ``master`` is "ADDRESS,PORT" on the first rank's host, or "".

    >>> set_rank_variables(Launch("PMI", 2, 1), "127.0.0.1,29400", environ := {"MASTER_PORT": "29500"})
    >>> sorted(environ.items())
    [('MASTER_ADDR', '127.0.0.1'), ('MASTER_PORT', '29500'), ('RANK', '1'), ('WORLD_SIZE', '2')]
    """
    rank, size = (launch.rank, launch.size) if launch else (0, 1)
    values = {"RANK": str(rank), "WORLD_SIZE": str(size)}
    if place := (0, 1) if size == 1 else place_on_host(environ):
        values["LOCAL_RANK"], values["LOCAL_WORLD_SIZE"] = map(str, place)
    address, _, port = master.rpartition(",")
    if address:
        values |= {"MASTER_ADDR": address, "MASTER_PORT": port}
    for name, value in values.items():
        environ.setdefault(name, value)


def has_rank_variables(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether RANK, the first of PyTorch's variables of a rank, is set."""
    return "RANK" in environ


def free_port() -> int:
    """Return a port that is free on this host."""
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def has_one_thread(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether OMP_NUM_THREADS keeps the BLAS below numpy from starting threads in each rank."""
    return environ.get("OMP_NUM_THREADS") == "1"


def forced_library(environ: Mapping[str, str] = os.environ) -> str:
    """Return MPI4PY_LIBMPI, the MPI library for mpi4py to load, or ""."""
    return environ.get("MPI4PY_LIBMPI", "")


def forgo_single_copy(started: bool = False, environ: MutableMapping[str, str] = os.environ) -> bool:
    """Unless MPI has started, set MPICH's variable against single copies, if missing; return whether they are off.

    >>> forgo_single_copy(started=True, environ={}), forgo_single_copy(environ={})
    (False, True)
    """
    # MPICH reads it once, in its start.
    if not started:
        environ.setdefault("MPIR_CVAR_CH4_CMA_ENABLE", "0")
    return environ.get("MPIR_CVAR_CH4_CMA_ENABLE") == "0"


def lengthen_tcp_reads(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set UCX_TCP_RX_SEG_SIZE=1m, for longer reads by MPICH, unless it or its TX twin is set; before MPI starts.

    >>> lengthen_tcp_reads(environ := {})
    >>> environ
    {'UCX_TCP_RX_SEG_SIZE': '1m'}
    >>> lengthen_tcp_reads(environ := {"UCX_TCP_TX_SEG_SIZE": "4m"})
    >>> environ
    {'UCX_TCP_TX_SEG_SIZE': '4m'}
    """
    # It takes 64 KiB by default. Beside a computing thread a rank comes to MPI a few hundred times a second. UCX does
    # not start where it may send more at once than it takes.
    if "UCX_TCP_TX_SEG_SIZE" not in environ:
        environ.setdefault("UCX_TCP_RX_SEG_SIZE", "1m")


def tasks_set_aside(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of tasks of this Slurm job; 1 outside of one."""
    return _number(environ, "SLURM_NTASKS") if "SLURM_NTASKS" in environ else 1


def offered_protocols(environ: Mapping[str, str] = os.environ) -> set[str]:
    """Return those of "PMI" (versions 1 and 2) and "PMIx" that the launcher offers to find other ranks.

    >>> sorted(offered_protocols({"PMI_FD": "9", "PMIX_NAMESPACE": "slurm.pmix.1.0"}))
    ['PMI', 'PMIx']
    """
    prefixes = {"PMI": "PMI_", "PMIx": "PMIX_NAMESPACE"}
    return {protocol for protocol, prefix in prefixes.items() if any(name.startswith(prefix) for name in environ)}


def demands_munge(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher's PMIx admits only ranks with a credential of munge."""
    return environ.get("PMIX_SECURITY_MODE") == "munge"


# The value of 'srun --mpi=' for each library that may work by it, and its condition. Cray's text names MPICH too, so it
# comes first.
_OF_SRUN = (
    ("CRAY", "cray_shasta", ""),
    ("Intel", "pmi2", ", and I_MPI_PMI_LIBRARY is set to Slurm's libpmi2.so"),
    ("MPICH", "pmi2", ""),
    ("Open MPI", "pmix", ", and Open MPI was built for this cluster"),
)


def advise_start(size: int, library: str = "", environ: Mapping[str, str] = os.environ) -> str:
    """Return words with the commands that start ``size`` ranks here; in Slurm also srun for the MPI library.

    >>> advise_start(4, environ={})
    'mpikv run -n 4 SCRIPT , or the mpiexec of the MPI library that Python loads'
    """
    command = f"mpikv run -n {size} SCRIPT"
    if "SLURM_JOB_ID" not in environ:
        return f"{command} , or the mpiexec of the MPI library that Python loads"
    # With the condition: a library that finds no protocol starts each process as a rank of its own.
    srun = [
        f", or  srun --mpi={kind} -n {size} python SCRIPT  if 'srun --mpi=list' shows {kind}{condition}"
        for name, kind, condition in _OF_SRUN
        if name in library
    ]
    return "".join([f"{command}  without srun, inside of salloc or sbatch", *srun[:1]])


def _number(environ: Mapping[str, str], variable: str) -> int:
    """Return the number in a launcher's variable, set in ``environ``; ConfigError if it is no whole number from 0."""
    text = environ[variable].strip()
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{variable}={environ[variable]!r} is not a number from 0; a launcher sets it: unset it")
    return int(text)


def visible_gpus(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the text of CUDA_VISIBLE_DEVICES, the GPUs that CUDA shows this process, or None if it is not set."""
    return environ.get("CUDA_VISIBLE_DEVICES")


# If ranks differ in one of these, NCCL waits for ever, or moves wrong bytes.
_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
_OF_NCCL = ("NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_COMM_BLOCKING", _ORDER, "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_PROTO")


def nccl_settings(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return, by name, the set variables of NCCL that must be the same on all ranks.

    >>> nccl_settings({"NCCL_ALGO": "Ring", "NCCL_DEBUG": "WARN"})
    {'NCCL_ALGO': 'Ring'}
    """
    return {name: environ[name] for name in _OF_NCCL if name in environ}


def order_launches(environ: MutableMapping[str, str] = os.environ) -> None:
    """Before NCCL's first use, set NCCL_LAUNCH_ORDER_IMPLICIT=1, if missing: several communicators' work starts in
    program order.

    Without it ranks may wait for each other for ever.

    >>> order_launches(environ := {})
    >>> environ
    {'NCCL_LAUNCH_ORDER_IMPLICIT': '1'}
    """
    environ.setdefault(_ORDER, "1")


def nccl_host(environ: Mapping[str, str] = os.environ) -> str:
    """Return NCCL's name of this host: NCCL_HOSTID, or the host's own.

    >>> nccl_host({"NCCL_HOSTID": "a"})
    'a'
    """
    # As NCCL itself decides it: ranks of one name are on one host, and may not share a GPU.
    return environ.get("NCCL_HOSTID") or platform.node()
