"""Counts the collective calls of simulated ranks, and replaces a planned one by another call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...async_store.async_kvstore import AsyncKVStore
from ...cluster import runtime
from ...store.kvstore import KVStore
from .faults import Differ, Fault

__all__ = ["PlannedCalls", "guard_doors"]


class PlannedCalls:
    """The planned calls of one run's stores; a fault that strikes is added to ``struck``."""

    def __init__(self, faults: Sequence[Fault], struck: list[Fault]) -> None:
        self._planned = {(fault.rank, fault.call): fault for fault in faults if isinstance(fault, Differ)}
        self._struck = struck
        self._made: dict[int, int] = {}
        self._inside: set[int] = set()

    def make(self, rank: int, door: Callable[..., Any], store: KVStore, *call: Any) -> Any:
        """Make a rank's call, or the planned one instead. Nested calls are not counted."""
        if rank in self._inside:
            return door(store, *call)
        made = self._made[rank] = self._made.get(rank, 0) + 1
        self._inside.add(rank)
        try:
            if (fault := self._planned.get((rank, made))) is None:
                return door(store, *call)
            self._struck.append(fault)
            return store.barrier()
        finally:
            self._inside.discard(rank)


def guard_doors() -> Callable[[], None]:
    """Route the calls of simulated ranks' stores through their runs' plans; return a function that undoes this."""
    # An asynchronous store's collective calls go through the base class, too; PlannedCalls counts them once.
    kinds: list[Any] = [KVStore, AsyncKVStore]
    doors = [kind._collective for kind in kinds]
    for kind, door in zip(kinds, doors, strict=True):
        kind._collective = _guarded(door)

    def undo() -> None:
        for kind, door in zip(kinds, doors, strict=True):
            kind._collective = door

    return undo


def _guarded(door: Callable[..., Any]) -> Callable[..., Any]:
    def collective(store: KVStore, *call: Any) -> Any:
        here: Any = runtime.present()
        if here.world is None or not here.leads:
            return door(store, *call)
        return here.scheduler.planned.make(here.rank, door, store, *call)

    return collective
