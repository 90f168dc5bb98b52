"""Simulated counterparts of functions of the process: time, files, and MPI.

They are installed once, while any cluster runs. Each asks :func:`mpikv.cluster.runtime.present` for the caller: a real
thread still reaches the real function.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

from ...cluster import runtime
from .calls import guard_doors
from .errors import SimulatedError

__all__ = ["one_core", "simulated_system"]

_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
_NO_MPI = "a simulated rank has no MPI: use the communicator that the program is given, whose library is comm.library"


class _Dispatched:
    """A function with a different behaviour for simulated ranks. It is an object, since a class made meanwhile would
    turn a Python function into its method.
    """

    def __init__(self, real: Callable[..., Any], simulated: Callable[..., Any]) -> None:
        self._real, self._simulated = real, simulated

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        here: Any = runtime.present()
        if here.world is None:
            return self._real(*arguments, **options)
        return self._simulated(here, *arguments, **options)


def _sleep(here: Any, seconds: float) -> None:
    if seconds != seconds:
        raise ValueError("Invalid value NaN (not a number)")
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    here.sleep(seconds)


def _clock(start: float = 0.0) -> Callable[[Any], float]:
    return lambda here: start + here.now()


def _clock_ns(start: int = 0) -> Callable[[Any], int]:
    return lambda here: start + int(here.now() * 1e9)


def _is_of_another_library(frame: FrameType) -> bool:
    """Return whether a frame's code may hold a lock of its own library: the next rank would wait for it for ever."""
    return frame.f_code.co_filename.startswith(_LIBRARIES) and not frame.f_globals["__name__"].startswith("mpikv.")


def _on_disk(real: Callable[..., Any], grows: bool = True) -> Callable[..., Any]:
    """Return a file function that is a scheduling point, and needs room on the disk if it ``grows``."""

    def simulated(here: Any, *arguments: Any, **options: Any) -> Any:
        if _is_of_another_library(sys._getframe(2)):
            return real(*arguments, **options)
        here.give_way()
        if grows and here.host in here.scheduler.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments, **options)

    return simulated


def _replacements() -> Iterator[tuple[ModuleType, str, Callable[..., Any]]]:
    yield time, "sleep", _sleep
    yield time, "time", _clock(time.time())
    yield time, "time_ns", _clock_ns(time.time_ns())
    for name in ("monotonic", "perf_counter"):
        yield time, name, _clock()
        yield time, f"{name}_ns", _clock_ns()
    for name in ("posix_fallocate", "pwrite", "pwritev", "rename", "replace"):
        yield os, name, _on_disk(getattr(os, name))
    for name in ("fsync", "fdatasync"):
        yield os, name, _on_disk(getattr(os, name), grows=False)


def _world(mpi: ModuleType) -> Any:
    if runtime.present().world is not None:
        raise SimulatedError(f"mpi4py.MPI.COMM_WORLD: {_NO_MPI}")
    return vars(mpi)["COMM_WORLD"]


class _Guarded(ModuleType):
    """``mpi4py.MPI``, if it is loaded already, without a world for simulated ranks."""

    COMM_WORLD = property(_world)


class _NoMPI:
    """Keeps simulated ranks from loading ``mpi4py.MPI``: that would start MPI in this process."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "mpi4py.MPI" and runtime.present().world is not None:
            raise ImportError(f"import mpi4py.MPI: {_NO_MPI}", name=name)
        return None


class _Changes:
    """The changes in this process, to undo them."""

    def __init__(self) -> None:
        self._real = list[tuple[ModuleType, str, Any]]()
        for module, name, simulated in list(_replacements()):
            self._real.append((module, name, getattr(module, name)))
            setattr(module, name, _Dispatched(getattr(module, name), simulated))
        self._reopen_doors = guard_doors()
        self._finder = _NoMPI()
        sys.meta_path.insert(0, self._finder)
        self._mpi = sys.modules.get("mpi4py.MPI")
        if self._mpi is not None:
            self._mpi.__class__ = _Guarded
        # It would run one rank's finalizers in another rank's thread, at moments outside of the seed's control.
        self._collects = gc.isenabled()
        gc.disable()

    def undo(self) -> None:
        for module, name, real in self._real:
            setattr(module, name, real)
        self._reopen_doors()
        sys.meta_path.remove(self._finder)
        if self._mpi is not None:
            self._mpi.__class__ = ModuleType
        if self._collects:
            gc.enable()


_lock, _running, _changes = threading.Lock(), 0, list[_Changes]()


@contextmanager
def simulated_system() -> Iterator[None]:
    """Install the ranks' time, files and MPI inside of a block. Blocks of several threads may overlap."""
    global _running
    with _lock:
        _running += 1
        if _running == 1:
            _changes.append(_Changes())
    try:
        yield
    finally:
        with _lock:
            _running -= 1
            if _running == 0:
                _changes.pop().undo()


@contextmanager
def one_core() -> Iterator[None]:
    """Keep this thread, and threads it starts, on their current core inside of a block.

    One thread of a run is active at a time, and waking one on another core takes longer than its turn.
    """
    cores, policy, priority = os.sched_getaffinity(0), os.sched_getscheduler(0), os.sched_getparam(0)
    # A sandbox may forbid both.
    with suppress(PermissionError):
        os.sched_setaffinity(0, {ctypes.CDLL(None).sched_getcpu()})
        # A woken thread must not preempt its waker, which still holds Python's lock.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with suppress(PermissionError):
            os.sched_setscheduler(0, policy, priority)
            os.sched_setaffinity(0, cores)
