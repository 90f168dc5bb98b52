"""What transports have in common of which each rank has memory of its own."""

from __future__ import annotations

__all__ = ["Unshared"]


class Unshared:
    """The facts of a :class:`~mpikv.protocols.Transport` whose ranks share no memory."""

    shared = False
    sharing_size = 1
    sharing_rank = 0
    single_copy = False

    def reclaim(self) -> None:
        """Nothing: memory goes back with the last array over it."""

    def fence(self, send_ready: bool = False) -> None:
        """Nothing: no rank sees what another has written."""
