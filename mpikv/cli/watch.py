"""The ranks of a running job as the launcher's side sees them: which died first, of what, and the files they share.

A rank that is killed leaves no word, and a launcher then ends the other ranks without telling which was the first. A
job that was killed also leaves its files in shared memory, which no other job ever takes away.

All of this needs Linux (5.3 to see who died). Elsewhere nothing is seen, and nothing is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import select
import signal
import stat
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..config import FILES

__all__ = ["PREFIX", "Death", "Watch", "remove_leftovers", "shared_files"]

PREFIX = "rank."
"""Begins the name of the file in which a rank writes its process id and its host when it starts."""

_TICK = 0.05
# Who makes a file in shared memory maps it soon after; others of the job a little later.
_FRESH = 0.5
# Seconds after which the ranks of a job have opened what it made; to remove a file does not hurt who has it open.
_OLD = 600.0
_SHARED = Path("/dev/shm")
# What MPI libraries, and a store that MPI makes no window, call their files. A rank may map others, which are no
# business of ours.
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
    """The same for several that were seen at once."""
    status: int | None
    """As :func:`os.waitstatus_to_exitcode` has it: negative after a signal. None: it could not be learned."""


class Watch:
    """Waits for a launcher and meanwhile looks at its ranks, which write their process ids to a directory."""

    def __init__(self, directory: Path) -> None:
        self.deaths: list[Death] = []
        self._directory = directory
        self._met: set[int] = set()
        self._alive: dict[int, tuple[int, int]] = {}
        self._poll = select.poll()
        self._files: set[str] = set()
        self._before = set(map(str, _SHARED.glob("*")))

    def wait(self, launcher: subprocess.Popen[bytes], bereft: Callable[[], None]) -> int:
        """Return the launcher's exit status. ``bereft`` is called while it runs and some ranks have ended."""
        try:
            own = _open(launcher.pid)
        except OSError:
            return launcher.wait()
        self._poll.register(own, select.POLLIN)
        while launcher.poll() is None:
            self._look(_TICK)
            if self.deaths:
                bereft()
        # It may end before the ranks that it has ended.
        self._poll.unregister(own)
        self._look(_TICK if launcher.returncode and self._alive else 0)
        for handle in (own, *self._alive):
            os.close(handle)
        return launcher.returncode

    def send(self, number: int) -> int:
        """Send a signal to the ranks that are alive, as far as they are met, and return how many they are."""
        handles = list(self._alive)
        for handle in handles:
            with contextlib.suppress(OSError):  # it ended meanwhile
                signal.pidfd_send_signal(handle, number)
        return len(handles)

    def remove_files(self, orphans: bool) -> None:
        """Remove what the ranks shared, and after a failure orphans. Only after the last of them ended."""
        told = "\n".join(path.read_text() for path in self._directory.glob(FILES + "*"))
        for file in {*self._files, *filter(_FILES.match, told.split()), *(self._orphans() if orphans else ())}:
            # A job that ends in peace removes its files itself.
            with contextlib.suppress(OSError):
                os.unlink(file)

    def _orphans(self) -> set[str]:
        """Return new files that no process has: whoever made them was killed before it was seen to have them."""
        new = {str(file) for file in _SHARED.glob("*") if not self._knows(file) and _ours(file)}
        # After the list: what another job makes at this moment is in its maker's maps by now.
        for process in Path("/proc").glob("[0-9]*") if new else ():
            new -= shared_files(int(process.name))
        return new

    def _look(self, seconds: float) -> None:
        self._see_deaths(seconds)
        self._meet_ranks()
        for pid in self._to_ask():
            self._files |= shared_files(pid)
            # That took a millisecond, in which another death may follow the first.
            self._see_deaths(0)

    def _see_deaths(self, seconds: float) -> None:
        ready, now = self._poll.poll(1000 * seconds), time.time_ns()
        for handle, _ in ready:
            if handle in self._alive:
                rank, pid = self._alive.pop(handle)
                self.deaths.append(Death(rank, now, _exit_status(handle, pid)))
                self._poll.unregister(handle)
                os.close(handle)

    def _meet_ranks(self) -> None:
        for path in self._directory.glob(PREFIX + "*"):
            rank, (pid, _, host) = int(path.suffix[1:]), path.read_text().partition(" ")
            # Not yet written, or, in a directory that several hosts share, of another host.
            if rank in self._met or host != platform.node():
                continue
            self._met.add(rank)
            try:
                handle = _open(int(pid))
            except ProcessLookupError:
                self.deaths.append(Death(rank, time.time_ns(), None))
                continue
            self._alive[handle] = rank, int(pid)
            self._poll.register(handle, select.POLLIN)

    def _to_ask(self) -> list[int]:
        """Return the ranks that may have made the newest shared files, which can be seen only while they live."""
        try:
            fresh = time.time() - _SHARED.stat().st_mtime < _FRESH
            unknown = fresh and any(_FILES.match(str(file)) for file in _SHARED.iterdir() if not self._knows(file))
        except OSError:
            return []
        return [pid for _, pid in self._alive.values()] if unknown else []

    def _knows(self, file: Path) -> bool:
        return str(file) in self._before or str(file) in self._files


def shared_files(pid: int) -> set[str]:
    """Return the shared files of an MPI library that a process has; none if it has ended."""
    try:
        return set(_FILES.findall(Path(f"/proc/{pid}/maps").read_text()))
    except OSError:
        return set()


def remove_leftovers() -> list[str]:
    """Remove the shared files of this user's jobs that were killed whole, a while ago; return their names."""
    old: dict[tuple[int, int], str] = {}
    for file in filter(_ours, _SHARED.glob("*")):
        with contextlib.suppress(OSError):  # it was removed meanwhile
            state = file.lstat()
            if stat.S_ISREG(state.st_mode) and time.time() - state.st_mtime > _OLD:
                old[state.st_dev, state.st_ino] = str(file)
    for process in Path("/proc").glob("[0-9]*") if old else ():
        for held in _held(process):
            old.pop(held, None)
    for name in old.values():
        with contextlib.suppress(OSError):
            os.unlink(name)
    return sorted(old.values())


def _held(process: Path) -> set[tuple[int, int]]:
    """Return device and number of the files that a process has open, or in memory, if it may be asked."""
    held = set()
    # Files that are open first: whoever opens one has it in memory before it closes it.
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
    """Return a handle on a process.

    Raises:
        ProcessLookupError: it has ended.
        OSError: this system has no such handles.
    """
    if not hasattr(os, "pidfd_open"):
        raise OSError("no pidfd_open")
    return os.pidfd_open(pid)


def _exit_status(handle: int, pid: int) -> int | None:
    """Return the status of a process that has ended and may be somebody else's child."""
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
