"""The handle of a call of a process group.

PyTorch's C++ knows two methods of it, ``wait`` and ``get_future``. A future that C++ sees as failed can only be made by
a function that raises, hence the two futures below.
"""

from __future__ import annotations

import math
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from ...cluster.tracebacks import hide_frames


class Work(dist.Work):  # type: ignore[misc]
    """A call, and its result. All methods are local."""

    def __init__(
        self,
        describe: Callable[[], str],
        result: Any,
        check_progress: Callable[[str], None],
        saw: Callable[[BaseException], None],
    ) -> None:
        """``describe`` returns the text of the call. ``check_progress`` raises where a wait would never end. ``saw``
        learns that somebody has seen the error.
        """
        super().__init__()
        self._describe, self.place = describe, ""
        self.source = -1
        """The rank that sent what was received."""
        self.help: Callable[[float], object] | None = None
        """Has a thread that waits take part in the work, until it is done or so many seconds are over."""
        self._result, self._check_progress, self._saw = result, check_progress, saw
        self._lock = threading.Lock()
        self._completed: threading.Event | None = None
        self._done = False
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None
        self._begun: Any = None
        self._future: Any = None

    def __repr__(self) -> str:
        return f"<mpikv Work {self.text} {'failed' if self._error else 'done' if self._done else 'pending'}>"

    @property
    def text(self) -> str:
        """The call, with its operands."""
        return self._describe()

    def finish(self, error: BaseException | None = None) -> None:
        """Complete the call, well or with an error, and run the functions that were given to its future. Local."""
        if error is not None:
            hide_frames(error)
            self._trace = error.__traceback__
            traceback.clear_frames(self._trace)  # they hold the caller's tensors
        with self._lock:
            self._error, self._done = error, True
            begun, completed = self._begun, self._completed
        if completed is not None:
            completed.set()
        if begun is not None:
            begun.set_result(None)

    def end(self, error: BaseException | None, source: int) -> None:
        """Complete a message, from some rank if it was received."""
        self.source = source
        self.finish(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end of the call, so for other ranks; return True, or raise its error, then seen. Not collective.

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
            self._check_progress(self.text)
            with self._lock:
                if self._completed is None:
                    self._completed = threading.Event()
            if not self._done:
                self._completed.wait(seconds if seconds > 0 else None)
        if not self._done:
            raise TimeoutError(f"{self.text} has not completed after {seconds:g} s; it is still running")

    def get_future(self) -> Any:
        """Return the ``torch.futures.Future`` of the result. Local.

        Its functions run in the thread that completes the call, or at once.
        """
        done = False
        with self._lock:
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
        if self._error is not None:
            raise self._error
        return self._result

    def is_completed(self) -> bool:
        """Return whether the call has completed, well or not."""
        return self._done

    def is_success(self) -> bool:
        """Return whether the call has completed well."""
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error of the call, if it has one by now, and mark it as seen: the next call does not raise it."""
        if self._error is not None:
            self._saw(self._error)
        return self._error

    def result(self) -> Any:
        """Return the tensors that the call fills."""
        return self._result

    def source_rank(self) -> int:
        """Return the rank that sent what was received."""
        return self.source

    _source_rank = source_rank
