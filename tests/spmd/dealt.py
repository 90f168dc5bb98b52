"""Ranks that a launcher has dealt to two hosts in turn, on one machine."""

from __future__ import annotations

from typing import Any


class Dealt:
    """A communicator of which ranks 0, 2, … are on one host and ranks 1, 3, … on another."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def Dup(self) -> Dealt:  # noqa: N802
        return Dealt(self._comm.Dup())

    def Split_type(self, kind: int, key: int) -> Any:  # noqa: N802
        return self._comm.Split(self._comm.rank % 2, key)
