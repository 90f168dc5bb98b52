"""The services of a rank's system: time, naps, threads, locks. A simulated rank gets them from its scheduler instead.

Every wait for another rank or thread goes through here. So a simulation decides who runs next, and its clock can jump
to the next deadline when all wait.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import platform
import resource
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

SHARED = "/dev/shm"
"""Where processes share files in memory. Containers of one machine may have one each."""


class OfMessages(partial[bool]):
    """A condition that only the message-passing library can make true.

    The scheduler asks a simulated rank again when a message has come for it, not at every change on its host.
    """


def _find_machine() -> str:
    """Return a text that processes have in common if they see one directory of shared memory, else a random one."""
    with suppress(OSError):
        boot, there = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.stat(SHARED)
        # One file system may be mounted in several containers, each with a directory of its own.
        return f"{boot} {there.st_dev} {there.st_ino}"
    return os.urandom(16).hex()


class Runtime:
    """Time, threads and locks of the real system. A simulation overrides all of it."""

    world: Any = None
    """The communicator of all ranks if the rank is simulated, else None."""
    polls = 200
    """The number of looks of a wait, each with a yield of the core, before it naps."""
    now: Callable[[], float] = staticmethod(time.monotonic)
    """Returns seconds since some moment; they never go back."""
    sleep: Callable[[float], None] = staticmethod(time.sleep)
    give_way: Callable[[], None] = staticmethod(os.sched_yield)
    """Lets another thread or process have the core."""
    lock: Callable[[], Any] = staticmethod(threading.Lock)
    condition: Callable[[], Any] = staticmethod(threading.Condition)
    event: Callable[[], Any] = staticmethod(threading.Event)

    def __init__(self) -> None:
        """Find the name of this host, and the text common to the processes of one shared memory. Local."""
        self.owned: dict[str, list[Any]] = {}
        """Objects of this rank's process until its end, by kind."""
        self.host = platform.node()
        """The name of this rank's host."""
        self.machine = _find_machine()
        """What the ranks that can share memory have in common, and no others."""

    @property
    def process(self) -> int:
        """The number of this rank's process."""
        return os.getpid()  # not cached: a fork changes it

    def peer(self, process: int) -> Any:
        """Return the simulated rank with this process number; None for a real one."""
        return None

    def busy(self) -> int:
        """Return how many nanoseconds the main thread of this rank's process has run on a core."""
        return time.clock_gettime_ns(_main_clock())

    def signs(self) -> list[int]:
        """Return signs of why this rank's process may be late, as nanoseconds and counts. Local.

        Nanoseconds in Python's garbage collector, and of its main thread without a core; pages and blocks that it read
        from a disk.
        """
        used, without_core = resource.getrusage(resource.RUSAGE_SELF), 0
        with suppress(OSError, IndexError):  # a kernel without these figures
            without_core = int(Path("/proc/self/schedstat").read_text().split()[1])
        return [_watch_collector()[0], without_core, used.ru_majflt, used.ru_inblock]

    def nap(self, seconds: float, until: float = math.inf, ready: Callable[[], bool] | None = None) -> bool:
        """Sleep ``seconds`` and return False; a simulated rank sleeps to ``until``, or returns True once ``ready()``.

        Returns:
            Whether ``ready()`` is known to be true.
        """
        time.sleep(seconds)
        return False

    def thread(self, run: Callable[[], None], name: str) -> threading.Thread:
        """Return a daemon thread that has not started."""
        return threading.Thread(target=run, name=name, daemon=True)


_SYSTEM = Runtime()


@cache
def _main_clock() -> int:
    """Return the number of the clock that counts the main thread's time on a core."""
    return time.pthread_getcpuclockid(threading.main_thread().ident or 0)


os.register_at_fork(after_in_child=_main_clock.cache_clear)


@cache
def _watch_collector() -> list[int]:
    """Register a callback, once, that adds the garbage collector's ns to the returned list's first item. Local."""
    spent = [0, 0]

    def note(phase: str, _: object) -> None:
        """Add the time since a collection began, at its end."""
        now = time.monotonic_ns()
        if phase == "start":
            spent[1] = now
        elif spent[1]:
            spent[0] += now - spent[1]

    gc.callbacks.append(note)
    return spent


class _Here(threading.local):
    # Class attributes: a new thread finds the real system without an __init__ per thread.
    runtime = _SYSTEM
    place: str | None = None
    """The line that issued the ``wait=False`` call that this thread makes; None in a thread that makes none."""


here = _Here()


def present() -> Runtime:
    """Return this thread's runtime: that of the real system, or of its simulated rank."""
    return here.runtime


def owned(kind: str) -> list[Any]:
    """Return the list, itself, that holds this process's objects of one kind; the first call makes it."""
    return here.runtime.owned.setdefault(kind, [])


@cache
def system_function(name: str) -> Any:
    """Return a function of the C library, for calls by ctypes that set ``errno``; OSError if there is none.

    Raises:
        OSError: it has none of that name.
    """
    try:
        # None is the process itself, whose C library has it. ctypes keeps errno per thread on request.
        return getattr(ctypes.CDLL(None, use_errno=True), name)
    except AttributeError:
        raise OSError(f"{name} is not in the system's library") from None
