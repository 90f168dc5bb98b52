"""The process that ``mpikv run`` starts on each rank, with the arguments ``(SCRIPT | -m MODULE) ARGUMENTS``.

The script runs as under plain Python; only its end differs. If one rank fails, the others would wait for it in their
next collective call for ever. So an uncaught exception or a nonzero exit prints its traceback, and ends the whole job.
Each rank reports its end to ``mpikv run``, since an mpiexec may report success for a rank that left early.
"""

from __future__ import annotations

import atexit
import builtins
import io
import os
import platform
import runpy
import sys
import types
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader

from ..checking.opening import check_world
from ..cluster.environment import FILES, UNSTARTED, forgo_single_copy, launch_of, run_directory, set_rank_variables
from ..cluster.mpi_library import may_read_processes
from ..cluster.printing import print_lines, until_read
from ..cluster.runtime import owned
from ..cluster.tracebacks import place_of, print_last
from ..config import aborts
from ..errors import ConfigError, text_of
from ..store.endings import tell_unseen
from .reports import Report, open_report
from .starts import wait_at_gate
from .watch import MISTAKE, PREFIX, hold_pipe, shared_files

INTERRUPTED = 130
# Mistakes of a program. Others may be those of a disk, a network or a peer.
_MISTAKES = (ImportError, SyntaxError, TypeError, NameError, AttributeError, NotImplementedError, ConfigError)


def main() -> None:
    """Run the script of the command line."""
    launch = launch_of()
    if not may_read_processes():
        forgo_single_copy()  # before the script can start MPI
    if os.environ.get("MPIKV_CHECK"):
        check_world()
    wait_at_gate(launch, os.environ)
    set_rank_variables(launch, os.environ.get("MPIKV_MASTER", ""))
    rank, size = (launch.rank, launch.size) if launch else (0, 1)
    prefix = f"[rank {rank}/{size}] " if size > 1 else ""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The launcher reads a pipe. Line buffering keeps the lines of ranks whole; PYTHONUNBUFFERED would send each
        # argument of a print by itself. And a killed rank loses no finished line.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    process = os.getpid()
    _print_errors_only(prefix, rank)
    report = open_report(os.environ)
    # At exit, not right after the script: its threads may outlive its last line.
    at_end = atexit.register(_record, report, rank, 0, process)
    status = 1
    try:
        if (directory := run_directory(os.environ)) is not None:
            with suppress(OSError):  # too few descriptors, or a file system without pipes
                hold_pipe(directory, rank)
        report(f"{PREFIX}{rank}", f"{process} {platform.node()}")
        status = _run(sys.argv[1:], prefix, lambda mistake: report(f"{MISTAKE}{rank}", mistake))
    except BaseException as error:  # of the script's own hook, say
        print_last(error, prefix, rank)
    finally:
        if status:
            atexit.unregister(at_end)
            _fail(report, status, rank, size, process)
    sys.exit(status)


def _print_errors_only(prefix: str, rank: int) -> None:
    """Set a hook that prints an uncaught exception and returns, in the place of the store's, which ends the job.

    This module ends it, with a record of the status. A hook of the script's around this one, as PyTorch's, prints what
    this one has printed only after it has returned.
    """

    def show(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        print_last(error.with_traceback(trace), prefix, rank)

    # The store sets no hook of its own over one with this mark.
    show.ends_the_job = True  # type: ignore[attr-defined]
    sys.excepthook = show


def _fail(report: Report, status: int, rank: int, size: int, process: int) -> None:
    """Record a failure, and end all ranks. It returns if only this process's exit status can tell of the failure."""
    with suppress(OSError):  # a full disk must not keep the job alive
        _record(report, rank, status, process)
    # A child forked by the script comes here, too, but it is no rank.
    if size > 1 and os.getpid() == process and aborts():
        try:
            tell_unseen()
            until_read()
        finally:
            _abort(status)


def _run(arguments: Sequence[str], prefix: str, tell: Callable[[str], object]) -> int:
    """Run a script or a module to its end and return its exit status."""
    try:
        if arguments[0] == "-m":
            _run_module(arguments[1:])
        else:
            _run_script(arguments)
    except SystemExit as error:
        return _exit_status(error, prefix)
    except KeyboardInterrupt as error:
        print_lines(f"interrupted{place_of(error)}", prefix)
        return INTERRUPTED
    except BaseException as error:
        _show(error)
        if isinstance(error, _MISTAKES):
            with suppress(OSError):  # a full disk
                tell(f"{type(error).__name__}{place_of(error)}")
        return 1
    return 0


def _run_module(arguments: Sequence[str]) -> None:
    sys.argv[:] = arguments
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd())
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def _run_script(arguments: Sequence[str]) -> None:
    sys.argv[:] = arguments
    script = os.path.abspath(arguments[0])
    if os.path.isdir(script) or zipfile.is_zipfile(script):
        runpy.run_path(script, run_name="__main__")
        return
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    # Not runpy: it removes the module after the script's last line, but threads and exit functions still need it.
    module = types.ModuleType("__main__")
    loader = SourceFileLoader("__main__", script)
    vars(module).update(__file__=script, __builtins__=builtins, __cached__=None, __loader__=loader)
    sys.modules["__main__"] = module
    with io.open_code(script) as file:
        code = compile(file.read(), script, "exec", dont_inherit=True)
    exec(code, vars(module))


def _exit_status(error: SystemExit, prefix: str) -> int:
    owned("exits").append(place_of(error))
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        status, cause = error.code & 0xFF, error.__context__
        if status and cause is not None and not error.__suppress_context__:
            # A handler may have printed it on another rank only.
            text = f"{type(cause).__name__}: {text_of(cause)}{place_of(cause)}"
            print_lines(f"exits with status {status} after {text}", prefix)
        return status
    print_lines(str(error.code), prefix)
    return 1


def _show(error: BaseException) -> None:
    """Print a traceback once, without the frames of this module; or call the script's own hook."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame):
        trace = trace.tb_next
    sys.excepthook(type(error), error, trace)


def _is_ours(frame: types.FrameType) -> bool:
    return frame.f_globals is globals() or frame.f_globals.get("__name__") == "runpy"


def _record(report: Report, rank: int, status: int, process: int) -> None:
    if os.getpid() == process:
        if status:
            report(f"{FILES}{rank}", "\n".join(shared_files(process)))
        elif not _has_started_mpi():
            report(f"{UNSTARTED}{rank}", "")
        report(str(rank), str(status))


def _has_started_mpi() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized())


def _abort(status: int) -> None:
    if _has_started_mpi():
        mpi = sys.modules["mpi4py.MPI"]
        if not mpi.Is_finalized():
            mpi.COMM_WORLD.Abort(status)
    elif "MPIKV_RUN" in os.environ and "PMI_FD" in os.environ:
        # Starting MPI only to abort would wait for all ranks to start it. MPICH's launcher ignores the exit status of a
        # rank without MPI, but accepts MPI_Abort's line of its protocol (PMI 1.1). Open MPI's uses the exit status.
        os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={status}\n".encode())


if __name__ == "__main__":
    main()
