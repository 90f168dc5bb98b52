"""A running job: its launcher process, the signals passed on to it, and the cause of its end.

Launchers put each rank in a process group of its own, and a killed launcher of Open MPI leaves its ranks behind. So
this process becomes the parent of all orphaned descendants (Linux), and ends them if the job failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

from ..cluster.environment import GIVEN_UP, UNSTARTED, free_port
from ..config import aborts
from .boards import CALLS, describe
from .reports import LOST, Reports
from .restarts import Restarts
from .starts import LauncherProcess, process_control
from .watch import MISTAKE, PREFIX, Death

GRACE = 30.0
"""Seconds between SIGTERM and the end of the job; equal to Slurm's default KillWait."""

NOT_LISTENING = 213
"""The exit status of Open MPI's launcher if its thread that listens to ranks did not start; then no rank has begun."""

# Seconds to the next, harder signal, after Ctrl-C and after each harder one; and to the last one, where the ranks were
# killed already, and are to start again.
_HARDER, _HARDEST = 4.0, 1.0

# In nanoseconds. A first death may be seen that much later than the deaths it caused. Where a status is
# unknown, as on other hosts, two deaths closer than the second have an unknown order.
_MOMENT, _DOUBT = 50_000_000, 20_000_000

# MPI_ERR_UNKNOWN of Open MPI: the status of its ranks that lose a connection to another host, where a rank has died.
_BEREFT = 14

# Ranks in one message.
_MOST_NAMED = 8

# Seconds between the end of a rank without MPI and the message to the user.
_WARN_AFTER = 5.0

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FREE = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that go to the ranks and mean nothing to this command."""

# Of <sys/prctl.h>.
_PR_SET_CHILD_SUBREAPER = 36


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
    goes_on: bool | None = None
    """Whether it was decided that the ranks start again, or that they do not."""
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
    spares: str | None = None,
) -> tuple[int, str]:
    """Run the launcher's command line to its end; return the exit status, and the reason if it is not 0.

    ``tell`` receives messages for the user while the job runs. ``one_host``: all ranks are on this one. A launcher that
    fails to start, as Open MPI's seldom does on a busy machine, is started once more. ``restarts`` decides whether all
    ranks start again after a death; ``spares`` are the modules that spares import for that.

    The status is that of the first failing rank. It is 1 if a rank left before the end of its script although the
    launcher reports success, 128 + s if this process received the signal s, else the launcher's own.
    """
    end = Job(command, environ, size, one_host, tell, grace, restarts, spares).run()
    if end.calls is not None:
        with contextlib.suppress(OSError):  # a full disk, which may have ended the job
            tell(f"the last calls of each rank:  mpikv trace {_keep_calls(end.calls)}")
    return end.status, end.what + end.more + (restarts.end(end.status) if restarts is not None else "")


@dataclass
class Job:
    """The starts of a job, one after the other; :func:`run_job` describes the arguments."""

    command: Sequence[str]
    environ: Mapping[str, str]
    size: int
    one_host: bool
    tell: Callable[[str], None]
    grace: float
    restarts: Restarts | None
    modules: str | None
    early: list[int] = field(default_factory=list)
    """Signals that have come between two starts, for the next one."""
    others: list[LauncherProcess] = field(default_factory=list)
    """Those beside the present one: before it, with launchers that are about to end; or after it, of spares."""
    spares: LauncherProcess | None = None

    def run(self) -> _End:
        """Start the ranks until they need not start again; return the last end."""
        retried = False
        with handling(_ENDING, lambda number, _: self.early.append(number)), contextlib.closing(self):
            while True:
                launcher = self._take()
                end = _Attempt(self, launcher).run()
                # Spares may have been about to end.
                if not end.begun and (launcher.has_spares or (end.status == NOT_LISTENING and not retried)):
                    what = f"{end.what} before it started a rank, as it may on a busy machine"
                    self.tell(f"{what}; it is started once more")
                    retried |= not launcher.has_spares
                elif not (not self.early and self.may_go_on(end) if end.goes_on is None else end.goes_on):
                    return end

    def _take(self) -> LauncherProcess:
        spares, self.spares = self.spares, None
        if spares is None or not spares.is_running():
            return self._make()
        self.others.remove(spares)
        return spares

    def _make(self) -> LauncherProcess:
        environ = self.environ
        if self.restarts is not None:
            # The port of the ranks before may still be closing.
            first, _, _ = environ.get("MPIKV_MASTER", "").partition(",")
            environ = {**environ, "MPIKV_KEEP": str(self.restarts.folder), "MPIKV_MASTER": f"{first},{free_port()}"}
        return LauncherProcess(self.command, environ)

    def prepare(self) -> None:
        """Start spares, once the present ranks have made a commit."""
        wants = self.modules is not None and self.spares is None
        if wants and self.restarts is not None and self.restarts.has_new_commit():
            spares = self._make()
            try:
                spares.prepare(self.modules or "")
            except OSError as error:
                # The job is well without them: a disk is full, or no process can be made.
                self.modules = None
                spares.end()
                self.tell(f"no spares could be started ({error}); ranks that start again take longer")
            else:
                self.spares = spares
                self.others.append(spares)

    def may_go_on(self, end: _End) -> bool:
        """Decide whether the ranks start again after an end, and tell the user if they do."""
        return self.restarts is not None and end.dies and self.restarts.go_on(end.what, end.mistakes)

    def launchers(self) -> list[int]:
        """Return the launchers beside the present one."""
        return [launcher.process.pid for launcher in self.others if launcher.is_running()]

    def close(self) -> None:
        """End what is left, at once on a signal."""

        def hurry(*_: object) -> None:
            for launcher in self.others:
                launcher.send(signal.SIGKILL)

        with handling(_ENDING, hurry):
            killed = [launcher.end() for launcher in self.others]
        if any(killed):
            _end_descendants()
        for launcher in self.others:
            launcher.watch.remove_files(orphans=True)


class _Attempt:
    """One of these starts, from its begin to its end."""

    def __init__(self, job: Job, launcher: LauncherProcess) -> None:
        self._job, self._launcher, self._watch = job, launcher, launcher.watch
        self._senders = [self._watch.send]
        self._warned, self._first = set[int](), list[Death]()
        self._goes_on: bool | None = None

    def run(self) -> _End:
        """Start the ranks, and return their end."""
        job, launcher, watch = self._job, self._launcher, self._watch
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: None if self._goes_on else launcher.end())
            if not job.one_host:
                reports = stack.enter_context(contextlib.closing(Reports(launcher.directory, job.size)))
                launcher.environ["MPIKV_RUN_AT"] = reports.address
                self._senders.insert(0, reports.send)
            with SignalRelay(launcher, job, self._send) as relay:
                status = watch.wait(launcher.process, lambda: self._attend(relay))
                # Only after success: after a failure a host may be cut off, and its connection stays open.
                if not job.one_host and status == 0:
                    reports.wait()
                end = self._find_end(status)
                if relay.received is not None:
                    # Ranks may have saved, and ended with the status that asks for another run.
                    status = end.status if end.status == os.EX_TEMPFAIL else 128 + relay.received
                    end = _End(status, f"stopped by {signal.Signals(relay.received).name}")
                relay.failed = end.status != 0
                with contextlib.closing(watch.boards):
                    if relay.failed and relay.received is None and (boards := watch.boards.read()):
                        end = end._replace(calls=describe(boards, end.what))
            if not _descendants(job.launchers()):
                # Spares wait now; a scan for orphans, which takes long, comes at the end of the job.
                watch.remove_files(orphans=end.status != 0 and not self._goes_on)
            # A rank writes its file before its script begins. Ranks of this host without a file have been ended.
            begun = relay.received is not None or any(launcher.directory.glob(PREFIX + "*"))
            return end._replace(begun=begun, goes_on=self._goes_on and end.dies)

    def _send(self, number: int) -> bool:
        # A launcher that has just started has no handlers yet: it would die of a signal it could pass on later.
        ignored = number in FREE and not any(self._launcher.directory.glob(PREFIX + "*"))
        return sum(send(number) for send in self._senders) > 0 or ignored

    def _attend(self, relay: SignalRelay) -> bool:
        """See to spares, and to deaths; return whether spares take over, beside a launcher that is about to end."""
        job, watch = self._job, self._watch
        # Ranks of other hosts record their ends; only those of this one are seen to die.
        if not (watch.deaths or (not job.one_host and _recorded(self._launcher.directory))):
            job.prepare()
            return False
        # Open MPI's launcher waits for unreachable hosts for ever. MPICH's may overlook a rank that leaves without a
        # message, and the other ranks wait for it.
        if aborts(job.environ) and _failures(_recorded(self._launcher.directory), watch.deaths):
            if job.restarts is not None and not self._first:
                # The deaths up to now: those that follow are of this signal. The launcher ends by itself, and prints
                # what the ranks had printed.
                self._first.extend(watch.deaths)
                self._send(signal.SIGKILL)
            relay.end_soon(_HARDER if job.restarts is None else _HARDEST)
            may_leave = self._goes_on is None and relay.received is None and watch.saw_all(job.size)
            if may_leave and job.spares is not None and job.spares.is_running():
                self._goes_on = job.may_go_on(self._find_end(None))
                if self._goes_on:
                    job.others.append(self._launcher)
                    # It may hang.
                    threading.Thread(target=self._launcher.stop, daemon=True).start()
        if absent := _without_mpi(self._launcher.directory) - self._warned:
            self._warned.update(absent)
            job.tell(
                f"{_name_ranks(absent)} ended more than {_WARN_AFTER:g} s ago without starting MPI; a rank that starts "
                "it, as by mpikv.create(), waits for all: if this job hangs, start MPI on every rank"
            )
        return bool(self._goes_on)

    def _find_end(self, status: int | None) -> _End:
        """Return the end of the ranks, by the launcher's status; None: it has not ended."""
        directory = self._launcher.directory
        deaths = [*(self._first or self._watch.deaths), *_lost(directory)]
        end = _verdict(-signal.SIGKILL if status is None else status, directory, deaths, self._job.size)
        return end._replace(mistakes={int(path.suffix[1:]): path.read_text() for path in directory.glob(MISTAKE + "*")})


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


def _lost(directory: Path) -> list[Death]:
    """Return the ends of ranks on other hosts, as of their connections. Those that were killed record none."""
    return [Death(int(path.suffix[1:]), int(path.read_text()), None) for path in directory.glob(LOST + "*")]


def _without_mpi(directory: Path) -> set[int]:
    """Return the ranks with scripts that ended well, a while ago, without starting MPI."""
    before = time.time() - _WARN_AFTER
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

    MPICH's launcher may learn of a death and kill the other ranks before this process sees the first one close its
    files. So among deaths within a moment, those that the launcher does not cause came first.
    """
    first = min(failures, key=lambda failure: failure.time_ns)
    begin = first.time_ns
    near = [failure for failure in failures if failure.time_ns - begin < _MOMENT]
    # Launchers kill the other ranks by SIGKILL; of those on other hosts only the time is known.
    caused = {-signal.SIGKILL, *([_BEREFT] if any(failure.status is None for failure in near) else ())}
    # Open MPI's first sends SIGTERM; a SIGKILL before that is not its own.
    after = {-signal.SIGTERM} if first.status == -signal.SIGKILL else set()
    others = [one for one in near if one.status not in caused and (one.time_ns == begin or one.status not in after)]
    others.sort(key=lambda failure: failure.time_ns)
    if any(failure.status is not None for failure in others):
        # A crash may be seen after the end of a connection that it caused, and MPICH may crash a rank without its peer.
        # What else ranks do about a death on another host is a status, or the launcher's SIGTERM.
        limit = others[0].time_ns + _DOUBT * (others[0].status is None)
        crashes = [one for one in others if (one.status or 0) < 0 and one.status != -signal.SIGTERM]
        crash = next((one for one in crashes if one.time_ns < limit), None)
        return [crash, *(one for one in others[: others.index(crash)] if one.status is None)] if crash else others[:1]
    limit = begin + _DOUBT * any(failure.status is None for failure in near)
    return [one for one in near if one.time_ns <= limit and (one.status != _BEREFT or first.status is not None)]


def _blame(first: Sequence[Death], status: int, size: int) -> _End:
    """Return a job's end from the deaths of the ranks that ended it."""
    who = "one of the " * (len(first) > 1) + _name_ranks(one.rank for one in first)
    so = ", so the job was stopped" if size > 1 else ""
    code = first[0].status
    if code is None and status == 0:
        what = f"{who} was killed, or left before the end of its script, while the launcher reports success"
        return _End(1, what, dies=True)
    if code is None:
        what = f"{who} was the first to end, without an error message"
        return _End(abs(status), what, f"{so} (status {status})", dies=True)
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
    elif lost := [one.rank for one in first[1:]]:
        # This signal is certain, and only the order is not.
        connections, they = ("connections", "they") if len(lost) > 1 else ("connection", "it")
        before = f"the {connections} of {_name_ranks(lost)} ended just before, so {they} may have been lost first"
        return _End(128 + killer, f"rank {first[0].rank} was killed by {killer.name}; {before}", dies=True)
    return _End(128 + killer, f"{who} was killed by {killer.name}", so + hint, dies=True)


def _name_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 3", or "ranks 3, 5" for several; of many, the first and the number of the others."""
    every = sorted(ranks)
    rest = f" and {len(every) - _MOST_NAMED} more" if len(every) > _MOST_NAMED else ""
    return ("ranks " if len(every) > 1 else "rank ") + ", ".join(map(str, every[:_MOST_NAMED])) + rest


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


class SignalRelay:
    """The launcher's process; it runs in a ``with`` block. SIGINT, SIGTERM and SIGHUP end the job, harder after a while
    or at a second SIGINT.

    These, SIGUSR1 and SIGUSR2 go to the ranks, and not to the launcher: Open MPI's would kill the ranks within a
    second.
    """

    def __init__(self, launcher: LauncherProcess, job: Job, send: Callable[[int], bool]) -> None:
        """``send`` sends a signal to all ranks, and returns whether nothing else is to be done."""
        self.received: int | None = None
        self.failed = True
        """Whether the end of the block ends all descendants of this process."""
        self._launcher, self._job, self._send_ranks = launcher, job, send
        self._harder_signals: list[int] = []
        self._started = self._ending = False
        self._until_end = contextlib.ExitStack()

    def __enter__(self) -> SignalRelay:
        """Start it. Only the main thread may, since this installs signal handlers."""
        with contextlib.ExitStack() as stack:
            self._begin(stack)
            self._until_end = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """After the launcher's end, restore the signal handlers; if the job failed, end its descendants first."""
        self._until_end.close()

    def _begin(self, stack: contextlib.ExitStack) -> None:
        stack.enter_context(handling((*_ENDING, *FREE), self._pass_on))
        stack.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, self._harder))
        stack.callback(self._clean_up)
        process_control(_PR_SET_CHILD_SUBREAPER, 1)()
        self._launcher.begin(self._job.size)
        self._started = True
        while self._job.early:
            self._pass_on(self._job.early.pop(0), None)

    def end_soon(self, seconds: float) -> None:
        """Give the launcher so many seconds to end by itself, then signal it."""
        if self.received is None and not self._ending:
            self._ending = True
            self._harder_signals = [signal.SIGTERM, signal.SIGKILL]
            signal.setitimer(signal.ITIMER_REAL, seconds, seconds)

    def _clean_up(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self.failed:
            _end_descendants(self._job.launchers())

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if not self._started:
            self._job.early.append(number)
            return
        if number in FREE:
            self._send_job(number)
            return
        if self.received is not None:
            # Shells and others may signal the whole group, and the same signal arrives twice: ignore the second.
            if number == signal.SIGINT:
                self._launcher.send(signal.SIGKILL)
            return
        self.received = number
        # A rank waiting inside MPI runs no Python signal handler, so harder signals must follow.
        self._harder_signals = [signal.SIGTERM, signal.SIGKILL]
        self._send_job(number)
        signal.setitimer(signal.ITIMER_REAL, _HARDER if number == signal.SIGINT else self._job.grace, _HARDER)

    def _harder(self, number: int, frame: FrameType | None) -> None:
        if self._harder_signals:
            self._launcher.send(self._harder_signals.pop(0))

    def _send_job(self, number: int) -> None:
        # If no rank has begun, there is nothing to save: signal the launcher itself.
        if not self._send_ranks(number):
            self._launcher.send(number)


def _end_descendants(without: Collection[int] = ()) -> None:
    """Kill and reap all descendants. Those whose parents die become children of this process, hence the rounds."""
    deadline = time.monotonic() + _HARDER
    while (left := _descendants(without)) and time.monotonic() < deadline:
        for pid in left:
            # Gone meanwhile, or not yet our own child.
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def _descendants(without: Collection[int] = ()) -> list[int]:
    """Return the processes that descend from this one, but not by those to do ``without``; none where there is no
    ``/proc``.
    """
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended while we look
            # The name before the last parenthesis may hold anything; the state and the parent follow it.
            parent = int(entry.read_text(errors="replace").rpartition(")")[2].split()[1])
            if (pid := int(entry.parent.name)) not in without:
                children.setdefault(parent, []).append(pid)
    found = children.get(os.getpid(), [])
    for pid in found:
        found.extend(children.get(pid, []))
    return found
