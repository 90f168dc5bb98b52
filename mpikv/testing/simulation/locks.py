"""Locks, conditions and events between tasks, as those of :mod:`threading` are between threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...cluster import runtime

if TYPE_CHECKING:
    from .task import Task

__all__ = ["Condition", "Event", "Lock"]


class Lock:
    """A lock. A task that finds it taken yields its turn."""

    def __init__(self) -> None:
        self._held = False
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; return whether it was free within ``timeout`` seconds, where -1 is for ever."""
        task: Any = runtime.present()
        if self._held and task.scheduler.choosing:
            raise RuntimeError("a condition that is looked at would wait for a lock")
        deadline = math.inf if timeout < 0 else task.now() + timeout
        while self._held:
            if not blocking or task.now() >= deadline:
                return False
            task.wait_in(self._waiting, deadline, self._is_free)
        self._held = True
        return True

    def _is_free(self) -> bool:
        return not self._held

    def release(self) -> None:
        """Give the lock back."""
        if not self._held:
            raise RuntimeError("release of a lock that nobody holds")
        self._held = False
        if self._waiting:
            _recall(self._waiting)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *failure: object) -> None:
        self.release()


class Condition(Lock):
    """A lock, and a wait for a change made under it."""

    def __init__(self) -> None:
        super().__init__()
        self._told: list[Task] = []

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Release the lock, and wait until ``predicate()`` is true or the time is over; return its value."""
        task: Any = runtime.present()
        deadline = math.inf if timeout is None else task.now() + timeout
        while not (result := predicate()) and task.now() < deadline:
            self.release()
            try:
                task.wait_in(self._told, deadline, lambda: bool(predicate()))
            finally:
                self.acquire()
        return result

    def notify_all(self) -> None:
        """Wake all waiting tasks."""
        _recall(self._told)


class Event:
    """A flag that is set once."""

    def __init__(self) -> None:
        self._set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        """Return whether it is set."""
        if not self._set:
            task: Any = runtime.present()
            task.poll()
        return self._set

    def set(self) -> None:
        """Set it."""
        self._set = True
        _recall(self._waiting)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set or the time is over; return whether it is set."""
        task: Any = runtime.present()
        deadline = math.inf if timeout is None else task.now() + timeout
        while not self._set and task.now() < deadline:
            task.wait_in(self._waiting, deadline, lambda: self._set)
        return self._set


def _recall(queue: list[Task]) -> None:
    here: Any = runtime.present()
    here.scheduler.recall(queue)
    here.changed()
