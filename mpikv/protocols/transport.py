"""The seam of transports: how bytes move between ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np

    from .arrays import Array
    from .memory import Memory


class Transport(Protocol):
    """Moves bytes between ranks.

    All methods are collective: every rank calls them in the same order with the same sizes. Arrays are one-dimensional,
    contiguous and of one dtype. A transport never sees a key, keeps no state of a value, and allocates nothing per
    call. It never writes to ``send``. It raises the library's errors as :class:`~mpikv.errors.TransportError`.

    The three sums return *terms*: arrays of the size of ``recv``. Their sum, from the first to the last, is the result
    on this rank; the caller adds them, in pieces that stay in the cache. A rank that receives nothing gets any arrays.

    - If the transport's library adds, ``recv`` is the only term.
    - Otherwise ``recv`` is unused, and the terms are the arrays in place: in memory that ranks share, in messages of a
      library that only carries, and for half precision, since its sums would travel wider than its terms.
    - One transport may do either, by dtype and number of ranks.

    Terms come in rank order, or in an order that adds up each host first. Each has the dtype of ``send`` or of
    ``recv``. The caller may read them until the next sum.

    A rank's own term may be a view of its ``send``. The rank must not change ``send`` before it has added the terms;
    with :attr:`single_copy`, also not before the next fence, agreement or exchange.

    Sums are made in the dtype of ``recv``: the dtype of ``send`` or, for half precision, float32. The sum of booleans
    is their logical or; integers wrap.
    """

    name: str

    @property
    def memory(self) -> Memory:
        """The memory, the host's or a GPU's, of all arrays that it takes and returns."""

    @property
    def control(self) -> Transport:
        """The transport of the same ranks for host arrays: this one, unless it moves GPU arrays."""

    rank: int
    size: int
    shared: bool
    """Whether :meth:`allocate` returns the same memory to every rank, of several ranks. A fence shows one rank's writes
    to all."""
    sharing_size: int
    """How many ranks share the memory of :meth:`allocate`, this one included; the maximum over hosts, so it is the same
    on every rank. From 2 on, :meth:`reduce` and :meth:`reduce_scatter` return two terms or more, and ranks must not
    update the same elements."""
    sharing_rank: int
    """This rank's number among the ranks that share its allocated memory, from 0."""
    single_copy: bool
    """Whether other ranks may read a ``send`` in place, outside of send buffers, after the sum has returned."""
    limit: int
    """The largest message of :meth:`reduce`, :meth:`allreduce` and :meth:`reduce_scatter`, in bytes of ``send``."""

    @property
    def send_buffers(self) -> tuple[Array, ...]:
        """Buffers (uint8, ``limit`` bytes each) in which a caller may, but need not, prepare sends; see :attr:`slot`.

        A sum or an all_to_all saves a copy if its ``send`` is the beginning of ``send_buffers[slot]``.
        """

    @property
    def slot(self) -> int:
        """The index in :attr:`send_buffers` of the buffer for the next sum or all_to_all. Either may change it."""

    def allocate(self, nbytes: int) -> Array:
        """Return ``nbytes`` zeroed bytes for values (uint8, aligned to 64 bytes), shared by ranks if :attr:`shared`;
        MemoryError on all ranks if one has too little. Collective.

        It goes back to the system with the last array over it.
        """

    def reduce(self, send: Array, recv: Array, root: int) -> Sequence[Array]:
        """Return terms, valid until the next sum: the root adds them up to the sum of all ranks' ``send``. They may be
        ``recv``, filled with that sum; or one may be a view of ``send``, and the class says when that may change.
        On other ranks they mean nothing. Collective.

        ``recv`` is ignored on other ranks.
        """

    def allreduce(self, send: Array, recv: Array) -> Sequence[Array]:
        """Return terms, valid until the next sum: each rank adds them up to the sum of all ranks' ``send``. They may be
        ``recv``, filled with that sum; or one may be a view of ``send``, and the class says when that may change.
        Collective.
        """

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Sequence[Array]:
        """Return terms, valid until the next sum: each rank adds them up to its part of the sum of all ranks' ``send``.
        They may be ``recv``, filled with that part; or one may be a view of ``send``, and the class says when that may
        change. Collective.

        Rank r's part has ``counts[r]`` elements.
        """

    def all_to_all(self, send: Array, counts: Sequence[int] | None) -> Sequence[Array]:
        """Send the r-th part of ``send``, of ``counts[r]`` elements, to rank r, or with ``counts`` None all of it to
        every rank; return an array from each rank, valid until the next exchange. All ranks pass the same ``counts``.
        Collective.

        ``send`` is uint8, equally long on every rank, and at most ``limit`` bytes. So rank r receives ``counts[r]``
        bytes from each rank.

        Returns the received bytes of each rank, in rank order.
        """

    def all_gather(self, buffer: Array, counts: Sequence[int]) -> None:
        """Fill ``buffer`` on every rank, in place: its r-th part, of ``counts[r]`` elements, comes from rank r.
        Collective.

        It is the same range of allocated memory on every rank, or private memory on every rank. In shared memory, no
        rank may still read values that the last fence has shown.
        """

    def broadcast(self, buffer: Array, root: int) -> None:
        """Copy the root's ``buffer`` to every rank's, in place; it lies as in :meth:`all_gather`. Collective."""

    def fence(self) -> None:
        """Wait until the writes of all ranks that share allocated memory are visible to each of them; at once if none
        do. Collective.
        """

    def agree(self, token: int, send_ready: bool = False) -> bool:
        """Return whether every rank passed the same token, in [0, 2**62); wait for all ranks. Also a fence. Collective.

        With ``send_ready``, ``send_buffers[slot]`` holds the ``send`` of the next sum, made if all agree; that sum then
        saves one wait for the others. Ranks with the same token pass the same ``send_ready``.

        Raises :class:`~mpikv.errors.Stalled` on the waiting ranks if another misses the deadline.
        """

    def close(self) -> None:
        """Release the memory of messages, on a GPU after its work; memory of values goes with its last array.
        Collective, idempotent.
        """


@runtime_checkable
class Transfers(Protocol):
    """Exchanges that go on beside other work, inside of :meth:`apart`."""

    ahead: int
    """How many messages may be on their way before the first is used."""

    def apart(self) -> AbstractContextManager[None]:
        """Return a context. Inside, exchanges may return before they are complete: pass each :meth:`sent` to
        :meth:`wait_for` before the end. Collective.
        """

    def sent(self) -> Any:
        """Return a mark of the latest exchange, once for each, to be passed to :meth:`wait_for`; None if it needs no
        wait. Local.
        """

    def wait_for(self, sent: Any) -> None:
        """Wait for an exchange by its mark of :meth:`sent`, on a GPU only on the store's stream. Its terms, or the
        values that it brings, are then there. Do nothing for None. Collective.
        """

    def note_read(self) -> None:
        """Note that this call reads the caller's arrays no more: the caller's stream will wait for the work queued so
        far, and not for later work of the call. On the host do nothing. Local.
        """


@runtime_checkable
class SumsInPlace(Protocol):
    """A transport whose library adds arrays of any size where they lie."""

    def adds(self, dtype: np.dtype[Any]) -> bool:
        """Return whether :meth:`allreduce_each` can sum arrays of a dtype. Local."""

    def allreduce_each(self, pairs: Sequence[tuple[Array, Array]]) -> None:
        """Sum each pair's first array over all ranks, into the second of every rank, maybe the same one. It
        :meth:`adds` their dtypes. Collective.
        """


@runtime_checkable
class ReadsInPlace(Protocol):
    """A transport whose ranks may read each other's arrays of any size where they lie."""

    def read_terms(self, send: Array, counts: Sequence[int]) -> Iterator[Sequence[Array]] | None:
        """Return an iterator over pieces of this rank's part of a sum, each a list of all ranks' terms; None on all
        ranks if one's ``send`` is small or cannot be read. Collective.

        Terms come in rank order, this rank's own in place. They may be read until the next piece. No rank may change
        another's part of its ``send`` before the next exchange.
        """


@runtime_checkable
class Carries(Protocol):
    """A transport over MPI that carries messages from one rank to another, most often between hosts."""

    def carry(self, sends: Sequence[tuple[int, Array]], receives: Sequence[tuple[int, Array]]) -> None:
        """Send each array (uint8) to its rank, and fill each array of ``receives`` from its rank; wait for all of them.
        Collective.

        Two ranks list the arrays between them in the same order with the same sizes; so does a rank for itself.
        """
