"""The place of an array of any library: the host, or a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from ..arrays.arrays import address_of, check_mutable, lies_elsewhere, source, target
from ..compute.cuda.gpu import gpu_of
from ..protocols import Array, Gpu


class Located(NamedTuple):
    """An array and its GPU; None for the host. The array is numpy's or the GPU library's."""

    array: Array
    gpu: Gpu | None

    @property
    def where(self) -> str:
        """The device in words: "the host", or the GPU's name."""
        return "the host" if self.gpu is None else self.gpu.name

    @property
    def outline(self) -> Array:
        """An array of numpy with the same addresses, to compare places. Do not read it: it may be a GPU's. Local."""
        if self.gpu is None:
            return self.array
        if not self.array.size:  # an empty array has no address, and numpy before 2.4 refuses the address 0
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
        """A tuple that is equal for arrays of the same address, shape, strides and dtype."""
        return address_of(self.outline), self.array.shape, self.array.strides, self.array.dtype.name


def locate_source(value: Any) -> Located:
    """Return an array to read from, with its GPU; a copy only for byte order; TypeError if it is no array. Local.

    Raises:
        TypeError: not an array.
        Unsupported, TransportUnavailable: this process cannot use the array's device.
    """
    return _on_gpu(value) if lies_elsewhere(value) else Located(source(value), None)


def locate_target(value: Any) -> Located:
    """Return an array over the same memory, to write to, with its GPU; TypeError if it cannot be written. Local.

    Raises:
        TypeError: not an array, or one that cannot be written.
        Unsupported, TransportUnavailable: this process cannot use the array's device.
    """
    if not lies_elsewhere(value):
        return Located(target(value), None)
    check_mutable(value)
    return _on_gpu(value)


def add_up(gpu: Gpu, arrays: Sequence[Array], dtype: np.dtype[Any]) -> Array:
    """Queue a sum of arrays on a GPU, from left to right in ``dtype``; return it as a new array. Local."""
    # The GPU's copy kernel casts, since CuPy does not add bfloat16.
    total, term = (gpu.empty(arrays[0].shape, dtype) for _ in range(2))
    gpu.copy((total,), (arrays[0],))
    for array in arrays[1:]:
        gpu.copy((term,), (array,))
        with gpu.current():  # the thread's current GPU may be another one
            np.add(total, term, out=total)
    return total


def _on_gpu(value: Any) -> Located:
    """Return a Located of an array on a GPU: CuPy's over the same memory; raise if CuPy cannot use it. Local."""
    gpu = gpu_of(value)
    # Adopted by DLPack, an array of another library stays where it is.
    return Located(value if gpu.owns(value) else gpu.adopt(value), gpu)
