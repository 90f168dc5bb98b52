"""A thread that runs an iterator before its items are needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from ..cluster.runtime import present

Item = TypeVar("Item")


class Ahead(Generic[Item]):
    """Runs an iterator in a thread of its own, and keeps its items until they are needed."""

    def __init__(self, source: Iterator[Item]) -> None:
        """Keep the iterator for the thread; :meth:`start` starts it."""
        self._changed, self._source = present().condition(), source
        self._items: list[Item] = []
        self._failure: BaseException | None = None
        self._process = present().process
        self._runs = self._stops = False
        self.ended = False
        """Whether no more items will come."""

    def start(self) -> None:
        """Start the thread that runs the iterator. Local. If that fails, iteration over this raises RuntimeError."""
        thread = present().thread(self._serve, "mpikv-save")
        # Set before the start: an interrupt may arrive inside start(), and close() would not wait for the thread.
        self._runs = True
        try:
            thread.start()
        except RuntimeError as error:
            self._end(error)

    def close(self) -> None:
        """Have the thread end after its current item, and wait for that; do nothing in a forked child. Local."""
        if not self._runs or present().process != self._process:
            return
        # Waits: the caller closes the file next, and the thread must not write to it any more.
        with self._changed:
            self._stops = True
            self._changed.wait_for(lambda: self.ended)

    def __iter__(self) -> Iterator[Item]:
        """Yield each item of the thread, after a wait for it; then raise the iterator's exception, if any. Again from
        the first on each iteration. Local.
        """
        taken = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda at=taken: len(self._items) > at or self.ended)
            if taken < len(self._items):
                yield self._items[taken]
                taken += 1
            elif self._failure is None:
                return
            else:
                raise self._failure

    def _serve(self) -> None:
        """In the thread: append the iterator's items until its end or :meth:`close`; keep its exception. Local."""
        failure = None
        try:
            for item in self._source:
                with self._changed:
                    self._items.append(item)
                    self._changed.notify_all()
                # Between items only: the item in hand is written as a whole.
                if self._stops:
                    break
        except BaseException as error:  # raised where the item is used
            failure = error
        self._end(failure)

    def _end(self, failure: BaseException | None) -> None:
        """Mark the items as ended, keep the exception if any, and wake waiting threads. Local."""
        with self._changed:
            self._failure, self.ended = failure, True
            self._changed.notify_all()
