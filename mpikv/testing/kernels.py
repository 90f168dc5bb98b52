"""What all kernels must do, as tests.

Subclass :class:`KernelsContract` in a test module and give the factory::

    class TestNumba(KernelsContract):
        def make(self):
            return mpikv.compute.kernels.find_kernels("numba")
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from .. import optimizers
from ..optimizers.updaters import Assign
from ..protocols import Kernels, Updater
from .updater import available, same_bits, wide, zeros

__all__ = ["KernelsContract"]

UPDATERS: tuple[Callable[[], Updater], ...] = (
    Assign,
    optimizers.SGD,
    partial(optimizers.SGD, momentum=0.9, wd=0.01),
    partial(optimizers.Adam, clip_gradient=0.75),
    partial(optimizers.Adam, multi_precision=True),
    partial(optimizers.RMSProp, centered=True),
    optimizers.FTRL,
)
SIZES = (0, 1, 1000, optimizers.BLOCK + 7)


class KernelsContract:
    """The promises of :class:`mpikv.protocols.Kernels`."""

    def make(self) -> Kernels:
        """Return the kernels."""
        raise AssertionError("a subclass of KernelsContract defines make()")

    def test_rules_are_names_of_optimizers(self) -> None:
        for name in self.make().rules:
            assert type(optimizers.create(name)).__name__.lower() == name

    @pytest.mark.parametrize("adding", [False, True])
    @pytest.mark.parametrize("updater", UPDATERS)
    def test_the_bits_are_those_of_the_updater(self, updater: Callable[[], Updater], adding: bool) -> None:
        for dtype in available():
            for size in SIZES:
                self._compare(updater(), size, dtype, adding)

    def _compare(self, updater: Updater, size: int, dtype: np.dtype[np.generic], adding: bool) -> None:
        kernels, random = self.make(), np.random.default_rng(size)
        kernels.prepare(updater, dtype, adding)
        expected = random.standard_normal(size).astype(dtype)
        found, total = expected.copy(), np.empty(size, wide(dtype))
        states = [zeros(updater, expected) for _ in range(2)]
        add_and_update = kernels.bind_adding(updater, found, states[1])
        update = kernels.bind(updater, total, found, states[1])
        for count in range(1, 4):
            if count == 3 and isinstance(updater, optimizers.Optimizer):
                updater.learning_rate = 0.25  # what was bound heeds it
            step = updater.step("key", count)
            left, right = random.standard_normal((2, size)).astype(dtype)
            kept = left.tobytes(), right.tobytes()
            updater.update(step, np.add(left, right, dtype=total.dtype), expected, states[0])
            if adding and add_and_update is not None:
                add_and_update(left, right, step)
                assert (left.tobytes(), right.tobytes()) == kept
            else:
                np.add(left, right, out=total, dtype=total.dtype)
                update(step)
            assert same_bits({"value": found, **states[1]}, {"value": expected, **states[0]})
