"""Buffers and views: a push without arrays does what one with arrays does, and nobody sees half of anything."""

import random
import tempfile
import time

import numpy as np
import pytest
from support.dealt import shared_files
from support.oracle import UPDATERS, Oracle, adopt

import mpikv
from mpikv import optimizers
from mpikv.errors import mark
from mpikv.testing.faulty import Slow, store_over
from mpikv.testing.wrappers import Wrapper

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


@pytest.fixture
def kv(comm, transport):
    with mpikv.create(comm=comm, transport=transport, timeout=10, bucket_bytes=4096) as store:
        yield store


def triangle(number):
    return number * (number + 1) // 2


def same(found, expected, key=""):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), key
    np.testing.assert_array_equal(found, expected, key)


# --- The same values as with arrays


def brought(kv, turn, rank, key, value):
    """Return what a rank pushes. MPI and hosts add in orders of their own, which only integers do not show."""
    draw = np.random.default_rng([turn, rank, *key.encode()])
    if value.dtype.kind in "fcV" and kv.transport in ("local", "shm"):
        return draw.normal(size=value.shape).astype(value.dtype)
    return draw.integers(0 if value.dtype.kind in "ub" else -4, 5, value.shape).astype(value.dtype)


@MEMORY
@pytest.mark.parametrize("name", UPDATERS)
def test_large_buffers_are_filled_with_their_values(comm, over, name, streamed):
    """Owners fill the buffers of every rank, unless one wants its values elsewhere. All may be filled again at once."""
    slow = lambda transport: Slow(transport, seed=2, longest=1e-3)  # noqa: E731
    with store_over(slow, comm=comm, timeout=10, bucket_bytes=4096, **over) as kv:
        kv.init(FLOATS)
        kv.buffer(list(FLOATS))
        adopt(kv, UPDATERS[name]())
        oracle = Oracle(FLOATS)
        oracle.adopt(UPDATERS[name]())
        for turn, order in enumerate((1, 2, -1, -2, 1)):
            keys = list(FLOATS)[::order]
            everyone = {key: [brought(kv, turn, rank, key, FLOATS[key]) for rank in range(kv.size)] for key in keys}
            buffers = kv.buffer(keys)
            for buffer, key in zip(buffers, keys, strict=True):
                buffer[...] = everyone[key][kv.rank]
                oracle.push(key, everyone[key])
            apart = turn == 2 and kv.rank == 0
            outs = [np.empty_like(buffer) for buffer in buffers] if apart else buffers
            assert kv.pushpull(keys, out=outs) is outs
            for out, buffer, view, key in zip(outs, buffers, kv.view(keys), keys, strict=True):
                same(out, oracle.values[key], key)
                same(view, oracle.values[key], key)
                if apart:
                    same(buffer, everyone[key][kv.rank], key)
                buffer.fill(7)


# --- Who may write when


class Dawdling(optimizers.Test):
    """Lets one rank take its time over each bucket, while others have read the last."""

    late = False

    def rule(self, step, block):
        if Dawdling.late:
            time.sleep(1e-3)
        super().rule(step, block)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("placement", ["root", "sharded", "replicated"])
def test_buffers_may_be_filled_again_at_once(comm, over, placement):
    """Other ranks, some of them slow, have read them when a push returns. Views stay until the next push."""
    shapes = {"large": 2500, "small": 7}
    with store_over(
        lambda transport: Slow(transport, seed=3, longest=1e-3),
        comm=comm,
        placement=placement,
        bucket_bytes=4096,
        timeout=10,
        **over,
    ) as kv:
        kv.init({key: np.zeros(size) for key, size in shapes.items()})
        kv.set_optimizer(Dawdling(learning_rate=1.0))
        buffers, views, expected = kv.buffer(list(shapes)), kv.view(list(shapes)), 0
        naps = random.Random(kv.rank)
        for turn in range(16):
            Dawdling.late = kv.rank == turn % kv.size
            for buffer in buffers:
                buffer.fill((turn + 1) * (kv.rank + 1))
            kv.pushpull(list(shapes)) if turn % 2 else kv.push(list(shapes))
            for buffer in buffers:
                buffer.fill(-1e6)
            if turn % 2 == 0:
                kv.pull(list(shapes), out=views)
            expected -= (turn + 1) * triangle(kv.size)
            for view in views:
                assert (view == expected).all()
            time.sleep(naps.choice([0, 1e-3]))
            for view in views:
                assert (view == expected).all(), "another rank's next push changed it"


@MEMORY
def test_values_can_be_seen_at_once_after_they_were_given(comm, over, ranks):
    """init, set and broadcast leave every rank's view right."""
    slow = lambda transport: Slow(transport, seed=1, longest=1e-3)  # noqa: E731
    with store_over(slow, comm=comm, root=ranks - 1, timeout=10, **over) as kv:
        for turn in range(8):
            key, size = f"w{turn}", 70_000
            kv.init(key, np.full(size, turn + 1.0))
            assert (kv.view(key) == turn + 1).all()
            kv.set(key, np.full(size, turn + 2.0))
            assert (kv.view(key) == turn + 2).all()
            kv.broadcast(key, np.full(size, turn + 3.0))
            assert (kv.view(key) == turn + 3).all()


# --- Keys that come and go


@MEMORY
def test_a_key_that_was_overwritten(kv):
    """Old buffers and views are nobody's: what is written there goes nowhere, and the new key begins without."""
    kv.init(["w", "v"], [np.ones(5), np.ones(5)])
    buffer, view = kv.buffer("w"), kv.view("w")
    kv.init("w", np.full(5, 2.0), overwrite=True)
    assert kv.version("w") == 0
    with pytest.raises(mpikv.ValueMismatch, match="no value for key 'w' and no buffer"):
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


class Poor(Wrapper):
    """Has no memory left when asked for the second time after :attr:`left` was set."""

    left = -1

    def allocate(self, nbytes):
        self.left -= 1
        if self.left == 0:
            raise mark(MemoryError("no memory is left"), "settled")
        return super().allocate(nbytes)


@MEMORY
def test_too_little_memory_for_some_of_the_buffers(comm, over):
    made = []
    with store_over(lambda inner: made.append(Poor(inner)) or made[0], comm=comm, timeout=10, **over) as kv:
        kv.init(["f", "i"], [np.ones(3), np.ones(3, np.int64)])
        with pytest.raises(mpikv.ValueMismatch, match="no buffer"):
            kv.push(["f", "i"])
        made[0].left = 2
        with pytest.raises(MemoryError):
            kv.buffer(["f", "i"])
        for key in ("f", "i"):
            with pytest.raises(mpikv.ValueMismatch, match="no buffer"):
                kv.pushpull(key)
        for buffer in kv.buffer(["f", "i"]):
            buffer.fill(3)
        for view in kv.pushpull(["f", "i"]):
            assert (view == 3 * kv.size).all()


@pytest.mark.processes
@MEMORY
def test_arrays_that_outlive_the_store(comm, transport):
    """Whoever still looks at a value, or fills a buffer, must not be killed. Their memory is freed later."""
    for holder in (None, 0, -1, None):
        before = shared_files()
        kv = mpikv.create(comm=comm, transport=transport, timeout=10)
        kv.init(["w", "v"], [np.ones(3), np.ones(3, np.float32)])
        shares = len(kv._group.host_ranks) > 1 and transport != "mpi"
        kept = [kv.view("w"), kv.buffer("w")]
        kept[1].fill(1)
        kv.pushpull("w")
        if holder is None or kv.rank != holder % kv.size:
            kept.clear()
        kv.close()
        assert bool(shared_files() - before) is (shares and bool(kept)), "memory without a reader is freed"
        if kept:
            same(kept[0], np.full(3, float(kv.size)))
            kept[1].fill(5)
            same(kept[1], np.full(3, 5.0))
            kept.clear()
            assert not shared_files() - before


# --- Views and buffers as arrays of other calls


@FORMS
def test_the_list_of_a_pushpull_is_the_callers(kv):
    kv.init(["a", "b"], [np.zeros(2), np.zeros(3)])
    kv.buffer(["a", "b"])
    for results in (kv.pushpull(["a", "b"]), kv.view(["a", "b"]), kv.buffer(["a", "b"])):
        results.reverse()
        results.append(None)
        assert [view.size for view in kv.pushpull(["a", "b"])] == [2, 3]
        assert [view.size for view in kv.view(["a", "b"])] == [2, 3]


# --- Calls that are prepared in the fast way


@FORMS
def test_keys_that_equal_known_ones(comm, transport):
    with mpikv.create(comm=comm, transport=transport, timeout=10) as kv:
        kv.init([1, 0], [np.zeros(3), np.zeros(4)])
        kv.buffer([1, 0])
        for _ in range(2):  # what was looked over once is not looked at again
            kv.push(1, np.ones(3))
            kv.pushpull([1, 0])
            wrong = True, 1.0, np.float64(1), np.bool_(True), [1.0, 0], [True, False], (1, False), [[1]], "1", b"1"
            for key in wrong:
                calls = [lambda key=key: kv.pull(key), lambda key=key: kv.view(key), lambda key=key: kv.buffer(key)]
                calls += [lambda key=key: kv.push(key), lambda key=key: kv.push(key, np.ones(3))]
                calls += [lambda key=key: kv.pushpull(key), lambda key=key: kv.pushpull(key, [np.ones(3), np.ones(4)])]
                for call in calls:
                    with pytest.raises((TypeError, mpikv.ValueMismatch), match=r"key|value"):
                        call()
        for key in (np.int64(1), np.uint8(1)):
            kv.push(key, np.ones(3))
            same(kv.pushpull(key), np.zeros(3))
            same(kv.view([key, 0])[0], np.zeros(3))
        assert kv.version(1) == 8
        assert kv.version(0) == 2


@FORMS
def test_texts_that_equal_known_ones(kv):
    kv.init("w", np.zeros(3))
    kv.buffer("w").fill(1)
    for key in ("w", np.str_("w"), ["w"], [np.str_("w")], (np.str_("w"),)):
        kv.push(key, np.ones(3) if not isinstance(key, (list, tuple)) else [np.ones(3)])
        result = kv.pushpull(key)
        same(result[0] if isinstance(key, (list, tuple)) else result, np.full(3, float(kv.size)))
    assert kv.version("w") == 10


# Those that random programs do not draw.
LAYOUTS = {
    "matrix": lambda array: array.view(np.matrix),
    "recarray": lambda array: array.view(np.recarray),
    "unaligned": lambda array: (
        np.frombuffer(bytearray(b"\0" + array.tobytes()), np.uint8)[1:].view(array.dtype).reshape(array.shape)
    ),
}


@FORMS
@pytest.mark.parametrize("shape", [(3, 4), (30, 100)], ids=["small", "several buckets"])
def test_layouts(kv, shape, tmp_path):
    base = np.arange(float(np.prod(shape))).reshape(shape)
    kv.init(["w", "v"], [np.zeros(shape), np.zeros(shape)])

    def mapped(array):
        with tempfile.TemporaryFile(dir=tmp_path) as file:
            copy = np.memmap(file, array.dtype, "w+", shape=array.shape)
        copy[...] = array
        return copy

    for name, make in {**LAYOUTS, "memmap": mapped}.items():
        value, other, out = (make(array) for array in (base.copy(), base + 1, np.zeros(shape)))
        kv.push(["w", "v"], [value, other])
        np.testing.assert_array_equal(kv.pull("w"), base * kv.size, name)
        np.testing.assert_array_equal(kv.pull("v"), (base + 1) * kv.size, name)
        np.testing.assert_array_equal(np.asarray(value), base, name)
        kv.pull(["w", "v"], [out, np.zeros(shape)])
        np.testing.assert_array_equal(np.asarray(out), base * kv.size, name)
        kv.pushpull(["w", "v"], [value, other])
        np.testing.assert_array_equal(np.asarray(value), base * kv.size, name)
        np.testing.assert_array_equal(np.asarray(other), (base + 1) * kv.size, name)
