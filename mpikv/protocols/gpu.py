"""The seam of a GPU: the part of CuPy that a store needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from .arrays import Array
    from .kernels import GpuKernels
    from .memory import Workspace


class Event(Protocol):
    """A point in the work of a stream."""

    @property
    def done(self) -> bool:
        """Whether the stream has passed this point. Never waits."""


class Stream(Protocol):
    """A queue of GPU work. As a context manager, this thread's current stream inside the block."""

    handle: int
    """The address of the CUDA stream, for NCCL."""

    def record(self) -> Event:
        """Queue an event behind all work queued so far, and return it. Does not wait."""

    def wait(self, event: Event) -> None:
        """Make work queued from now on wait for the event, which may belong to another stream. Returns at once."""

    def synchronize(self) -> None:
        """Wait, on the host, until all queued work is done."""

    def begin_capture(self) -> None:
        """Record the work that this thread queues on the stream from now on, instead of running it. It must not
        allocate memory.

        Until :meth:`end_capture` nobody may wait for the stream, query an event recorded meanwhile, or make the stream
        wait for another one. Nor must the work move pageable memory of the host.
        """

    def end_capture(self) -> Graph:
        """Stop the recording, and return the recorded work, or raise TransportError; work queued later runs again.

        Raises:
            TransportError: some work meanwhile cannot be recorded.
        """

    def __enter__(self) -> object: ...

    def __exit__(self, *failure: object) -> None: ...


class Graph(Protocol):
    """Recorded work with its addresses and arguments. It keeps no memory alive."""

    def launch(self) -> None:
        """Queue all the recorded work on this thread's current stream, as one."""

    def close(self) -> None:
        """Drop the recorded work; launched work is done all the same, and a later launch raises. Idempotent.

        Call it before NCCL's communicator ends.
        """


class Gpu(Protocol):
    """One GPU as far as a store needs it. CuPy's is in ``mpikv/compute/cuda/gpu.py``.

    Work goes to the thread's current stream. Arrays are those of one library, as ``cupy.ndarray``. They have
    ``shape``, ``dtype``, ``size``, ``nbytes``, ``itemsize``, ``strides``, ``reshape``, ``view(dtype)``, ``copy``,
    ``fill``, slices and ``array[...] = other``, and take part in numpy's functions; they have no ``flags.writeable``.
    """

    name: str
    """As ``cuda:0``."""
    uuid: str
    """The same for all processes that use this GPU, and for no other GPU."""

    def use(self) -> None:
        """Make this the current GPU of the calling thread."""

    def watch(self) -> None:
        """Make this the thread's current GPU, and let it query events without ending another thread's capture.

        CUDA forbids such queries while a stream is captured in the strictest mode, as by PyTorch's graphs: they would
        end the capture.
        """

    def stream(self) -> Stream:
        """Return a new stream of high priority that does not wait for the default stream."""

    def current(self) -> Stream:
        """Return this thread's current stream."""

    def capturing(self) -> bool:
        """Return whether the current stream, CuPy's or torch's, records its work instead of running it."""

    def zeros(self, nbytes: int) -> Array:
        """Return so many new zeroed bytes (uint8), aligned to 256 bytes, allocated on the current stream; or raise
        MemoryError.

        Raises:
            MemoryError: the GPU has too little memory.
        """

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array of any content, allocated on the current stream, or raise MemoryError."""

    def release(self, stream: Stream) -> None:
        """Free the unused memory that the library keeps for a stream, so that other libraries can allocate it."""

    kind: type
    """The type of arrays."""

    def owns(self, value: object) -> bool:
        """Return whether this is an array of the library, on this GPU."""

    def addresses(self, values: Sequence[Any]) -> Sequence[int] | None:
        """Return values' addresses if all are plain arrays of the library on this GPU; else, or for no values, None."""

    def adopt(self, value: Any, ordered: bool = False) -> Array:
        """Return an array over another library's array on this GPU, or raise Unsupported. Queue a wait for that
        library's work, unless ``ordered``: the caller sees to it.

        By DLPack. ``ordered``: the caller orders the work of the library's current stream itself, so no wait for that
        is needed.

        Raises:
            Unsupported: it lies on another device.
        """

    def upload(self, array: Array, out: Array | None = None) -> Array:
        """Queue a copy of a numpy array to ``out`` or to new memory, and return that; may wait. The numpy array may be
        changed on return.

        ``out`` has the same shape and dtype.
        """

    def download(self, array: Array, out: Array | None = None) -> Array:
        """Copy a GPU array to ``out``, a numpy array of its shape and dtype, or to a new one; wait; return that."""

    def squares_and_finite(self, arrays: Sequence[Array], dtypes: Sequence[np.dtype[Any]]) -> list[tuple[float, bool]]:
        """Return for each array, as if rounded to its dtype of ``dtypes``, the sum of squares and whether all elements
        are finite; wait for the GPU.

        The sums have the bits of the host's optimizers.

        Raises:
            Unsupported: an array, or one of ``dtypes``, is of no float.
        """

    def scale(self, arrays: Sequence[Array], factor: float) -> None:
        """Queue a multiplication of arrays of floats in place, in float64, rounded once."""

    def kernels(self) -> GpuKernels:
        """Return the kernels that run optimizers' rules on arrays of the library. Bind and run them only with this GPU
        current.
        """

    def address(self, array: Array) -> int:
        """Return the address of the first element in the GPU's memory."""

    def copy(self, targets: Sequence[Array], sources: Sequence[Array]) -> None:
        """Queue a copy of each source to its target, cast where the dtypes differ: one launch for many contiguous
        arrays.
        """

    def exceeding(self, arrays: Sequence[Array], bound: float) -> Sequence[bool]:
        """Return for each array if it has NaN or a magnitude above ``bound``; wait for the GPU.

        As :meth:`Memory.exceeding`, by one launch for many arrays and one small copy. Raises as :meth:`zeros`.
        """

    def workspace(self) -> Workspace:
        """Return a new object that moves and sums rows of this GPU's arrays, for one thread at a time."""
