"""The host's memory, as a store sees it. A GPU's is in ``memory/device.py``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from typing import Any

import numpy as np

from ..arrays import arrays
from ..cluster.background import makes_calls
from ..errors import Unsupported
from ..protocols import Array, Gpu, Transport
from .stream_order import HostOrder

__all__ = ["HOST", "HostMemory", "private"]


class HostMemory:
    """numpy arrays; all that is done to them is done when a call returns. A :class:`~mpikv.protocols.Memory`, and its
    :class:`~mpikv.protocols.Workspace`.

    An array of a GPU is copied here while its call is prepared, on the caller's present stream, which is waited for.
    One that is to be filled is given what stands for it here, when the call is done, on the same stream.
    """

    is_host = True

    def __init__(self, find: Callable[[Any], Gpu] | None = None) -> None:
        """``find`` returns the GPU of another library's array that lies on one; without it such arrays are refused."""
        self._find = find
        self._said = False
        self.order = HostOrder()

    @property
    def workspace(self) -> HostMemory:
        return self

    def zeros(self, nbytes: int) -> Array:
        return arrays.zeros(nbytes, huge_pages=True)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return np.empty(shape, dtype)

    # What is of the host passes without being looked at here: training calls these thousands of times.

    def source(self, value: Any) -> Array:
        try:
            return arrays.source(value)
        except Unsupported:
            if arrays.lies_on_host(value):
                raise
            return self._fetched(value)

    def facts(self, value: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
        try:
            array = arrays.source(value)
        except Unsupported:
            if arrays.lies_on_host(value):
                raise
            array = self._found(value)[1]
        return array.shape, array.dtype

    def target(self, out: Any) -> Array:
        try:
            return arrays.target(out)
        except Unsupported:
            if arrays.lies_on_host(out):
                raise
            return self._stand_in(out)

    def copy(self, targets: Sequence[Array], sources: Sequence[Array]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target[...] = source  # which begins in half the time that copyto takes

    def over(self, memory: Array) -> AbstractContextManager[None]:
        return nullcontext()

    def clear(self, array: Array) -> None:
        array.fill(0)

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
        sums = table[ids]
        # Of int64 and uint64 numpy would make floats.
        np.add(sums, rows, out=sums, dtype=sums.dtype, casting="unsafe")
        table[ids] = sums

    def sum_runs(self, rows: Array, order: Array, starts: Array) -> Array:
        rows = rows[order]
        if not prod(rows.shape[1:]):
            return rows[starts]  # reduceat of rows without elements is an error
        total: Array = np.add.reduceat(rows, starts, axis=0, dtype=arrays.accumulator(rows.dtype))
        return total.astype(rows.dtype, copy=False)

    def to_host(self, array: Array) -> Array:
        return array

    def exceeding(self, every: Sequence[Array], bound: float) -> Sequence[bool]:
        return [array.size > 0 and not _largest(array) <= bound for array in every]

    # --- Arrays of GPUs

    def find(self, value: Any) -> Gpu:
        """Return the GPU of an array that lies on one.

        Raises:
            Unsupported: this memory knows none.
        """
        if self._find is None:
            raise Unsupported("the array is on a GPU, and this store cannot copy it to the host; copy it first")
        return self._find(value)

    def _fetched(self, value: Any) -> Array:
        gpu, there = self._copied(value)
        array = np.empty(there.shape, there.dtype)
        gpu.download(there, array)
        return array

    def _stand_in(self, out: Any) -> Array:
        arrays.check_mutable(out)
        gpu, there = self._copied(out)
        arrays.check_apart(there)
        array = np.empty(there.shape, there.dtype)
        whole = there if there.flags.c_contiguous else gpu.empty(there.shape, there.dtype)
        self.order.add(partial(_fill, gpu, there, whole, array))
        return array

    def _found(self, value: Any) -> tuple[Gpu, Array]:
        """Return the GPU of an array, and the array as one of its library's."""
        gpu = self.find(value)
        # That owns() knows it for an array is nothing that types can say.
        return gpu, value if gpu.owns(value) else gpu.adopt(value)

    def _copied(self, value: Any) -> tuple[Gpu, Array]:
        """Return the same of an array that is copied."""
        if self._find is not None and makes_calls():
            raise Unsupported(
                "with wait=False a host store takes host arrays only: its worker thread does not know the stream of "
                "a GPU array; copy it to the host, or leave wait=False out"
            )
        gpu, there = self._found(value)
        if not self._said:
            self._said = True
            logging.getLogger("mpikv").warning(
                "an array on %s is used with a host store, and every call copies it to the host; "
                "mpikv.create('nccl') keeps values on GPUs",
                gpu.name,
            )
        return gpu, there


HOST = HostMemory()


def private(transport: Transport) -> Callable[[int], Array]:
    """Return what makes zeroed memory for each rank alone. On GPUs it is collective, and raises MemoryError on every
    rank if one has too little; the host gives pages when they are written, so that it does not lack memory here.
    """
    if not transport.memory.is_host:
        return transport.allocate
    # A huge page would hold a piece of every rank's shard.
    return transport.memory.zeros if transport.size == 1 else arrays.zeros


def _fill(gpu: Gpu, out: Array, whole: Array, array: Array) -> None:
    """Copy an array of the host to one of a GPU: by contiguous memory there, as nothing is copied into gaps at once."""
    gpu.upload(array, whole)
    if whole is not out:
        gpu.copy((out,), (whole,))


def _largest(array: Array) -> float:
    """Return the size of the largest element; NaN, if one is."""
    # Neither makes a temporary array, and both pass a NaN on. ml_dtypes' bfloat16 is compared as float32.
    values = array.astype(np.float32) if array.dtype.name == "bfloat16" else array
    return max(float(values.max()), -float(values.min()))
