"""The rules of the optimizers on a GPU. A :class:`~mpikv.typing.Kernels`.

An update is one launch, which reads each element once, makes all of the update of it, and writes it once. The bits are
those of the rules in numpy (a NaN is a NaN: its sign and payload are as it happens).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import Unsupported
from ..optimizers.forms import FORMS, call_of
from ..optimizers.optimizer import Optimizer, Step
from ..typing import Array, Codec, Memory, Updater, Whole
from . import layerwise
from .codes import CudaRanges, has_code
from .copies import copy, prepare
from .loading import Kernel, address_of, kernel, pointer
from .steps import NUMBERS, Row, Table

__all__ = ["UPDATE", "CudaKernels"]

STATES = 3
UPDATE = np.dtype(
    [
        ("total", np.uintp),
        ("value", np.uintp),
        ("master", np.uintp),
        ("state", np.uintp, STATES),
        ("size", np.int64),
        ("numbers", np.float64, NUMBERS),
        ("table", np.uintp),
    ],
    align=True,
)
"""What one launch is given: ``Update`` of rules.cu."""

THREADS = 256
# A GPU of 132 multiprocessors runs 1056 such blocks at once. With more of them a thread has fewer elements for which to
# round the numbers.
MOST_BLOCKS = 2048


class CudaKernels:
    """The optimizers of :data:`mpikv.optimizers.forms.FORMS`, and LARS and LAMB, as CUDA kernels, for float32, float64,
    float16 and bfloat16, the latter two computed in float32, with a master or without.

    Arrays are CuPy's, contiguous. Updaters that are no optimizers are left to themselves: they get CuPy's arrays.
    """

    rules: Sequence[str] = tuple(sorted(kind.__name__.lower() for kind in (*FORMS, *layerwise.KINDS)))

    def prepare(self, updater: Updater, dtype: np.dtype[Any], adding: bool) -> None:
        """Compile what the updater's present options need for values of this dtype, or load it.

        Raises:
            Unsupported: the optimizer has no kernel, or none for this dtype.
            TransportUnavailable: nothing can be compiled here.
        """
        if updater.assigns:
            # The sum of half precision is float32.
            prepare(np.dtype(np.float32) if _is_half(dtype) else dtype, dtype)
        elif isinstance(updater, Optimizer):
            _refuse_unknown(updater)
            updater.slots(dtype)
            if type(updater) in layerwise.KINDS:
                layerwise.prepare(updater, dtype)
                return
            form, _ = call_of(updater, Step(1.0, 0.0, updater.correction(1)))
            _kernel_of(form, dtype.name)

    def bind(self, updater: Updater, total: Array, value: Array, state: Mapping[str, Array]) -> Callable[[Any], None]:
        """Return what launches one update of these arrays, which lives as long as they do.

        Raises:
            Unsupported: the optimizer has no kernel.
            ValueMismatch: an array is not as the optimizer needs it.
        """
        if updater.assigns:
            return _assignment(total, value)
        if not isinstance(updater, Optimizer):
            return updater.bind(total, value, state)
        _refuse_unknown(updater)
        if type(updater) in layerwise.KINDS:
            update = layerwise.bind(updater, [Whole(total, value, state)])
            return lambda step: update([step])
        return _Update(updater, total, value, state)

    def bind_whole(self, updater: Updater, wholes: Sequence[Whole]) -> Callable[[Sequence[Any]], None]:
        """Return what makes one update of each of some whole values, by a step each; it lives as long as they do.

        Raises: as :meth:`bind`.
        """
        if isinstance(updater, Optimizer) and type(updater) in layerwise.KINDS:
            return layerwise.bind(updater, wholes)
        updates = [self.bind(updater, *whole) for whole in wholes]

        def run(steps: Sequence[Any]) -> None:
            for update, step in zip(updates, steps, strict=True):
                update(step)

        return run

    def bind_adding(self, updater: Updater, value: Array, state: Mapping[str, Array]) -> None:
        return None  # where a library adds, there is one term

    def table(self, updater: Updater, memory: Memory, count: int, dtypes: Iterable[np.dtype[Any]]) -> Table:
        assert isinstance(updater, Optimizer)
        _refuse_unknown(updater)
        table = Table(updater, memory.zeros(Table.nbytes(count)), count)
        for dtype in dtypes:
            _kernel_of(table.form, dtype.name, "update_late")
        return table

    def codec(self, codec: Codec) -> Codec:
        """Return a codec of the same payloads for CuPy's arrays, compiled or loaded; or the codec, if it has no kernel.

        Raises:
            TransportUnavailable: nothing can be compiled here.
        """
        return CudaRanges(codec) if has_code(codec) else codec


def _refuse_unknown(optimizer: Optimizer) -> None:
    kind = type(optimizer)
    if kind not in FORMS and kind not in layerwise.KINDS:
        known = ", ".join(sorted(each.__name__ for each in (*FORMS, *layerwise.KINDS)))
        raise Unsupported(
            f"{kind.__name__} has no CUDA kernel (known: {known}); use one of these, an updater function, which is "
            "given arrays on the GPU, or a store on the host"
        )


def _assignment(total: Array, value: Array) -> Callable[[Any], None]:
    if pointer(value) == pointer(total):
        return _nothing  # the sum was made in its place
    return lambda step: copy((value,), (total,))


def _nothing(step: Any) -> None:
    pass


class _Update:
    """One update of some arrays, to be launched for a step. It keeps the arrays."""

    def __init__(self, optimizer: Optimizer, total: Array, value: Array, state: Mapping[str, Array]) -> None:
        slots = optimizer.slots(value.dtype)
        self._optimizer, self._arrays = optimizer, (total, value, *state.values())
        self._dtype, self._blocks = value.dtype.name, min(-(-value.size // THREADS), MOST_BLOCKS)
        self._arguments = np.zeros(1, UPDATE)
        self._numbers = self._arguments["numbers"][0]
        wide = np.dtype(np.float32) if _is_half(value.dtype) else value.dtype
        given = self._arguments[0]
        given["size"] = value.size
        given["total"] = address_of("the sum", total, wide, value.size)
        given["value"] = address_of("the value", value, value.dtype, value.size)
        if "master" in slots:
            given["master"] = address_of("master", state["master"], slots["master"], value.size)
        for place, name in enumerate(optimizer.states):
            given["state"][place] = address_of(name, state[name], slots[name], value.size)

    def __call__(self, step: Step | Row) -> None:
        if not self._blocks:
            return
        if isinstance(step, Row):
            self._arguments["table"] = step.address
            run = _kernel_of(step.form, self._dtype, "update_late")
        else:
            # Options may have changed since the last call.
            form, numbers = call_of(self._optimizer, step)
            self._numbers[: len(numbers)] = numbers
            run = _kernel_of(form, self._dtype)
        run((self._blocks,), (THREADS,), (self._arguments,))


def _kernel_of(form: str, dtype: str, name: str = "update") -> Kernel:
    return kernel("rules.cu", f"{name}<{form}_rule, {dtype}_kind>")


def _is_half(dtype: np.dtype[Any]) -> bool:
    return dtype.name in ("float16", "bfloat16")
