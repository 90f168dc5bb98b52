"""Steps of updates in a GPU's memory, which kernels read when they run: what a graph of them needs, whose arguments are
the same at each launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..optimizers.forms import call_of
from ..optimizers.optimizer import Optimizer, Step
from ..typing import Array
from .loading import kernel, pointer

__all__ = ["NUMBERS", "WRITTEN", "Row", "Table"]

NUMBERS = 12
"""How many a row has: those of an ``Update`` of rules.cu."""

WORDS = 510
WRITTEN = np.dtype([("target", np.uintp), ("count", np.int64), ("numbers", np.float64, WORDS)], align=True)
"""What one launch is given: ``Numbers`` of steps.cu."""

THREADS = 128
_WIDTH = NUMBERS * np.dtype(np.float64).itemsize


class Row(NamedTuple):
    """Stands for a step that an update finds when it runs."""

    form: str
    address: int


class Table:
    """The :class:`~mpikv.typing.StepTable` of :class:`~.kernels.CudaKernels`. It keeps its memory."""

    def __init__(self, optimizer: Optimizer, memory: Array, count: int) -> None:
        """``memory`` is uint8, of :meth:`nbytes`."""
        self._optimizer, self._memory = optimizer, memory
        self.form = call_of(optimizer, optimizer.step("", 1))[0]
        self._address = pointer(memory)
        self.rows: Sequence[Any] = [Row(self.form, self._address + row * _WIDTH) for row in range(count)]
        self._given = np.zeros((count, NUMBERS))
        self._written = 0
        self._arguments = np.zeros(1, WRITTEN)
        kernel("steps.cu", "write_numbers")

    @staticmethod
    def nbytes(count: int) -> int:
        """Return how much memory so many rows take."""
        return count * _WIDTH

    def fits(self, step: Step) -> bool:
        return call_of(self._optimizer, step)[0] == self.form

    def write(self, steps: Sequence[Step]) -> None:
        # Most keys share their step.
        known = {id(step): call_of(self._optimizer, step)[1] for step in steps}
        width = len(known[id(steps[0])])
        given = np.array([known[id(step)] for step in steps])
        rows = self._given[: len(steps)]
        if len(steps) <= self._written and np.array_equal(rows[:, :width], given):
            return
        rows[:, :width] = given
        self._written = len(steps)
        self._queue(rows.reshape(-1))

    def _queue(self, numbers: Array) -> None:
        run, arguments = kernel("steps.cu", "write_numbers"), self._arguments[0]
        for low in range(0, numbers.size, WORDS):
            some = numbers[low : low + WORDS]
            arguments["target"] = self._address + low * numbers.itemsize
            arguments["count"] = some.size
            arguments["numbers"][: some.size] = some
            run((1,), (THREADS,), (self._arguments,))
