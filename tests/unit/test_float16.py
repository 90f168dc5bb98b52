"""The conversions of half precision give the libraries' bits: for every half, and for the float32 around each."""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpikv.arrays import float16

ml_dtypes = pytest.importorskip("ml_dtypes")

DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
Array = npt.NDArray[Any]


def bits(array: Array) -> Array:
    return array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)


def every(dtype: np.dtype[Any]) -> Array:
    return np.arange(1 << 16, dtype=np.uint16).view(dtype)


def around(dtype: np.dtype[Any]) -> Array:
    """Return every half, what is halfway to the next, and the float32 numbers before and after each."""
    half = every(dtype)
    with np.errstate(all="ignore"):
        exact = half.astype(np.float32)
        following = (bits(half) + np.uint16(1)).view(dtype).astype(np.float32)
        halfway = exact + (following - exact) / 2
    numbers = np.concatenate([exact, halfway])
    near = [np.nextafter(numbers, np.float32(limit)) for limit in (-np.inf, np.inf)]
    return np.concatenate([numbers, *near])


@pytest.fixture(autouse=True)
def quietly() -> Any:
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_half_is_widened(dtype: np.dtype[Any]) -> None:
    expected = every(dtype).astype(np.float32)
    wide = np.empty(1 << 16, np.float32)
    float16.widen(every(dtype), wide)
    assert (bits(wide) == bits(expected)).all()
    # Without those that are left to the libraries, so that each other one is shown to be right by itself.
    finite = every(dtype)[np.isfinite(expected)]
    wide = np.empty(finite.size, np.float32)
    float16.widen(finite, wide)
    assert (bits(wide) == bits(finite.astype(np.float32))).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("finite", [False, True])
def test_what_lies_around_every_half_is_rounded(dtype: np.dtype[Any], finite: bool) -> None:
    numbers = around(dtype)
    if finite:
        numbers = numbers[np.isfinite(numbers.astype(dtype).astype(np.float32))]
    narrow = np.empty(numbers.size, dtype)
    float16.narrow(numbers, narrow)
    assert (bits(narrow) == bits(numbers.astype(dtype))).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([1, 8191, 8192, 8193, 40_000, 70_001]))
@settings(max_examples=30, deadline=None)
def test_any_bits_are_rounded(dtype: np.dtype[Any], seed: int, size: int) -> None:
    words = np.random.default_rng(seed).integers(0, 1 << 32, size, np.uint32)
    # Of all float32 few are halves that are not zero: in half of the cases all are of about their size.
    if seed % 2:
        words = words & np.uint32(0x807FFFFF) | (words >> 3 & np.uint32(31)) + np.uint32(100) << np.uint32(23)
    numbers = words.view(np.float32)
    narrow = np.empty(size, dtype)
    float16.narrow(numbers, narrow)
    expected = numbers.astype(dtype)
    assert (np.isnan(expected.astype(np.float32)) == np.isnan(numbers)).all()
    assert (bits(narrow) == bits(expected)).all()


def same(found: Array, expected: Array) -> bool:
    """Return whether the bits are equal, but for those of NaN."""
    nan = np.isnan(expected.astype(np.float32))
    return bool((np.isnan(found.astype(np.float32)) == nan).all() and (bits(found) == bits(expected))[~nan].all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_loops_round_and_add_as_numpy_does(dtype: np.dtype[Any]) -> None:
    pytest.importorskip("numba")
    from mpikv.compute.numba import half_rules as compiled_halves

    numbers, random = around(dtype), np.random.default_rng(0)
    value = np.empty(numbers.size, dtype)
    compiled_halves.bind_rounding(numbers, value)(None)
    assert same(value, numbers.astype(dtype))
    first, value, wide = every(dtype), np.empty(1 << 16, dtype), random.standard_normal(1 << 16).astype(np.float32)
    for _ in range(8):
        second = random.permutation(first)
        for one, other in ((first, second), (wide, second), (first, wide), (wide, wide)):
            compiled_halves.bind_adding(value)(one, other, None)
            assert same(value, (one.astype(np.float32) + other.astype(np.float32)).astype(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 8191, 8192, (1 << 15) - 1, 1 << 15, 100_003])
def test_halves_are_added_in_float32(dtype: np.dtype[Any], size: int) -> None:
    random = np.random.default_rng(size)
    total, given = random.standard_normal(size).astype(np.float32), random.standard_normal(2 * size).astype(dtype)
    for part in (given[:size], given[::2]):
        expected = total + part.astype(np.float32)
        float16.add_widened(total, part)
        assert (bits(total) == bits(expected)).all()


# Of the state of a processor's vector instructions: subnormal numbers are zero, as what is read and what is written.
_VANISH = 0x8040


@contextmanager
def flushing() -> Iterator[None]:
    """Let this thread's processor take subnormal numbers for zero, as torch's set_flush_denormal does."""
    libm = ctypes.CDLL("libm.so.6")
    state = (ctypes.c_uint32 * 8)()  # the last is MXCSR
    libm.fegetenv(state)
    before = state[7]
    try:
        state[7] = before | _VANISH
        libm.fesetenv(state)
        yield
    finally:
        state[7] = before
        libm.fesetenv(state)


@pytest.mark.skipif(
    platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc", reason="what sets the flags is x86's, by glibc"
)
@pytest.mark.parametrize("kernels", ["numpy", "numba"])
def test_halves_do_not_vanish_with_subnormal_numbers(kernels: str) -> None:
    """Which are normal ones in float32, wherever the sum is made."""
    if kernels == "numba":
        pytest.importorskip("numba")
        from mpikv.compute.numba import half_rules as compiled_halves
    dtype = np.dtype(np.float16)
    finite = every(dtype)[np.isfinite(every(dtype))]
    expected, doubled = finite.astype(np.float32), (2 * finite.astype(np.float32)).astype(dtype)
    wide, total, value = np.empty_like(expected), expected.copy(), np.empty_like(finite)
    with flushing():
        vanished = np.multiply(np.float32(2.0**-149), np.float32(2.0**100)) == 0
        if kernels == "numpy":
            float16.widen(finite, wide)
            float16.add_widened(total, finite)
            float16.narrow(total, value)
        else:
            compiled_halves.bind_adding(value)(finite, finite, None)
    assert vanished
    assert (bits(value) == bits(doubled)).all()
    if kernels == "numpy":
        assert (bits(wide) == bits(expected)).all()
