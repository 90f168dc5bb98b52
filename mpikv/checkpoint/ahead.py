"""A thread that runs an iterator before its items are needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from ..cluster.runtime import present

Item = TypeVar("Item")


class Ahead(Generic[Item]):
    """Runs an iterator in a thread of its own, and keeps its items until they are needed."""

    def __init__(self) -> None:
        self._changed = present().condition()
        self.source: Iterator[Item] | None = None
        """The iterator that :meth:`prepare` has given it."""
        self._items: list[Item] = []
        self._failure: BaseException | None = None
        self._process = present().process
        self._runs = self._stops = False
        self.ended = False
        """Whether no more items will come."""

    def prepare(self, items: Iterator[Item]) -> Iterator[Item]:
        """Set the iterator for the thread, which is not started yet; return one over the items that it makes. Local.

        It waits for each item, and raises the iterator's exception.
        """
        self.source = items
        return self._take_items()

    def start(self) -> None:
        """Start the thread. Local. If the system has no thread left, the first use of an item raises RuntimeError."""
        thread = present().thread(self._serve, "mpikv-save")
        # Set before the start: an interrupt may arrive inside start(), and stop() would not wait for the thread.
        self._runs = True
        try:
            thread.start()
        except RuntimeError as error:
            self._end(error)

    def stop(self) -> None:
        """Have the thread end after its current item, and wait for that; do nothing in a forked child. Local."""
        if not self._runs or present().process != self._process:
            return
        # Waits: the caller closes the file next, and the thread must not write to it any more.
        with self._changed:
            self._stops = True
            self._changed.wait_for(lambda: self.ended)

    def _take_items(self) -> Iterator[Item]:
        """Yield each item of the thread, after a wait for it; then raise the iterator's exception, if any. Local."""
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
        """Run the iterator in the thread to its end or :meth:`stop`; keep its exception for the taker. Local."""
        assert self.source is not None
        failure = None
        try:
            for item in self.source:
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
        with self._changed:
            self._failure, self.ended = failure, True
            self._changed.notify_all()
