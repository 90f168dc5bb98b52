"""Where an array of any library lies: on the host, or on which GPU."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from ..arrays.arrays import check_mutable, lies_elsewhere, source, target
from ..compute.cuda.gpu import gpu_of
from ..protocols import Array, Gpu

__all__ = ["Located", "added_up", "readable", "writable"]


class Located(NamedTuple):
    """An array, numpy's or of the library of its GPU, and the GPU; None for the host."""

    array: Array
    gpu: Gpu | None

    @property
    def where(self) -> str:
        """The name of the place."""
        return "the host" if self.gpu is None else self.gpu.name

    @property
    def outline(self) -> Array:
        """An array of numpy's that lies where this one does, to compare places by. Nothing may be read from it, as
        it may be the memory of a GPU.
        """
        if self.gpu is None:
            return self.array
        if not self.array.size:  # which lies nowhere: numpy before 2.4 refuses the address 0
            return np.empty(self.array.shape, f"V{self.array.itemsize}")
        interface = {
            "version": 3,
            "data": (self.gpu.address(self.array), True),
            "shape": self.array.shape,
            "strides": self.array.strides,
            "typestr": f"|V{self.array.itemsize}",
        }
        return np.asarray(SimpleNamespace(__array_interface__=interface))

    @property
    def extent(self) -> tuple[Any, ...]:
        """What arrays over exactly the same elements have in common."""
        return self.outline.__array_interface__["data"][0], self.array.shape, self.array.strides, self.array.dtype.name


def readable(value: Any) -> Located:
    """Return an array to read from, without a copy; of a GPU one of its library's.

    Raises:
        TypeError: not an array.
        Unsupported, TransportUnavailable: it lies where it cannot be used.
    """
    return _on_gpu(value) if lies_elsewhere(value) else Located(source(value), None)


def writable(value: Any) -> Located:
    """Return an array over the same memory, to write to.

    Raises:
        TypeError: not an array, or one that cannot be written.
        Unsupported, TransportUnavailable: it lies where it cannot be used.
    """
    if not lies_elsewhere(value):
        return Located(target(value), None)
    check_mutable(value)
    return _on_gpu(value)


def added_up(gpu: Gpu, arrays: Sequence[Array], dtype: np.dtype[Any]) -> Array:
    """Return a new array that holds the sum of arrays of a GPU, from left to right, which is made in a dtype."""
    # Casts are left to the GPU, as CuPy adds no bfloat16.
    total, term = (gpu.empty(arrays[0].shape, dtype) for _ in range(2))
    gpu.copy((total,), (arrays[0],))
    for array in arrays[1:]:
        gpu.copy((term,), (array,))
        with gpu.current():  # which need not be that of the thread's present GPU
            np.add(total, term, out=total)
    return total


def _on_gpu(value: Any) -> Located:
    gpu = gpu_of(value)
    return Located(value if gpu.owns(value) else gpu.adopt(value), gpu)
