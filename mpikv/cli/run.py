"""``mpikv run``: start a script on several ranks, with the launcher and settings for Python's MPI library."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import platform
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec

from ..cluster.environment import free_port
from ..cluster.mpi_library import why_no_room
from ..cluster.printing import print_lines
from ..errors import ConfigError, MPIKVError, TransportUnavailable
from . import launchers
from .allocation import find_allocation, find_kill_wait
from .job import FREE, GRACE, handling, run_job
from .output import UNREAD, has_lost_reader, open_closed_files
from .parser import Parser
from .restarts import Restarts, find_folders, open_folder
from .watch import remove_leftovers

DESCRIPTION = """\
Start a Python script, or a module, on several ranks, with the launcher that belongs to the MPI library that mpi4py
loads. SCRIPT or -m MODULE ends the options: all that follows is its own."""

EPILOG = """\
examples:
  mpikv run -n 4 train.py --epochs 10      four ranks on this host
  mpikv run -n auto -m package.train       one rank per core, or per task of a Slurm job; a module
  mpikv run -n 4 --hosts a:2,b:2 train.py  two ranks on each of two hosts
  mpikv run --check -n 4 any_mpi4py.py     say why ranks of a script that uses mpi4py hang, or differ
  mpikv run -n 4 --restarts 3 train.py     go on after deaths from the last commit of kv.steps
  mpikv run -n 4 --dry-run train.py        only show the command and the variables

A rank runs the script as plain Python would, but an uncaught exception or a nonzero exit on one rank ends the whole job
(MPIKV_ABORT=0: does not). All ranks get the signals that this command gets: SIGUSR1 and SIGUSR2, which mean nothing to
it; SIGTERM, after which they have the seconds of --grace; Ctrl-C, after which they have 4. One more Ctrl-C kills them.

Each rank has the variables that torch.distributed reads: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR
and MASTER_PORT. Those that are set stay.

Ranks on other hosts get few variables from Open MPI: MPIKV_*, MPI4PY_*, OMPI_*, OMP_NUM_THREADS, PYTHONPATH, and what
--env names. MPICH gives them all.

exit status:
  0        every rank reached the end of its script, on all hosts
  2        nothing was started: misuse, no MPI library, or a launcher that does not fit it
  75       a loop of kv.steps ended early, at SIGTERM, and the same command goes on from there
  128 + s  this command received the signal s; 141 if nobody reads its output any more, as in 'mpikv run ... | head'
  other    that of the rank that failed first (an uncaught exception is 1); 1 where a rank left early without saying so;
           else the launcher's

Inside a Slurm job (salloc, sbatch) it starts the ranks on the nodes of the job, with any MPI library. Whether srun does
depends on that library and on what 'srun --mpi=list' shows: 'srun --mpi=pmi2 python train.py' serves MPICH.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    program = _program(parser, options)
    _check_spares(parser, options)
    open_closed_files()
    try:
        # No rank has begun that could receive them.
        with handling(FREE, lambda *_: None):
            return _run(options, program)
    except MPIKVError as error:
        _note(str(error))
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mpikv run",
        usage="mpikv run -n N [options] (SCRIPT | -m MODULE) [ARGUMENT ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "-n",
        "-np",
        dest="ranks",
        metavar="N",
        type=_ranks,
        required=True,
        help="number of ranks; 'auto': one per core, or Slurm's tasks",
    )
    add(
        "--hosts",
        metavar="A:2,B:2",
        type=parse_hosts,
        help="hosts, each with the most ranks it may take (default: an equal share)",
    )
    add("--check", action="store_true", help="compare the ranks' calls of mpi4py's COMM_WORLD, with deadlines")
    add("--tag", action="store_true", help="begin each line of output with its rank")
    add("--launcher", metavar="PATH", help="the mpiexec to use, instead of looking for it")
    add(
        "--grace",
        metavar="SECONDS",
        type=_seconds,
        help=f"how long ranks have after SIGTERM (default: Slurm's KillWait in a job, else {GRACE:g})",
    )
    add(
        "--restarts",
        metavar="N",
        type=_count,
        default=0,
        help="start all ranks again after a death; give up after N restarts without a new commit of kv.steps",
    )
    add(
        "--spares",
        metavar="MODULE,...",
        help="start the ranks of the next restart after the first commit; they import these modules, and wait",
    )
    add("--keep", metavar="DIR", help="folder for the commits of kv.steps (default: shared memory, until the job ends)")
    add("--env", metavar="NAME", action="append", default=[], help="forward this variable, too (repeatable)")
    add("--dry-run", action="store_true", help="print the command and the variables, and start nothing")
    add("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    add("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _ranks(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number or 'auto'")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds


def parse_hosts(text: str) -> dict[str, int]:
    """Return the number of ranks for each host; 0 if the text does not say.

    >>> parse_hosts("a:2,b")
    {'a': 2, 'b': 0}
    """
    hosts: dict[str, int] = {}
    for part in text.split(","):
        name, colon, count = part.strip().partition(":")
        if not name or name in hosts or (colon and (not count.isdecimal() or int(count) < 1)):
            raise argparse.ArgumentTypeError(f"{part!r} in {text!r} is not a new HOST or HOST:NUMBER")
        hosts[name] = int(count or "0")
    return hosts


def _program(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    """Return the arguments for the rank's process. Errors that every rank would print are reported here once."""
    if options.module is not None:
        return _module(parser, options.module)
    script: list[str] = options.script[1:] if options.script[:1] == ["--"] else options.script
    if script and _is_python(script[0]):
        _check_python(parser, script)
        script = script[1:]
        if script[:1] == ["-m"]:
            return _module(parser, script[1:])
    if not script:
        parser.error("give a script, or -m and a module")
    _check_script(parser, script[0])
    return script


def _module(parser: argparse.ArgumentParser, arguments: list[str]) -> list[str]:
    if not arguments:
        parser.error("-m needs the name of a module")
    if not _has_module(arguments[0]):
        parser.error(f"no module named {arguments[0].partition('.')[0]!r}")
    return ["-m", *arguments]


def _has_module(name: str) -> bool:
    top = name.partition(".")[0]
    # Like python -m, the ranks look in the current directory first.
    here = PathFinder.find_spec(top, [os.getcwd(), *sys.path])
    return here is not None or top in sys.builtin_module_names or find_spec(top) is not None


def _check_script(parser: argparse.ArgumentParser, script: str) -> None:
    if not os.path.exists(script):
        module = script.isidentifier() and _has_module(script)
        parser.error(f"no file {script!r}" + (f"; to run the module of that name: -m {script}" if module else ""))
    if not os.access(script, os.R_OK):
        parser.error(f"the file {script!r} cannot be read")
    if os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
        parser.error(f"{script!r} is a directory without a file __main__.py")


def _check_spares(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.spares is None:
        return
    if not options.restarts:
        parser.error("--spares needs --restarts N")
    for module in options.spares.split(","):
        if find_spec(module.partition(".")[0]) is None:
            parser.error(
                f"--spares: no installed module is named {module!r}; spares import none that lies beside the script"
            )


_PYTHON = re.compile(r"(python|pypy)[\d.]*")


def _is_python(word: str) -> bool:
    """Return whether a word names the interpreter, which an mpiexec needs before the script."""
    return _PYTHON.fullmatch(os.path.basename(word)) is not None and (os.sep in word or not os.path.isfile(word))


def _check_python(parser: argparse.ArgumentParser, script: list[str]) -> None:
    """Refuse another interpreter than this one, and options for it: all ranks run this one."""
    given = os.path.abspath(script[0])
    # Compare folders with links resolved, but not the interpreter's own link: by it environments differ.
    folder, ours = (os.path.realpath(os.path.dirname(path)) for path in (given, sys.executable))
    if os.sep in script[0] and folder != ours:
        parser.error(
            f"ranks run with {sys.executable}, not with {given}; leave it out, or install mpikv there and "
            f"start that: {given} -m mpikv run ..."
        )
    version = re.fullmatch(r"\D+(\d+)(?:\.(\d+))?[\d.]*", os.path.basename(script[0]))
    wanted = tuple(int(number) for number in version.groups() if number) if version else ()
    if wanted != sys.version_info[: len(wanted)]:
        parser.error(f"ranks run with {sys.executable}, which is not {script[0]}; leave {script[0]} out")
    if script[1:2] == ["-c"]:
        parser.error("-c is not supported; write the code to a file and give that file")
    if len(script) > 1 and script[1].startswith("-") and script[1] != "-m":
        parser.error(f"ranks run with {sys.executable} without the option {script[1]}; leave it out")


# Not -m: it would import this package, and numpy, from the current directory first.
_ENTRY = "import sys; sys.path[0] or sys.path.pop(0); from mpikv.cli.rank import main; main()"


def _run(options: argparse.Namespace, program: Sequence[str]) -> int:
    environ = launchers.environment()
    if unset := [name for name in options.env if name not in environ]:
        raise ConfigError(f"--env names variables that are not set: {', '.join(unset)}")
    command = [sys.executable, "-c", _ENTRY, *program]
    slurm = None if options.hosts else find_allocation(environ)
    cores = launchers.core_count() if slurm is None else slurm.cores
    size = options.ranks if options.ranks != "auto" else cores if slurm is None else slurm.size
    hosts = _fill(options.hosts, size) if options.hosts else None
    try:
        library = launchers.find_library(environ)
        launcher = launchers.find_launcher(library, environ, options.launcher)
    except TransportUnavailable as error:
        if size > 1 or hosts:
            raise
        _note(f"one rank, started without a launcher: {error}")
        plan, version = launchers.direct(command, cores, environ), ""
    else:
        version = library.version
        plan = launchers.plan(
            library,
            launcher,
            command,
            size=size,
            cores=cores,
            uid=os.getuid(),
            environ=environ,
            hosts=hosts,
            tasks=slurm.tasks if slurm else (),
            tag=options.tag,
            forwarded=[*options.env, *["MPIKV_KEEP"] * bool(options.keep)],
            shield=slurm is not None and launchers.can_shield(environ),
        )
    if options.dry_run:
        print(
            "\n".join(
                [*(f"{name}={shlex.quote(value)}" for name, value in plan.variables.items()), shlex.join(plan.command)]
            )
        )
        return 0
    if any(name in plan.variables for name in launchers.ROOT_VARIABLES):
        _note("running as root: Open MPI refuses this by default, so this command sets the variables that allow it")
    if left := remove_leftovers() + find_folders(remove=True):
        _note(f"removed {len(left)} file{'s' * (len(left) > 1)} left by killed jobs of this user, such as {left[0]}")
    one_host = not hosts and (slurm is None or (slurm.here and len(slurm.tasks) == 1))
    first = "127.0.0.1" if one_host else next(iter(hosts)) if hosts else slurm.first if slurm else platform.node()
    if one_host and (problem := why_no_room(version, size, as_if_empty=False)):
        raise TransportUnavailable(problem)
    if version and (rivals := launchers.name_rivals(version)):
        _note(rivals)
    checks = {"MPIKV_CHECK": "1"} if options.check else {}
    with contextlib.ExitStack() as stack:
        restarts = None
        if options.restarts or options.keep:
            if not one_host and (options.spares or not options.keep):
                text = "on several hosts --restarts needs --keep DIR, a folder on a file system that they share"
                raise ConfigError(f"{text}, and no --spares")
            home = stack.enter_context(open_folder(options.keep))
            restarts = Restarts(home, size, options.restarts, options.keep is not None, _note, flushed=not one_host)
        status, reason = run_job(
            plan.command,
            {**launchers.clean(environ), **plan.variables, "MPIKV_MASTER": f"{first},{free_port()}", **checks},
            size,
            one_host=one_host,
            tell=_note,
            grace=options.grace or find_kill_wait(environ) or GRACE,
            restarts=restarts,
            spares=options.spares,
        )
    # The launcher has killed the ranks after a closed pipe: MPICH's by SIGKILL, Open MPI's by SIGTERM.
    if status in (128 + signal.SIGKILL, 128 + signal.SIGTERM) and has_lost_reader():
        return UNREAD
    if reason:
        _note(reason)
    return status


def _fill(hosts: dict[str, int], size: int) -> dict[str, int]:
    """Return the number of ranks for each host, filling one host before the next."""
    share = math.ceil(size / len(hosts))
    filled: dict[str, int] = {}
    for host, room in hosts.items():
        taken = min(room or share, size - sum(filled.values()))
        if taken:
            filled[host] = taken
    if sum(filled.values()) < size:
        raise ConfigError(f"--hosts has room for {sum(filled.values())} ranks, not for {size}")
    return filled


def _note(text: str) -> None:
    print_lines(text, "mpikv run: ")
