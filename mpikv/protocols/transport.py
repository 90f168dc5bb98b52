"""The seam of transports: how bytes move between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .arrays import Array
from .memory import Memory

__all__ = ["Transport"]


class Transport(Protocol):
    """Moves bytes between ranks.

    All methods are collective: every rank calls them in the same order with the same sizes. Arrays are
    one-dimensional, contiguous and of one dtype. A transport never sees a key, keeps no state of a value, and
    allocates nothing per call. ``send`` is never written. The library's errors leave as
    :class:`~mpikv.errors.TransportError`.

    The three sums return *terms*: arrays of the size of ``recv`` whose sum, from the first to the last, is what this
    rank receives. Where the transport's library adds, ``recv`` itself is the only one. Else they are where the terms
    lie, and ``recv`` was not used: where memory is seen by all ranks, where a library only carries, and where sums
    would travel wider than their terms, as those of half precision do. One transport may do either, as the dtype and
    the number of ranks have it. Terms come in rank order, or in one in which those of a host are added up, each in
    the dtype of ``send`` or of ``recv``; they may be read until the next sum. So whoever adds them can do it in pieces
    that stay in the cache. A rank that receives nothing gets anything.

    A rank's own term may be a view of its ``send``, which it must not change before it has added the terms, and where
    the transport has :attr:`single_copy`, not before the next fence, agreement or exchange either.

    Sums are made in the dtype of ``recv``, which is the dtype of ``send`` or, for half precision, float32. The sum of
    booleans is their logical or; integers wrap.
    """

    name: str

    @property
    def memory(self) -> Memory:
        """Where all arrays lie that it is given and that it returns."""

    @property
    def control(self) -> Transport:
        """The transport of the same ranks that moves arrays of the host: this one, unless it moves a GPU's."""

    rank: int
    size: int
    shared: bool
    """Whether :meth:`allocate` returns the same memory to every rank, of which there are several. Then one rank's
    writes are seen by all after a fence."""
    sharing_size: int
    """How many ranks share what :meth:`allocate` returns, this one included; the largest such number where it differs,
    so that it is the same on every rank. From 2 on, :meth:`reduce` and :meth:`reduce_scatter` return two terms or
    more, and ranks must not update the same elements."""
    sharing_rank: int
    """This rank's number among those that share its allocated memory, from 0."""
    single_copy: bool
    """Whether other ranks may read a ``send`` where it lies, outside of send buffers, after the sum has returned."""
    limit: int
    """The largest message of :meth:`reduce`, :meth:`allreduce` and :meth:`reduce_scatter`, in bytes of ``send``."""

    @property
    def send_buffers(self) -> tuple[Array, ...]:
        """Memory (uint8, ``limit`` bytes each) in which to prepare sends. Using it is never required; a sum, or an
        all_to_all, whose ``send`` is the beginning of ``send_buffers[slot]`` saves a copy.
        """

    @property
    def slot(self) -> int:
        """The index of the send buffer for the next sum or all_to_all, and only that one."""

    def allocate(self, nbytes: int) -> Array:
        """Return zeroed memory for values: ``nbytes`` of uint8, aligned to 64 bytes, owned by the transport until it
        closes, or reclaims it.

        Raises MemoryError on every rank if one has too little.
        """

    def reclaim(self) -> None:
        """Give back what was allocated and over which no rank has an array any more; what one still has stays."""

    def reduce(self, send: Array, recv: Array, root: int) -> Sequence[Array]:
        """Sum every rank's ``send`` at the root. ``recv`` is ignored on the other ranks."""

    def allreduce(self, send: Array, recv: Array) -> Sequence[Array]:
        """Sum every rank's ``send`` at every rank, with the same bits on each."""

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Sequence[Array]:
        """Sum every rank's ``send``; rank r receives the r-th part, of ``counts[r]`` elements."""

    def all_to_all(self, send: Array, counts: Sequence[int] | None) -> Sequence[Array]:
        """Pass bytes on: rank r receives the r-th part of every rank's ``send``, of ``counts[r]`` bytes.

        ``send`` is uint8, as long on every rank, and at most ``limit`` bytes. With ``counts`` None every rank receives
        all of every rank's.

        Returns what each rank sent to this one, in rank order, which may be read until the next exchange of data.
        """

    def all_gather(self, buffer: Array, counts: Sequence[int]) -> None:
        """Fill ``buffer`` on every rank: its r-th part, of ``counts[r]`` elements, is rank r's. In place.

        It is the same range of allocated memory on every rank, or private memory on every rank. Of memory that
        ranks share, nobody may still read what the last fence has shown.
        """

    def broadcast(self, buffer: Array, root: int) -> None:
        """Copy the root's ``buffer`` to every rank's, in place. Of memory, see :meth:`all_gather`."""

    def fence(self, send_ready: bool = False) -> None:
        """Make what any rank wrote to allocated memory visible to the ranks that share it. ``send_ready`` as in
        :meth:`agree`.
        """

    def agree(self, token: int, send_ready: bool = False) -> bool:
        """Return whether every rank passed the same token, in [0, 2**62). Also a barrier and a fence.

        With ``send_ready``, the same on ranks of the same token, ``send_buffers[slot]`` holds the ``send`` of the
        sum that comes next if all agree. Then that sum need not wait for the others once more.

        Raises :class:`~mpikv.errors.Stalled` on the ranks that wait when another does not come before the deadline.
        """

    def close(self) -> None:
        """Release all memory. Collective, idempotent."""
