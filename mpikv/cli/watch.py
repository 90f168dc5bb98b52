"""The ranks of a running job, seen from the launcher's side: the first death, its cause, and shared files.

A killed rank reports nothing, and a launcher ends the other ranks without naming the first. A killed job also leaves
files in shared memory, and no other job removes them.

All of this needs Linux (5.3 to see deaths). Elsewhere it sees nothing and removes nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import resource
import select
import signal
import stat
import struct
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from ..cluster.environment import FILES
from .boards import Boards

PREFIX = "rank."
"""Prefix of a rank's file with its process id and host, written at its start."""

PIPE = "pipe."
"""Prefix of a rank's named pipe, which it has open until it dies."""

MISTAKE = "mistake."
"""Prefix of a rank's file with an error of the program, which another start would most likely raise again."""

_TICK = 0.05
# Of so many descriptors one of the highest is taken: each more takes memory of the kernel.
_MOST_FILES = 1024
# The most seconds between the close of a dead rank's files and its end: a GPU's driver may take long.
_DYING = 2.0
# Ticks between two looks for boards.
_SELDOM = 19
# Seconds in which a shared file is mapped: first by its maker, a little later by others of the job.
_FRESH = 0.5
# Seconds after which a job's ranks have opened its files. Removing a file does not hurt a process that has it open.
_OLD = 600.0
_SHARED = Path("/dev/shm")
# Names of files made by MPI libraries, and by a store without an MPI window. Ranks map other files, too; leave these.
_FILES = re.compile(
    rf"{_SHARED}/(?:mpich_|mpikv-\d|sm_segment\.|vader_segment\.|osc_(?:sm|rdma)\.)\S*(?!.*\(deleted\))"
)

# Of <linux/pidfd.h>: PIDFD_GET_INFO with the structure's first version, and the bit of its mask for the exit status.
_INFO_BYTES, _INFO_EXIT = 64, 8
_GET_INFO = (3 << 30) | (_INFO_BYTES << 16) | (0xFF << 8) | 11


class Death(NamedTuple):
    """The end of a rank's process."""

    rank: int
    time_ns: int
    """When it was seen; equal for deaths seen at once."""
    status: int | None
    """As in :func:`os.waitstatus_to_exitcode`: negative after a signal. None: unknown."""


class Watch:
    """Waits for a launcher and watches its ranks; these write their process ids into a directory."""

    def __init__(self, directory: Path) -> None:
        self.deaths: list[Death] = []
        self._directory = directory
        self._met: set[int] = set()
        self._alive: dict[int, tuple[int, int, int]] = {}
        self._poll = select.poll()
        self._files: set[str] = set()
        self._before = set(map(str, _SHARED.glob("*")))
        self.boards = Boards()
        self._turn = 0

    def wait(self, launcher: subprocess.Popen[bytes], leaves: Callable[[], bool]) -> int | None:
        """Return the launcher's exit status; None as soon as ``leaves`` returns True, called again and again."""
        try:
            own = _open(launcher.pid)
        except OSError:
            return launcher.wait()
        self._poll.register(own, select.POLLIN)
        left = False
        while launcher.poll() is None and not left:
            self._look(_TICK)
            left = leaves()
        # The launcher may end before the ranks it has killed: look for their deaths, too.
        self._poll.unregister(own)
        self._look(_TICK if launcher.returncode and self._alive else 0)
        for handle in {own, *self._alive, *(pipe for _, _, pipe in self._alive.values())}:
            os.close(handle)
        return launcher.returncode

    def saw_all(self, size: int) -> bool:
        """Return whether it has seen so many ranks begin and end."""
        return len(self._met) == size and not self._alive

    def send(self, number: int) -> int:
        """Send a signal to the living ranks it knows, and return their number."""
        handles = list(self._alive)
        for handle in handles:
            with contextlib.suppress(OSError):  # it ended meanwhile
                signal.pidfd_send_signal(handle, number)
        return len(handles)

    def remove_files(self, orphans: bool) -> None:
        """Remove the ranks' shared files, and after a failure orphans. Call it after the last rank has ended."""
        listed = "\n".join(path.read_text() for path in self._directory.glob(FILES + "*"))
        for file in {*self._files, *filter(_FILES.match, listed.split()), *(self._orphans() if orphans else ())}:
            # A job that ends normally removes its files itself.
            with contextlib.suppress(OSError):
                os.unlink(file)

    def _orphans(self) -> set[str]:
        """Return new files without a process: their makers were killed before this one saw their maps."""
        return unused(file for file in _SHARED.glob("*") if not self._knows(file) and _ours(file))

    def _look(self, seconds: float) -> None:
        self._see_deaths(seconds)
        self._meet_ranks()
        self._turn += 1
        # When files were made, and seldom in between: a rank with many open files would wait for this processor.
        if (fresh := self._is_fresh()) or self._turn % _SELDOM == 0:
            # One rank at a time: most often all ranks have the same boards, which outlive them here.
            for _, pid, _ in list(self._alive.values())[self._turn % max(len(self._alive), 1) :][:1]:
                self.boards.look(pid)
        for pid in self._to_ask() if fresh else ():
            self._files |= shared_files(pid)
            # Reading the maps takes a millisecond; in that time a second death may follow the first.
            self._see_deaths(0)

    def _see_deaths(self, seconds: float) -> None:
        ready, now = {handle for handle, _ in self._poll.poll(1000 * seconds)}, time.time_ns()
        # A rank that dies closes its files a while before its end: MPICH's launcher may kill others in between. One
        # without a pipe, or with a child that has it, may have died before those with a closed pipe.
        closed = {handle for handle, (_, pid, _) in self._alive.items() if ready and _has_closed_files(pid)}
        since = {pipe for pipe, _ in self._poll.poll(0)} - ready - self._alive.keys()
        for handle, (rank, pid, pipe) in list(self._alive.items()):
            if (handle in ready or (handle in closed and pipe not in since)) and _ends(handle):
                del self._alive[handle]
                self.deaths.append(Death(rank, now, _exit_status(handle, pid)))
            elif pipe in ready:  # the program has closed it, or is another one now, or takes long to end
                self._alive[handle] = rank, pid, handle
            else:
                continue
            for one in {handle, pipe} - self._alive.keys():
                self._poll.unregister(one)
                os.close(one)

    def _meet_ranks(self) -> None:
        for path in self._directory.glob(PREFIX + "*"):
            rank, (pid, _, host) = int(path.suffix[1:]), path.read_text().partition(" ")
            # The file is not yet written; or, in a directory shared by several hosts, another host's rank wrote it.
            if rank in self._met or host != platform.node():
                continue
            self._met.add(rank)
            try:
                handle = _open(int(pid))
            except ProcessLookupError:
                self.deaths.append(Death(rank, time.time_ns(), None))
                continue
            pipe = handle
            with contextlib.suppress(OSError):  # it could make none
                pipe = os.open(self._directory / f"{PIPE}{rank}", os.O_RDONLY | os.O_NONBLOCK)
            self._alive[handle] = rank, int(pid), pipe
            for one in {handle, pipe}:
                self._poll.register(one, select.POLLIN)

    def _is_fresh(self) -> bool:
        """Return whether shared files have been made, or removed, a moment ago."""
        try:
            return time.time() - _SHARED.stat().st_mtime < _FRESH
        except OSError:  # this system has none
            return False

    def _to_ask(self) -> list[int]:
        """Return the ranks that may have made the newest shared files; their maps are readable only while they live."""
        unknown = any(_FILES.match(str(file)) for file in _SHARED.iterdir() if not self._knows(file))
        return [pid for _, pid, _ in self._alive.values()] if unknown else []

    def _knows(self, file: Path) -> bool:
        return str(file) in self._before or str(file) in self._files


def hold_pipe(directory: Path, rank: int) -> None:
    """Make a rank's named pipe, and have it open until this process dies."""
    name = directory / f"{PIPE}{rank}"
    os.mkfifo(name)
    with name.open("r+b", buffering=0) as pipe:
        # Linux puts a dead process's files on a list, from the lowest descriptor on, and closes the last one of it
        # first: this one before the connection to the launcher.
        fcntl.fcntl(pipe, fcntl.F_DUPFD_CLOEXEC, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _MOST_FILES) - 9)


def shared_files(pid: int) -> set[str]:
    """Return a process's shared files of an MPI library; none if it has ended."""
    try:
        return set(_FILES.findall(Path(f"/proc/{pid}/maps").read_text()))
    except OSError:
        return set()


def find_leftovers() -> list[str]:
    """Return the shared files of this user's jobs that were killed as a whole a while ago."""
    return sorted(unused(filter(_ours, _SHARED.glob("*")), _OLD))


def remove_leftovers() -> list[str]:
    """Remove these files, and return their names."""
    found = find_leftovers()
    for name in found:
        with contextlib.suppress(OSError):
            os.unlink(name)
    return found


def unused(files: Iterable[Path], age: float = 0.0, without: int = 0) -> set[str]:
    """Return the files of at least that age, in seconds, that no process has, but for one to do ``without``."""
    found: dict[tuple[int, int], str] = {}
    for file in files:
        with contextlib.suppress(OSError):  # it was removed meanwhile
            state = file.lstat()
            if stat.S_ISREG(state.st_mode) and time.time() - state.st_mtime >= age:
                found[state.st_dev, state.st_ino] = str(file)
    # Read processes after the list: then a brand-new file is open or mapped in its maker.
    for process in Path("/proc").glob("[0-9]*") if found else ():
        for held in _held(process) if process.name != str(without) else ():
            found.pop(held, None)
    return set(found.values())


def _held(process: Path) -> set[tuple[int, int]]:
    """Return device and inode of a process's open and mapped files, as far as they are readable."""
    held = set()
    # Open files first: a process maps a file before it closes it, so the file is in one of the two lists.
    with contextlib.suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                state = descriptor.stat()
                held.add((state.st_dev, state.st_ino))
    with contextlib.suppress(OSError):
        for line in (process / "maps").read_text(errors="replace").splitlines():
            major, _, minor = line.split()[3].partition(":")
            held.add((os.makedev(int(major, 16), int(minor, 16)), int(line.split()[4])))
    return held


def _ours(file: Path) -> bool:
    with contextlib.suppress(OSError):  # it was removed meanwhile
        return _FILES.match(str(file)) is not None and file.stat().st_uid == os.getuid()
    return False


def _open(pid: int) -> int:
    """Return a handle (pidfd) on a process.

    Raises:
        ProcessLookupError: it has ended.
        OSError: the system has no such handles.
    """
    if not hasattr(os, "pidfd_open"):
        raise OSError("no pidfd_open")
    return os.pidfd_open(pid)


def _has_closed_files(pid: int) -> bool:
    """Return whether a process has ended or is about to, or its first thread alone has ended."""
    try:
        return "\nFDSize:\t0\n" in Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:  # its parent has taken note of its end; or too many files are open here
        return not Path(f"/proc/{pid}").exists()


def _ends(handle: int) -> bool:
    """Return whether a process ends within a moment."""
    ending = select.poll()  # select() takes no descriptors from 1024 on
    ending.register(handle)
    return bool(ending.poll(1000 * _DYING))


def _exit_status(handle: int, pid: int) -> int | None:
    """Return the status of an ended process, which may be another's child; None if unknown."""
    with contextlib.suppress(OSError, IndexError):  # its parent was faster
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        if fields[0] == "Z":
            return os.waitstatus_to_exitcode(int(fields[-1]))
    info = bytearray(struct.pack("Q", _INFO_EXIT).ljust(_INFO_BYTES, b"\0"))
    with contextlib.suppress(OSError):  # Linux before 6.15
        fcntl.ioctl(handle, _GET_INFO, info)
        if struct.unpack_from("Q", info)[0] & _INFO_EXIT:
            return os.waitstatus_to_exitcode(int(struct.unpack_from("i", info, _INFO_BYTES - 4)[0]))
    return None
