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
# Seconds in which the next work comes where a program trains: to start a thread for each call would take longer than
# the call.
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
        self._changed = threading.Condition()
        self._works: deque[Work] = deque()
        self._alive = self._woken = self._stopped = False

    def look_after(self, work: Work) -> None:
        """Look after work that comes after all before it, on the same stream."""
        with self._changed:
            self._works.append(work)
            self._run()

    def wake(self) -> None:
        """Let go of what is used once more: something is, since the thread looked."""
        with self._changed:
            self._woken = True
            self._run()

    def stop(self) -> None:
        """Have the thread end, for good, when all is done that it looks after. It is not waited for."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _run(self) -> None:
        if self._alive:
            self._changed.notify()
        elif not self._stopped:
            self._alive = True
            threading.Thread(target=self._watch, name="mpikv-watchdog", daemon=True).start()

    def _watch(self) -> None:
        try:
            self._prepare()
            while self._is_needed():
                time.sleep(_NAP)
                self._drop_done()
                if self._works:
                    self._waiting.until(self._moved, tuple)
        except Exception as error:
            self._fail(error, self._works[0].call if self._works else "")
            with self._changed:
                self._works.clear()
                self._alive, self._stopped = False, True

    def _is_needed(self) -> bool:
        """Return whether there is work, or something in use, or will be soon; if not, the thread ends."""
        if self._works or not self._drop():
            return True
        with self._changed:
            self._changed.wait_for(lambda: self._works or self._woken or self._stopped, _IDLE)
            self._alive = bool(self._works) or (self._woken and not self._stopped)
            self._woken = False
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
