"""A look at what a GPU has been given to do, which by itself never says that it does not come to its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ..typing import Event
from ..waiting import Waits

__all__ = ["Watchdog", "Work"]

# Seconds in which what goes well is done, and nobody looks.
_NAP = 0.01


class Work:
    """One call: from its beginning in flight, until it is known to be done."""

    def __init__(self, call: str) -> None:
        self.call = call
        self.event: Event | None = None
        """Behind it on its stream; None as long as the host is in the call."""
        self.failed = False

    @property
    def done(self) -> bool:
        return self.failed or (self.event is not None and self.event.done)


class Watchdog:
    """A thread that is alive as long as work is in flight. It has an end after the deadline of ``waiting``, counted
    from when it began to look, or when ``check`` raises; then ``fail`` is told of it, in this thread.
    """

    def __init__(self, waiting: Waits, check: Callable[[], None], fail: Callable[[Exception, str], None]) -> None:
        self._waiting, self._check, self._fail = waiting, check, fail
        self._lock = threading.Lock()
        self._newest = Work("")
        self._alive = False

    def look_after(self, work: Work) -> None:
        """Look after work that comes after all before it, on the same stream."""
        with self._lock:
            self._newest = work
            if self._alive:
                return
            self._alive = True
        threading.Thread(target=self._watch, name="mpikv-watchdog", daemon=True).start()

    def _watch(self) -> None:
        while (work := self._next()) is not None:
            try:
                self._waiting.until(lambda work=work: self._is_done(work), tuple)  # type: ignore[misc]
            except Exception as error:
                work.failed = True
                self._fail(error, work.call)

    def _next(self) -> Work | None:
        """Return the newest work, or None if it is done, whereupon the thread ends."""
        time.sleep(_NAP)
        with self._lock:
            work = self._newest
            if work.done:
                self._alive = False
                return None
            return work

    def _is_done(self, work: Work) -> bool:
        if work.done:
            return True
        self._check()
        return False
