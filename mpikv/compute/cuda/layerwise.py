"""LARS and LAMB on a GPU: updates of many whole values by three launches, with numpy's bits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import numpy as np

from ...optimizers.layerwise import LAMB, LARS, Layerwise
from ...optimizers.optimizer import Step
from ...optimizers.recording import Rule, call_of, rule_of
from ...protocols import Updater, Whole
from .loading import addresses_of, allocate_floats, argument_dtype, gpu_pointer, kernel
from .norms import CELL, PIECES, cells_of
from .parts import THREADS
from .steps import rows_of

MOST, ROWS, STATES, PART = 44, 14, 2, 1 << 12

PARTS = {"direct": "norms<{0}, {1}_kind>", "adapt": "rates<{0}>", "rule": "descent<{0}, {1}_kind, {2}>"}
"""The parts of the optimizer, and the launch of each: of a rule's name, a dtype and the place of the rate."""


def has_kernels(updater: Updater) -> TypeGuard[Layerwise]:
    """Return whether this module has kernels for an updater: for LARS and LAMB, not for subclasses. Local."""
    return type(updater) in (LARS, LAMB)  # their descent uses the rate by itself


def prepare(optimizer: Layerwise, dtype: np.dtype[Any]) -> None:
    """Compile or load the optimizer's kernels for values of a dtype, for the current GPU. Local."""
    for part in PARTS:
        kernel("layerwise.cu", *launch_of(part, rule_of(optimizer, (part,)), dtype.name))


def launch_of(part: str, rule: Rule, dtype: str) -> tuple[str, Rule]:
    """Return the C++ name of a part's kernel, and ``rule`` itself: arguments of :func:`.loading.kernel`. Local."""
    place = rule.numbers.index("s.rate") if part == "rule" else 0
    return PARTS[part].format(rule.name, dtype, place), rule


def bind(optimizer: Layerwise, wholes: Sequence[Whole]) -> Callable[[Sequence[Step]], None]:
    """Return a function that queues updates of values, a step each, and keeps them alive; LAMB spoils the sums. Local.

    It takes three launches for 44 values of a dtype. LAMB leaves undefined content in the sums.

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
        """Queue the updates of all values, each by its step."""
        for batch in batches:
            batch.update(steps)

    return update


class _Batch:
    """Values of one dtype for one launch, and the places of their steps in the call."""

    def __init__(self, optimizer: Layerwise, places: Sequence[int], wholes: Sequence[Whole]) -> None:
        """Allocate GPU memory for norms; write the arrays' addresses into a launch's argument. Local."""
        self._optimizer, self._places, self._wholes = optimizer, places, wholes
        self._dtype = wholes[0].value.dtype.name
        self._cells = sum(cells_of(whole.value.size) for whole in wholes)
        self._sums = allocate_floats(2 * PIECES * self._cells + len(wholes))
        self._given = np.zeros(1, argument_dtype("layerwise.cu", "Layers"))
        given = self._given[0]
        for number, whole in enumerate(wholes):
            given["size"][number] = whole.value.size
            for field, address in addresses_of(optimizer, whole, STATES).items():
                given[field][..., number] = address
        given["end"][: len(wholes)] = np.cumsum([cells_of(whole.value.size) for whole in wholes])
        given["sums"] = gpu_pointer(self._sums)
        given["count"] = len(wholes)

    def update(self, steps: Sequence[Step]) -> None:
        """Queue three launches that update the values, by a step each; more, with new memory, if too many differ."""
        given, mine = self._given[0], [steps[place] for place in self._places]
        rows, different = rows_of(mine, ROWS)
        if len(rows) < len(mine):  # too many different steps for one launch
            for some in (slice(0, len(rows)), slice(len(rows), None)):
                _Batch(self._optimizer, self._places[some], self._wholes[some]).update(steps)
            return
        given["row"][: len(rows)] = rows
        # In this order on one stream: the rates need the norms, and the descent needs the rates.
        grids = self._cells * PIECES, len(rows), self._cells * (CELL // PART)
        for part, grid in zip(PARTS, grids, strict=True):
            for row, step in enumerate(different):
                # Options may have changed since the last call.
                rule, numbers = call_of(self._optimizer, step, (part,))
                given["numbers"][row, : len(numbers)] = numbers
            kernel("layerwise.cu", *launch_of(part, rule, self._dtype))((grid,), (THREADS,), (self._given,))
