"""The contract of updaters, as tests.

Subclass :class:`UpdaterContract` in a test module and give the two factories::

    class TestAdam(UpdaterContract):
        def updater(self):
            return optimizers.Adam()

        def other(self):
            return optimizers.Adam(beta1=0.5)
"""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest

from ..errors import Unsupported
from ..protocols import Array, Updater

__all__ = ["UpdaterContract"]

DTYPES = ("float32", "float64", "float16", "bfloat16")
GUARD = 8
"""Elements before and after a range; an update must not change them."""


class UpdaterContract:
    """The promises of :class:`mpikv.protocols.Updater`."""

    block = 1 << 16
    """The updater's largest piece of work, in elements; tests use sizes around it."""
    unsupported: tuple[str, ...] = ("bool", "int32", "int64", "complex64")
    """Dtypes that ``slots`` refuses."""

    def updater(self) -> Updater:
        """Return a new updater, always of the same settings."""
        raise AssertionError("a subclass of UpdaterContract defines updater()")

    def other(self) -> Updater:
        """Return an updater of the same class with other updates than :meth:`updater`."""
        raise AssertionError("a subclass of UpdaterContract defines other()")

    def test_slots_are_names_and_dtypes(self) -> None:
        for dtype in available():
            slots = self.updater().slots(dtype)
            assert {type(name) for name in slots} <= {str}
            assert all(np.dtype(kind) is kind for kind in slots.values())
            assert list(slots.items()) == list(self.updater().slots(dtype).items())

    def test_slots_of_half_precision_are_wider(self) -> None:
        for dtype in available():
            if dtype.itemsize == 2:
                assert all(kind == np.float32 for kind in self.updater().slots(dtype).values())

    def test_slots_refuses_dtypes(self) -> None:
        for name in self.unsupported:
            with pytest.raises(Unsupported, match=name):
                self.updater().slots(np.dtype(name))

    def test_settings_are_equal_for_equal_updaters_only(self) -> None:
        assert self.updater().settings() == self.updater().settings()
        assert self.updater().settings() != self.other().settings()

    def test_settings_do_not_change_by_updates(self) -> None:
        updater = self.updater()
        before = updater.settings(), updater.revision
        self.run(updater, self.value(5, np.dtype(np.float32)))
        assert (updater.settings(), updater.revision) == before

    def test_step_depends_on_settings_and_count(self) -> None:
        updater = self.updater()
        for count in (1, 2, 1000):
            assert updater.step("key", count) == updater.step("key", count) == self.updater().step("key", count)

    def test_what_a_step_depends_on_is_told(self) -> None:
        updater = self.updater()
        if not updater.depends_on_count:
            assert updater.step("key", 1) == updater.step("key", 2)
        if not updater.by_key:
            assert updater.step("key", 3) == updater.step("layer_bias", 3)

    def test_a_bound_update_gives_the_same_bits(self) -> None:
        random = np.random.default_rng(3)
        for dtype in available():
            updater, value = self.updater(), self.value(self.block + 1, dtype)
            bound, state = value.copy(), zeros(updater, value)
            bound_state, total = zeros(updater, value), np.empty(value.shape, wide(dtype))
            update = updater.bind(total, bound, bound_state)
            for count in (1, 2, 3):
                given = random.standard_normal(value.shape).astype(total.dtype)
                np.copyto(total, given)
                update(updater.step("key", count))
                updater.update(updater.step("key", count), given, value, state)
            assert same_bits({"value": bound, **bound_state}, {"value": value, **state})

    def test_an_update_changes_the_value(self) -> None:
        value = self.value(8, np.dtype(np.float32))
        assert (self.run(self.updater(), value)["value"] != value).all()

    def test_zero_elements(self) -> None:
        for dtype in available():
            self.run(self.updater(), self.value(0, dtype))

    def test_the_same_input_gives_the_same_bits(self) -> None:
        for dtype in available():
            value = self.value(self.block + 1, dtype)
            updater = self.updater()
            expected = self.run(updater, value)
            assert same_bits(self.run(updater, value), expected), "the updater kept something of the first run"
            assert same_bits(self.run(self.updater(), value), expected)

    def test_a_value_may_be_cut_anywhere(self) -> None:
        if not self.updater().elementwise:
            pytest.skip("takes whole values")
        random = np.random.default_rng(1)
        block = self.block
        for dtype, size in itertools.product(available(), (1, 3, block - 1, block, block + 1, 2 * block + 7)):
            value = self.value(size, dtype)
            expected = self.run(self.updater(), value)
            for pieces in (2, 5):
                cuts = sorted(int(cut) for cut in random.integers(0, size, pieces - 1, endpoint=True))
                assert same_bits(self.run(self.updater(), value, cuts=cuts), expected), (dtype, size, cuts)

    def test_a_whole_value_may_have_any_shape(self) -> None:
        if self.updater().elementwise:
            pytest.skip("takes flat ranges")
        for dtype in available():
            flat = self.value(2 * 3 * 5, dtype)
            expected = self.run(self.updater(), flat)
            result = self.run(self.updater(), flat.reshape(2, 3, 5))
            assert all(array.shape == (2, 3, 5) for array in result.values())
            assert same_bits({name: array.reshape(-1) for name, array in result.items()}, expected)

    def test_a_value_without_dimensions(self) -> None:
        if self.updater().elementwise:
            pytest.skip("takes flat ranges")
        for dtype in available():
            flat = self.value(1, dtype)
            expected = self.run(self.updater(), flat)
            assert same_bits(self.run(self.updater(), flat.reshape(())), expected)

    def test_half_precision_is_rounded_once(self) -> None:
        for dtype in available():
            if dtype.itemsize == 2:
                value = self.value(self.block + 1, dtype)
                has_master = "master" in self.updater().slots(dtype)
                result = self.run(self.updater(), value, updates=3 if has_master else 1)
                exact = self.run(self.updater(), value.astype(np.float32), updates=3 if has_master else 1)
                if has_master:
                    assert same_bits({"value": result.pop("master")}, {"value": exact["value"]})
                exact["value"] = exact["value"].astype(dtype)
                assert same_bits(result, exact)

    def test_nothing_is_raised_for_values_that_diverged(self) -> None:
        if self.updater().may_raise:
            pytest.skip("may raise")
        for dtype in available():
            updater, value = self.updater(), self.value(8, dtype)
            value[:4] = [np.nan, np.inf, -np.inf, 0]
            with np.errstate(all="raise"):
                total = np.array([0, np.inf, np.nan, 0, np.inf, np.nan, 0, 1e30], wide(dtype))
                updater.update(updater.step("key", 1), total, value, zeros(updater, value))

    def test_an_update_allocates_no_arrays(self) -> None:
        for dtype in available():
            updater, value = self.updater(), self.value(8 * self.block, dtype)
            state = zeros(updater, value)
            total = np.ones(value.shape, wide(dtype))
            updater.update(updater.step("key", 1), total, value, state)
            tracemalloc.start()
            try:
                updater.update(updater.step("key", 2), total, value, state)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert peak < value.nbytes // 4, f"{peak} bytes were allocated for a value of {value.nbytes}"

    def value(self, size: int, dtype: np.dtype[Any]) -> Array:
        """Return the initial value of a test."""
        return np.random.default_rng(size).standard_normal(size).astype(dtype)

    def run(
        self, updater: Updater, value: Array, *, updates: int = 3, cuts: list[int] | None = None
    ) -> dict[str, Array]:
        """Update a copy of the value, piece by piece if there are cuts; return it and its state.

        All arrays lie inside of larger ones; their other elements are compared after each update.
        """
        random = np.random.default_rng(2)
        guarded = {"value": embedded(value)}
        guarded |= {name: embedded(array) for name, array in zeros(updater, value).items()}
        inner = {name: array[GUARD:-GUARD].reshape(value.shape) for name, array in guarded.items()}
        for count in range(1, updates + 1):
            sums = embedded(random.standard_normal(value.shape).astype(wide(value.dtype)))
            total = sums[GUARD:-GUARD].reshape(value.shape)
            if cuts is None:
                state = {name: array for name, array in inner.items() if name != "value"}
                updater.update(updater.step("key", count), total, inner["value"], state)
            else:
                for start, stop in itertools.pairwise([0, *cuts, value.size]):
                    part = {name: array[start:stop] for name, array in inner.items()}
                    updater.update(updater.step("key", count), total[start:stop], part.pop("value"), part)
            for name, array in {**guarded, "total": sums}.items():
                outside = np.concatenate([array[:GUARD], array[-GUARD:]])
                assert np.all(outside.astype(np.float64) == GUARD), f"{name} was written outside of the range"
        return inner


def available() -> list[np.dtype[Any]]:
    """Return the available dtypes of :data:`DTYPES`; bfloat16 needs the package ml_dtypes."""
    try:
        import ml_dtypes
    except ImportError:
        return [np.dtype(name) for name in DTYPES if name != "bfloat16"]
    return [np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in DTYPES]


def wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a push's sum."""
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


def zeros(updater: Updater, value: Array) -> dict[str, Array]:
    """Return the initial state of a store."""
    state = {name: np.zeros(value.shape, dtype) for name, dtype in updater.slots(value.dtype).items()}
    if "master" in state:
        state["master"][...] = value
    return state


def embedded(array: Array) -> Array:
    """Return a flat copy with guards around it."""
    copy = np.full(array.size + 2 * GUARD, GUARD, array.dtype)
    copy[GUARD:-GUARD] = array.reshape(-1)
    return copy


def same_bits(left: dict[str, Array], right: dict[str, Array]) -> bool:
    """Return whether the arrays of the same names hold the same bytes."""
    return left.keys() == right.keys() and all(left[name].tobytes() == right[name].tobytes() for name in left)
