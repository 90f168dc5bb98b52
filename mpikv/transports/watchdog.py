"""A thread that watches a GPU's queued work: the GPU never reports that work does not end."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ..cluster.printing import log
from ..cluster.waiting import Waiting
from ..memory.device import DeviceMemory
from ..protocols import Event

Fail: TypeAlias = Callable[[Exception, str], None]
"""Ends the work in flight after an error; the text names the oldest call."""

# Seconds between two looks. Successful work is done by then, and costs no look.
_NAP = 0.01
# Seconds without work until the thread ends. A training queues its next work sooner, so the thread is not made anew.
_IDLE = 5.0


class Work:
    """One call, in flight from its beginning until it is known to be done."""

    def __init__(self, call: str) -> None:
        """Note a call that begins; the caller then sets ``event``, or ``failed``. Local."""
        self.call = call
        self.event: Event | None = None
        """The event behind the call on its stream; None while the host is in the call."""
        self.failed = False

    @property
    def done(self) -> bool:
        """Whether the call has failed, or the GPU has done the work that it queued. Never waits."""
        return self.failed or (self.event is not None and self.event.done)


class Watchdog:
    """A thread that lives while work is in flight, and a while longer. Its methods are local.

    If the oldest work misses the deadline of ``waiting``, counted from when it became the oldest, or if ``check``
    raises, the thread calls ``fail`` and stops watching all later work.
    """

    def __init__(
        self, waiting: Waiting, memory: DeviceMemory, check: Callable[[], None], fail: Fail, rank: int
    ) -> None:
        """Register :meth:`wake` as ``memory.order.wake``, for memory to be released; start no thread yet. Local.

        ``rank`` is this one, for messages.
        """
        self._waiting, self._check, self._fail, self._rank = waiting.warning(self._warn), check, fail, rank
        self._prepare, self._drop = memory.gpu.watch, memory.order.drop_done
        memory.order.wake = self.wake
        self._works: deque[Work] = deque()
        self._alive = self._stopped = False
        self._claiming = threading.Lock()

    def look_after(self, work: Work) -> None:
        """Watch work from now on; it must follow all earlier work on the same stream. May start the thread. Local."""
        # In this order: see _may_end.
        self._works.append(work)
        self.wake()

    def wake(self) -> None:
        """Start the thread, unless one runs or :meth:`stop` was called, to release memory of finished work. Local."""
        if not (self._alive or self._stopped) and self._take_place():
            threading.Thread(target=self._watch, name="mpikv-watchdog", daemon=True).start()

    def stop(self) -> None:
        """Ask the thread to end once all watched work is done, and let none start again. Does not wait."""
        self._stopped = True

    def _take_place(self) -> bool:
        """Note that a thread watches; return whether none did before."""
        with self._claiming:
            alive, self._alive = self._alive, True
            return not alive

    def _watch(self) -> None:
        """Look at queued work, drop its memory, and end if none comes; call ``fail`` if some is late or fails. In the
        thread.
        """
        try:
            self._prepare()
            # It ends when nothing has needed it for a while: an idle program has no thread.
            needed = time.monotonic()
            while True:
                # It polls for new work: to wake a thread takes longer than the rest of a call.
                time.sleep(_NAP)
                # Without a lock: only this thread removes work, and deque.append is atomic.
                while self._works and self._works[0].done:
                    self._works.popleft()
                if self._works:
                    self._waiting.until(self._oldest_is_done, tuple)
                if self._works or not self._drop():
                    needed = time.monotonic()
                elif (self._stopped or time.monotonic() - needed >= _IDLE) and self._may_end():
                    return
        except Exception as error:
            # First: this thread ends here, and no later work may start another.
            self._stopped = True
            self._fail(error, self._works[0].call if self._works else "")
            self._works.clear()

    def _may_end(self) -> bool:
        """Return whether this thread may end: nothing is left to watch or drop, or another thread watches now. If so,
        this one counts no more. In the thread.
        """
        # A caller adds work, then reads _alive. So this clears _alive first, then looks for work once more: one of the
        # two sees the other.
        self._alive = False
        return not (self._works or not self._drop()) or not self._take_place()

    def _oldest_is_done(self) -> bool:
        """Return whether the oldest work is done; if not, call ``check``, which may raise."""
        if self._works[0].done:
            return True
        self._check()
        return False

    def _warn(self, waited: float, _: Sequence[int]) -> None:
        """Log that this rank has waited for the GPU, and the oldest call. Local."""
        call = self._works[0].call
        log("rank %d has waited %.1f s for the GPU, in %s", self._rank, waited, call)
