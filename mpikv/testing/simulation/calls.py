"""Counts the collective calls of stores that simulated ranks make, to put another one in the place of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...async_store.async_kvstore import AsyncKVStore
from ...cluster import runtime
from ...store.kvstore import KVStore
from .faults import Differ, Fault

__all__ = ["other_calls"]


@contextmanager
def other_calls(scheduler: Any, faults: Sequence[Fault], struck: list[Fault]) -> Iterator[None]:
    """Carry out what is planned for calls of stores, in a block, and add it to those that have ``struck``."""
    planned = {(fault.rank, fault.call): fault for fault in faults if isinstance(fault, Differ)}
    if not planned:
        yield
        return
    counts = _Counts(scheduler, planned, struck)
    # An asynchronous store's door leads through that of all stores.
    kinds: list[Any] = [KVStore, AsyncKVStore]
    doors = [kind._collective for kind in kinds]
    for kind, door in zip(kinds, doors, strict=True):
        kind._collective = counts.around(door)
    try:
        yield
    finally:
        for kind, door in zip(kinds, doors, strict=True):
            kind._collective = door


class _Counts:
    def __init__(self, scheduler: Any, planned: dict[tuple[int, int], Differ], struck: list[Fault]) -> None:
        self._scheduler, self._planned, self._struck = scheduler, planned, struck
        self._made: dict[int, int] = {}
        self._inside: set[int] = set()

    def around(self, door: Callable[..., Any]) -> Callable[..., Any]:
        """Return a door that counts who goes in, but not again inside of it."""

        def collective(store: KVStore, *call: Any) -> Any:
            here: Any = runtime.present()
            if getattr(here, "scheduler", None) is not self._scheduler or not here.leads or here.rank in self._inside:
                return door(store, *call)
            rank = here.rank
            made = self._made[rank] = self._made.get(rank, 0) + 1
            self._inside.add(rank)
            fault = self._planned.get((rank, made))
            try:
                if fault is None:
                    return door(store, *call)
                self._struck.append(fault)
                return store.barrier()
            finally:
                self._inside.discard(rank)

        return collective
