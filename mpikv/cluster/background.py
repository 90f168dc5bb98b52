"""Non-blocking calls: a queue, the thread that makes them, and an order common to all ranks.

The next call must be the same on every rank, and at any moment one rank has issued more calls than another. So before
each call the ranks compare the lengths of their queues. The next call is the most urgent of the calls that all have; of
several, the one issued first.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from types import TracebackType
from typing import Any

from ..errors import Closed, TransportError, Unsupported, noted, text_of
from ..protocols import Issue
from .printing import log
from .runtime import here, present
from .tracebacks import hidden_from_pytest, hide_frames, place_here

__tracebackhide__ = hidden_from_pytest

# Seconds between two looks at another thread's running call: nobody notifies this condition when it ends.
_SHORT = 1e-3


class Work:
    """A call made with ``wait=False``, and its result.

    Example:
        >>> import mpikv, numpy as np
        >>> kv = mpikv.create()
        >>> kv.init("w", np.zeros(2))
        >>> work = kv.pushpull("w", np.ones(2), wait=False)
        >>> work.wait()
        array([1., 1.])
        >>> work.done
        True
    """

    def __init__(
        self,
        pending: Pending,
        urgent: int,
        text: Callable[[], str],
        run: Callable[[], Any],
        issue: Issue | None,
        awaited: bool = False,
    ) -> None:
        """Keep a call and the program's line that issues it; :meth:`Pending.add` queues it. Local.

        ``issue`` orders its arrays' work on a GPU, or is None; ``awaited``: its issuer is sure to wait for it.
        """
        self._pending, self._urgency, self._text, self._issue = pending, urgent, text, issue
        self._run: Callable[[], Any] | None = run if issue is None else partial(issue.run, run)
        # Of the rank's own system: in a simulation a wait for it lets other ranks run.
        self._completed = present().event()
        self._result: Any = None
        self.inner: Callable[[Any], Any] | None = None
        """Converts the call's own result into the result of :meth:`wait`, if they differ."""
        self._awaited = awaited
        self._place = place_here()
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None

    def __repr__(self) -> str:
        state = (
            f"failed: {text_of(self._error, repr)}" if self._error is not None else "done" if self.done else "pending"
        )
        return f"<mpikv.Work {self._text()} {state}>"

    @property
    def done(self) -> bool:
        """Whether the call has completed, well or not. Local. On a GPU a call completes when it is queued."""
        return bool(self._completed.is_set())

    @property
    def error(self) -> BaseException | None:
        """The call's error; None if there is none, or not yet. Local. Reading it does not count as having seen it."""
        # Each raise would make the traceback longer, so it is set back.
        return self._error and self._error.with_traceback(self._trace)

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the call, on a GPU until it is queued; return its result, or raise its error, now seen; TimeoutError
        after ``timeout`` s. On a GPU the current stream waits for the rest. Local.

        Local: every rank may wait at any time, more than once, or not at all. An error that nobody has seen is logged,
        and raised by the next blocking call, in its place.

        Args:
            timeout: seconds; None waits until the call has completed. The store's own timeout bounds that, unless an
                updater never returns.

        Raises:
            TimeoutError: the call has not completed yet; it goes on, and so does the store.
            Unsupported: an updater waits for a call that comes after the updater's own.
            Closed: it was issued before a fork, and completes in the other process.
        """
        self._pending.check_waitable(self)
        self._awaited |= timeout is None
        if not self._completed.wait(timeout):
            raise TimeoutError(f"{self._text()} has not completed after {timeout} s; it is still running")
        error = self.error
        if self._issue is not None:
            # After a failure of the GPU no stream can wait for it, and the call's own error says more.
            with nullcontext() if error is None else suppress(TransportError):
                self._issue.rejoin()
        if error is not None:
            self._pending.saw(self)
            raise error
        return self._result if self.inner is None else self.inner(self._result)

    def _perform(self) -> None:
        """Make the call, and keep its result or error; drop the function that holds the caller's arrays. Collective."""
        assert self._run is not None
        try:
            self._result = self._run()
        except BaseException as error:  # sys.exit in an updater, too: wait() raises it where the program can end
            self._fail(error)
        self._run = None  # it holds the caller's arrays

    def _fail(self, error: BaseException) -> None:
        """Keep an error as the call's outcome, and clear its frames, which may hold the caller's arrays. Local."""
        hide_frames(error)
        self._error, self._trace = error, error.__traceback__
        self._run = None
        # Frames hold the caller's arrays, and a kept Work would keep them alive.
        traceback.clear_frames(self._trace)


class Pending:
    """The non-blocking calls of one store. Its methods are local, but those of its thread."""

    def __init__(
        self,
        least: Callable[[int], int],
        on_worker: Callable[[], AbstractContextManager[None]] = nullcontext,
        busy: Callable[[], bool] = bool,
    ) -> None:
        """Make an empty queue without a thread. ``least``, collective, returns the smallest of all ranks' numbers.

        The thread enters ``on_worker`` while it makes a call, and begins none while another thread's call keeps the
        store ``busy``.
        """
        self._least, self._on_worker, self._busy = least, on_worker, busy
        self._changed = present().condition()
        self._queue: list[Work] = []
        self._unseen: list[Work] = []
        self._completed = 0
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._ending = self._some_are_urgent = False
        self.active = False
        """Whether calls are queued or running."""
        self.waiting = False
        """Whether a call must look here before it may run: others come first, or one has failed unseen."""

    def add(self, work: Work) -> Work:
        """Queue a call and return it; start the thread at the first one; raise Closed if the store has ended. Local."""
        with self._changed:
            if self._ending:
                raise Closed(f"{work._text()}: the store has ended; create a new store")
            self._start()
            self._some_are_urgent |= work._urgency != 0
            self._queue.append(work)
            self.active = self.waiting = True
            self._changed.notify_all()
        return work

    def _start(self) -> None:
        """Start the queue's thread, once; RuntimeError if the system has no thread left. Local; the lock is held."""
        if self._thread is None:
            # Set before start(): an interrupt may come while start() waits, and the next call would start a second one.
            self._thread = present().thread(self._serve, "mpikv")
            try:
                self._thread.start()
            except RuntimeError:  # the system has no thread left
                self._thread = None
                raise

    def runs_here(self) -> bool:
        """Return whether this is the queue's thread, as in one of its calls or in an updater of one."""
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def drain(self, patience: float | None = None) -> bool:
        """Wait until no call is left, or ``patience`` s pass in which none ends; return whether none is left. Local.

        In the queue's own thread, which cannot wait for itself, and in a forked child, it returns True at once.
        """
        # Without the lock, as most calls come here with nothing pending.
        if not self.active or self.runs_here() or os.getpid() != self._process:
            return True
        # Patience counts from the last completed call: a long queue that moves is no stall.
        completed = -1
        with self._changed:
            while completed < self._completed:
                completed = self._completed
                if self._changed.wait_for(lambda: not self.active, patience):
                    return True
        return False

    def claim_when_done(self, claim: Callable[[], None]) -> None:
        """Wait until all queued calls have completed; call ``claim()`` before the thread begins another. Not
        for the queue's own thread, which would wait for itself. Local.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self.active)
            claim()

    def take_failure(self) -> BaseException | None:
        """Return the first unseen error or None, and mark all as seen; in the queue's thread None, marking none. Local.

        A note on the error names its call.
        """
        with self._changed:
            if not self._unseen or self.runs_here():
                return None
            unseen, self._unseen = self._unseen, []
            self._set_waiting()
        error = unseen[0].error
        assert error is not None
        more = f", nor for {len(unseen) - 1} later ones that failed" if len(unseen) > 1 else ""
        return noted(error, f"in {unseen[0]._text()}, for which nobody has waited{more}")

    def saw(self, work: Work) -> None:
        """Count a call's error as seen, so that no later call raises it. Local."""
        with self._changed:
            if work in self._unseen:
                self._unseen.remove(work)
                self._set_waiting()

    def check_waitable(self, work: Work) -> None:
        """Unless the call is done, raise Unsupported in the queue's thread, and Closed in a forked child. Local."""
        if work.done:
            return
        if self.runs_here():
            raise Unsupported(f"an updater cannot wait for {work!r}, which comes after the call that runs the updater")
        if os.getpid() != self._process:
            raise Closed(f"{work!r} was issued before a fork, which MPI does not survive; it completes in the parent")

    def end(self) -> None:
        """Refuse later calls, and let the thread end once the queue is empty; does not wait. Local."""
        if os.getpid() != self._process:
            return  # a forked child lacks the thread, and the thread may have held the lock at the fork
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def _set_waiting(self) -> None:
        """Set ``waiting``: whether calls are queued or running, or an error is unseen. Local; the lock is held."""
        self.waiting = self.active or bool(self._unseen)

    # --- The thread

    def _serve(self) -> None:
        """Make queued calls, one at a time, until :meth:`end` was called and the queue is empty. The thread's function;
        its calls are collective.
        """
        # One call at a time: two threads of one rank would make collectives in another order on each rank.
        while queued := self._await_call():
            with self._on_worker():
                work = self._make_next(queued)
            # After the block: a thread that waits for the call may close the store at once.
            self._complete(work)
            del work  # its result may be shared memory, and could not be freed while this frame holds it

    def _make_next(self, queued: int) -> Work:
        """Agree on the next call, take it out of the queue and make it; return it, perhaps failed. Collective."""
        here.place = self._queue[0]._place  # only this thread takes calls out
        try:
            work = self._take(self._least(queued))
        except BaseException as error:
            # Which call is next cannot be known any more: the first one reports the failure, and the store has ended.
            work = self._take(1)
            work._fail(error)
        else:
            here.place = work._place
            work._perform()
        return work

    def _await_call(self) -> int:
        """Wait until a call is queued and the store is free; return how many are queued, 0 at the end. Local."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._ending)
            while self._queue and self._busy():
                self._changed.wait_for(lambda: not self._busy(), _SHORT)
            return len(self._queue)

    def _take(self, common: int) -> Work:
        """Remove the most urgent of the first ``common`` calls from the queue, and return it."""
        with self._changed:
            # Without priorities the first: then all ranks have the same first, and need not look at the rest.
            candidates = range(common if self._some_are_urgent else 1)
            return self._queue.pop(max(candidates, key=lambda place: (self._queue[place]._urgency, -place)))

    def _complete(self, work: Work) -> None:
        """Mark a call as completed, and wake all who wait. Its error counts as unseen, and is logged unless a wait
        without a timeout has begun or is sure to come. Local.
        """
        if work._error is not None and not work._awaited:
            log("a call with wait=False has failed: %s; its wait() raises the error", repr(work))
        with self._changed:
            self._completed += 1
            if work._error is not None:
                self._unseen.append(work)
            self.active = bool(self._queue)
            self._set_waiting()
            work._completed.set()
            self._changed.notify_all()


def urgency(priority: Any) -> int:
    """Return the highest of a call's priorities as an int; 0 if there is none, or one is no number. Raises nothing."""
    wishes = priority if isinstance(priority, (list, tuple)) else [priority]
    # Nothing is raised here, before the call: it reports a bad priority to all ranks.
    try:
        return max(map(int, wishes), default=0)
    except (TypeError, ValueError, OverflowError):
        return 0
