"""Kernels of the fake GPU: numpy's rules of updaters and codecs, with one launch per call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np

from ..compute.cuda.codes import has_code
from ..optimizers.optimizer import Optimizer
from ..optimizers.recording import call_of, is_recordable, rule_of
from ..protocols import ElementwiseCodec, Memory, Updater

if TYPE_CHECKING:
    from .fakegpu import FakeArray, FakeGpu

__all__ = ["FakeKernels", "FakeRanges", "FakeTable"]


class FakeKernels:
    """The :class:`~mpikv.protocols.Kernels` of a :class:`FakeGpu`: the rules of updaters, in numpy, one launch each."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def prepare(self, updater: Updater, dtype: np.dtype[Any], adding: bool) -> None:
        if is_recordable(updater):
            rule_of(updater)

    def bind(
        self, updater: Updater, total: FakeArray, value: FakeArray, state: Mapping[str, FakeArray]
    ) -> Callable[[Any], None]:
        beneath = {name: array._beneath for name, array in state.items()}
        several = self._several(
            [total, value, *state.values()], [updater.bind(total._beneath, value._beneath, beneath)]
        )
        return lambda step: several((step,))

    def bind_ranges(
        self, updater: Updater, total: FakeArray, value: FakeArray, state: Mapping[str, FakeArray], ends: Sequence[int]
    ) -> Callable[[Sequence[Any]], None]:
        updates = []
        for part in (slice(low, high) for low, high in itertools.pairwise((0, *ends))):
            beneath = {name: array._beneath[part] for name, array in state.items()}
            updates.append(updater.bind(total._beneath[part], value._beneath[part], beneath))
        return self._several([total, value, *state.values()], updates)

    def _several(
        self, arrays: Sequence[FakeArray], updates: Sequence[Callable[[Any], None]]
    ) -> Callable[[Sequence[Any]], None]:
        """Return a function that makes several updates by one launch."""

        def launch(steps: Sequence[Any]) -> None:
            rows = [step.memory for step in steps if isinstance(step, FakeRow)]
            # An updater may overwrite the sum.
            self._gpu.compute("update", rows, arrays, partial(run, steps))

        def run(steps: Sequence[Any]) -> None:
            for update, step in zip(updates, steps, strict=True):
                update(step.table.steps[step.number] if isinstance(step, FakeRow) else step)

        return launch

    # The arrays of a Whole are typed as numpy's; here they are FakeArrays.
    def bind_whole(self, updater: Updater, wholes: Sequence[Any]) -> Callable[[Sequence[Any]], None]:
        arrays = [array for whole in wholes for array in (whole.total, whole.value, *whole.state.values())]
        beneath = [
            (whole.total._beneath, whole.value._beneath, {name: array._beneath for name, array in whole.state.items()})
            for whole in wholes
        ]

        norms = self._gpu.empty((3 * len(wholes),), np.dtype(np.float64))

        def launch(steps: Sequence[Any]) -> None:
            self._gpu.compute("update of whole values", [], [*arrays, norms], partial(run, steps))

        def run(steps: Sequence[Any]) -> None:
            for step, (total, value, state) in zip(steps, beneath, strict=True):
                updater.update(step, total, value, state)

        return launch

    def step_table(self, updater: Updater, memory: Memory, count: int, dtypes: Iterable[np.dtype[Any]]) -> FakeTable:
        return FakeTable(self._gpu, updater, memory, count)

    def bind_adding(self, updater: Updater, value: FakeArray, state: Mapping[str, FakeArray]) -> None:
        return None

    def codec(self, codec: Any) -> Any:
        return FakeRanges(self._gpu, codec) if has_code(codec) else codec


class FakeRanges:
    """A codec on a :class:`FakeGpu`, if CUDA has kernels for it: the host's code, with one launch per call."""

    elementwise: ClassVar[Literal[True]] = True

    def __init__(self, gpu: FakeGpu, codec: Any) -> None:
        self.codec: ElementwiseCodec = codec
        self.feedback = self.codec.feedback
        self._gpu = gpu

    def settings(self) -> str:
        return self.codec.settings()

    def nbytes(self, count: int) -> int:
        return self.codec.nbytes(count)

    def encode(self, gradient: FakeArray, payload: FakeArray, residual: FakeArray | None = None) -> None:
        kept = [] if residual is None else [residual]
        arrays = gradient._beneath, payload._beneath, None if residual is None else residual._beneath
        self._gpu.compute("encode", [gradient, *kept], [payload, *kept], partial(self.codec.encode, *arrays))

    def decode_add(self, payload: FakeArray, total: FakeArray) -> None:
        decode = partial(self.codec.decode_add, payload._beneath, total._beneath)
        self._gpu.compute("decode_add", [payload, total], [total], decode)


class FakeRow(NamedTuple):
    """A step whose numbers an update reads when it runs."""

    table: FakeTable
    number: int
    memory: Any


class FakeTable:
    """The :class:`~mpikv.protocols.StepTable` of :class:`FakeKernels`."""

    def __init__(self, gpu: FakeGpu, updater: Updater, memory: Memory, count: int) -> None:
        assert isinstance(updater, Optimizer)
        self._gpu, self._optimizer, self._rule = gpu, updater, rule_of(updater)
        self._memory: Any = memory.zeros(count)
        self.steps: list[Any] = [None] * count
        self.rows = [FakeRow(self, row, self._memory[row : row + 1]) for row in range(count)]

    def fits(self, step: Any) -> bool:
        return call_of(self._optimizer, step)[0] is self._rule

    def write(self, steps: Sequence[Any]) -> None:
        self.steps[: len(steps)] = steps
        self._gpu.compute("write steps", [], [self._memory[: len(steps)]], lambda: None)
