"""The host's memory, as a store sees it. A GPU's is in ``device.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import arrays
from .typing import Array, Transport

__all__ = ["HOST", "HostMemory", "private"]


class HostMemory:
    """numpy arrays; all that is done to them is done when a call returns. A :class:`~mpikv.typing.Memory`."""

    on_host = True

    def zeros(self, nbytes: int) -> Array:
        return arrays.zeros(nbytes)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return np.empty(shape, dtype)

    def source(self, value: Any) -> Array:
        return arrays.source(value)

    def target(self, out: Any) -> Array:
        return arrays.target(out)

    def view(self, array: Array) -> Array:
        view: Array = array.view()
        view.flags.writeable = False
        return view

    def copy(self, targets: Sequence[Array], sources: Sequence[Array]) -> None:
        for target, source in zip(targets, sources, strict=True):
            np.copyto(target, source, casting="unsafe")

    def to_host(self, array: Array) -> Array:
        return array

    def exceeding(self, arrays: Sequence[Array], bound: float) -> Sequence[bool]:
        return [array.size > 0 and not _largest(array) <= bound for array in arrays]

    def in_order(self, run: Callable[..., Any], *arguments: Any) -> Any:
        return run(*arguments)

    def close(self) -> None:
        pass

    def abandon(self) -> None:
        pass


HOST = HostMemory()


def private(transport: Transport) -> Callable[[int], Array]:
    """Return what makes zeroed memory for each rank alone. On GPUs it is collective, and raises MemoryError on every
    rank if one has too little; the host gives pages when they are written, so that it does not lack memory here.
    """
    return transport.memory.zeros if transport.memory.on_host else transport.allocate


def _largest(array: Array) -> float:
    """Return the size of the largest element; NaN, if one is."""
    # Neither makes a temporary array, and both pass a NaN on. ml_dtypes' bfloat16 is compared as float32.
    values = array.astype(np.float32) if array.dtype.name == "bfloat16" else array
    return max(float(values.max()), -float(values.min()))
