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
def test_values_can_be_seen_at_once_after_they_were_given(comm, transport, ranks):
    """init, set and broadcast leave every rank's view right."""
    slow = lambda transport: Slow(transport, seed=1, longest=1e-3)  # noqa: E731
    with store_over(slow, comm=comm, transport=transport, root=ranks - 1, timeout=10) as kv:
        for turn in range(8):
            key, size = f"w{turn}", 70_000
            kv.init(key, np.full(size, turn + 1.0))
            assert (kv.view(key) == turn + 1).all()
            kv.set(key, np.full(size, turn + 2.0))
            assert (kv.view(key) == turn + 2).all()
            kv.broadcast(key, np.full(size, turn + 3.0))
            assert (kv.view(key) == turn + 3).all()


@MEMORY
def test_a_key_that_was_overwritten(kv):
    """Old buffers and views are nobody's: what is written there goes nowhere, and the new key begins without."""
    kv.init(["w", "v"], [np.ones(5), np.ones(5)])
    buffer, view = kv.buffer("w"), kv.view("w")
    kv.init("w", np.full(5, 2.0), overwrite=True)
    assert kv.version("w") == 0
    with pytest.raises(mpikv.ValueMismatch, match="no value for key 'w', and no buffer"):
        kv.push("w")
    with pytest.raises(TypeError, match="read-only"):
        kv.pull("w", out=view)
    buffer.fill(9)
    same(kv.buffer("w"), np.zeros(5))
    kv.pushpull("w")
    same(kv.view("w"), np.zeros(5))
    same(kv.pull("v"), np.ones(5))
    kv.push("w", np.ones(5))
    same(kv.pull("w"), np.full(5, float(kv.size)))


@MEMORY
def test_a_key_that_was_deleted(kv):
    kv.init(["w", "v"], [np.ones(5), np.ones(5)])
    kv.buffer("w").fill(7)
    view = kv.view("w")
    kv.pushpull("w")
    kv.delete("w")
    for call in (lambda: kv.push("w"), lambda: kv.pushpull("w"), lambda: kv.buffer("w"), lambda: kv.view("w")):
        with pytest.raises(mpikv.KeyNotInitialized, match="'w'"):
            call()
    kv.init("w", np.ones(5))
    with pytest.raises(mpikv.ValueMismatch, match="no value for key 'w', and no buffer"):
        kv.pushpull("w")
    kv.buffer("w").fill(2)
    same(kv.pushpull("w"), np.full(5, 2.0 * kv.size))
    view.sum()


class Poor(Wrapper):
    """Has no memory left when asked for the second time after :attr:`left` was set."""

    left = -1

    def allocate(self, nbytes):
        self.left -= 1
        if self.left == 0:
            raise settled(MemoryError("no memory is left"))
        return super().allocate(nbytes)


@MEMORY
def test_too_little_memory_for_some_of_the_buffers(comm, transport):
    with store_over(Poor, comm=comm, transport=transport, timeout=10) as kv:
        kv.init(["f", "i"], [np.ones(3), np.ones(3, np.int64)])
        with pytest.raises(mpikv.ValueMismatch, match="no buffer"):
            kv.push(["f", "i"])
        kv._transport.left = 2
        with pytest.raises(MemoryError):
            kv.buffer(["f", "i"])
        for key in ("f", "i"):
            with pytest.raises(mpikv.ValueMismatch, match="no buffer"):
                kv.pushpull(key)
        for buffer in kv.buffer(["f", "i"]):
            buffer.fill(3)
        for view in kv.pushpull(["f", "i"]):
            assert (view == 3 * kv.size).all()


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


@MEMORY
@pytest.mark.parametrize("placement", ["auto", "root", "sharded", "replicated"])
def test_views_are_pushed(comm, transport, placement, monkeypatch):
    """The sum goes where they are."""
    size = 3000
    if placement in ("sharded", "replicated"):
        monkeypatch.setattr("mpikv.exchange._STREAMED_BYTES", 0)
    with mpikv.create(comm=comm, transport=transport, placement=placement, timeout=10, bucket_bytes=4096) as kv:
        kv.init(["a", "b", "c"], [np.arange(size) + 1.0, -np.arange(size) - 1.0, np.arange(5.0)])
        a, b, c = (value.copy() for value in kv.view(["a", "b", "c"]))
        kv.push("a", kv.view("a"))
        same(kv.pull("a", out=kv.view("a")), a * kv.size)
        kv.set(["a", "b"], [a, b])
        kv.push(["c", "a", "b"], kv.view(["c", "b", "a"]))
        for view, expected in zip(kv.pull(["a", "b", "c"], out=kv.view(["a", "b", "c"])), (b, a, c), strict=True):
            same(view, expected * kv.size)
        kv.set(["a", "b"], [a, b])
        assert kv.pushpull("a", kv.view("a")) is kv.view("a")
        same(kv.view("a"), a * kv.size)
        kv.set(["a", "b"], [a, b])
        outs = [np.empty(size), kv.view("b")]
        kv.pushpull(["a", "b"], [kv.view("b")[::-1], [kv.view("a"), kv.view("a")]], out=outs)
        same(outs[0], b[::-1] * kv.size)
        same(outs[1], 2 * a * kv.size)


@MEMORY
def test_views_are_given_as_values(kv):
    kv.init(["a", "b"], [np.arange(3000.0), -np.arange(3000.0)])
    kv.set(["a", "b"], kv.view(["b", "a"]))
    same(kv.view("a"), -np.arange(3000.0))
    same(kv.view("b"), np.arange(3000.0))
    kv.broadcast(["a", "b", "c"], kv.view(["b", "a", "a"]))
    same(kv.view("a"), np.arange(3000.0))
    same(kv.view("b"), -np.arange(3000.0))
    same(kv.view("c"), -np.arange(3000.0))
    kv.init(["a", "b"], kv.view(["b", "a"]), overwrite=True)
    same(kv.view("a"), -np.arange(3000.0))
    same(kv.view("b"), np.arange(3000.0))


@FORMS
def test_keys_that_are_named_twice(kv):
    kv.init(["a", "b"], [np.zeros(2), np.zeros(2)])
    keys = ["a", "b", "a"]
    kv.push(["a", "b"], [np.ones(2), np.ones(2)])
    for out in ([np.zeros(2)] * 2, [np.zeros(2)] * 4):
        with pytest.raises(mpikv.ValueMismatch, match=f"3 keys and {len(out)} outs"):
            kv.pull(keys, out=out)
        with pytest.raises(mpikv.ValueMismatch, match=f"3 keys and {len(out)} values"):
            kv.push(keys, out)
    first, second, third = kv.buffer(keys)
    assert np.shares_memory(first, third)
    first.fill(1)
    second.fill(2)
    # A buffer is one array, however often its key is named.
    for views in (kv.pushpull(keys), kv.view(keys)):
        for view, number in zip(views, (1, 2, 1), strict=True):
            same(view, np.full(2, float(number * kv.size)))
    outs = [np.zeros(2) for _ in keys]
    kv.pushpull(keys, out=outs)
    for out, number in zip(outs, (1, 2, 1), strict=True):
        same(out, np.full(2, float(number * kv.size)))
    assert (kv.version("a"), kv.version("b")) == (3, 3)


