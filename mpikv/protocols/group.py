"""The seam of process groups: which ranks there are, and the words and memory that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from .arrays import Array


class Group(Protocol):
    """The ranks of a store or of a communicator, as one of them sees them."""

    rank: int
    size: int
    local_rank: int
    host_ranks: tuple[int, ...]
    """The ranks of this rank's host, by their local ranks."""
    host_cores: int
    """How many cores the ranks of this host may use together."""
    hosts: tuple[str, ...]
    """Their names."""

    @property
    def one_host(self) -> bool:
        """Whether all ranks share the memory of one host."""

    @property
    def threads(self) -> bool:
        """Whether several threads of this process may use the group at once."""

    def allocate(self, nbytes: int, pages_now: bool = True) -> Array:
        """Return zeros that this host's ranks share; MemoryError on all if there is no room. Collective over the host.

        They are aligned to 128 bytes. Without ``pages_now`` the system makes each page at first use. The memory goes
        back to the system with the last array over it.

        Raises MemoryError on every rank of the host if its shared memory is too small.
        """

    def exchange(self, text: str) -> Sequence[str]:
        """Send a text to this host's ranks, and return the texts of all, in rank order. Collective over the host."""

    def gather(self, text: str) -> Sequence[str]:
        """Send a text to all ranks, and return the texts of all, in rank order. Collective, with a deadline.

        Raises :class:`~mpikv.errors.Stalled` if not all ranks come within the timeout.
        """

    def announce_end(self, why: str) -> None:
        """Tell the other ranks why this one will take part in nothing more: their :meth:`find_end` returns it. Local;
        does not wait.
        """

    def find_end(self) -> str:
        """Return a text: one other rank that has left, and why; "" if none has. Local; any thread may ask."""

    def announce_shutdown(self) -> Callable[[], list[int]]:
        """Tell the other ranks that this one shuts down; return a function that lists those yet to say so, to be called
        until it returns []. Local.
        """

    def close(self) -> None:
        """End the exchange of texts; shared memory stays. Collective, idempotent."""
