"""The rules of the optimizers on a GPU. A :class:`~mpikv.protocols.Kernels`.

One launch updates one value, or many keys with numbers of their own. It reads each element once, updates it, and writes
it once. The bits are those of the rules in numpy; only sign and payload of a NaN are arbitrary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from ...arrays.arrays import accumulator
from ...errors import Unsupported
from ...optimizers.optimizer import Optimizer, Step
from ...optimizers.recording import Rule, call_of, is_recordable, rule_of
from ...protocols import Array, Codec, Memory, Updater, Whole
from . import layerwise
from .codes import CudaCodec, has_code
from .copies import copy, prepare
from .loading import Kernel, addresses_of, argument_dtype, gpu_pointer, kernel
from .steps import NUMBERS, Row, Table, rows_of

STATES = 8


class Room(NamedTuple):
    """The most ranges of elements per launch, and the most different rows of numbers."""

    name: str
    ranges: int
    rows: int


ONE, MANY = Room("one", 1, 1), Room("many", 200, 16)


PART, THREADS = 1 << 12, 256
"""Elements per block, and threads per block. The GPU gives the next block to a free multiprocessor."""


class CudaKernels:
    """CUDA kernels for all element-wise optimizers, and LARS and LAMB. They take float32, float64, float16 and
    bfloat16; the last two are computed in float32, with or without a master.

    Arrays are CuPy's, contiguous. Other updaters, and a user's optimizers of whole values, run as they are: they
    receive CuPy's arrays, and numpy's functions call CuPy on these.

    The GPU of the arrays must be the current one when an update is bound, and when it runs.
    """

    def __init__(self, present: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        """``present`` returns a context that makes the kernels' GPU the thread's current one."""
        self._present = present

    def prepare(self, updater: Updater, dtype: np.dtype[Any], adding: bool) -> None:
        """Compile or load the kernels for the updater's present options and this dtype, if it has some. Local.

        Raises:
            Unsupported: the optimizer cannot update values of this dtype, or its rule cannot be compiled.
            TransportUnavailable: the kernels cannot be compiled here.
        """
        with self._present():
            if updater.assigns:
                # ASSIGN only casts: the sum of half precision is float32.
                prepare(accumulator(dtype), dtype)
            elif isinstance(updater, Optimizer):
                updater.slots(dtype)
                if layerwise.has_kernels(updater):
                    layerwise.prepare(updater, dtype)
                elif is_recordable(updater):
                    _preload(rule_of(updater), dtype)

    def bind(self, updater: Updater, total: Array, value: Array, state: Mapping[str, Array]) -> Callable[[Any], None]:
        """Return a function of a step that queues one update of these arrays, and keeps them alive. Local.

        Raises:
            ValueMismatch: an array has a wrong dtype or size, or has gaps.
        """
        if updater.assigns:
            if gpu_pointer(value) == gpu_pointer(total):
                return lambda step: None  # the sum was made in the value's memory
            return lambda step: copy((value,), (total,))
        if layerwise.has_kernels(updater):
            update = layerwise.bind(updater, [Whole(total, value, state)])
            return lambda step: update([step])
        if not is_recordable(updater):
            return updater.bind(total, value, state)
        several = _Updates(updater, Whole(total, value, state), (value.size,), ONE)
        return lambda step: several((step,))

    def bind_ranges(
        self, updater: Updater, total: Array, value: Array, state: Mapping[str, Array], ends: Sequence[int]
    ) -> Callable[[Sequence[Any]], None]:
        """Return a function that, given a step for each range, queues the updates of all with few launches. Local.

        One launch does for 200 ranges and up to 16 different steps.

        Raises: as :meth:`bind`.
        """
        assert isinstance(updater, Optimizer)
        return _Updates(updater, Whole(total, value, state), ends, MANY)

    def bind_whole(self, updater: Updater, wholes: Sequence[Whole]) -> Callable[[Sequence[Any]], None] | None:
        """Return a function that queues updates of whole values, by a step each; None without such kernels. Local.

        It takes three launches, and keeps the arrays alive.

        Raises: as :meth:`bind`.
        """
        return layerwise.bind(updater, wholes) if layerwise.has_kernels(updater) else None

    def bind_adding(self, updater: Updater, value: Array, state: Mapping[str, Array]) -> None:
        """Return None: NCCL sums completely, so no second addend is left for an update. Local."""

    def bind_list(self, arrays: Sequence[Array]) -> None:
        """Return None: lists of arrays need no code of their own, as one launch copies many arrays."""

    def step_table(self, updater: Updater, memory: Memory, count: int, dtypes: Iterable[np.dtype[Any]]) -> Table:
        """Return a table in new GPU memory for steps of ``count`` keys, and compile the updates that read it. Local."""
        assert isinstance(updater, Optimizer)
        with self._present():
            table = Table(updater, memory, count)
            for dtype in dtypes:
                _preload(table.rule, dtype)
        return table

    def codec(self, codec: Codec) -> Codec:
        """Return the CUDA codec with the same payloads, compiled or loaded; the codec itself without a kernel. Local.

        Raises:
            TransportUnavailable: the kernels cannot be compiled here.
        """
        with self._present():
            return CudaCodec(codec) if has_code(codec) else codec


class _Updates:
    """Launches updates of consecutive ranges of some arrays, by a step each. It keeps the arrays alive."""

    def __init__(self, optimizer: Optimizer, whole: Whole, ends: Sequence[int], room: Room) -> None:
        """Write the arrays' addresses into a launch's argument; ValueMismatch if one does not fit. Local."""
        self._optimizer, self._whole = optimizer, whole
        self._dtype, self._room = whole.value.dtype.name, room
        self._ends = np.array(ends, np.int64)
        self._arguments = np.zeros(1, argument_dtype("rules.cu", "Update", ranges=room.ranges, rows=room.rows))
        given = self._given = self._arguments[0]
        self._rows, self._numbers = given["row"], given["numbers"].reshape(-1, NUMBERS)
        for field, address in addresses_of(optimizer, whole, STATES).items():
            given[field] = address
        self._cut, self._blocks = (0, 0), 0

    def __call__(self, steps: Sequence[Step | Row]) -> None:
        """Queue launches, as few as possible, that update each range by its step. Local."""
        low = 0
        while low < len(steps):
            some = steps[low : low + self._room.ranges]
            rule, count = self._use_table(some) if isinstance(some[0], Row) else self._use_steps(some)
            # A step of all ranges uses the same cut each time: rewrite the argument only if it differs.
            if self._cut != (cut := (low, low + count)):
                begin, end = int(self._ends[low - 1]) if low else 0, int(self._ends[low + count - 1])
                self._given["begin"], self._given["count"] = begin, count
                self._given["end"][:count] = self._ends[low : low + count]
                self._cut, self._blocks = cut, -(-(end - begin) // PART)
            if self._blocks:
                _kernel_of(rule, self._dtype, self._room)((self._blocks,), (THREADS,), (self._arguments,))
            low += count

    def _use_table(self, steps: Sequence[Any]) -> tuple[Rule, int]:
        """Point the launch's argument to rows of a table in GPU memory; return the rule, and the number of ranges."""
        self._given["table"] = steps[0].table
        self._rows[: len(steps)] = [step.row for step in steps]
        return steps[0].rule, len(steps)

    def _use_steps(self, steps: Sequence[Any]) -> tuple[Rule, int]:
        """Write the numbers of the first steps, as many as fit, into the launch's argument; return rule and count."""
        rows, different = rows_of(steps, self._room.rows)
        for row, step in enumerate(different):
            # Options may have changed since the last call.
            rule, numbers = call_of(self._optimizer, step)
            self._numbers[row, : len(numbers)] = numbers
        self._given["table"] = 0
        self._rows[: len(rows)] = rows
        return rule, len(rows)


def _preload(rule: Rule, dtype: np.dtype[Any]) -> None:
    """Compile or load a rule's kernels before their first launch; Unsupported: too many numbers or states. Local."""
    if len(rule.numbers) >= NUMBERS or len(rule.states) > STATES:
        most = f"more than {NUMBERS - 1} different numbers or {STATES} states: compute some in correction()"
        raise Unsupported(f"{rule.name} cannot be compiled for a GPU: it has {most}, or use a store on the host")
    for room in (ONE, MANY):
        _kernel_of(rule, dtype.name, room)


def _kernel_of(rule: Rule, dtype: str, room: Room) -> Kernel:
    """Return a rule's kernel for a dtype, compiled or loaded if new; ``room``: for how many ranges. Local."""
    return kernel("rules.cu", f"update<{rule.name}, {dtype}_kind, {room.name}>", rule)
