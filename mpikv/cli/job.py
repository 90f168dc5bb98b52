"""A running job: its launcher process, the signals passed on to it, and the cause of its end.

Launchers put each rank in a process group of its own, and a killed launcher of Open MPI leaves its ranks behind. So
this process becomes the parent of all orphaned descendants (Linux), and ends them if the job failed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import IO, Any, NamedTuple

from ..cluster.environment import GIVEN_UP, UNSTARTED, free_port
from ..config import aborts
from .boards import CALLS, describe
from .reports import Reports
from .restarts import Restarts
from .watch import MISTAKE, PREFIX, Death, Watch

__all__ = ["FREE", "GRACE", "NOT_LISTENING", "Job", "handling", "run_job"]

GRACE = 30.0
"""Seconds between SIGTERM and the end of the job; equal to Slurm's default KillWait."""

NOT_LISTENING = 213
"""The exit status of Open MPI's launcher if its thread that listens to ranks did not start; then no rank has begun."""

# Seconds to the next, harder signal, after Ctrl-C and after each harder one; and to the last one, where the ranks were
# killed already, and are to start again.
_HARDER, _HARDEST = 4.0, 1.0

# In nanoseconds. A first death may be seen that much later than the deaths it caused. Two deaths closer than the second
# have an unknown order.
_MOMENT, _DOUBT = 50_000_000, 20_000_000

# Seconds between the end of a rank without MPI and the message to the user.
_PATIENCE = 5.0

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FREE = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that go to the ranks and mean nothing to this command."""

# Of <sys/prctl.h>.
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class _End(NamedTuple):
    """The end of a job."""

    status: int
    what: str = ""
    """What ended it."""
    more: str = ""
    """What followed, and advice."""
    dies: bool = False
    """Whether ranks have died, so that others could take their places."""
    begun: bool = True
    """Whether a rank's script may have begun."""
    calls: Mapping[str, Any] | None = None
    """The last calls of the ranks, after a failure."""
    mistakes: Mapping[int, str] = MappingProxyType({})
    """The program's own errors on ranks, which another start would most likely raise again."""


def run_job(
    command: Sequence[str],
    environ: Mapping[str, str],
    size: int,
    *,
    one_host: bool,
    tell: Callable[[str], None],
    grace: float = GRACE,
    restarts: Restarts | None = None,
) -> tuple[int, str]:
    """Run the launcher's command line to its end; return the exit status, and the reason if it is not 0.

    ``tell`` receives messages for the user while the job runs. ``one_host``: all ranks are on this one. A launcher that
    fails to start, as Open MPI's seldom does on a busy machine, is started once more. ``restarts`` decides whether all
    ranks start again after a death.

    The status is that of the first failing rank. It is 1 if a rank left before the end of its script although the
    launcher reports success, 128 + s if this process received the signal s, else the launcher's own.
    """
    early, retried = list[int](), False
    # A signal between two starts goes to the next one.
    with handling(_ENDING, lambda number, _: early.append(number)):
        while True:
            end = _run_once(command, environ, size, one_host, tell, grace, restarts, early)
            if end.status == NOT_LISTENING and not end.begun and not retried:
                tell(f"{end.what} before it started a rank, as it may on a busy machine; it is started once more")
                retried = True
            elif early or restarts is None or not end.dies or not restarts.go_on(end.what, end.mistakes):
                break
    if end.calls is not None:
        with contextlib.suppress(OSError):  # a full disk, which may have ended the job
            tell(f"the last calls of each rank:  mpikv trace {_keep_calls(end.calls)}")
    return end.status, end.what + end.more + (restarts.end(end.status) if restarts is not None else "")


def _run_once(
    command: Sequence[str],
    environ: Mapping[str, str],
    size: int,
    one_host: bool,
    tell: Callable[[str], None],
    grace: float,
    restarts: Restarts | None,
    early: list[int],
) -> _End:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mpikv-run-")))
        environ = {**environ, "MPIKV_RUN": str(directory)}
        watch, senders = Watch(directory), []
        if restarts is not None:
            # The port of the ranks before may still be closing.
            environ |= {"MPIKV_KEEP": str(restarts.folder), "MPIKV_MASTER": f"127.0.0.1,{free_port()}"}
        if not one_host:
            reports = stack.enter_context(contextlib.closing(Reports(directory, size)))
            environ["MPIKV_RUN_AT"] = reports.address
            senders.append(reports.send)
        senders.append(watch.send)

        def send(number: int) -> bool:
            # A launcher that has just started has no handlers yet: it would die of a signal it could pass on later.
            ignored = number in FREE and not any(directory.glob(PREFIX + "*"))
            return sum(one(number) for one in senders) > 0 or ignored

        warned, first = set[int](), list[Death]()

        def bereft(job: Job) -> None:
            # Open MPI's launcher waits for unreachable hosts for ever. MPICH's may overlook a rank that leaves without
            # a message, and the other ranks wait for it.
            if aborts(environ) and _failures(_recorded(directory), watch.deaths):
                if restarts is not None and not first:
                    # The deaths up to now: those that follow are of this signal. The launcher ends by itself, and
                    # prints what the ranks had printed.
                    first.extend(watch.deaths)
                    watch.send(signal.SIGKILL)
                job.end_soon(_HARDER if restarts is None else _HARDEST)
            if absent := _without_mpi(directory) - warned:
                warned.update(absent)
                ranks = ("ranks " if len(absent) > 1 else "rank ") + ", ".join(map(str, sorted(absent)))
                tell(
                    f"{ranks} ended more than {_PATIENCE:g} s ago without starting MPI; a rank that starts it, as by "
                    "mpikv.create(), waits for all: if this job hangs, start MPI on every rank"
                )

        with Job(command, environ, send, grace, early) as job:
            status = watch.wait(job.process, lambda: bereft(job))
            # Only after success: after a failure a host may be cut off, and its connection stays open.
            if not one_host and status == 0:
                reports.wait()
            end = _verdict(status, directory, first or watch.deaths, size)
            mistakes = {int(path.suffix[1:]): path.read_text() for path in directory.glob(MISTAKE + "*")}
            if job.received is not None:
                # Ranks may have saved, and ended with the status that asks for another run.
                status = end.status if end.status == os.EX_TEMPFAIL else 128 + job.received
                end = _End(status, f"stopped by {signal.Signals(job.received).name}")
            job.failed = end.status != 0
            with contextlib.closing(watch.boards):
                if job.failed and job.received is None and (boards := watch.boards.read()):
                    end = end._replace(calls=describe(boards, end.what))
        if not _descendants():
            watch.remove_files(orphans=end.status != 0)
        # A rank writes its file before its script begins. Ranks of this host without a file have been ended.
        begun = job.received is not None or any(directory.glob(PREFIX + "*"))
        return end._replace(begun=begun, mistakes=mistakes)


def _verdict(status: int, directory: Path, deaths: Sequence[Death], size: int) -> _End:
    recorded = _recorded(directory)
    failures = _failures(recorded, deaths)
    if why := _given_up(directory, failures):
        return _End(1, why, dies=True)
    if failures:
        return _blame(_first(failures), status, size)
    if status:
        code = 128 - status if status < 0 else status
        # It may have seen the death of a rank that had not yet told its number.
        return _End(code, f"the launcher ended with status {code}", dies=True)
    if missing := sorted(set(range(size)) - set(recorded)):
        ranks = ", ".join(map(str, missing))
        what = f"the launcher reports success, but not all ranks reached the end of the script; missing: {ranks}"
        return _End(1, what, dies=True)
    return _End(0)


def _keep_calls(dump: Mapping[str, Any]) -> str:
    """Write the last calls of the ranks into a file for the user alone; return its path."""
    with tempfile.NamedTemporaryFile("w", prefix=CALLS, suffix=".json", delete=False) as file:
        json.dump(dump, file)
    return file.name


def _recorded(directory: Path) -> dict[int, Death]:
    """Return the ends recorded by the ranks themselves."""
    files = [path for path in directory.iterdir() if path.name.isdigit()]
    ends = [Death(int(path.name), path.stat().st_mtime_ns, int(path.read_text())) for path in files]
    return {end.rank: end for end in ends}


def _without_mpi(directory: Path) -> set[int]:
    """Return the ranks with scripts that ended well, a while ago, without starting MPI."""
    before = time.time() - _PATIENCE
    return {int(path.suffix[1:]) for path in directory.glob(UNSTARTED + "*") if path.stat().st_mtime < before}


def _given_up(directory: Path, failures: Sequence[Death]) -> str:
    """Return why a rank ended the job before any failure: others had waited for it in vain."""
    file = directory / GIVEN_UP
    if not file.exists() or any(failure.time_ns < file.stat().st_mtime_ns for failure in failures):
        return ""
    return file.read_text()


def _failures(recorded: Mapping[int, Death], seen: Sequence[Death]) -> list[Death]:
    failures = [end for end in recorded.values() if end.status]
    # After its record of success a rank still finalizes MPI, and may be killed in it.
    return failures + [death for death in seen if death.status or death.rank not in recorded]


def _first(failures: Sequence[Death]) -> list[Death]:
    """Return the deaths that ended the job; several if their order is unknown.

    MPICH's launcher may learn of a death and kill the other ranks before this process sees the first one end. So among
    deaths within a moment, those that the launcher does not cause came first.
    """
    begin = min(failure.time_ns for failure in failures)
    near = [failure for failure in failures if failure.time_ns - begin < _MOMENT]
    # Launchers kill the other ranks by SIGKILL.
    others = [failure for failure in near if failure.status != -signal.SIGKILL]
    if others:
        return [min(others, key=lambda failure: failure.time_ns)]
    return [failure for failure in near if failure.time_ns - begin < _DOUBT]


def _blame(first: Sequence[Death], status: int, size: int) -> _End:
    """Return a job's end from the deaths of the ranks that ended it."""
    ranks = ", ".join(str(one.rank) for one in sorted(first))
    who = f"rank {ranks}" if len(first) == 1 else f"one of the ranks {ranks}"
    so = ", so the job was stopped" if size > 1 else ""
    code = first[0].status
    if code is None:
        what = f"{who} was the first to end, without an error message"
        return _End(abs(status) or 1, what, f"{so} (status {status})", dies=True)
    if code == 0:
        return _End(1, f"{who} left before the end of its script, as by os._exit(0)", so, dies=True)
    if code > 0:
        # Such a rank asks for another run, which is for a batch script to start.
        return _End(code, f"{who} ended with status {code}", so, dies=code != os.EX_TEMPFAIL)
    killer, hint = signal.Signals(-code), ""
    if killer == signal.SIGKILL:
        # A launcher takes over the status of a rank that was killed: as 9, 137, or by the same signal.
        who_killed = (
            "the kernel may have killed it for lack of memory (see dmesg)"
            if abs(status) % 128 == killer
            else f"the launcher may have, which ended with status {status}: see its message"
        )
        hint = f"; if nobody sent this signal, {who_killed}"
    return _End(128 + killer, f"{who} was killed by {killer.name}", so + hint, dies=True)


@contextlib.contextmanager
def handling(numbers: Sequence[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle signals in a block. For the main thread.

    An ignored signal stays ignored: nohup, and shells with background jobs, rely on that.
    """
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class Job:
    """The launcher's process; it runs in a ``with`` block. SIGINT, SIGTERM and SIGHUP end the job, harder after a while
    or at a second SIGINT.

    These, SIGUSR1 and SIGUSR2 go to the ranks, and not to the launcher: Open MPI's would kill the ranks within a
    second.
    """

    process: subprocess.Popen[bytes]

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        send: Callable[[int], bool],
        grace: float,
        early: list[int],
    ) -> None:
        """``send`` sends a signal to all ranks, and returns whether nothing else is to be done. ``early`` signals have
        come, or come before the start.
        """
        self.received: int | None = None
        self.failed = True
        """Whether the end of the block ends all descendants of this process."""
        self._command, self._environ, self._send_ranks, self._grace = command, environ, send, grace
        self._harder_signals: list[int] = []
        self._early = early
        self._started = self._ending = False
        self._until_end = contextlib.ExitStack()

    def __enter__(self) -> Job:
        """Start it. Only the main thread may, since this installs signal handlers."""
        with contextlib.ExitStack() as stack:
            self._start(stack)
            self._until_end = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """After the launcher's end, restore the signal handlers; if the job failed, end its descendants first."""
        self._until_end.close()

    def _start(self, stack: contextlib.ExitStack) -> None:
        stack.enter_context(handling((*_ENDING, *FREE), self._pass_on))
        stack.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, self._harder))
        stack.callback(self._clean_up)
        _process_control(_PR_SET_CHILD_SUBREAPER, 1)()
        # A session of its own: it must get only passed-on signals, and not the terminal's Ctrl-C as well.
        self.process = subprocess.Popen(
            self._command,
            env=self._environ,
            stdin=_stdin(),
            bufsize=0,
            start_new_session=True,
            preexec_fn=_process_control(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )
        if self.process.stdin is not None:
            threading.Thread(target=_copy_terminal, args=(self.process.stdin,), daemon=True).start()
        self._started = True
        while self._early:
            self._pass_on(self._early.pop(0), None)

    def end_soon(self, seconds: float) -> None:
        """Give the launcher so many seconds to end by itself, then signal it."""
        if self.received is None and not self._ending:
            self._ending = True
            self._harder_signals = [signal.SIGTERM, signal.SIGKILL]
            signal.setitimer(signal.ITIMER_REAL, seconds, seconds)

    def _clean_up(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self.failed:
            _end_descendants()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if not self._started:
            self._early.append(number)
            return
        if number in FREE:
            self._send_job(number)
            return
        if self.received is not None:
            # Shells and others may signal the whole group, and the same signal arrives twice: ignore the second.
            if number == signal.SIGINT:
                self._send(signal.SIGKILL)
            return
        self.received = number
        # A rank waiting inside MPI runs no Python signal handler, so harder signals must follow.
        self._harder_signals = [signal.SIGTERM, signal.SIGKILL]
        self._send_job(number)
        signal.setitimer(signal.ITIMER_REAL, _HARDER if number == signal.SIGINT else self._grace, _HARDER)

    def _harder(self, number: int, frame: FrameType | None) -> None:
        if self._harder_signals:
            self._send(self._harder_signals.pop(0))

    def _send_job(self, number: int) -> None:
        # If no rank has begun, there is nothing to save: signal the launcher itself.
        if not self._send_ranks(number):
            self._send(number)

    def _send(self, number: int) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.killpg(self.process.pid, number)


def _stdin() -> int | None:
    """Return the launcher's input: our own; or a pipe if that is a terminal, since only our session can read it."""
    if not os.isatty(0):
        return None
    try:
        foreground = os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # another session's terminal
        foreground = False
    # In the background, reading the terminal would stop this process.
    return subprocess.PIPE if foreground else subprocess.DEVNULL


def _copy_terminal(pipe: IO[bytes]) -> None:
    with contextlib.suppress(OSError), pipe:  # the launcher ended, or the terminal went away
        while typed := os.read(0, 4096):
            pipe.write(typed)


def _process_control(option: int, value: int) -> Callable[[], None]:
    """Return a function that sets an attribute of the process that calls it (Linux only), even after a fork."""
    control = getattr(ctypes.CDLL(None), "prctl", None)

    def call() -> None:
        if control is not None:
            control(option, value, 0, 0, 0)

    return call


def _end_descendants() -> None:
    """Kill and reap all descendants. Those whose parents die become children of this process, hence the rounds."""
    deadline = time.monotonic() + _HARDER
    while (left := _descendants()) and time.monotonic() < deadline:
        for pid in left:
            # Gone meanwhile, or not yet our own child.
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def _descendants() -> list[int]:
    """Return the processes that descend from this one; none where there is no ``/proc``."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended while we look
            # The name before the last parenthesis may hold anything; the state and the parent follow it.
            parent = int(entry.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    found = children.get(os.getpid(), [])
    for pid in found:
        found.extend(children.get(pid, []))
    return found
