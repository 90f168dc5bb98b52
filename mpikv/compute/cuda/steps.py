"""Numbers of optimizer steps in GPU memory. Kernels of a captured graph read them when they run, since the arguments of
a graph are the same at each launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...optimizers.optimizer import Optimizer, Step
from ...optimizers.recording import Rule, call_of, rule_of
from ...protocols import Memory
from .loading import argument_dtype, gpu_pointer, kernel

NUMBERS = 12
"""Numbers per row, as in ``Update`` of rules.cu."""

KEYS, ROWS = 2400, 16
THREADS = 256
_WIDTH = NUMBERS * np.dtype(np.float64).itemsize


def rows_of(steps: Sequence[Any], most: int) -> tuple[list[int], list[Any]]:
    """Return for each step its place among the distinct step objects, and these; stop before more than ``most``.

    >>> one, other = "one", "other"
    >>> rows_of([one, other, one, "third", one], 2)
    ([0, 1, 0], ['one', 'other'])
    """
    known: dict[int, int] = {}
    rows, different = list[int](), list[Any]()
    for step in steps:
        row = known.setdefault(id(step), len(known))
        if row == most:
            break
        if row == len(different):
            different.append(step)
        rows.append(row)
    return rows, different


class Row(NamedTuple):
    """A step whose numbers an update reads when it runs."""

    rule: Rule
    table: int
    """Address of the table's first row."""
    row: int


class Table:
    """The :class:`~mpikv.protocols.StepTable` of :class:`~.kernels.CudaKernels`. It owns its memory."""

    def __init__(self, optimizer: Optimizer, memory: Memory, count: int) -> None:
        """Allocate rows for the steps of ``count`` keys; load the kernel that writes them. Local."""
        self._optimizer, self._memory = optimizer, memory.zeros(count * _WIDTH)
        self.rule = rule_of(optimizer)
        self._address = gpu_pointer(self._memory)
        self.rows: Sequence[Any] = [Row(self.rule, self._address, row) for row in range(count)]
        # Of each launch of the last write the first row, the rows of keys, and numbers: equal ones need no launch.
        self._last_written: list[tuple[int, list[int], list[tuple[float, ...]]]] = []
        self._arguments = np.zeros(1, argument_dtype("steps.cu", "Numbers"))
        self._launch = kernel("steps.cu", "write_numbers")

    def fits(self, step: Step) -> bool:
        """Return whether updates that read this table can run a step: by the same rule, with any numbers."""
        return call_of(self._optimizer, step)[0] is self.rule

    def write(self, steps: Sequence[Step]) -> None:
        """Queue launches that write the numbers of steps into the first rows; none if as in the last call. Local."""
        batches, low, given = [], 0, self._arguments[0]
        while low < len(steps):
            rows, different = rows_of(steps[low : low + KEYS], ROWS)
            batches.append((low, rows, [call_of(self._optimizer, step)[1] for step in different]))
            low += len(rows)
        if batches == self._last_written:
            return
        self._last_written = batches
        for low, rows, numbers in batches:
            given["target"], given["count"] = self._address + low * _WIDTH, len(rows)
            given["row"][: len(rows)] = rows
            given["numbers"].reshape(ROWS, NUMBERS)[: len(numbers), : len(numbers[0])] = numbers
            self._launch((-(-len(rows) * NUMBERS // THREADS),), (THREADS,), (self._arguments,))
