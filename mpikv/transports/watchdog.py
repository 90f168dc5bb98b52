"""A look at what a GPU has been given to do, which by itself never says that it does not come to its end."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from ..cluster.printing import warn
from ..cluster.waiting import Waiting
from ..protocols import Event

__all__ = ["Watchdog", "Work"]

# Seconds in which what goes well is done, and nobody looks.
_NAP = 0.01
# Seconds in which the next work comes where a program trains.
_IDLE = 5.0


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
    """A thread that is alive as long as work is in flight, and a while longer. The oldest that is not done has an end
    after the deadline of ``waiting``, counted from when it came to be the oldest, or when ``check`` raises; then
    ``fail`` is told of it, in this thread, and nobody looks after what was in flight behind it.
    """

    def __init__(
        self,
        waiting: Waiting,
        prepare: Callable[[], None],
        check: Callable[[], None],
        fail: Callable[[Exception, str], None],
        drop: Callable[[], bool],
        rank: int,
    ) -> None:
        """``prepare`` is called in the thread before it asks for anything. ``drop`` lets go of what work that is done
        has used, and tells whether that was all. ``rank`` is this one, for messages.
        """
        self._waiting = waiting.warning(self._warn)
        self._prepare, self._check, self._fail, self._drop, self._rank = prepare, check, fail, drop, rank
        self._works: deque[Work] = deque()
        self._alive = self._stopped = False
        self._claiming = threading.Lock()

    def look_after(self, work: Work) -> None:
        """Look after work that comes after all before it, on the same stream."""
        self._works.append(work)
        if not self._alive:
            self._start()

    def wake(self) -> None:
        """Let go of what is used once more: something is, since the thread looked."""
        if not self._alive:
            self._start()

    def stop(self) -> None:
        """Have the thread end, for good, when all is done that it looks after. It is not waited for."""
        self._stopped = True

    def _start(self) -> None:
        if not self._stopped and self._claim():
            threading.Thread(target=self._watch, name="mpikv-watchdog", daemon=True).start()

    def _claim(self) -> bool:
        """Return whether nobody else is the thread."""
        with self._claiming:
            alive, self._alive = self._alive, True
            return not alive

    def _watch(self) -> None:
        try:
            self._prepare()
            needed = time.monotonic()
            while True:
                # It is not told of what comes: it looks. To wake a thread takes longer than all else of a call.
                time.sleep(_NAP)
                self._drop_done()
                if self._works:
                    self._waiting.until(self._moved, tuple)
                if self._works or not self._drop():
                    needed = time.monotonic()
                elif (self._stopped or time.monotonic() - needed >= _IDLE) and self._may_end():
                    return
        except Exception as error:
            self._stopped = True
            self._fail(error, self._works[0].call if self._works else "")
            self._works.clear()

    def _may_end(self) -> bool:
        # Whoever brings something looks whether the thread is alive after that. So this looks for it once more.
        self._alive = False
        return not (self._works or not self._drop()) or not self._claim()

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
        warn("rank %d has waited %.1f s for the GPU, in %s", self._rank, waited, call)
