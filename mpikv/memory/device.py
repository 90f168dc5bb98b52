"""The memory of a GPU: where its arrays come from and go to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import numpy as np

from ..arrays.arrays import check_apart, check_mutable, lies_elsewhere, source, storable, target
from ..cluster.printing import log
from ..errors import Unsupported
from ..protocols import Array, Gpu
from .stream_order import GpuOrder

ALIGNMENT = 256
"""Most bytes of padding per array in a workspace. CUDA's allocator aligns arrays to as many."""
_GPUS: WeakSet[Gpu] = WeakSet()
"""The GPUs of this process's stores, past and present."""


def locate(value: Any) -> tuple[Array, Gpu | None]:
    """Return ``value`` as an array, uncopied, and its GPU (None: host); Unsupported without a store on that GPU. Local.

    Raises:
        TypeError: not an array.
        Unsupported: it lies on a GPU of which this process has no store.
    """
    if not lies_elsewhere(value):
        return source(value), None
    for gpu in tuple(_GPUS):
        if gpu.owns(value):
            return value, gpu
    # An array of another library: each GPU is asked, as only the right one can adopt it.
    why = ""
    for gpu in tuple(_GPUS):
        try:
            return gpu.adopt(value), gpu
        except Unsupported as error:
            why = f" ({error})"
    raise Unsupported(f"the array is on a GPU, and this process has no store on that GPU; create the store first{why}")


def read_to_host(value: Any) -> Array:
    """Return an array as numpy's; from a GPU a copy, after a wait; Unsupported without a store on that GPU. Local.

    Raises:
        TypeError, Unsupported: as :func:`locate`.
    """
    array, gpu = locate(value)
    return array if gpu is None else gpu.download(array)


class DeviceMemory:
    """The :class:`~mpikv.protocols.Memory` of one GPU, with the stream of one store."""

    is_host = False

    def __init__(self, gpu: Gpu) -> None:
        """Make the streams on the GPU; from now on :func:`locate` knows the GPU. Local."""
        self.gpu = gpu
        self.workspace = gpu.workspace()
        _GPUS.add(gpu)
        self.order = GpuOrder(gpu)
        self._warned = False

    def zeros(self, nbytes: int) -> Array:
        """Return so many new zeroed bytes on the GPU, allocated on the store's stream. Local."""
        with self.order.stream:
            return self.gpu.zeros(nbytes)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new GPU array of any content; inside a call it is allocated on the caller's stream. Local."""
        return self.order.new(shape, dtype)

    def source(self, value: Any) -> Array:
        """Return an array on this GPU to read ``value`` from: over its memory, or uploaded (may warn once). Local."""
        # owns() has proved that it is an Array; a type guard cannot say so.
        if self.gpu.owns(value):
            return value  # type: ignore[no-any-return]
        if lies_elsewhere(value):
            return self._adopted(value)
        array = source(value)
        storable(array.dtype)  # of another kind nothing can be there
        self._warn_of_copies(array)
        return self.gpu.upload(array)

    def target(self, out: Any) -> Array:
        """Return the array over ``out``, on the GPU or host (may warn once); raise if it cannot be filled. Local."""
        if self.gpu.owns(out):
            if not out.flags.c_contiguous:
                check_apart(out)
            return out  # type: ignore[no-any-return]
        if lies_elsewhere(out):
            check_mutable(out)
            there = self._adopted(out)
            check_apart(there)
            return there
        # A host array that is filled: a download at the end of the call, which waits for it.
        array = target(out)
        self._warn_of_copies(array)
        return array

    def _adopted(self, value: Any) -> Array:
        """Return an array over the memory of another library's GPU array, ordered after that library's work. Local."""
        # An issued call runs after the work on the caller's stream already, so a worker needs no second wait.
        return self.gpu.adopt(value, ordered=self.order.thread.on_worker)

    def copy(self, targets: Sequence[Array], sources: Sequence[Array]) -> None:
        """Copy arrays to targets of any dtype, on GPU or host; wait for downloads; raise if the GPU failed. Local."""
        # The common case in one launch: all arrays lie on this GPU.
        if self.gpu.addresses(targets) is not None and self.gpu.addresses(sources) is not None:
            self.gpu.copy(targets, sources)
            return
        # Uploads and downloads one by one; what lies on the GPU already follows in one launch.
        here = list[tuple[Array, Array]]()
        for out, array in zip(targets, sources, strict=True):
            there, same = self.gpu.owns(array), array.dtype == out.dtype
            if not self.gpu.owns(out):
                if there and same:
                    self._download(array, out)
                else:
                    out[...] = self.to_host(array)
            elif there or not same:
                here.append((out, array if there else self.gpu.upload(array)))
            else:
                self.gpu.upload(array, out)  # which takes no memory there
        if here:
            self.gpu.copy([out for out, _ in here], [array for _, array in here])

    def to_host(self, array: Array) -> Array:
        """Return a host array, itself or a copy. Waits for the GPU; raises if its work has failed. Local."""
        return self._download(array) if self.gpu.owns(array) else array

    def _download(self, array: Array, out: Array | None = None) -> Array:
        """Copy a GPU array into ``out``, or a new host array; wait; return that; raise if GPU work failed. Local."""
        # On the store's stream: the array may still be filled there.
        with self.order.stream:
            there = self.gpu.download(array, out)
        # Aborted work ends, too, and leaves undefined content behind.
        self.order.check()
        return there

    def exceeding(self, every: Sequence[Array], bound: float) -> Sequence[bool]:
        """Return for each array if it has NaN or a magnitude above ``bound``; wait; raise if the GPU failed. Local."""
        found = self.gpu.exceeding(every, bound) if every else ()
        self.order.check()  # as in to_host
        return found

    def _warn_of_copies(self, host_array: Array) -> None:
        """At a store's first host array, log that every call copies such arrays; later do nothing. Local."""
        if not self._warned:
            self._warned = True
            log(
                "a host array (%s%s) is used with a store on %s, and every call copies such arrays; keep arrays on "
                "the GPU",
                host_array.dtype,
                list(host_array.shape),
                self.gpu.name,
            )
