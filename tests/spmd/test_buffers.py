"""Buffers and views: a push without arrays does what one with arrays does, and nobody sees half of anything."""

from __future__ import annotations

import random
import tempfile
import time

import numpy as np
import pytest

import mpikv
from mpikv import optimizers
from mpikv.arrays import accumulator
from mpikv.errors import settled
from mpikv.testing.faulty import Slow, Wrapper, store_over

ml_dtypes = pytest.importorskip("ml_dtypes")

MEMORY = pytest.mark.ranks(1, 3)
FORMS = pytest.mark.ranks(1, 2)

# With buckets of 4096 bytes: one value of three buckets, two of half precision that share none, neighbours in a block,
# and values of one and of no elements.
FLOATS = {
    "large": np.zeros((3, 500)),
    "a": np.zeros(5),
    "none": np.zeros((0, 3)),
    "b": np.zeros(3),
    "c": np.zeros(60),
    "scalar": np.zeros((), np.float32),
    "single": np.zeros((2, 3), np.float32),
    "half": np.zeros(2100, np.float16),
    "bfloat": np.zeros(33, ml_dtypes.bfloat16),
}
OTHERS = {
    "flags": np.zeros(9, np.bool_),
    "int8": np.zeros(40, np.int8),
    "uint16": np.zeros((2, 3), np.uint16),
    "int64": np.zeros(700, np.int64),
    "complex": np.zeros(4, np.complex64),
}


@pytest.fixture(params=["shm", "mpi"])
def transport(request, ranks):
    if ranks == 1 and request.param == "mpi":
        pytest.skip("one rank has one transport")
    return "auto" if ranks == 1 else request.param


@pytest.fixture
def kv(comm, transport):
    with mpikv.create(comm=comm, transport=transport, timeout=10, bucket_bytes=4096) as store:
        yield store


def triangle(number):
    return number * (number + 1) // 2


def same(found, expected, key=""):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), key
    np.testing.assert_array_equal(found, expected, key)


@MEMORY
def test_arrays_that_outlive_the_store(comm, transport):
    """Whoever still looks at a value, or fills a buffer, must not be killed. Their memory is freed later."""
    last: list = []
    for holder in (None, 0, -1, None):
        kv = mpikv.create(comm=comm, transport=transport, timeout=10)
        kv.init(["w", "v"], [np.ones(3), np.ones(3, np.float32)])
        windows = [window for window, _ in kv._group._windows]
        kept = [kv.view("w"), kv.buffer("w")]
        kept[1].fill(1)
        kv.pushpull("w")
        if holder is None or kv.rank != holder % kv.size:
            kept.clear()
        kv.close()
        assert not any(last), "memory at which nobody looks any more is freed at the next end"
        if holder is None:
            assert not any(windows), "memory at which nobody looks is freed"
        elif kept:
            same(kept[0], np.full(3, float(kv.size)))
            kept[1].fill(5)
            same(kept[1], np.full(3, 5.0))
        if transport == "shm" and holder is not None:
            assert 0 < sum(map(bool, windows)) < len(windows)
        last = windows


