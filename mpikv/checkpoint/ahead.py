"""A thread that does the work of an iterator ahead of whoever takes its items."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from ..cluster.runtime import present

__all__ = ["Ahead"]

Item = TypeVar("Item")


class Ahead(Generic[Item]):
    """Takes the items of an iterator in a thread of its own, before anybody asks for them."""

    def __init__(self) -> None:
        self._changed = present().condition()
        self._source: Iterator[Item] | None = None
        self._items: list[Item] = []
        self._failure: BaseException | None = None
        self._process = present().process
        self._runs = self._stops = False
        self.ended = False
        """Whether all items were made, or no more will be."""

    @property
    def has_work(self) -> bool:
        """Whether it was told what to do."""
        return self._source is not None

    def prepare(self, items: Iterator[Item]) -> Iterator[Item]:
        """Take over an iterator; return one that waits for each of its items, and raises what making it has raised.
        Local.
        """
        self._source = items
        return self._taken()

    def start(self) -> None:
        """Begin to make the items. Local. That the system has no thread left is told who asks for the first of them."""
        thread = present().thread(self._serve, "mpikv-save")
        # Before it starts: an interrupt comes while this waits for it, and nobody would wait for its end.
        self._runs = True
        try:
            thread.start()
        except RuntimeError as error:
            self._end(error)

    def stop(self) -> None:
        """End after the item that is being made, and wait for that. Not in a forked child, which has no such thread."""
        if not self._runs or present().process != self._process:
            return
        with self._changed:
            self._stops = True
            self._changed.wait_for(lambda: self.ended)

    def _taken(self) -> Iterator[Item]:
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
        assert self._source is not None
        failure = None
        try:
            for item in self._source:
                with self._changed:
                    self._items.append(item)
                    self._changed.notify_all()
                if self._stops:
                    break
        except BaseException as error:  # for the thread that asks for the item
            failure = error
        self._end(failure)

    def _end(self, failure: BaseException | None) -> None:
        with self._changed:
            self._failure, self.ended = failure, True
            self._changed.notify_all()
