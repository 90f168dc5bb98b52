"""One start of a job's ranks: the launcher's process, the directory of the ranks' files, and the watch over them.

The ranks of the next start may begin early, as spares: they import modules and start MPI, which takes most of the time
of a start, and sleep in a read from a gate until the ranks before them have died. The gate is a pipe of ``mpikv run``:
it closes with this command, however that ends, and the spares end, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO

from ..cluster.environment import Launch, free_port
from ..cluster.mpi_library import start_mpi
from ..cluster.printing import flush_output
from .watch import Watch

_SPARES, _GATE, _PORT_BYTES = "MPIKV_SPARES", "gate", 5
# What each loop of steps imports.
_MODULES = ("mpikv.creation", "mpikv.keep.commits")
# Of <sys/prctl.h>.
_PR_SET_PDEATHSIG = 1
# Seconds until a launcher gets the signal: spares may import for long, and nobody needs them any more.
_LAUNCHER_END = {signal.SIGTERM: 3.0, signal.SIGKILL: 5.0}


class LauncherProcess:
    """A launcher that is to start, runs, or has ended. Only the main thread may start it."""

    process: subprocess.Popen[bytes]

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mpikv-run-")
        self.directory = Path(self._folder.name)
        self.watch = Watch(self.directory)
        self.environ = {**environ, "MPIKV_RUN": self._folder.name}
        self._command = command
        self._gate: int | None = None

    def prepare(self, modules: str) -> None:
        """Start the ranks as spares. ``modules`` are what they import, with commas between."""
        os.mkfifo(self.directory / _GATE, 0o600)
        # For reading, too: else it would wait for a first reader.
        self._gate = os.open(self.directory / _GATE, os.O_RDWR | os.O_CLOEXEC)
        stdin = _stdin()
        # What there is to read by now is for the ranks before them.
        self._launch({**self.environ, _SPARES: modules}, subprocess.PIPE if stdin is None else stdin)

    def begin(self, size: int) -> None:
        """Let the ranks begin; spares, each as soon as it is ready."""
        if self._gate is None:
            self._launch(self.environ, _stdin())
        else:
            # The port of the ranks before may still be closing.
            os.write(self._gate, f"{free_port():{_PORT_BYTES}}".encode() * size)
        if self.process.stdin is not None:
            threading.Thread(target=_copy_input, args=(self.process.stdin,), daemon=True).start()

    def _launch(self, environ: Mapping[str, str], stdin: int | None) -> None:
        # A session of its own: it must get only passed-on signals, and not the terminal's Ctrl-C as well.
        self.process = subprocess.Popen(
            self._command,
            env=environ,
            stdin=stdin,
            bufsize=0,
            start_new_session=True,
            preexec_fn=process_control(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )

    @property
    def has_spares(self) -> bool:
        """Whether its ranks have begun as spares."""
        return self._gate is not None

    def is_running(self) -> bool:
        """Return whether the launcher has not ended."""
        return self.process.poll() is None

    def send(self, number: int) -> None:
        """Send a signal to the launcher, if it has not ended."""
        if self.is_running():
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.killpg(self.process.pid, number)

    def stop(self) -> bool:
        """Let the launcher end, as it should when its ranks have. Any thread may call this.

        Return whether it was killed: a killed launcher may leave its ranks behind.
        """
        for number, seconds in _LAUNCHER_END.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
            self.send(number)
        return self.process.wait() == -signal.SIGKILL

    def end(self) -> bool:
        """Stop the launcher, or its spares, and remove the directory. Return what :meth:`stop` does."""
        if self._gate is not None:
            os.close(self._gate)
        killed = "process" in vars(self) and self.stop()  # if it was found, and started
        self._folder.cleanup()
        return killed


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


def _copy_input(pipe: IO[bytes]) -> None:
    with contextlib.suppress(OSError), pipe:  # the launcher ended, or the terminal went away
        while typed := os.read(0, 4096):
            pipe.write(typed)


def process_control(option: int, value: int) -> Callable[[], None]:
    """Return a function that sets an attribute of the process that calls it (Linux only), even after a fork."""
    control = getattr(ctypes.CDLL(None), "prctl", None)

    def call() -> None:
        if control is not None:
            control(option, value, 0, 0, 0)

    return call


# --- In a rank


def wait_at_gate(launch: Launch | None, environ: MutableMapping[str, str]) -> None:
    """In a spare, return when its script is to begin; exit if none is. Elsewhere, return at once."""
    if (modules := environ.pop(_SPARES, None)) is None:
        return
    # It does not wait for a writer, which may be gone already.
    pipe = os.open(Path(environ["MPIKV_RUN"], _GATE), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(pipe, True)
    print_held = _hold_output()
    # The script will raise their errors, where it needs them.
    for module in (*_MODULES, *modules.split(",")):
        with contextlib.suppress(Exception):
            import_module(module)
    if launch is not None and launch.size > 1:
        # If it fails, this rank fails, and all start without spares.
        start_mpi(launch)
    port = os.read(pipe, _PORT_BYTES)
    os.close(pipe)
    if not port:
        sys.exit()
    print_held()
    environ["MPIKV_MASTER"] = f"127.0.0.1,{int(port)}"


def _hold_output() -> Callable[[], None]:
    """Keep what this process prints from now on, until the function that is returned prints it."""
    held = [(number, os.dup(number), os.memfd_create("held")) for number in (1, 2)]
    for number, _, file in held:
        os.dup2(file, number)

    def print_held() -> None:
        flush_output()
        for number, own, file in held:
            os.dup2(own, number)
            with open(number, "wb", closefd=False) as output:
                output.write(os.pread(file, os.fstat(file).st_size, 0))
            os.close(own)
            os.close(file)

    return print_held
