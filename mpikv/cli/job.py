"""A running job: its launcher process, the signals passed on to it, and how it ended.

Launchers put each rank in a process group of its own, and Open MPI's leaves its ranks behind when it is killed. So this
process becomes the parent of all that its descendants leave behind (Linux), and ends them when the job failed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

__all__ = ["Job", "run_job"]

GRACE = 4.0
"""Seconds between a signal that asks the job to end and the next, harder one."""

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Of <sys/prctl.h>.
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def run_job(command: Sequence[str], environ: Mapping[str, str], size: int, *, one_host: bool) -> tuple[int, str]:
    """Run the launcher's command line to its end; return the exit status and, where it is not 0, the reason.

    The status is that of the rank that failed first; 1 where a rank left before the end of its script although the
    launcher reports success; 128 + s where this process received the signal s; else the launcher's own.
    """
    with tempfile.TemporaryDirectory(prefix="mpikv-run-") as directory:
        job = Job(command, {**environ, "MPIKV_RUN": directory})
        status = job.wait()
        if job.received is not None:
            return 128 + job.received, f"stopped by {signal.Signals(job.received).name}"
        return _verdict(status, Path(directory), size, one_host)


def _verdict(status: int, directory: Path, size: int, one_host: bool) -> tuple[int, str]:
    records = sorted(directory.iterdir(), key=lambda record: record.stat().st_mtime_ns)
    ended = {int(record.name): int(record.read_text() or "1") for record in records}
    for rank, code in ended.items():
        if code:
            return code, f"rank {rank} ended with status {code}" + (", so the job was stopped" if size > 1 else "")
    if status:
        code = 128 - status if status < 0 else status
        return code, f"the launcher ended with status {code}"
    missing = sorted(set(range(size)) - set(ended)) if one_host else []
    if missing:
        ranks = ", ".join(map(str, missing))
        return 1, f"the launcher reports success, but not all ranks reached the end of the script; missing: {ranks}"
    return 0, ""


class Job:
    """The launcher's process, to which SIGINT, SIGTERM and SIGHUP are passed on. A second one, or time, kills it."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start it. Only the main thread may, since it installs signal handlers."""
        self.received: int | None = None
        self._harder_signals: list[int] = []
        self._early: list[int] = []
        self._started = False
        # One that is ignored stays ignored: nohup, and shells for their background jobs, ask for that.
        numbers = [number for number in _PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.getsignal(number) for number in (*numbers, signal.SIGALRM)}
        for number in numbers:
            signal.signal(number, self._pass_on)
        signal.signal(signal.SIGALRM, self._harder)
        _process_control(_PR_SET_CHILD_SUBREAPER, 1)()
        # In a session of its own, it gets what is passed on and not the terminal's Ctrl-C besides.
        self._process = subprocess.Popen(
            command,
            env=environ,
            stdin=_stdin(),
            bufsize=0,
            start_new_session=True,
            preexec_fn=_process_control(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )
        if self._process.stdin is not None:
            threading.Thread(target=_copy_terminal, args=(self._process.stdin,), daemon=True).start()
        self._started = True
        for early in self._early:
            self._pass_on(early, None)

    def wait(self) -> int:
        """Wait for the launcher, end what it left behind if the job failed, and return its exit status."""
        status = self._process.wait()
        signal.setitimer(signal.ITIMER_REAL, 0)
        if status or self.received is not None:
            _end_descendants()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        return status

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if not self._started:
            self._early.append(number)
            return
        if self.received is not None:
            self._send(signal.SIGKILL)
            return
        self.received = number
        # A rank that waits inside MPI does not see SIGINT, and MPICH's launcher then waits for that rank.
        self._harder_signals = [signal.SIGTERM, signal.SIGKILL] if number == signal.SIGINT else [signal.SIGKILL]
        self._send(number)
        signal.setitimer(signal.ITIMER_REAL, GRACE, GRACE)

    def _harder(self, number: int, frame: FrameType | None) -> None:
        if self._harder_signals:
            self._send(self._harder_signals.pop(0))

    def _send(self, number: int) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.killpg(self._process.pid, number)


def _stdin() -> int | None:
    """Return what the launcher reads: our input, or a pipe where that is a terminal, which only this session reads."""
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
    deadline = time.monotonic() + GRACE
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
