"""The common part of transports without shared memory."""

from __future__ import annotations


class Unshared:
    """The facts of a :class:`~mpikv.protocols.Transport` with separate memory on each rank."""

    shared = False
    sharing_size = 1
    sharing_rank = 0
    single_copy = False

    def fence(self) -> None:
        """Do nothing: no rank sees the writes of another."""
