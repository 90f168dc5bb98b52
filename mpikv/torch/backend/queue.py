"""The order of the calls of one process group, and the thread that makes those for which nobody waits at once.

Calls are made in the order of issue, the same on every rank, so ranks need not compare their queues. A call is made in
the caller's thread if the caller waits and no other call is pending.

A function that was given to a future runs in the thread that completes the call. Its own calls are made there at once,
before the next of the queue: it may wait for them, as PowerSGD's does. The order is the same on every rank if the
function is given before the next call is issued, as DDP gives it: that call waits for it. Given later, it runs before
the next call or after it, by the time, and ranks may disagree.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from ...cluster.tracebacks import place_here
from ...errors import Closed, Unsupported, noted
from .work import Work

_Call: TypeAlias = "tuple[Work, Callable[[], object]]"


class Queue:
    """The pending calls of a process group. All methods are local."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._calls: deque[_Call] = deque()
        self._busy = self._ended = False
        self._thread: threading.Thread | None = None
        self._place = ""
        self._unseen: tuple[Exception, str] | None = None

    def place(self) -> str:
        """Return the line of the program that issued the running call."""
        return self._place or place_here()

    def add(self, work: Work, run: Callable[[], object], waits: bool) -> Work:
        """Make a call here if the caller ``waits`` and none is pending, else queue it for a thread; return its handle.

        ``waits``: the caller waits at once.

        Raises:
            Closed: the queue has ended.
        """
        if self._runs_here():
            self._make(work, run)
            return work
        with self._changed:
            if self._ended:
                raise Closed(f"{work.text}: the process group was shut down")
            at_once = waits and not self._calls and not self._busy
            if at_once:
                self._busy = True
            else:
                work.place = place_here()
                self._calls.append((work, run))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                    self._thread.start()
                self._changed.notify_all()
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
        """Note that somebody has seen an error."""
        if (unseen := self._unseen) is not None and unseen[0] is error:
            self._unseen = None

    def check_progress(self, call: str) -> None:
        """Raise Unsupported if a call that is pending can never complete while this thread waits."""
        if self._runs_here():
            raise Unsupported(f"a function of a future waits for {call}, which comes later; return the future instead")

    def end(self, patience: float) -> bool:
        """Let no more calls in; wait ``patience`` seconds for those in; return whether all ended. Not collective."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            return self._runs_here() or self._changed.wait_for(lambda: not (self._calls or self._busy), patience)

    def _runs_here(self) -> bool:
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def _free(self) -> None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()

    def _serve(self) -> None:
        """Make the queued calls one after the other, in the thread of the queue, until its end."""
        while call := self._take_next():
            self._place = call[0].place
            self._make(*call)
            self._place = ""
            del call  # it holds the caller's tensors
            self._free()

    def _take_next(self) -> _Call | None:
        """Wait for a call to make, and take it from the queue, busy from then on; None at the end. Local."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy and (self._calls or self._ended))
            if not self._calls:
                return None
            self._busy = True
            return self._calls.popleft()

    def _make(self, work: Work, run: Callable[[], object]) -> None:
        """Make a call and complete its handle; an error goes to the handle, noted as unseen, and is not raised."""
        try:
            run()
        except BaseException as error:
            if isinstance(error, Exception):
                self._unseen = error, work.text
            work.finish(error)
        else:
            work.finish()
