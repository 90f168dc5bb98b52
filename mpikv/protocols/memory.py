"""The seam of memory: where arrays lie, how rows move, and how work on them is ordered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import numpy as np

from .arrays import Array

Result = TypeVar("Result")


class Workspace(Protocol):
    """Moves rows of arrays, by their numbers: on the host by numpy, on a GPU on the thread's current stream.

    On a GPU it may take its memory from a reserved block.

    All methods are local. Tables and rows are arrays of one memory, on a GPU contiguous. Rows lie along their first
    dimension, and the other dimensions are alike. Numbers are int64 and in range: host arrays, or results of
    :meth:`numbers`.
    """

    def over(self, memory: Array) -> AbstractContextManager[None]:
        """Return a context. Inside, new arrays and numbers, but not those of :meth:`sum_runs`, come from this memory
        (uint8) until it is full. After it others may overwrite them.

        On the host none does: memory is not scarce there.
        """

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array of any content."""

    def copy(self, targets: Sequence[Array], sources: Sequence[Array]) -> None:
        """Copy each source to its target, cast where the dtypes differ; on a GPU only queue that."""

    def prepare_rows(self, dtype: np.dtype[Any]) -> None:
        """Compile the code that moves and adds rows of values of this dtype, unless it exists; or raise.

        Raises:
            TransportUnavailable: nothing can be compiled here.
        """

    def numbers(self, every: Sequence[Array]) -> Sequence[Array]:
        """Return these lists of row numbers as they are; on a GPU copies of them there, made by one upload that may
        wait.
        """

    def take_rows(self, table: Array, ids: Array, out: Array | None = None) -> Array:
        """Copy the table's rows of these numbers to ``out``, of its dtype, or to an array of :meth:`empty`; return
        that.
        """

    def put_rows(self, table: Array, ids: Array, rows: Array | None) -> None:
        """Overwrite the table's rows of these numbers by rows, cast where dtypes differ, or by zeros if None. Each
        number occurs once.
        """

    def add_rows(self, table: Array, ids: Array, rows: Array) -> None:
        """Add rows to the table's rows of these numbers, in place. Each number occurs once.

        The table has the dtype of the rows, or their accumulator, and adds in its own.
        """

    def sum_runs(self, rows: Array, order: Array, starts: Array) -> Array:
        """Return new rows: the sums of the runs of ``rows[order]`` that begin at ``starts``, each rounded once.

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
        """The object that moves rows of this memory's arrays. Used inside :meth:`StreamOrder.run`, it works on the
        store's stream.
        """

    def zeros(self, nbytes: int) -> Array:
        """Return so many new zeroed bytes (uint8), aligned to 64 bytes at least; on a GPU allocated on the store's
        stream.
        """

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array of any content, for the caller of a store to keep; inside a call on a GPU it is allocated
        on his stream.
        """

    def source(self, value: Any) -> Array:
        """Return an array of this memory to read ``value`` from: over the same memory if it lies here, else a copy (may
        wait); or raise.

        Raises:
            TypeError: not an array.
            Unsupported: it cannot be copied here.
        """

    def target(self, out: Any) -> Array:
        """Return the array over ``out``, on GPU or host. For a GPU's ``out``, a host's memory returns a new array, and
        notes that :meth:`StreamOrder.run` copies it to ``out`` after its function. Local.

        If there is no call, :meth:`StreamOrder.cancel` forgets the copy.

        Raises:
            TypeError: not an array, or one that cannot be written.
            Unsupported: this memory cannot copy to its place.
        """

    def copy(self, targets: Sequence[Array], sources: Sequence[Array]) -> None:
        """Copy each source to its target, of the same shape, cast where the dtypes differ. On a GPU wait only for
        copies to the host, and raise after these if GPU work has failed.

        Either may be a host array, whatever this memory is.
        """

    def to_host(self, array: Array) -> Array:
        """Return an array of the host itself. Of an array of a GPU return a numpy copy, after a wait; raise if GPU work
        has failed.
        """

    def exceeding(self, every: Sequence[Array], bound: float) -> Sequence[bool]:
        """Return for each array of floats if it has NaN or a magnitude above ``bound``; on a GPU wait, and raise if it
        has failed.
        """


class StreamOrder(Protocol):
    """The order between a store's calls and its callers' work. On the host a call is done on return.

    All methods are local.
    """

    needed: bool
    """Whether a call has to queue its work by :meth:`run`."""

    @property
    def failed(self) -> bool:
        """Whether queued work, or another rank, is known to have failed. Later results would be wrong."""

    def begin(self) -> None:
        """Raise if the GPU has failed, or the current stream is being captured. For an issued call, queue a wait for
        the work that its caller's stream had when it was issued. On the host do nothing.

        Raises:
            Unsupported: this thread's current stream cannot order a call.
            TransportError: the GPU has failed.
        """

    def check_new(self) -> None:
        """Raise Unsupported if this call, on a worker thread, cannot make arrays of :meth:`Memory.empty` for its
        caller's stream.
        """

    def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call ``function(*arguments)`` and return its result. On a GPU its work is queued on the store's stream,
        between the earlier and the later work of the caller's. On the host, copies that :meth:`Memory.target` has noted
        follow.

        The arguments live until the work is done.
        """

    def cancel(self) -> None:
        """Forget the copies that :meth:`Memory.target` has noted, as their call is not made. A GPU has none."""

    def issue(self) -> Issue | None:
        """Record how far the current stream's work is; return a call for another thread to make after that work. On the
        host return None: none is needed.

        Raises:
            Unsupported: as in :meth:`begin`.
        """

    def on_worker(self) -> AbstractContextManager[None]:
        """Return a context in which this thread makes calls that others issued, with the store's stream current."""

    def rejoin(self) -> None:
        """Queue a wait on the current stream for all calls that worker threads have made. On the host do nothing."""

    def wait(self) -> None:
        """Make the host wait until the store's stream has done all queued work. A host store has none."""

    def close(self) -> None:
        """Wait for queued work, discard recorded work, give unused memory back to the GPU. More can be queued, but not
        recorded.
        """

    def abandon(self, why: str) -> None:
        """End work in flight that may wait for missing ranks; tell the others why, as they may wait for this rank.

        With ``why`` "" it tells nobody. In a forked child it does nothing.
        """


class Issue(Protocol):
    """A call that one thread has issued and another makes."""

    def run(self, call: Callable[[], Result]) -> Result:
        """Run ``call()`` as the issued call, and return its result; keep its arrays alive until the GPU is done. Only
        inside :meth:`StreamOrder.on_worker`.
        """

    def rejoin(self) -> None:
        """Queue a wait on the current stream for the work of the issued call; do nothing if it was not made."""
