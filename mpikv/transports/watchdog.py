"""A look at what a GPU has been given to do, which by itself never says that it does not come to its end."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from ..cluster.waiting import Waiting
from ..protocols import Event

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
    """A thread that is alive as long as work is in flight. The oldest that is not done has an end after the deadline
    of ``waiting``, counted from when it came to be the oldest, or when ``check`` raises; then ``fail`` is told of it,
    in this thread, and nobody looks after what was in flight behind it.
    """

    def __init__(
        self,
        waiting: Waiting,
        prepare: Callable[[], None],
        check: Callable[[], None],
        fail: Callable[[Exception, str], None],
        rank: int,
    ) -> None:
        """``prepare`` is called in the thread before it asks for anything; ``rank`` is this one, for messages."""
        self._waiting = waiting.warning(self._warn)
        self._prepare, self._check, self._fail, self._rank = prepare, check, fail, rank
        self._lock = threading.Lock()
        self._works: deque[Work] = deque()
        self._alive = False

    def look_after(self, work: Work) -> None:
        """Look after work that comes after all before it, on the same stream."""
        with self._lock:
            self._works.append(work)
            if self._alive:
                return
            self._alive = True
        threading.Thread(target=self._watch, name="mpikv-watchdog", daemon=True).start()

    def _watch(self) -> None:
        while self._is_needed():
            try:
                self._prepare()
                self._drop_done()
                if self._works:
                    self._waiting.until(self._moved, tuple)
            except Exception as error:
                self._fail(error, self._works[0].call)
                self._works.clear()

    def _is_needed(self) -> bool:
        """Return whether there is work; if there is none, the thread ends."""
        time.sleep(_NAP)
        with self._lock:
            self._alive = bool(self._works)
            return self._alive

    def _drop_done(self) -> None:
        # Only this thread takes work away.
        while self._works and self._works[0].done:
            self._works.popleft()

    def _moved(self) -> bool:
        """Return whether the oldest work is done."""
        if self._works[0].done:
            return True
        self._check()
        return False

    def _warn(self, waited: float, _: Sequence[int]) -> None:
        call = self._works[0].call
        logging.getLogger("mpikv").warning("rank %d has waited %.1f s for the GPU, in %s", self._rank, waited, call)
