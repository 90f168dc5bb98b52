"""Temporary rows on a GPU, in memory reserved beforehand: no rank may run out of memory in the middle of a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np

from ..protocols import Array, Gpu

ALIGNMENT = 256
"""Most bytes of padding per array in a workspace. CUDA's allocator aligns arrays to as many."""


class GpuWorkspace:
    """The :class:`~mpikv.protocols.Workspace` of a GPU, for one thread at a time."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        # Without memory of their own: the GPU's methods as they are.
        self.copy, self.clear, self.prepare_rows, self.sum_runs = gpu.copy, gpu.clear, gpu.prepare_rows, gpu.sum_runs
        self._memory: Array | None = None
        self._used = 0

    @contextmanager
    def over(self, memory: Array) -> Iterator[None]:
        outer = self._memory, self._used
        self._memory, self._used = memory, 0
        try:
            yield
        finally:
            # Nested use: without the outer offset, rows in use would be handed out again.
            self._memory, self._used = outer

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        begin, nbytes = self._used, prod(shape) * np.dtype(dtype).itemsize
        if self._memory is None or begin + nbytes > self._memory.size:
            # Beyond the reserve the allocator may fail on this rank alone; callers reserve enough (see Rows._needed).
            return self._gpu.empty(shape, dtype)
        self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        array: Array = self._memory[begin : begin + nbytes].view(dtype).reshape(shape)
        return array

    def numbers(self, every: Sequence[Array]) -> Sequence[Array]:
        # One upload for all: each copy from the host costs a call of its own, however short it is.
        there, ends = self._there(np.concatenate(every)), np.cumsum([ids.size for ids in every]).tolist()
        return [there[end - ids.size : end] for ids, end in zip(every, ends, strict=True)]

    def take_rows(self, table: Array, ids: Array, out: Array | None = None) -> Array:
        rows = self.empty((ids.size, *table.shape[1:]), table.dtype) if out is None else out
        self._gpu.take_rows(table, self._there(ids), rows)
        return rows

    def put_rows(self, table: Array, ids: Array, rows: Array | None) -> None:
        # The kernel copies bits: a cast is a pass of its own, in reserved memory.
        if rows is not None and rows.dtype != table.dtype:
            given, rows = rows, self.empty(rows.shape, table.dtype)
            self._gpu.copy((rows,), (given,))
        self._gpu.put_rows(table, self._there(ids), rows)

    def add_rows(self, table: Array, ids: Array, rows: Array) -> None:
        self._gpu.add_rows(table, self._there(ids), rows)

    def _there(self, ids: Array) -> Array:
        return ids if self._gpu.owns(ids) else self._gpu.upload(ids, self.empty(ids.shape, ids.dtype))
