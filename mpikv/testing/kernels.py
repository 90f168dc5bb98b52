"""The contract of kernels, as tests.

Subclass :class:`KernelsContract` in a test module and give the factory::

    class TestNumba(KernelsContract):
        def make(self):
            return mpikv.compute.kernels.find_kernels("numba")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from .. import optimizers
from ..optimizers.updaters import Assign
from ..protocols import Array, BoundList, Kernels, Updater
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


def _various() -> list[Array]:
    """Return arrays of many shapes and dtypes."""
    random = np.random.default_rng(7)
    shapes = [(), (1,), (0, 3), (5,), (7, 1), (2, 3, 4), (1, 1, 2, 1), (1000,)]
    return [random.random(shape).astype(dtype) for shape in shapes for dtype in available() for _ in range(2)]


def _others(array: Array) -> dict[str, Any]:
    """Return variants of an array: some may take its place, others must be refused."""
    frozen, wide = array.copy(), np.zeros((*array.shape, 2), array.dtype)
    frozen.flags.writeable = False
    return {
        "the same": array,
        "another": array.copy(),
        "flat": array.reshape(-1),
        "one more dimension": array[None].copy(),
        "turned": array.T.copy(),
        "longer": np.concatenate([array.reshape(-1)] * 2),
        "another dtype": array.astype(np.int8),
        "the other byte order": array.astype(array.dtype.newbyteorder()),
        "frozen": frozen,
        "a view": array[...],
        "with holes": wide[..., 0],
        "of another class": array.view(np.recarray) if array.ndim else array.view(np.memmap),
        "masked": np.ma.masked_array(array),
        "none": None,
        "a number": 3.0,
        "a list": [array],
    }


def _fits(other: Any, array: Array, writable: bool, own: bool) -> bool:
    return (
        type(other) is np.ndarray
        and (other.shape, other.dtype) == (array.shape, array.dtype)
        and bool(other.flags.c_contiguous)
        and (not writable or bool(other.flags.writeable))
        and (not own or other.base is None)
    )


class KernelsContract:
    """The promises of :class:`mpikv.protocols.Kernels`."""

    binds_lists = False
    """Whether the kernels bind lists of numpy arrays."""

    def make(self) -> Kernels:
        """Return the kernels."""
        raise AssertionError("a subclass of KernelsContract defines make()")

    @pytest.mark.parametrize("adding", [False, True])
    @pytest.mark.parametrize("updater", UPDATERS)
    def test_the_bits_are_those_of_the_updater(self, updater: Callable[[], Updater], adding: bool) -> None:
        for dtype in available():
            for size in SIZES:
                self._compare(updater(), size, dtype, adding)

    def test_others_fit_a_list_if_numpy_says_so(self) -> None:
        arrays = _various()
        bound = self._bound(arrays)
        for place in (0, len(arrays) // 2, len(arrays) - 1):
            for name, other in _others(arrays[place]).items():
                given: list[Any] = [np.empty_like(array) for array in arrays]
                given[place] = other
                for writable, own in product((False, True), repeat=2):
                    fits = _fits(other, arrays[place], writable, own)
                    assert bound.fits(given, writable, own) is fits, f"{name} in place of {arrays[place]!r}"
                    assert bound.fits(tuple(given), writable, own) is fits
        assert not bound.fits(arrays[1:], False, False)
        assert not bound.fits([*arrays, arrays[0]], False, False)

    def test_lists_are_copied_both_ways(self) -> None:
        arrays = _various()
        bound, before = self._bound(arrays), [array.tobytes() for array in arrays]
        given = [np.empty_like(array) for array in arrays]
        assert bound.give(given)
        assert [array.tobytes() for array in given] == before
        for array in arrays:
            array[...] = 0
        assert bound.take(tuple(given))
        assert [array.tobytes() for array in arrays] == before

    def test_what_does_not_fit_a_list_is_not_copied(self) -> None:
        arrays = _various()
        bound = self._bound(arrays)
        for name, other in _others(arrays[-1]).items():
            given: list[Any] = [np.empty_like(array) for array in arrays]
            given[-1], before = other, repr(other)
            assert bound.give(given) is _fits(other, arrays[-1], True, False), name
            assert bound.take(given) is _fits(other, arrays[-1], False, False), name
            assert _fits(other, arrays[-1], True, False) or repr(other) == before
        assert not bound.take(arrays[1:])
        assert not bound.give([*arrays, arrays[0]])

    def test_few_arrays_are_not_bound(self) -> None:
        assert self.make().bind_list([]) is self.make().bind_list([np.zeros(3)]) is None

    def _bound(self, arrays: Sequence[Array]) -> BoundList:
        bound = self.make().bind_list(arrays)
        if not self.binds_lists:
            assert bound is None
            pytest.skip("kernels without lists")
        assert bound is not None
        return bound

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
                updater.learning_rate = 0.25  # a bound update must use the new rate
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
