"""The host's memory, as a store sees it. A GPU's is in ``memory/device.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from typing import Any, NoReturn

import numpy as np

from ..arrays import arrays
from ..cluster.printing import log
from ..cluster.runtime import here
from ..errors import Unsupported
from ..protocols import Array, Gpu, Transport
from .stream_order import HostOrder


def _refuse(_: Any) -> NoReturn:
    """Always raise Unsupported: the ``find`` of a memory that takes no arrays of GPUs. Local."""
    raise Unsupported("the array is on a GPU, and this store cannot copy it to the host; copy it first")


class HostMemory:
    """The :class:`~mpikv.protocols.Memory` of numpy arrays, and its :class:`~mpikv.protocols.Workspace`. Its operations
    end before they return.

    An array on a GPU is copied to the host when its call is prepared. The copy runs on the caller's current stream, and
    the call waits for it. An ``out`` on a GPU is filled after the call, on the same stream, from a host array.
    """

    is_host = True

    def __init__(self, find: Callable[[Any], Gpu] = _refuse) -> None:
        """Without ``find``, the memory refuses arrays of GPUs."""
        self.find = find
        """Returns the GPU of another library's array that lies on one."""
        self._warned = False
        self.order = HostOrder()

    @property
    def workspace(self) -> HostMemory:
        """This object itself: it also moves rows."""
        return self

    def zeros(self, nbytes: int) -> Array:
        """Return so many new zeroed bytes of host memory, in huge pages if they are many. Local."""
        return arrays.zeros(nbytes, huge_pages=True)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new numpy array of any content. Local."""
        return np.empty(shape, dtype)

    # Host arrays take the short path, without a test for GPUs: training calls these thousands of times.

    def source(self, value: Any) -> Array:
        """Return a host array to read ``value`` from: its memory, or a copy from a GPU (waits, may warn). Local."""
        try:
            return arrays.source(value)
        except Unsupported:
            if arrays.lies_on_host(value):
                raise
            gpu, there = self._locate(value)
            return gpu.download(there)

    def target(self, out: Any) -> Array:
        """Return the array over ``out``; for a GPU's a new one, copied there after the call (warns once). Local."""
        try:
            return arrays.target(out)
        except Unsupported:
            if arrays.lies_on_host(out):
                raise
            return self._stand_in(out)

    def copy(self, targets: Sequence[Array], sources: Sequence[Array]) -> None:
        """Copy each source to its target, cast where the dtypes differ. Local."""
        for target, source in zip(targets, sources, strict=True):
            target[...] = source  # which begins in half the time that copyto takes

    def over(self, memory: Array) -> AbstractContextManager[None]:
        """Return a context that does nothing: numpy makes its own memory."""
        return nullcontext()

    def prepare_rows(self, dtype: np.dtype[Any]) -> None:
        """Do nothing: numpy needs no compilation."""

    def numbers(self, every: Sequence[Array]) -> Sequence[Array]:
        """Return the row numbers as they are. Local."""
        return every

    def take_rows(self, table: Array, ids: Array, out: Array | None = None) -> Array:
        """Return the rows of these numbers, copied to ``out`` or to a new array. Local."""
        if out is None:
            return table[ids]
        # The caller has checked the range. Without mode="clip", take would fill a temporary array and copy it.
        return table.take(ids, axis=0, out=out, mode="clip")

    def put_rows(self, table: Array, ids: Array, rows: Array | None) -> None:
        """Overwrite the rows of these numbers by rows, or by zeros. Local."""
        table[ids] = 0 if rows is None else rows

    def add_rows(self, table: Array, ids: Array, rows: Array) -> None:
        """Add rows to the rows of these numbers, in the table's dtype. Each number occurs once. Local."""
        sums = table[ids]
        # Else numpy would add int64 and uint64 as float64, and lose the low bits.
        np.add(sums, rows, out=sums, dtype=sums.dtype, casting="unsafe")
        table[ids] = sums

    def sum_runs(self, rows: Array, order: Array, starts: Array) -> Array:
        """Return the sums of the runs of ``rows[order]`` that begin at ``starts``, each rounded once. Local."""
        # A copy in order: reduceat takes runs only.
        rows = rows[order]
        if not prod(rows.shape[1:]):
            return rows[starts]  # reduceat of rows without elements is an error
        total: Array = np.add.reduceat(rows, starts, axis=0, dtype=arrays.accumulator(rows.dtype))
        return total.astype(rows.dtype, copy=False)

    def to_host(self, array: Array) -> Array:
        """Return the array itself. Local."""
        return array

    def exceeding(self, every: Sequence[Array], bound: float) -> Sequence[bool]:
        """Return for each array if it has NaN or a magnitude above ``bound``. Local."""
        return [array.size > 0 and not _largest(array) <= bound for array in every]

    # --- Arrays of GPUs

    def _stand_in(self, out: Any) -> Array:
        """Return a new host array to fill; note to copy it to ``out``, on a GPU, after the call. Local."""
        arrays.check_mutable(out)
        gpu, there = self._locate(out)
        arrays.check_apart(there)
        array = np.empty(there.shape, there.dtype)
        whole = there if there.flags.c_contiguous else gpu.empty(there.shape, there.dtype)
        # After the call: until ranks have agreed, nothing of the caller's may change.
        self.order.add(partial(_fill, gpu, there, whole, array))
        return array

    def _locate(self, value: Any) -> tuple[Gpu, Array]:
        """Return the GPU of an array, and an Array over its memory; raise on a worker thread; warn once. Local."""
        if self.find is not _refuse and here.place is not None:
            raise Unsupported(
                "with wait=False a host store takes host arrays only: its worker thread does not know the stream of "
                "a GPU array; copy it to the host, or leave wait=False out"
            )
        gpu = self.find(value)
        # owns() has proved that it is an Array; a type guard cannot say so.
        there = value if gpu.owns(value) else gpu.adopt(value)
        if not self._warned:
            self._warned = True
            log(
                "an array on %s is used with a host store, and every call copies it to the host; "
                "mpikv.create('nccl') keeps values on GPUs",
                gpu.name,
            )
        return gpu, there


HOST = HostMemory()


def private_allocator(transport: Transport) -> Callable[[int], Array]:
    """Return a function that allocates zeroed memory for each rank alone. On GPUs that function is collective. Local.

    There it raises MemoryError on every rank if one has too little. The host maps pages at the first write, so it does
    not fail here.
    """
    if not transport.memory.is_host:
        return transport.allocate
    # A rank writes to its own shard only; with huge pages it would take memory for its neighbours' shards, too.
    return transport.memory.zeros if transport.size == 1 else arrays.zeros


def _fill(gpu: Gpu, out: Array, whole: Array, array: Array) -> None:
    """Queue an upload of a host array to ``out``, by way of ``whole``: contiguous GPU memory, or ``out``. Local."""
    gpu.upload(array, whole)
    if whole is not out:
        gpu.copy((out,), (whole,))


def _largest(array: Array) -> float:
    """Return the largest magnitude of the elements; NaN if one is NaN. Local."""
    # max and min make no temporary array, as abs would, and both return NaN if there is one. The bfloat16 of
    # ml_dtypes is compared as float32.
    values = array.astype(np.float32) if array.dtype.name == "bfloat16" else array
    return max(float(values.max()), -float(values.min()))
