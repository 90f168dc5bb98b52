"""The handle of a call of a process group, and the queue of calls with the thread that makes those that nobody awaits.

Calls are made in the order of issue, the same on every rank, so ranks need not compare their queues. A call is made in
the caller's thread if the caller waits and no other call is pending.

A function that was given to a future runs in the thread that completes the call. Its own calls are made there at once,
before the next of the queue: it may wait for them, as PowerSGD's does. The order is the same on every rank if the
function is given before the next call is issued, as DDP gives it: that call waits for it. Given later, it runs before
the next call or after it, by the time, and ranks may disagree.

PyTorch's C++ knows two methods of the handle, ``wait`` and ``get_future``. A future that C++ sees as failed can only be
made by a function that raises, hence two futures.
"""

from __future__ import annotations

import math
import threading
import traceback
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from ...cluster.runtime import here
from ...cluster.tracebacks import hide_frames, place_here
from ...errors import Closed, Unsupported, noted


class Work(dist.Work):  # type: ignore[misc]  # types are checked without torch, so of no known type
    """A call, and its result. All methods are local."""

    def __init__(self, text: Callable[[], str], result: Any, queue: Queue) -> None:
        """Describe a pending call, and start nothing: ``text()`` returns it with its operands; ``result``: the tensors
        that it fills.
        """
        super().__init__()
        self.text, self.place = text, ""
        self.source = -1
        """The rank that sent what was received."""
        self.help: Callable[[float], object] | None = None
        """Has a thread that waits take part in the work, until it is done or so many seconds are over."""
        self._result, self._queue = result, queue
        self._done = False
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None
        self._begun: Any = None
        self._future: Any = None

    def __repr__(self) -> str:
        return f"<mpikv Work {self.text()} {'failed' if self._error else 'done' if self._done else 'pending'}>"

    def finish(self, error: BaseException | None = None, source: int = -1) -> None:
        """Mark the call as done, well or with an error, and run the functions that were given to its future. Local.

        ``source`` is the rank that sent what was received.
        """
        self.source = source
        if error is not None:
            hide_frames(error)
            self._trace = error.__traceback__
            traceback.clear_frames(self._trace)  # they hold the caller's tensors
        with self._queue.changed:
            self._error, self._done = error, True
            begun = self._begun
            self._queue.changed.notify_all()
        if begun is not None:
            begun.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the call's end, so for other ranks; return True or raise its error, now seen. Not collective.

        Raises:
            TimeoutError: it has not completed within ``timeout``, if that is above 0; the call goes on.
        """
        if not self._done:
            self._wait_for_end(timeout.total_seconds() if timeout else 0)
        if (error := self.exception()) is not None:
            raise error.with_traceback(self._trace)  # each raise would make the traceback longer
        return True

    synchronize = wait

    def _wait_for_end(self, seconds: float) -> None:
        """Wait until the call has ended, so for other ranks; TimeoutError after ``seconds`` above 0. Not collective."""
        # PyTorch's 0 and negative numbers mean "for ever"; the group's own deadline bounds that.
        if self.help is not None:
            self.help(seconds if seconds > 0 else math.inf)
        else:
            self._queue.check_progress(self.text())
            with self._queue.changed:
                self._queue.changed.wait_for(lambda: self._done, seconds if seconds > 0 else None)
        if not self._done:
            raise TimeoutError(f"{self.text()} has not completed after {seconds:g} s; it is still running")

    def get_future(self) -> Any:
        """Return the ``torch.futures.Future`` of the result. Local.

        Its functions run in the thread that completes the call, or at once.
        """
        done = False
        with self._queue.changed:
            if self._future is None:
                self._begun = Future()
                self._future = self._begun.then(self._value)
                done = self._done
        if done:
            self._begun.set_result(None)
        elif self.help is not None:
            self.help(0)  # the deadline of a message begins
        return self._future

    def _value(self, _: Any) -> Any:
        """In the future: return the tensors that the call fills, or raise its error. Local."""
        if self._error is not None:
            raise self._error
        return self._result

    def is_completed(self) -> bool:
        """Return whether the call has ended, well or not."""
        return self._done

    def is_success(self) -> bool:
        """Return whether the call has ended without an error."""
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error of the call, if it has one by now, and mark it as seen: the next call does not raise it."""
        if self._error is not None:
            self._queue.saw(self._error)
        return self._error

    def result(self) -> Any:
        """Return the tensors that the call fills, at once: filled or not, and also of a failed call."""
        return self._result

    def source_rank(self) -> int:
        """Return the rank that sent what was received; -1 before, and for a call that receives nothing."""
        return self.source

    _source_rank = source_rank


class Queue:
    """The pending calls of a process group. All methods are local."""

    def __init__(self, name: str) -> None:
        """Make an empty queue; its thread, of this name, starts with the first call that is queued."""
        self._name = name
        self.changed = threading.Condition()
        """Held while calls, and what is known of their ends, change."""
        self._calls: deque[tuple[Work, Callable[[], object]]] = deque()
        self._busy = self._ended = False
        self._thread: threading.Thread | None = None
        self._unseen: tuple[Exception, str] | None = None

    def add(self, work: Work, run: Callable[[], object], waits: bool) -> Work:
        """Queue a call for the queue's thread, and return ``work``. But make the call here and now if this is that
        thread, or if the caller ``waits`` and no call is pending.

        Raises:
            Closed: the queue has ended.
        """
        if self._runs_here():
            self._make(work, run)
            return work
        with self.changed:
            if self._ended:
                raise Closed(f"{work.text()}: the process group was shut down")
            at_once = waits and not self._calls and not self._busy
            if at_once:
                self._busy = True
            else:
                work.place = place_here()
                self._calls.append((work, run))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                    self._thread.start()
                self.changed.notify_all()
        if at_once:
            try:
                self._make(work, run)
            finally:
                self._free()
        return work

    def take_failure(self) -> Exception | None:
        """Return the error of an earlier call that nobody has seen, or None; it counts as seen from now on. Local.

        A function of a future may ignore the error that the future has, and give wrong gradients.
        """
        if (unseen := self._unseen) is None:
            return None
        self._unseen = None
        advice = "a program that handles the error of a future asks for it by work.exception()"
        return noted(unseen[0], f"in {unseen[1]}, for which nobody has waited; {advice}")

    def saw(self, error: BaseException) -> None:
        """Note that the program has seen an error, so that the next call does not raise it."""
        if (unseen := self._unseen) is not None and unseen[0] is error:
            self._unseen = None

    def check_progress(self, call: str) -> None:
        """Raise Unsupported if this thread makes the queue's calls, and so must not wait for a later one."""
        if self._runs_here():
            raise Unsupported(f"a function of a future waits for {call}, which comes later; return the future instead")

    def end(self, patience: float) -> bool:
        """Let no more calls in; wait ``patience`` seconds for those in; return whether all ended. Not collective."""
        with self.changed:
            self._ended = True
            self.changed.notify_all()
            return self._runs_here() or self.changed.wait_for(lambda: not (self._calls or self._busy), patience)

    def _runs_here(self) -> bool:
        """Return whether this thread is the queue's own."""
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def _free(self) -> None:
        """Note that no call runs any more, and wake the threads that wait for this."""
        with self.changed:
            self._busy = False
            self.changed.notify_all()

    def _serve(self) -> None:
        """Make the queued calls one after the other, in the thread of the queue, until its end."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: not self._busy and (self._calls or self._ended))
                if not self._calls:
                    return
                self._busy, call = True, self._calls.popleft()
            self._make(*call)
            del call  # it holds the caller's tensors
            self._free()

    def _make(self, work: Work, run: Callable[[], object]) -> None:
        """Make a call and complete its handle; an error goes to the handle, noted as unseen, and is not raised."""
        before, here.place = here.place, work.place or here.place
        try:
            try:
                run()
            finally:
                here.place = before  # functions of its future run next, and have lines of their own
        except BaseException as error:
            if isinstance(error, Exception):
                self._unseen = error, work.text()
            work.finish(error)
        else:
            work.finish()
