"""Threads of a rank that share out the work on long messages, each a part of the elements: a *lane*.

numpy and numba let other threads run while they work on arrays. ``concurrent.futures`` would do, but for the end of a
program: it takes no work then, and a store still makes its pending calls.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import numpy as np

from ..protocols import Array

SHARED_OUT = 1 << 20
"""From so many bytes on work is shared out: to wake a thread may take as long as to copy them."""
# Shorter arrays of a list are copied whole, each by one thread.
CUT_BYTES = 64 << 10


class Team:
    """The calling thread and ``size - 1`` others, which end by :meth:`close`, or with the team."""

    def __init__(self, size: int) -> None:
        """Start no threads yet. Local."""
        self.size = size
        self._jobs, self._news = SimpleQueue[Any](), SimpleQueue[None]()
        self._started = 0
        self._end = weakref.finalize(self, self._jobs.put, None)
        self._end.atexit = False

    def run(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run one job or more, up to ``size`` at once, the first here; may start threads; return or raise when all have
        ended. Local.

        It raises the error of a job. numpy warns of no overflow in the other threads.
        """
        if not (self._started or self._start()):
            for job in jobs:
                job()
            return
        ended, interrupt, started = list[BaseException | None](), None, 0
        try:
            for job in jobs[1:]:
                self._jobs.put((job, ended))
                started += 1
            jobs[0]()
        finally:
            while len(ended) < started:  # they write to memory of the store, and of the caller
                try:
                    self._news.get()  # news of an earlier call may be left
                except KeyboardInterrupt as pressed:
                    interrupt = pressed
        for error in filter(None, [interrupt, *ended]):
            raise error

    def _start(self) -> int:
        """Start the threads, fewer at a limit of the system; return how many there are now. Local."""
        # Daemons: a store that is never closed must not keep the program from ending. At its end Python may start none.
        with suppress(RuntimeError):
            while self._started < self.size - 1:
                threading.Thread(target=_work, args=(self._jobs, self._news), name="mpikv lane", daemon=True).start()
                self._started += 1
        return self._started

    def close(self) -> None:
        """Tell the threads to end, without a wait for them; idempotent. Local."""
        self._end()


def _work(jobs: SimpleQueue[Any], news: SimpleQueue[None]) -> None:
    """Run jobs, a thread's whole work: add each one's error, or None, to its list, then tell ``news``. At None put it
    back for the next thread, and end. Local.
    """
    np.seterr(all="ignore")  # a thread begins with rules of its own
    while (given := jobs.get()) is not None:
        job, ended = given
        error = None
        try:
            job()
        except BaseException as raised:  # MemoryError, say
            error = raised
        del given, job  # the arrays' owner may free them
        ended.append(error)
        news.put(None)
    jobs.put(None)


def deal(targets: Sequence[Array], sources: Sequence[Array], count: int) -> list[tuple[list[Array], list[Array]]]:
    """Return ``count`` lanes of (targets, sources) to copy, of about as many bytes; some may be empty. Long arrays are
    cut into views for all lanes. Copy nothing. Local.

    >>> deal([np.zeros((2, 65536))], [np.ones((2, 65536))], 2)[1][0][0].shape
    (2, 32768)
    """
    lanes: list[tuple[list[Array], list[Array]]] = [([], []) for _ in range(count)]
    loads = [0] * count
    for target, source in zip(targets, sources, strict=True):
        if target.nbytes < CUT_BYTES:
            lane = loads.index(min(loads))
            loads[lane] += target.nbytes
            lanes[lane][0].append(target)
            lanes[lane][1].append(source)
            continue
        length = max(target.shape)
        before = (slice(None),) * target.shape.index(length)
        for lane, (outs, given) in enumerate(lanes):
            where = (*before, slice(length * lane // count, length * (lane + 1) // count))
            outs.append(target[where])
            given.append(source[where])
    return lanes
