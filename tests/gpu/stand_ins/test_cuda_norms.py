"""Norms on a GPU, without one: the kernels run on the host, where their bits are those of numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.emulation import OnDevice, launched
from support.rules import bits, numbers

import mpikv
from mpikv.compute.cuda import norms
from mpikv.testing.updater import available

FLOATS = available()
CELL = norms.CELL
# Around lanes, leaves, cells, and what is halved unevenly.
SIZES = st.one_of(
    st.integers(0, 300),
    st.integers(CELL - 300, CELL + 300),
    st.integers(0, 3 * CELL),
    st.sampled_from([7, 8, 9, 127, 128, 129, 135, 136, 1000, CELL - 1, CELL, CELL + 1, 2 * CELL + 128]),
)

# The first of them compiles the kernels.
pytestmark = pytest.mark.deadline(120)


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    with launched("norms.cu", tmp_path_factory.mktemp("norms")) as listed:
        yield listed


def device(array):
    return array.view(OnDevice)


def joined(sums):
    return norms.joined(np.asarray(sums))


def in_numpy(array, dtype):
    """Return the sums of each cell, as numpy makes them."""
    with np.errstate(all="ignore"):
        kept = array.astype(dtype)
        cells = [kept[low : low + CELL].astype(np.float64) for low in range(0, array.size, CELL)]
        return [(np.sum(np.square(cell)), np.count_nonzero(~np.isfinite(cell))) for cell in cells]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=40, deadline=None)
@given(
    st.lists(SIZES, min_size=1, max_size=4),
    st.sampled_from(FLOATS),
    st.sampled_from([0, 0, 1e-4, 0.5]),
    st.integers(0, 2**32),
)
def test_sums_have_the_bits_of_numpy(launches, dtype, sizes, wanted, wild, seed):
    random = np.random.default_rng(seed)
    arrays = [numbers(random, size, dtype, wild) for size in sizes]
    sums, counts = norms.measure([device(array) for array in arrays], [wanted] * len(arrays))
    assert counts == [norms.cells_of(array.size) for array in arrays]
    expected = np.array([pair for array in arrays for pair in in_numpy(array, wanted)]).reshape(-1)
    assert bits(joined(sums).reshape(-1)) == bits(expected)


@pytest.mark.parametrize("size", [*range(1, 1100, 7), *range(CELL - 40, CELL + 1, 3)])
def test_every_way_of_halving(launches, size):
    """Numbers of which each order of addition makes another sum."""
    array = np.random.default_rng(size).standard_normal(size) * 10.0 ** np.random.default_rng(1).uniform(-8, 8, size)
    sums, _ = norms.measure([device(array)], [array.dtype])
    assert joined(sums)[0, 0] == np.add.reduce(array * array)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=30, deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=4), st.floats(1e-12, 1e12), st.integers(0, 2**32))
def test_scaling_has_the_bits_of_numpy(launches, dtype, sizes, factor, seed):
    random = np.random.default_rng(seed)
    arrays = [numbers(random, size, dtype, 0.1) for size in sizes]
    expected = [array.copy() for array in arrays]
    norms.scale([device(array) for array in arrays], factor)
    with np.errstate(all="ignore"):
        for array, wanted in zip(arrays, expected, strict=True):
            np.multiply(wanted, factor, out=wanted, dtype=np.float64, casting="unsafe")
            assert bits(array) == bits(wanted)


def test_many_arrays_take_few_launches(launches):
    arrays = [np.full(1 + number % 3, number, np.float32) for number in range(400)]
    launches.clear()
    sums, _ = norms.measure([device(array) for array in arrays], [np.dtype(np.float32)] * 400)
    assert len(launches) == 3
    assert (joined(sums)[:, 0] == [(array**2).sum() for array in arrays]).all()
    launches.clear()
    norms.scale([device(array) for array in arrays], 2.0)
    assert len(launches) == 3
    assert all((array == 2 * number).all() for number, array in enumerate(arrays))


def test_kinds_between_each_other(launches):
    """Each array's cells are in its place, whichever launch has filled them."""
    dtypes = [np.dtype(name) for name in ("float32", "float64", "float32", "float16", "float16", "float64")]
    arrays = [(np.arange(1 + 50_000 * number) % 10).astype(dtype) for number, dtype in enumerate(dtypes)]
    arrays.insert(2, np.zeros(0, np.float16))
    sums, counts = norms.measure([device(array) for array in arrays], [np.dtype(np.float32)] * len(arrays))
    expected = np.array([pair for array in arrays for pair in in_numpy(array, np.float32)])
    assert (joined(sums) == expected).all()
    assert counts == [1, 1, 0, 2, 3, 4, 4]


def test_what_cannot_be_measured(launches):
    with pytest.raises(
        mpikv.Unsupported, match=r"an array of int32 on a GPU cannot be measured or scaled \(known: float16"
    ):
        norms.scale([device(np.ones(3, np.int32))], 2.0)


def test_a_norm_is_within_a_unit_of_the_exact_one(launches):
    """What the order of addition costs, beside a sum that is rounded once."""
    for size in (1000, CELL, 5 * CELL + 77):
        array = np.random.default_rng(size).standard_normal(size).astype(np.float32)
        sums, _ = norms.measure([device(array)], [array.dtype])
        found = math.sqrt(sum(joined(sums)[:, 0].tolist()))
        exact = math.sqrt(math.fsum((array.astype(np.float64) ** 2).tolist()))
        assert abs(found - exact) <= 2 * math.ulp(exact)
