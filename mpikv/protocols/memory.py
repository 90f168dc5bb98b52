"""The seam of memory: where arrays lie, what moves their rows, and in what order work on them happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from .arrays import Array

__all__ = ["Issue", "Memory", "StreamOrder", "Workspace"]


class Workspace(Protocol):
    """Moves rows of arrays, by their numbers: the host's by numpy, a GPU's on the thread's present stream.

    On a GPU it may do so in memory that was taken beforehand.

    All methods are local. Tables and rows are arrays of one memory, in a GPU's contiguous; rows lie along their first
    dimension, and the others are alike. Numbers are int64 and in range: arrays of the host, or what :meth:`numbers`
    has made of one.
    """

    def over(self, memory: Array) -> AbstractContextManager[None]:
        """Return a block in which new arrays are parts of this one (uint8), as far as they fit, and memory for numbers
        is. On the host they are not, where memory is not scarce.
        """

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array of any content."""

    def copy(self, targets: Sequence[Array], sources: Sequence[Array]) -> None:
        """Copy each source to its target, cast where the dtypes differ."""

    def clear(self, array: Array) -> None:
        """Fill an array with zeros."""

    def prepare_rows(self, dtype: np.dtype[Any]) -> None:
        """Compile what moves and adds rows of values of this dtype, unless it is there.

        Raises:
            TransportUnavailable: nothing can be compiled here.
        """

    def numbers(self, every: Sequence[Array]) -> Sequence[Array]:
        """Return arrays of numbers of rows where they are used: what is used soon, or often, comes there at once."""

    def take_rows(self, table: Array, ids: Array, out: Array | None = None) -> Array:
        """Return the rows of these numbers, one after the other: ``out``, of the table's dtype, or a new array."""

    def put_rows(self, table: Array, ids: Array, rows: Array | None) -> None:
        """Copy rows, or zeros, to those of these numbers, each of which is there once, cast where the dtypes differ."""

    def add_rows(self, table: Array, ids: Array, rows: Array) -> None:
        """Add rows to those of these numbers, each of which is there once, in the dtype of the table: that of the rows,
        or what sums of it are made in.
        """

    def sum_runs(self, rows: Array, order: Array, starts: Array) -> Array:
        """Return sums of rows, each rounded once: the first of those of the numbers ``order[starts[0]:starts[1]]``, the
        last of those from ``order[starts[-1]]`` on. On a GPU they are made from the first to the last, on the host as
        numpy's ``add.reduceat`` does.
        """


class Memory(Protocol):
    """An allocator: where a store's arrays lie, the host's memory or a GPU's, and what copies them.

    All methods are local. Those that copy in a GPU's memory return before it is done; whatever comes after them on the
    store's stream finds it done.
    """

    is_host: bool

    @property
    def order(self) -> StreamOrder:
        """In what order calls and copies happen."""

    @property
    def workspace(self) -> Workspace:
        """What moves rows of its arrays. What it returns is the store's, where :meth:`StreamOrder.run` runs a call."""

    def zeros(self, nbytes: int) -> Array:
        """Return zeroed bytes (uint8), aligned to 64 bytes at least."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array of any content, for a caller to keep."""

    def source(self, value: Any) -> Array:
        """Return an array of this memory to read ``value`` from, without a copy if it lies here.

        Raises:
            TypeError: not an array.
            Unsupported: it cannot be brought here.
        """

    def facts(self, value: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return the shape and the dtype of what :meth:`source` would return, and raise what it would."""

    def target(self, out: Any) -> Array:
        """Return an array that :meth:`copy` can write to, over the memory of ``out``.

        Raises:
            TypeError: not an array, or one that cannot be written.
            Unsupported: it lies where nothing of this memory can be copied to.
        """

    def copy(self, targets: Sequence[Array], sources: Sequence[Array]) -> None:
        """Copy each source to its target, of the same shape, cast where the dtypes differ. One of the two may be an
        array of the host, whatever this memory is.
        """

    def to_host(self, array: Array) -> Array:
        """Return a numpy array of the same content, complete: the array itself, or a copy."""

    def exceeding(self, every: Sequence[Array], bound: float) -> Sequence[bool]:
        """Return for each array of floats whether an element is no number, or larger in size than the bound.

        On a GPU it waits until the present stream has computed them.
        """


class StreamOrder(Protocol):
    """In what order the calls of a store and the work of its callers happen. On the host each is done when it returns.

    All methods are local.
    """

    needed: bool
    """Whether what a call does has to be run by :meth:`run`."""

    @property
    def failed(self) -> bool:
        """Whether what was queued is known to have failed, so that nothing that follows can be right."""

    def begin(self) -> None:
        """Let what a call prepares come after what the stream had to do on which the call was issued, at that moment.

        Raises:
            Unsupported: no call can be made in the order of this thread's present stream.
            TransportError: the GPU has failed.
        """

    def check_new(self) -> None:
        """Raise Unsupported if whoever has issued the call that is prepared can be given no arrays of
        :meth:`Memory.empty`.
        """

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``function(*arguments)``, which is all that a call does to arrays, on the store's stream: after what
        the caller's stream has to do so far, and before what it is given next. The arguments live until it is done.
        """

    def cancel(self) -> None:
        """Take note that the call is not made for which arrays were prepared."""

    def issue(self) -> Issue | None:
        """Return a note of a call that this thread leaves to another; None where what it is given needs no order.

        Raises:
            Unsupported: as in :meth:`begin`.
        """

    def on_worker(self) -> AbstractContextManager[None]:
        """Return a context in which this thread makes calls that others have issued."""

    def rejoin(self) -> None:
        """Let what this thread's present stream is given next come after all calls of other threads so far."""

    def wait(self) -> None:
        """Wait until all that was queued is done."""

    def close(self) -> None:
        """Wait, give up what was recorded, and give back to the GPU what nothing uses any more. More can be queued."""

    def abandon(self, why: str) -> None:
        """End what is in flight, where it may wait for ranks that do not come; there tell the others why, unless that
        is "", as they may wait for this one. In a forked child, nothing.
        """


class Issue(Protocol):
    """A call that one thread has issued and another makes."""

    def run(self, call: Callable[[], Any]) -> Any:
        """Return ``call()``, which prepares the call and makes it, and keeps what that uses. In
        :meth:`StreamOrder.on_worker`.
        """

    def rejoin(self) -> None:
        """Let what this thread's present stream is given next come after the call, which was made."""
