"""LARS and LAMB on a GPU: updates of many whole values by three launches, with numpy's bits."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...arrays.arrays import accumulator
from ...optimizers.layerwise import LAMB, LARS
from ...optimizers.optimizer import Optimizer, Step
from ...protocols import Whole
from .loading import address_of, kernel, room
from .norms import CELL, PIECES, THREADS, cells_of

MOST, NUMBERS, DESCENT_PART = 44, 8, 1 << 12
LAYERS = np.dtype(
    [
        *((name, np.uintp, MOST) for name in ("total", "value", "master", "first", "second")),
        *((name, np.int64, MOST) for name in ("size", "end")),
        *((name, np.float64, MOST) for name in ("rate", "wd", "one", "other")),
        ("numbers", np.float64, NUMBERS),
        ("sums", np.uintp),
        ("count", np.int64),
    ],
    align=True,
)
"""The argument of each launch: ``Layers`` of layerwise.cu."""

KINDS: Mapping[type[Optimizer], str] = {LARS: "lars", LAMB: "lamb"}
"""The optimizers of whole values, and the prefixes of their kernels' names."""


def prepare(optimizer: Optimizer, dtype: np.dtype[Any]) -> None:
    """Compile or load the kernels for values of a dtype. Local."""
    for name in _names(optimizer, dtype.name):
        kernel("layerwise.cu", name)


def bind(optimizer: Optimizer, wholes: Sequence[Whole]) -> Callable[[Sequence[Step]], None]:
    """Return a function that updates some values, by a step each, with three launches for 44 values of a dtype. It
    keeps the arrays alive. LAMB leaves undefined content in the sums.

    Raises:
        ValueMismatch: an array has a wrong dtype or size, or has gaps.
    """
    kinds: defaultdict[str, list[int]] = defaultdict(list)
    for index, whole in enumerate(wholes):
        # An empty value has no cell, and a launch of no blocks is an error.
        if whole.value.size:
            kinds[whole.value.dtype.name].append(index)
    batches = [
        _Batch(optimizer, some, [wholes[index] for index in some])
        for members in kinds.values()
        for some in (members[low : low + MOST] for low in range(0, len(members), MOST))
    ]

    def update(steps: Sequence[Step]) -> None:
        for batch in batches:
            batch.update(steps)

    return update


class _Batch:
    """Values of one dtype for one launch, and the places of their steps in the call."""

    def __init__(self, optimizer: Optimizer, places: Sequence[int], wholes: Sequence[Whole]) -> None:
        self._optimizer, self._places, self._wholes = optimizer, places, wholes
        self._names = _names(optimizer, wholes[0].value.dtype.name)
        self._cells = sum(cells_of(whole.value.size) for whole in wholes)
        self._sums = room(2 * PIECES * self._cells + len(wholes))
        self._given = np.zeros(1, LAYERS)
        given = self._given[0]
        for number, whole in enumerate(wholes):
            _point(given, number, optimizer, whole)
        given["end"][: len(wholes)] = np.cumsum([cells_of(whole.value.size) for whole in wholes])
        given["sums"] = address_of("memory for norms", self._sums, np.dtype(np.float64), self._sums.size)
        given["count"] = len(wholes)

    def update(self, steps: Sequence[Step]) -> None:
        # Options may have changed since the last call.
        given, count = self._given[0], len(self._places)
        mine = [steps[place] for place in self._places]
        numbers = _numbers(self._optimizer)
        given["numbers"][: len(numbers)] = numbers
        given["rate"][:count] = [step.rate for step in mine]
        given["wd"][:count] = [step.wd for step in mine]
        own = [_own(self._optimizer, step) for step in mine]
        given["one"][:count], given["other"][:count] = zip(*own, strict=True)
        norms, rates, descent = (kernel("layerwise.cu", name) for name in self._names)
        # In this order on one stream: the rates need the norms, and the descent needs the rates.
        norms((self._cells * PIECES,), (THREADS,), (self._given,))
        rates((count,), (THREADS,), (self._given,))
        descent((self._cells * (CELL // DESCENT_PART),), (THREADS,), (self._given,))


def _point(given: Any, number: int, optimizer: Optimizer, whole: Whole) -> None:
    """Write a value's size and addresses of arrays into place ``number`` of a kernel's argument; check them."""
    total, value, state = whole
    slots, size = optimizer.slots(value.dtype), value.size
    wide = accumulator(value.dtype)
    given["size"][number] = size
    given["total"][number] = address_of("the sum", total, wide, size)
    given["value"][number] = address_of("the value", value, value.dtype, size)
    for field, name in (("master", "master"), *zip(("first", "second"), optimizer.states, strict=False)):
        if name in slots:
            given[field][number] = address_of(name, state[name], slots[name], size)


def _names(optimizer: Optimizer, dtype: str) -> tuple[str, str, str]:
    name = KINDS[type(optimizer)]
    return f"{name}_norms<{dtype}_kind>", f"{name}_rates", f"{name}_descent<{dtype}_kind>"


def _numbers(optimizer: Any) -> tuple[float, ...]:
    bound = math.inf if optimizer.clip_gradient is None else optimizer.clip_gradient
    scale = optimizer.rescale
    if isinstance(optimizer, LARS):
        return scale, bound, optimizer.momentum, optimizer.eta, optimizer.epsilon, abs(scale)
    lowest = -math.inf if optimizer.lower_bound is None else optimizer.lower_bound
    highest = math.inf if optimizer.upper_bound is None else optimizer.upper_bound
    beta1, beta2 = optimizer.beta1, optimizer.beta2
    return scale, bound, beta1, 1.0 - beta1, beta2, 1.0 - beta2, lowest, highest


def _own(optimizer: Any, step: Step) -> tuple[float, float]:
    """Return the numbers that differ between layers."""
    if isinstance(optimizer, LARS):
        return (step.correction[0] if step.correction else -1.0), 0.0
    first, second = step.correction
    return optimizer.epsilon * second, second / first
