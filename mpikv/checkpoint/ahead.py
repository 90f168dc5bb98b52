"""A thread that does the work of an iterator ahead of whoever takes its items."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Generic, TypeVar

from ..cluster.runtime import present

__all__ = ["Ahead"]

Item = TypeVar("Item")


class Ahead(Generic[Item]):
    """Takes the items of an iterator in a thread of its own, before anybody asks for them."""

    def __init__(self) -> None:
        self._changed = present().condition()
        self._items: list[Item] = []
        self._failure: BaseException | None = None
        self._process = os.getpid()
        self._stops = False
        self.started = self.ended = False

    def run(self, items: Iterator[Item]) -> Iterator[Item]:
        """Start, and return an iterator that waits for each item, and raises what making it has raised. Local.

        Raises:
            RuntimeError: the system has no thread left.
        """
        thread = present().thread(lambda: self._serve(items), "mpikv-save")
        # Before it starts: an interrupt comes while this waits for it, and nobody would wait for its end.
        self.started = True
        try:
            thread.start()
        except RuntimeError:
            self.started = False
            raise
        return self._taken()

    def stop(self) -> None:
        """End after the item that is being made, and wait for that. Not in a forked child, which has no such thread."""
        if not self.started or os.getpid() != self._process:
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

    def _serve(self, items: Iterator[Item]) -> None:
        failure = None
        try:
            for item in items:
                with self._changed:
                    self._items.append(item)
                    self._changed.notify_all()
                if self._stops:
                    break
        except BaseException as error:  # for the thread that asks for the item
            failure = error
        with self._changed:
            self._failure, self.ended = failure, True
            self._changed.notify_all()
