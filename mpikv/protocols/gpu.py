"""The seam of a GPU: as much of CuPy as a store needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from .arrays import Array
from .kernels import GpuKernels

__all__ = ["Event", "Gpu", "Graph", "Stream"]


class Event(Protocol):
    """A point in the work of a stream."""

    @property
    def done(self) -> bool:
        """Whether the stream has come there. Never waits."""


class Stream(Protocol):
    """A queue of work of a GPU. As a context manager, the one to which this thread gives its work meanwhile."""

    handle: int
    """What NCCL is given: the address of the CUDA stream."""

    def record(self) -> Event:
        """Return the point behind all that was queued so far."""

    def wait(self, event: Event) -> None:
        """Let what is queued from now on begin after the event, which may be one of another stream. Returns at once."""

    def synchronize(self) -> None:
        """Wait until all that was queued is done."""

    def begin_capture(self) -> None:
        """Have work that this thread gives to the stream recorded from now on, and not run.

        Until :meth:`end_capture` nobody may wait for the stream, ask for a point that is recorded meanwhile, or let it
        wait for another stream; and what is recorded must not take memory, or move pageable memory of the host.
        """

    def end_capture(self) -> Graph:
        """Return what was recorded; the stream runs again what it is given.

        Raises:
            TransportError: something was done meanwhile that cannot be recorded.
        """

    def __enter__(self) -> object: ...

    def __exit__(self, *failure: object) -> None: ...


class Graph(Protocol):
    """Recorded work, with the addresses and arguments that it was given. It keeps no memory."""

    def launch(self) -> None:
        """Queue all of it on this thread's present stream, as one."""

    def close(self) -> None:
        """Give it up, which NCCL's communicator must find done when it ends. What is queued is done all the same.
        Idempotent.
        """


class Gpu(Protocol):
    """One GPU as far as a store needs it: CuPy's (``mpikv/compute/cuda/gpu.py``), or one that stands for it where there
    is none.

    Work goes to the thread's present stream. Arrays are those of one library, ``cupy.ndarray`` or a stand-in, which
    have ``shape``, ``dtype``, ``size``, ``nbytes``, ``itemsize``, ``strides``, ``reshape``, ``view(dtype)``,
    ``copy``, ``fill``, slices and ``array[...] = other``, and take part in numpy's functions; they have no
    ``flags.writeable``.
    """

    name: str
    """As ``cuda:0``."""
    uuid: str
    """The same for all processes that use this GPU, and for no other GPU."""

    def use(self) -> None:
        """Make this the GPU of the present thread, as it is of the one that made this object."""

    def watch(self) -> None:
        """Make this the GPU of the present thread, which asks for events only. That ends no capture of another thread,
        as it would by itself: CUDA forbids such questions while a stream is captured in its strictest mode, as
        PyTorch's graphs are.
        """

    def stream(self) -> Stream:
        """Return a new stream of high priority, which does not wait for the default stream."""

    def current(self) -> Stream:
        """Return this thread's present stream."""

    def capturing(self) -> bool:
        """Return whether what that is given is recorded, and not run."""

    def zeros(self, nbytes: int) -> Array:
        """Return new zeroed bytes (uint8), aligned to 256 bytes.

        Raises:
            MemoryError: the GPU has too little.
        """

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array of any content. Raises as :meth:`zeros`."""

    def release(self, stream: Stream) -> None:
        """Give back what memory was taken on a stream and is not in use: others than CuPy may need it."""

    kind: type
    """The type of arrays."""

    def owns(self, value: object) -> bool:
        """Return whether this is an array of the library, on this GPU."""

    def addresses(self, values: Sequence[Any]) -> Sequence[int] | None:
        """Return where values begin that are all plain arrays of the library, on this GPU; else, and for none, None."""

    def adopt(self, value: Any, ordered: bool = False) -> Array:
        """Return an array over the memory of another library's array on this GPU (DLPack), ordered after its work.

        ``ordered``: what the library's present stream of this thread has to do by now need not come before, where that
        is what it knows.

        Raises:
            Unsupported: it lies on another device.
        """

    def upload(self, array: Array, out: Array | None = None) -> Array:
        """Return a copy of a numpy array, in ``out`` if that is given, of the same shape and dtype. What is copied may
        be changed when this returns.
        """

    def download(self, array: Array, out: Array) -> None:
        """Fill a numpy array of the same shape and dtype, and wait until it is filled."""

    def measure(self, arrays: Sequence[Array], dtypes: Sequence[np.dtype[Any]]) -> list[tuple[float, bool]]:
        """Return of each array, as it is when rounded to a dtype, the sum of its squares, which has the bits of the
        host's optimizers, and whether all its numbers are finite. Waits for it.

        Raises:
            Unsupported: an array, or one of ``dtypes``, is of no float.
        """

    def scale(self, arrays: Sequence[Array], factor: float) -> None:
        """Multiply arrays of floats in place, in float64, and round once."""

    def kernels(self) -> GpuKernels:
        """Return what runs the rules of optimizers on arrays of the library. What it has bound is bound, and run, where
        this is the thread's present GPU.
        """

    def address(self, array: Array) -> int:
        """Return where the first element lies."""

    def copy(self, targets: Sequence[Array], sources: Sequence[Array]) -> None:
        """Copy each source to its target, cast where the dtypes differ: one launch for many contiguous arrays."""

    def exceeding(self, arrays: Sequence[Array], bound: float, flags: Array) -> Sequence[bool]:
        """As :meth:`Memory.exceeding`, by one launch for many arrays of a dtype and one small copy to the host.
        ``flags`` is memory for the results: a byte for each array (uint8). It takes no other for contiguous arrays.
        """

    # Rows: as in a Workspace, whose numbers lie here.

    def clear(self, array: Array) -> None: ...

    def prepare_rows(self, dtype: np.dtype[Any]) -> None: ...

    def take_rows(self, table: Array, ids: Array, out: Array) -> None: ...

    def put_rows(self, table: Array, ids: Array, rows: Array | None) -> None: ...

    def add_rows(self, table: Array, ids: Array, rows: Array) -> None: ...

    def sum_runs(self, rows: Array, order: Array, starts: Array) -> Array: ...
