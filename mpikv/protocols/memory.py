"""The seam of memory: where arrays lie, how rows move, and how work on them is ordered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from .arrays import Array


class Workspace(Protocol):
    """Moves rows of arrays, by their numbers: on the host by numpy, on a GPU on the thread's current stream.

    On a GPU it may take its memory from a reserved block.

    All methods are local. Tables and rows are arrays of one memory, on a GPU contiguous. Rows lie along their first
    dimension, and the other dimensions are alike. Numbers are int64 and in range: host arrays, or results of
    :meth:`numbers`.
    """

    def over(self, memory: Array) -> AbstractContextManager[None]:
        """Return a context: inside, new arrays and numbers come from this memory (uint8), as far as they fit.

        Those of :meth:`sum_runs` never do. On the host none does: memory is not scarce there.
        """

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array of any content."""

    def copy(self, targets: Sequence[Array], sources: Sequence[Array]) -> None:
        """Copy each source to its target, cast where the dtypes differ."""

    def prepare_rows(self, dtype: np.dtype[Any]) -> None:
        """Compile the code that moves and adds rows of values of this dtype, unless it exists; or raise.

        Raises:
            TransportUnavailable: nothing can be compiled here.
        """

    def numbers(self, every: Sequence[Array]) -> Sequence[Array]:
        """Return these lists of row numbers as they are; on a GPU copies of them, made by one transfer."""

    def take_rows(self, table: Array, ids: Array, out: Array | None = None) -> Array:
        """Return copies of the rows of these numbers: in ``out``, of the table's dtype, or in a new array."""

    def put_rows(self, table: Array, ids: Array, rows: Array | None) -> None:
        """Overwrite the table's rows of these numbers by rows, cast where dtypes differ, or by zeros if None.

        Each number occurs once.
        """

    def add_rows(self, table: Array, ids: Array, rows: Array) -> None:
        """Add rows to the table's rows of these numbers, in place. Each number occurs once.

        The table has the dtype of the rows, or their accumulator, and adds in its own.
        """

    def sum_runs(self, rows: Array, order: Array, starts: Array) -> Array:
        """Return sums of rows, each rounded once: one for each run of ``order`` between two ``starts``.

        The last run ends where ``order`` does. A GPU adds from the first row to the last, the host as numpy's
        ``add.reduceat`` does.
        """


class Memory(Protocol):
    """An allocator and its copies: a store's arrays lie in host memory or in a GPU's.

    All methods are local. Copies in GPU memory return before they are done; later work on the store's stream finds them
    done.
    """

    is_host: bool

    @property
    def order(self) -> StreamOrder:
        """The object that orders calls and copies with the work of callers' streams."""

    @property
    def workspace(self) -> Workspace:
        """The object that moves rows of its arrays. Results belong to the store inside of :meth:`StreamOrder.run`."""

    def zeros(self, nbytes: int) -> Array:
        """Return zeroed bytes (uint8), aligned to 64 bytes at least."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array of any content. The caller may keep it."""

    def source(self, value: Any) -> Array:
        """Return an array of this memory to read ``value`` from: without a copy if it lies here, else a copy; or raise.

        Raises:
            TypeError: not an array.
            Unsupported: it cannot be copied here.
        """

    def target(self, out: Any) -> Array:
        """Return the array over ``out``, on GPU or host, or a new one, noted to be copied there after the call. Local.

        A host's memory has a stand-in for an array of a GPU: :meth:`StreamOrder.run` copies it after the call. If there
        is no call, :meth:`StreamOrder.cancel` forgets it.

        Raises:
            TypeError: not an array, or one that cannot be written.
            Unsupported: this memory cannot copy to its place.
        """

    def copy(self, targets: Sequence[Array], sources: Sequence[Array]) -> None:
        """Copy each source to its target, of the same shape, cast where the dtypes differ.

        Either may be a host array, whatever this memory is.
        """

    def to_host(self, array: Array) -> Array:
        """Return a numpy array of the same content: the array itself, or a copy, once that is complete."""

    def exceeding(self, every: Sequence[Array], bound: float) -> Sequence[bool]:
        """Return for each array of floats whether an element is NaN or larger in magnitude than the bound.

        On a GPU it waits until the current stream has computed them.
        """


class StreamOrder(Protocol):
    """The order between a store's calls and its callers' work. On the host a call is done on return.

    All methods are local.
    """

    needed: bool
    """Whether a call has to queue its work by :meth:`run`."""

    @property
    def failed(self) -> bool:
        """Whether queued work is known to have failed. Later results would be wrong."""

    def begin(self) -> None:
        """Make a call's preparation wait for the work that its caller's stream had when it was issued; or raise.

        Raises:
            Unsupported: this thread's current stream cannot order a call.
            TransportError: the GPU has failed.
        """

    def check_new(self) -> None:
        """Raise Unsupported if the caller of the prepared call cannot receive arrays of :meth:`Memory.empty`."""

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``function(*arguments)``, with its work on arrays queued on the store's stream.

        The work runs after the present work of the caller's stream, and before its next. The arguments live until it is
        done.
        """

    def cancel(self) -> None:
        """Forget the prepared arrays of a call that is not made."""

    def issue(self) -> Issue | None:
        """Return a note of the caller's stream for a call by another thread; None on the host, where none is needed.

        Raises:
            Unsupported: as in :meth:`begin`.
        """

    def on_worker(self) -> AbstractContextManager[None]:
        """Return a context in which this thread makes calls that others have issued."""

    def rejoin(self) -> None:
        """Make the current stream, not the host, wait for calls other threads have made; do nothing on the host."""

    def wait(self) -> None:
        """Wait, on the host, until all queued work is done."""

    def close(self) -> None:
        """Wait for queued work, release recorded work, give unused memory back to the GPU. More can be queued."""

    def abandon(self, why: str) -> None:
        """End work in flight that may wait for missing ranks; tell the others why, as they may wait for this rank.

        With ``why`` "" it tells nobody. In a forked child it does nothing.
        """


class Issue(Protocol):
    """A call that one thread has issued and another makes."""

    def run(self, call: Callable[[], Any]) -> Any:
        """Make the issued call, and return ``call()``; keep its arrays alive.

        In :meth:`StreamOrder.on_worker`.
        """

    def rejoin(self) -> None:
        """Make the current stream, not the host, wait for work of the issued call; do nothing if it was not made."""
