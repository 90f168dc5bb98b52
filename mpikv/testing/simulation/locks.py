"""Locks, conditions and events between tasks, as those of :mod:`threading` are between threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ...cluster import runtime

__all__ = ["Condition", "Event", "Lock"]


class Lock:
    """A lock. A task that finds it taken gives up its turn."""

    def __init__(self) -> None:
        self._held = False
        self._wanted = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; return whether it could be had in so many seconds, where -1 is for ever."""
        task: Any = runtime.present()
        if self._held and task.scheduler.choosing:
            raise RuntimeError("a condition that is looked at would wait for a lock")
        deadline = math.inf if timeout < 0 else task.now() + timeout
        self._wanted += 1
        try:
            while self._held:
                if not blocking or task.now() >= deadline:
                    return False
                task.nap(0, deadline, lambda: not self._held)
            self._held = True
        finally:
            self._wanted -= 1
        return True

    def release(self) -> None:
        """Give the lock back."""
        if not self._held:
            raise RuntimeError("release of a lock that nobody holds")
        self._held = False
        if self._wanted:
            _changed()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *failure: object) -> None:
        self.release()


class Condition(Lock):
    """A lock, and a wait for something that is changed under it."""

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait, without the lock, until ``predicate()`` is true or the time is over; return what it is."""
        task: Any = runtime.present()
        deadline = math.inf if timeout is None else task.now() + timeout
        while not (result := predicate()) and task.now() < deadline:
            self.release()
            try:
                task.nap(0, deadline, lambda: bool(predicate()))
            finally:
                self.acquire()
        return result

    def notify_all(self) -> None:
        """Let those that wait look again."""
        _changed()


class Event:
    """A flag that is set once."""

    def __init__(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._set

    def set(self) -> None:
        """Set it."""
        self._set = True
        _changed()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set or the time is over; return whether it is set."""
        task: Any = runtime.present()
        deadline = math.inf if timeout is None else task.now() + timeout
        while not self._set and task.now() < deadline:
            task.nap(0, deadline, self.is_set)
        return self._set


def _changed() -> None:
    here: Any = runtime.present()
    here.changed()
