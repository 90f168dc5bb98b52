"""Sums of half precision have the bits of sums in float32, rounded once: for every half, and what is around each."""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mpikv.arrays import arrays

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
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("wide", [False, True])
def test_halves_are_added_in_float32(dtype: np.dtype[Any], count: int, wide: bool) -> None:
    random = np.random.default_rng(count)
    terms = [random.standard_normal(1003).astype(dtype) for _ in range(count)]
    terms += [random.standard_normal(1003).astype(np.float32)] * wide
    expected = sum((term[3:900].astype(np.float32) for term in terms[1:]), terms[0][3:900].astype(np.float32))
    total = np.empty(897, np.float32)
    arrays.add(terms, 3, 900, total)
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
def test_compiled_halves_do_not_vanish_with_subnormal_numbers() -> None:
    """Which are normal ones in float32, wherever the sum is made."""
    pytest.importorskip("numba")
    from mpikv.compute.numba import half_rules as compiled_halves

    dtype = np.dtype(np.float16)
    finite = every(dtype)[np.isfinite(every(dtype))]
    doubled, value = (2 * finite.astype(np.float32)).astype(dtype), np.empty_like(finite)
    add = compiled_halves.bind_adding(value)
    with flushing():
        vanished = np.multiply(np.float32(2.0**-149), np.float32(2.0**100)) == 0
        add(finite, finite, None)
    assert vanished
    assert (bits(value) == bits(doubled)).all()
