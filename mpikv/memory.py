"""The host's memory, as a store sees it. A GPU's is in ``device.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from . import arrays
from .typing import Array, Transport

__all__ = ["HOST", "HostMemory", "private"]


class HostMemory:
    """numpy arrays; all that is done to them is done when a call returns. A :class:`~mpikv.typing.Memory`, and its
    :class:`~mpikv.typing.Tables`.
    """

    on_host = True

    @property
    def tables(self) -> HostMemory:
        return self

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
            target[...] = source  # which begins in half the time that copyto takes

    def prepare_rows(self, dtype: np.dtype[Any]) -> None:
        pass

    def numbers(self, every: Sequence[Array]) -> Sequence[Array]:
        return every

    def take_rows(self, table: Array, ids: Array, out: Array | None = None) -> Array:
        if out is None:
            return table[ids]
        # They are known to be in range; to find that out, take would copy first.
        return table.take(ids, axis=0, out=out, mode="clip")

    def put_rows(self, table: Array, ids: Array, rows: Array | None) -> None:
        table[ids] = 0 if rows is None else rows

    def add_rows(self, table: Array, ids: Array, rows: Array) -> None:
        table[ids] += rows

    def sum_runs(self, rows: Array, order: Array, starts: Array) -> Array:
        rows = rows[order]
        if not prod(rows.shape[1:]):
            return rows[starts]  # reduceat of rows without elements is an error
        total: Array = np.add.reduceat(rows, starts, axis=0, dtype=arrays.accumulator(rows.dtype))
        return total.astype(rows.dtype, copy=False)

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
