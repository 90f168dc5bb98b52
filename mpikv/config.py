"""Settings, and the one place that reads the environment.

An argument of :func:`mpikv.create` comes first, then the variable ``MPIKV_<FIELD>``, then the default.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from .errors import ConfigError, a_kind
from .options import choice, count, flag, number, settle_fields

TRANSPORTS = ("auto", "hierarchical", "local", "mpi", "shm")
PLACEMENTS = ("auto", "replicated", "root", "sharded")
KERNELS = ("numba", "numpy")
# Fields that are no arguments of create.
VARIABLES_ONLY = ("abort", "full_traceback", "gpu_sharing", "simulate_ranks_per_host", "single_copy", "trace")
# Fields in which ranks may differ.
OWN_AFFAIRS = ("abort", "full_traceback", "trace")


@dataclass(frozen=True)
class Config:
    """Settings of a store. All but ``abort``, ``full_traceback`` and ``trace`` must be the same on every rank;
    :func:`mpikv.create` compares them.
    """

    transport: str = choice("auto", TRANSPORTS)
    """How bytes move: ``local`` (one rank), ``shm`` (ranks of one host), ``hierarchical`` (several hosts, with ``shm``
    inside of each), ``mpi`` (any hosts); ``auto`` chooses by the hosts of the ranks."""
    placement: str = choice("auto", PLACEMENTS)
    """Where values live: ``root``, ``sharded``, ``replicated``; ``auto`` chooses by the updater."""
    bucket_bytes: int = count(1 << 20)
    """Bytes of the largest message, a multiple of 64 from 4096 to 1 GiB. About the size of a core's cache is best."""
    timeout: float = number(60.0, "[0.001, 1e9]")
    """Seconds that a rank waits for another before it raises ``Stalled``, above 0."""
    warn_after: float = number(5.0, "[0.001, 1e9]")
    """Seconds after which a waiting rank logs the late ranks and their lines of code; above 0."""
    verify_calls: bool = flag(True)
    """Whether each call compares the ranks' calls before data move. False is for measurements only."""
    deterministic: bool = flag(False)
    """Whether sums are added in an order that does not depend on the transport, the placement or the buckets, nor on
    the number of ranks, if that is a power of two and all push lists of equally many arrays."""
    native_halves: bool = flag(False)
    """Whether NCCL sums half precision in its own dtype: half of the bytes, and a rounding at each addition."""
    kernels: str = choice("numpy", KERNELS)
    """The code of optimizers' rules: ``numpy``, or ``numba``. numba compiles most rules to code that passes over memory
    once and gives the same bits."""
    single_copy: bool = flag(True)
    """Whether ranks of one host may read each other's large arrays in place, if the system lets them, instead of copies
    in shared memory. A variable only."""
    abort: bool = flag(True)
    """Whether an uncaught exception on one rank ends the whole job. Always off in a notebook."""
    full_traceback: bool = flag(False)
    """Whether tracebacks keep the frames of this package, and every rank prints its own. A variable only."""
    simulate_ranks_per_host: int = count(0)
    """For tests and measurements: treat each group of so many ranks as a host of its own; 0 follows MPI. A variable
    only, no argument of :func:`mpikv.create`."""
    gpu_sharing: bool = flag(False)
    """For tests: ranks of a host share its GPUs if there are fewer GPUs than ranks. Measurements then mean nothing. A
    variable only."""
    trace: str = ""
    """A directory for this rank's record of the begin and end of each call, for ``mpikv trace``; empty for none. A
    variable only."""

    def __post_init__(self) -> None:
        settle_fields(self)
        if self.bucket_bytes % 64 or not 4096 <= self.bucket_bytes <= 1 << 30:
            raise ConfigError(f"bucket_bytes={self.bucket_bytes} is not a multiple of 64 from 4096 to 2**30")

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ, **arguments: Any) -> Config:
        """Return the settings: the arguments that are not None, else the variables, else the defaults.

        >>> Config.read({"MPIKV_TIMEOUT": "5"}, placement="root").timeout
        5.0
        """
        parsers = {f"MPIKV_{field.name.upper()}": (field.name, _PARSERS[field.type]) for field in fields(cls)}
        values: dict[str, Any] = {}
        for variable in environ:
            if variable not in parsers:
                continue
            (name, parse), text = parsers[variable], environ[variable]
            try:
                values[name] = parse(text)
            except ValueError as error:
                kind = error if parse is _switch else a_kind(parse("0"))
                raise ConfigError(f"{variable}={text!r} is not {kind}") from None
        try:
            config = cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{error} (from the environment)") from None
        return replace(config, **{name: value for name, value in arguments.items() if value is not None})


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a warning for each variable that looks like a setting and is none.

    >>> unknown_variables({"MPIKV_TIMOUT": "5", "MPIKV_TIMEOUT": "5"})
    ['unknown variable MPIKV_TIMOUT; did you mean MPIKV_TIMEOUT?']
    """
    known = {f"MPIKV_{field.name.upper()}" for field in fields(Config)}
    unknown = [name for name in environ if name.startswith("MPIKV_") and name not in known | LAUNCHER_VARIABLES]
    if not unknown:
        return []
    import difflib  # as seldom as somebody mistypes a name

    near = [difflib.get_close_matches(name, known, n=1) for name in unknown]
    return [
        f"unknown variable {name}" + "".join(f"; did you mean {each}?" for each in found)
        for name, found in zip(unknown, near, strict=True)
    ]


def aborts(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the failure of one rank ends the whole job."""
    try:
        return Config.read(environ).abort
    except ConfigError:  # create() reports the bad variable; a job that could hang is worse
        return True


def keeps_frames(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether tracebacks keep the frames of this package: MPIKV_FULL_TRACEBACK, at any time.

    >>> keeps_frames({"MPIKV_FULL_TRACEBACK": "1"}), keeps_frames({})
    (True, False)
    """
    # A bad text means True: this runs while an error is printed, and must not raise.
    text = environ.get("MPIKV_FULL_TRACEBACK", "0")
    return _SWITCHES.get(text.lower(), True)


def updates_on_kvstore(environ: Mapping[str, str] = os.environ) -> bool:
    """Return MXNET_UPDATE_ON_KVSTORE, as MXNet's programs set it: whether a Trainer's store updates the weights.

    >>> updates_on_kvstore({"MXNET_UPDATE_ON_KVSTORE": "0"}), updates_on_kvstore({})
    (False, True)
    """
    text = environ.get("MXNET_UPDATE_ON_KVSTORE", "1")
    try:
        return _switch(text)
    except ValueError:
        raise ConfigError(f"MXNET_UPDATE_ON_KVSTORE={text!r} is neither 0 nor 1") from None


def wants_slices(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether DMLC_PS_VAN_TYPE asks for the store ``p3``, as in MXNet's programs that name another one.

    >>> wants_slices({"DMLC_PS_VAN_TYPE": "p3"}), wants_slices({"DMLC_PS_VAN_TYPE": "zmq"}), wants_slices({})
    (True, False, False)
    """
    return environ.get("DMLC_PS_VAN_TYPE", "").lower() == "p3"


def slice_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """Return the bytes of a message of the store ``p3``: MXNET_KVSTORE_SLICE_THRESHOLD elements of float32.

    >>> slice_bytes({"MXNET_KVSTORE_SLICE_THRESHOLD": "2000"}), slice_bytes({})
    (8000, 160000)
    """
    text = environ.get("MXNET_KVSTORE_SLICE_THRESHOLD", "40000")
    if not text.isascii() or not text.isdigit() or not 0 < int(text) <= 1 << 28:
        raise ConfigError(f"MXNET_KVSTORE_SLICE_THRESHOLD={text!r} is not a number of elements from 1 to 2**28")
    return max(4096, -(-int(text) * 4 // 64) * 64)


def visible_gpus(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return CUDA_VISIBLE_DEVICES, the GPUs that CUDA shows this process, or None if it is not set."""
    return environ.get("CUDA_VISIBLE_DEVICES")


# If ranks differ in one of these, NCCL waits for ever, or moves wrong bytes.
_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
_OF_NCCL = ("NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_COMM_BLOCKING", _ORDER, "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_PROTO")


def nccl_settings(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the set variables of NCCL that must be the same on all ranks.

    >>> nccl_settings({"NCCL_ALGO": "Ring", "NCCL_DEBUG": "WARN"})
    {'NCCL_ALGO': 'Ring'}
    """
    return {name: environ[name] for name in _OF_NCCL if name in environ}


def order_launches(environ: MutableMapping[str, str] = os.environ) -> None:
    """Make NCCL launch the work of several communicators on a GPU in program order, unless a variable says otherwise.

    Without it ranks may wait for each other for ever. Call it before NCCL is first used.

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
    return environ.get("NCCL_HOSTID") or platform.node()


# Variables of the launcher, set for its ranks; not settings of a store.
LAUNCHER_VARIABLES = frozenset({"MPIKV_RUN", "MPIKV_RUN_AT"})
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


_SWITCHES = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}


def _switch(text: str) -> bool:
    if text.lower() not in _SWITCHES:
        raise ValueError(f"a switch ({', '.join(_SWITCHES)})")
    return _SWITCHES[text.lower()]


# Annotations are strings here, so the table is keyed by them.
_PARSERS: Mapping[Any, Callable[[str], Any]] = {"str": str, "int": int, "float": float, "bool": _switch}


@dataclass(frozen=True)
class Launch:
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
    """Return the launcher's size and rank, or None if no launcher started this process.

    >>> launch_of({"PMI_SIZE": "4", "PMI_RANK": "1"}).size
    4
    """
    for launcher, size, rank in _LAUNCHERS:
        if rank in environ and (not size or size in environ):
            # A PMIx launcher sets the rank but not always the size.
            return Launch(launcher, _number(environ, size) if size in environ else 0, _number(environ, rank))
    return None


# The launchers' variables of the local rank and the number of local ranks.
_LOCAL_RANKS = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def place_on_host(environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Return this process's local rank and the number of its launch's ranks on this host; None if no launcher says.

    >>> place_on_host({"MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"})
    (2, 4)
    """
    for rank, size in _LOCAL_RANKS:
        if rank in environ and size in environ:
            return _number(environ, rank), _number(environ, size)
    return None


def has_one_thread(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether OMP_NUM_THREADS keeps the BLAS below numpy from starting threads in each rank."""
    return environ.get("OMP_NUM_THREADS") == "1"


def forced_library(environ: Mapping[str, str] = os.environ) -> str:
    """Return MPI4PY_LIBMPI, the MPI library for mpi4py to load, or ""."""
    return environ.get("MPI4PY_LIBMPI", "")


# Variables that make MPI libraries take ranks of one machine for ranks of several hosts.
_DIVIDING = ("MPIR_CVAR_NOLOCAL", "MPIR_CVAR_NUM_CLIQUES", "MPIR_CVAR_ODD_EVEN_CLIQUES", "PMIX_SECURITY_MODE")


def dividing_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the set variables that, in some launches, make MPI take ranks of one machine for ranks of several hosts.

    >>> dividing_variables({"PMIX_SECURITY_MODE": "native", "HOME": "/"})
    ['PMIX_SECURITY_MODE=native']
    """
    return [f"{name}={environ[name]}" for name in _DIVIDING if name in environ]


def forgo_single_copy(started: bool = False, environ: MutableMapping[str, str] = os.environ) -> bool:
    """Tell MPICH to read no memory of other processes, unless it has started; return whether it knows.

    >>> forgo_single_copy(started=True, environ={}), forgo_single_copy(environ={})
    (False, True)
    """
    if not started:
        environ.setdefault("MPIR_CVAR_CH4_CMA_ENABLE", "0")
    return environ.get("MPIR_CVAR_CH4_CMA_ENABLE") == "0"


def tasks_set_aside(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of tasks of this Slurm job; 1 outside of one."""
    return _number(environ, "SLURM_NTASKS") if "SLURM_NTASKS" in environ else 1


def offered_protocols(environ: Mapping[str, str] = os.environ) -> set[str]:
    """Return the launcher's protocols for this process to find the other ranks: PMI (versions 1 and 2) and PMIx.

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
    ("Intel", "pmi2", " with I_MPI_PMI_LIBRARY set to Slurm's libpmi2.so"),
    ("MPICH", "pmi2", ""),
    ("Open MPI", "pmix", " with an Open MPI that was built for this cluster"),
)


def advise_start(size: int, library: str = "", environ: Mapping[str, str] = os.environ) -> str:
    """Return the commands that start ``size`` ranks here; in Slurm also srun, if it offers the MPI library's protocol.

    >>> advise_start(4, environ={})
    'mpikv run -n 4 SCRIPT , or the mpiexec of the MPI library that Python loads'
    """
    command = f"mpikv run -n {size} SCRIPT"
    if "SLURM_JOB_ID" not in environ:
        return f"{command} , or the mpiexec of the MPI library that Python loads"
    ways = [(kind, condition) for name, kind, condition in _OF_SRUN if name in library][:1]
    offered = _kinds_of_srun(environ) if ways else set()
    srun = [f", or  srun --mpi={way} -n {size} python SCRIPT {condition}" for way, condition in ways if way in offered]
    return "".join([f"{command}  without srun, inside of salloc or sbatch", *srun]).rstrip()


def _kinds_of_srun(environ: Mapping[str, str]) -> set[str]:
    """Return the values that ``srun --mpi=list`` prints; none if it does not answer within 5 seconds."""
    import subprocess  # slow to import

    try:
        answer = subprocess.run(
            ["srun", "--mpi=list"], env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return set()
    return set(re.findall(r"^(?:srun:)?\s*(\w+)$", answer.stdout + answer.stderr, re.MULTILINE))


def _number(environ: Mapping[str, str], variable: str) -> int:
    """Return the number in a launcher's variable."""
    text = environ[variable].strip()
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{variable}={environ[variable]!r} is not a number from 0; a launcher sets it: unset it")
    return int(text)
