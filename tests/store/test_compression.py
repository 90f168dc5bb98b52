"""Compressed pushes give what the quantiser, simulated for all ranks in one process, gives, wherever values live."""

import time
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpikv
from mpikv import codecs, optimizers
from mpikv.cluster.mpi_library import library_of
from mpikv.cluster.process_group import ProcessGroup
from mpikv.cluster.status_board import StatusBoard
from mpikv.config import Config
from mpikv.errors import ConfigError, NotFinite, PeerFailed, RankMismatch, Unsupported, ValueMismatch
from mpikv.store.kvstore import open_stores
from mpikv.testing import Recording
from mpikv.testing.codec import together
from mpikv.testing.faulty import Slow, store_over
from mpikv.testing.wrappers import Wrapper
from mpikv.transports import open_transport

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

F32 = np.float32
PLACEMENTS = ("root", "sharded", "replicated")
NAMES = ("2bit", "1bit", "fp16", "bf16", {"type": "topk", "ratio": 0.1}, {"type": "lowrank", "rank": 2})


def of_one_rank(comm):
    """Return a store of this rank alone."""
    return mpikv.create() if comm is None else mpikv.create(comm=library_of(comm).COMM_SELF)


def gradients(size, step, ranks, positions=1, scale=0.4):
    """Return what all ranks push: an array for each rank and position."""
    shape = (ranks, positions, *np.atleast_1d(size))
    return (scale * np.random.default_rng([step, *np.atleast_1d(size)]).standard_normal(shape)).astype(F32)


# --- The simulated quantisers: plain numpy, by the rules alone


def two_bits(kept):
    threshold = F32(0.5)
    return np.where(kept >= threshold, threshold, np.where(kept <= -threshold, -threshold, F32(0)))


def one_bit(kept):
    return np.where(kept > F32(0.5), F32(1), F32(-1))


def half(kept):
    return kept.astype(np.float16).astype(F32)


def upper_half(kept):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    return kept.astype(ml_dtypes.bfloat16).astype(F32)


QUANTISERS = {"2bit": two_bits, "1bit": one_bit, "fp16": half, "bf16": upper_half}


class Simulated:
    """All ranks' residuals in one process."""

    def __init__(self, quantise):
        self.quantise, self.left = quantise, {}

    def total(self, arrays):
        """Return the sum of what arrives of (rank, position) arrays: position by position, in rank order."""
        total = np.zeros(arrays.shape[2:], F32)
        for position in range(arrays.shape[1]):
            for rank in range(arrays.shape[0]):
                kept = self.left.get((rank, position), F32(0)) + arrays[rank, position]
                sent = self.quantise(kept)
                self.left[rank, position] = kept - sent
                total = total + sent
        return total


# --- Sums


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", QUANTISERS)
@pytest.mark.feature("compression-everywhere")
def test_sums_are_those_of_the_simulated_quantiser(comm, transport, name, placement):
    with mpikv.create(comm=comm, placement=placement, transport=transport, compression=name) as kv:
        for size in (1, 2, 15, 17, 63, 64, 65, 257, 1000, 100_000):
            simulated = Simulated(QUANTISERS[name])
            kv.init(f"w{size}", np.zeros(size, F32))
            for step in range(3):
                arrays = gradients(size, step, kv.size)
                kv.push(f"w{size}", arrays[kv.rank, 0])
                np.testing.assert_array_equal(kv.pull(f"w{size}"), simulated.total(arrays))


@settings(max_examples=15)
@given(
    kernels=st.sampled_from(["numpy", "numba"] if find_spec("numba") else ["numpy"]),
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=6),
    name=st.sampled_from(["2bit", "1bit"]),
    placement=st.sampled_from(PLACEMENTS),
    bucket_bytes=st.sampled_from([4096, 8192, 1 << 20]),
    data=st.data(),
)
@pytest.mark.deadline(120)
def test_any_lists_of_keys(comm, kernels, sizes, name, placement, bucket_bytes, data):
    """A key that is not in a call sends nothing and keeps its residual, though it lies in the same message."""
    simulated = [Simulated(QUANTISERS[name]) for _ in sizes]
    options = {"placement": placement, "bucket_bytes": bucket_bytes, "compression": name, "kernels": kernels}
    with mpikv.create(comm=comm, **options) as kv:
        kv.init(list(range(len(sizes))), [np.zeros(size, F32) for size in sizes])
        expected = [np.zeros(size, F32) for size in sizes]
        for step in range(4):
            keys = data.draw(st.lists(st.sampled_from(range(len(sizes))), min_size=1, unique=True))
            arrays = [gradients(sizes[key], step, kv.size) for key in keys]
            kv.push(keys, [array[kv.rank, 0] for array in arrays])
            for key, array in zip(keys, arrays, strict=True):
                expected[key] = simulated[key].total(array)
            for value, total in zip(kv.pull(list(range(len(sizes)))), expected, strict=True):
                np.testing.assert_array_equal(value, total)


@pytest.mark.parametrize("name", ["2bit", "1bit", "fp16"])
@pytest.mark.feature("compression-residual-per-array")
def test_each_array_of_a_list_has_a_residual_of_its_own(comm, name):
    for placement in PLACEMENTS:
        with mpikv.create(comm=comm, placement=placement, compression=name, bucket_bytes=4096) as kv:
            simulated = [Simulated(QUANTISERS[name]) for _ in range(2)]
            kv.init(["a", "b"], [np.zeros(30, F32), np.zeros(2000, F32)])
            for step, positions in enumerate((3, 1, 2, 3)):
                arrays = [gradients(size, step, kv.size, positions) for size in (30, 2000)]
                kv.push(["a", "b"], [list(array[kv.rank]) for array in arrays])
                for value, array, each in zip(kv.pull(["a", "b"]), arrays, simulated, strict=True):
                    np.testing.assert_array_equal(value, each.total(array))


def test_ranks_may_bring_lists_of_different_lengths(comm):
    with mpikv.create(comm=comm, compression="1bit") as kv:
        kv.init("w", np.zeros(100, F32))
        kv.push("w", [np.full(100, 3, F32)] * (kv.rank + 1))
        assert (kv.pull("w") == kv.size * (kv.size + 1) / 2).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.feature("compression-half")
def test_half_precision_is_compressed_in_float32(comm, dtype):
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    for name in ("2bit", "fp16", "bf16"):
        with mpikv.create(comm=comm, compression=name, bucket_bytes=4096) as kv:
            simulated = Simulated(QUANTISERS[name])
            kv.init("w", np.zeros(5000, dtype))
            for step in range(3):
                arrays = gradients(5000, step, kv.size).astype(dtype)
                kv.push("w", arrays[kv.rank, 0])
                expected = simulated.total(arrays.astype(F32)).astype(dtype)
                assert kv.pull("w").tobytes() == expected.tobytes()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_largest_of_each_rank_are_added(comm, transport, placement):
    options = {"placement": placement, "transport": transport, "bucket_bytes": 4096}
    with mpikv.create(comm=comm, compression={"type": "topk", "ratio": 0.3}, **options) as kv:
        kv.init(["a", "b"], [np.zeros((50, 60), F32), np.zeros(7, F32)])
        left = {(key, rank): F32(0) for key in "ab" for rank in range(kv.size)}
        for step in range(3):
            arrays = {"a": gradients((50, 60), step, kv.size), "b": gradients(7, step, kv.size)}
            kv.push(["a", "b"], [arrays[key][kv.rank, 0] for key in "ab"])
            for key, value in zip("ab", kv.pull(["a", "b"]), strict=True):
                total = np.zeros(value.shape, F32)
                for rank in range(kv.size):
                    kept = (left[key, rank] + arrays[key][rank, 0]).reshape(-1)
                    places = np.argsort(-np.abs(kept), kind="stable")[: -(-3 * kept.size // 10)]
                    sent = np.zeros_like(kept)
                    sent[places] = kept[places]
                    left[key, rank] = (kept - sent).reshape(value.shape)
                    total += sent.reshape(value.shape)
                np.testing.assert_array_equal(value, total)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_sums_of_low_rank(comm, transport, placement):
    codec, shape = codecs.LowRank(rank=2), (60, 50)
    options = {"placement": placement, "transport": transport, "bucket_bytes": 4096}
    with mpikv.create(comm=comm, compression=codecs.ErrorFeedback(codec), **options) as kv:
        kv.init(["w", "b"], [np.zeros(shape, F32), np.zeros(9, F32)])
        states, left = [codec.state(shape) for _ in range(kv.size)], np.zeros((kv.size, 3000), F32)
        for step in range(4):
            arrays, biases = gradients(shape, step, kv.size), gradients(9, step, kv.size)
            left += arrays.reshape(kv.size, -1)
            rounds = [codec.exchange(each.copy(), shape, state) for each, state in zip(left, states, strict=True)]
            results = together(rounds)
            left -= [own for _, own in results]
            kv.push(["w", "b"], [arrays[kv.rank, 0], biases[kv.rank, 0]])
            value, bias = kv.pull(["w", "b"])
            np.testing.assert_allclose(value.reshape(-1), results[0][0], rtol=1e-3, atol=1e-4)
            np.testing.assert_allclose(bias, biases.sum(axis=(0, 1)), rtol=1e-5, atol=1e-6)


# --- With everything else of the store


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("optimizer", [optimizers.SGD(momentum=0.9), optimizers.LAMB(), None, print])
def test_updaters_get_the_sums(comm, name, optimizer):
    """A store with the codec and the updater is one with the codec alone, whose sums another store updates by."""
    sizes = ((20, 30), (5,), (3000,))
    with (
        mpikv.create(comm=comm, compression=name, bucket_bytes=4096, deterministic=True) as kv,
        mpikv.create(comm=comm, compression=name, bucket_bytes=4096, deterministic=True, placement="root") as sums,
    ):
        alone = of_one_rank(comm)
        for store in (kv, sums, alone):
            store.init(list(range(3)), [np.ones(size, F32) for size in sizes])
        for store in (kv, alone):
            if optimizer is print:
                store.set_updater(lambda key, received, stored: stored + F32(0.5) * received)
            elif optimizer:
                store.set_optimizer(optimizer)
        for step in range(3):
            arrays = [gradients(size, step, kv.size)[kv.rank, 0] for size in sizes]
            out = [np.empty(size, F32) for size in sizes]
            kv.pushpull(list(range(3)), arrays, out=out)
            sums.push(list(range(3)), arrays)
            alone.push(list(range(3)), sums.pull(list(range(3))))
            for found, expected in zip(out, alone.pull(list(range(3))), strict=True):
                np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
        alone.close()


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_order_of_a_list_of_arrays(comm, deterministic):
    """A deterministic store adds them up in pairs; else one comes after the other."""
    terms = [np.full(3, term, F32) for term in (1e8, 1, -1e8, 1)]
    first, second, third, fourth = terms
    expected = (first + second) + (third + fourth) if deterministic else ((first + second) + third) + fourth
    with mpikv.create(comm=comm, deterministic=deterministic, compression={"type": "topk", "ratio": 1.0}) as kv:
        kv.init("w", np.zeros(3, F32))
        kv.push("w", terms)
        np.testing.assert_array_equal(kv.pull("w"), expected * kv.size)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.feature("compression-everywhere", "pushpull-compressed")
def test_buffers_are_compressed(comm, name):
    with mpikv.create(comm=comm, compression=name) as kv, mpikv.create(comm=comm, compression=name) as other:
        for store in (kv, other):
            store.init(["a", "b"], [np.zeros((30, 40), F32), np.zeros(3, F32)])
        buffers, views = kv.buffer(["a", "b"]), kv.view(["a", "b"])
        for step in range(3):
            arrays = [gradients(shape, step, kv.size)[kv.rank, 0] for shape in ((30, 40), 3)]
            for buffer, array in zip(buffers, arrays, strict=True):
                buffer[...] = array
            kv.pushpull(["a", "b"])
            other.push(["a", "b"], arrays)
            for view, buffer, array, expected in zip(views, buffers, arrays, other.pull(["a", "b"]), strict=True):
                np.testing.assert_array_equal(view, expected)
                np.testing.assert_array_equal(buffer, array)
            kv.push(["a", "b"])
            other.push(["a", "b"], arrays)
            for value, expected in zip(kv.pull(["a", "b"]), other.pull(["a", "b"]), strict=True):
                np.testing.assert_array_equal(value, expected)


def residuals(kv):
    """Return the residuals of this rank's: for each key, those of each position."""
    return {key: [each.copy() for each in kv._exchange.values.table[key].residuals()] for key in kv}


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_have_left_join_bring_nothing(comm, name, buffers):
    """With 1 bit, not even -1 for zeros; and what they keep stays."""
    with mpikv.create(comm=comm, compression=name) as kv:
        kv.init("w", np.zeros((20, 20), F32))
        if buffers:
            kv.buffer("w")[...] = 5
        kv.push("w", np.full((20, 20), 1.5, F32))
        before = residuals(kv)["w"][0]
        last = []
        with kv.join():
            for _ in range(2 if kv.is_root else 0):
                kv.push("w") if buffers else kv.push("w", np.full((20, 20), 5, F32))
                last.append(kv.pull("w"))
        if kv.is_root:
            with of_one_rank(comm) as alone:
                check_alone(alone, name, last)
        else:
            np.testing.assert_array_equal(residuals(kv)["w"][0], before)


def check_alone(kv, name, last):
    """What the only rank with work pushed is what it would have pushed in a store of its own."""
    if isinstance(name, dict) and name["type"] == "lowrank":
        return  # the first push, of all ranks, has left another start
    kv.set_gradient_compression(name)
    kv.init("w", np.zeros((20, 20), F32))
    kv.push("w", np.full((20, 20), 1.5, F32))
    for expected in last:
        kv.push("w", np.full((20, 20), 5, F32))
        np.testing.assert_array_equal(kv.pull("w"), expected)


@pytest.mark.parametrize("name", ["1bit", "topk"])
def test_calls_that_nobody_waits_for_are_compressed(comm, name):
    with mpikv.create(comm=comm, compression=name) as kv, mpikv.create(comm=comm, compression=name) as other:
        arrays = [gradients((20, 30), step, kv.size)[kv.rank, 0] for step in range(4)]
        outs = [np.empty((20, 30), F32) for _ in arrays]
        for store in (kv, other):
            store.init("w", np.zeros((20, 30), F32))
        works = [kv.pushpull("w", array, out=out, wait=False) for array, out in zip(arrays, outs, strict=True)]
        for work, array, out in zip(works, arrays, outs, strict=True):
            work.wait()
            np.testing.assert_array_equal(out, other.pushpull("w", array.copy()))
        with pytest.raises(NotFinite if kv.is_root else PeerFailed):
            kv.push("w", np.full((20, 30), np.nan if kv.is_root else 0, F32), wait=False).wait()


@pytest.mark.feature("compression-set")
def test_none_ends_compression_and_drops_residuals(comm):
    with mpikv.create(comm=comm) as kv:
        kv.init("w", np.zeros(8, F32))
        kv.set_gradient_compression({"type": "2bit", "threshold": 1.0})
        kv.push("w", np.full(8, 0.75, F32))
        assert not kv.pull("w").any()
        kv.set_gradient_compression(None)
        assert kv.compression is None
        kv.push("w", np.full(8, 0.75, F32))
        assert (kv.pull("w") == 0.75 * kv.size).all()
        kv.set_gradient_compression({"type": "2bit", "threshold": 1.0})
        kv.push("w", np.full(8, 0.75, F32))
        assert not kv.pull("w").any()
        kv.push("w", np.full(8, 0.75, F32))
        assert (kv.pull("w") == kv.size).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.feature("compression-init-pull-exact")
def test_init_set_broadcast_and_pull_lose_nothing(comm, name):
    values = gradients((10, 30), 0, 1)[0, 0]
    with mpikv.create(comm=comm, compression=name) as kv:
        kv.init("w", values)
        np.testing.assert_array_equal(kv.pull("w"), values)
        kv.set("w", 3 * values)
        np.testing.assert_array_equal(kv.pull("w"), 3 * values)
        np.testing.assert_array_equal(kv.broadcast("w", 5 * values), 5 * values)


@pytest.mark.parametrize("name", NAMES)
def test_a_value_that_starts_anew_has_no_residual(comm, name):
    with mpikv.create(comm=comm, compression=name) as kv, mpikv.create(comm=comm, compression=name) as new:
        arrays = gradients((20, 30), 0, kv.size)
        kv.init("w", np.zeros((30, 20), F32))
        kv.push("w", arrays[kv.rank, 0].reshape(30, 20))
        kv.init("w", np.zeros((20, 30), F32), overwrite=True)
        new.init("w", np.zeros((20, 30), F32))
        for store in (kv, new):
            store.push("w", arrays[kv.rank, 0])
        np.testing.assert_array_equal(kv.pull("w"), new.pull("w"))
        for store in (kv, new):
            store.delete("w")
            store.init("w", np.zeros(600, F32))
            store.push("w", arrays[kv.rank, 0].reshape(-1))
        np.testing.assert_array_equal(kv.pull("w"), new.pull("w"))


# --- What goes over the wire


@pytest.mark.parametrize(
    ("name", "placement", "calls"),
    [
        ("2bit", "root", ["all_to_all"]),
        ("2bit", "sharded", ["all_to_all"]),
        ("2bit", "replicated", ["all_to_all"]),
        ("topk", "sharded", ["all_to_all"]),
        ("lowrank", "sharded", ["allreduce", "allreduce"]),
    ],
)
def test_collectives_of_a_compressed_push(comm, name, placement, calls):
    group, config = ProcessGroup(comm), Config(transport="mpi" if comm else "auto", placement=placement)
    recording = Recording(open_transport(group, config))
    with mpikv.KVStore(group, StatusBoard(group), recording, config, found=mpikv.create) as store:
        store.set_gradient_compression(name)
        store.init("w", np.zeros((100, 100), F32))
        recording.take()
        store.push("w", np.ones((100, 100), F32))
        assert recording.take() == calls


class Addressed(Wrapper):
    """Keeps which ranks are sent something by each exchange from all to all."""

    def __init__(self, transport):
        super().__init__(transport)
        self.ranks = []

    def all_to_all(self, send, counts):
        self.ranks.append(None if counts is None else tuple(np.flatnonzero(counts)))
        return super().all_to_all(send, counts)


@pytest.mark.ranks(2, 3)
def test_values_of_one_owner_go_to_that_alone(comm):
    """In a list of keys as one by one, and what lies in several hands goes to all."""
    made = []
    with store_over(lambda inner: made.append(Addressed(inner)) or made[0], comm=comm, placement="sharded") as kv:
        kv.set_optimizer("lamb", learning_rate=0.1)
        kv.set_gradient_compression({"type": "topk", "ratio": 1.0})
        keys = ["a", "b", "c"]
        kv.init(keys, [np.zeros((400, 400), F32)] * 3)
        ranks = made[0].ranks
        kv.push(keys, [np.ones((400, 400), F32)] * 3)
        together = ranks.copy()
        assert all(len(each) == 1 for each in together)
        assert len(set(together)) == min(3, kv.size)
        ranks.clear()
        for key in keys:
            kv.push(key, np.ones((400, 400), F32))
        assert ranks == together
        kv.set_optimizer("sgd")
        ranks.clear()
        kv.push(keys, [np.ones((400, 400), F32)] * 3)
        assert set(ranks) == {None}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_lists_of_values_have_the_sums_of_each(comm, transport, placement):
    """Keys of all sizes: some have several owners, some one, and some lie in one message."""
    shapes = [(3,), (0, 4), (500, 9), (70, 70), (), (2, 40), (1,)]
    options = {"comm": comm, "transport": transport, "placement": placement, "bucket_bytes": 4096}
    with mpikv.create(compression={"type": "topk", "ratio": 1.0}, **options) as kv, mpikv.create(**options) as other:
        for optimizer in (None, "sgd", "lamb"):
            for store in (kv, other):
                if optimizer:
                    store.set_optimizer(optimizer, learning_rate=0.5)
                else:
                    store.init(list(range(7)), [np.zeros(shape, F32) for shape in shapes])
            for step, keys in enumerate(([0, 1, 2, 3, 4, 5, 6], [6, 2, 0], [3])):
                arrays = [gradients((1, *shapes[key]), step, kv.size)[kv.rank, 0, 0] for key in keys]
                for store in (kv, other):
                    store.push(keys, [np.round(64 * array) / 64 for array in arrays])
                for found, expected in zip(kv.pull(list(range(7))), other.pull(list(range(7))), strict=True):
                    np.testing.assert_array_equal(found, expected)


# --- Bad input: an error on every rank, and nothing lost


def culprit(comm):
    return 0 if comm is None else comm.size - 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e38])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.feature("compression-not-finite")
def test_numbers_that_are_not_finite_raise(comm, name, bad):
    with mpikv.create(comm=comm, compression=name) as kv, mpikv.create(comm=comm, compression=name) as other:
        arrays = gradients((10, 20), 0, kv.size)[kv.rank, 0]
        for store in (kv, other):
            store.init("w", np.zeros((10, 20), F32))
            store.push("w", arrays)
        before = kv.pull("w")
        spoilt = arrays.copy()
        spoilt[3, 4] = bad
        error = NotFinite if kv.rank == culprit(comm) else PeerFailed
        for push in (kv.push, kv.pushpull):
            with pytest.raises(error, match=r"key 'w' has . NaN, . infinite and . elements above 1.3e\+30"):
                push("w", spoilt.copy() if kv.rank == culprit(comm) else arrays.copy())
        np.testing.assert_array_equal(kv.pull("w"), before)
        for store in (kv, other):
            store.push("w", arrays)
        np.testing.assert_array_equal(kv.pull("w"), other.pull("w"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("buffer", [False, True])
def test_halves_that_are_not_finite_raise(comm, dtype, buffer):
    """They are counted as they are, whatever numpy is told to do about floating point errors."""
    dtype = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.float16
    spoilt = np.array([np.inf, 1, 2, np.nan, -np.inf], dtype)
    with mpikv.create(comm=comm, compression="2bit") as kv, np.errstate(all="raise"):
        kv.init("w", np.zeros(5, dtype))
        bad = kv.rank == culprit(comm)
        mine = [spoilt if bad else np.ones(5, dtype)]
        if buffer:
            kv.buffer("w")[...] = mine.pop()
        with pytest.raises(NotFinite if bad else PeerFailed, match="1 NaN, 2 infinite and 0 elements above"):
            kv.push("w", *mine)
        assert not kv.pull("w").any()


@pytest.mark.parametrize("dtype", ["int32", "int64", "bool", "float64", "complex64"])
@pytest.mark.feature("compression-other-dtypes")
def test_other_dtypes_are_refused(comm, dtype):
    with mpikv.create(comm=comm, compression="2bit") as kv:
        kv.init(["n", "w"], [np.zeros(4, dtype), np.zeros(4, F32)])
        with pytest.raises(Unsupported, match=f"key 'n' has dtype {dtype}, and compression 2bit"):
            kv.push(["n", "w"], [np.ones(4, dtype), np.ones(4, F32)])
        kv.push("w", np.ones(4, F32))
        kv.set_gradient_compression(None)
        kv.push("n", np.ones(4, dtype))
        assert kv.pull("n")[0] == (True if dtype == "bool" else kv.size)


def test_lists_of_one_call_are_of_one_length(comm):
    with mpikv.create(comm=comm, compression="2bit") as kv:
        kv.init(["a", "b"], [np.zeros(4, F32)] * 2)
        with pytest.raises(ValueMismatch, match="the keys have lists of 1 and 2 arrays"):
            kv.push(["a", "b"], [[np.ones(4, F32)], [np.ones(4, F32)] * 2])


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_an_updater_that_raises_leaves_residuals_as_they_were(comm, name, first):
    """Two stores, one of which has an updater that fails once, go on alike."""

    def fail(key, received, stored):
        raise ArithmeticError("not today")

    with mpikv.create(comm=comm, compression=name) as kv, mpikv.create(comm=comm, compression=name) as other:
        for store in (kv, other):
            store.init("w", np.zeros((10, 20), F32))
            for step in range(0 if first else 2):
                store.push("w", gradients((10, 20), step, kv.size)[kv.rank, 0])
        before = kv.pull("w")
        kv.set_updater(fail)
        with pytest.raises(ArithmeticError if kv.is_root else PeerFailed, match="not today"):
            kv.push("w", gradients((10, 20), 3, kv.size)[kv.rank, 0])
        np.testing.assert_array_equal(kv.pull("w"), before)
        kv.set_updater(None)
        for step in range(4, 6):
            for store in (kv, other):
                store.push("w", gradients((10, 20), step, kv.size)[kv.rank, 0])
            np.testing.assert_array_equal(kv.pull("w"), other.pull("w"))


@pytest.mark.feature("compression-threshold-exact")
def test_ranks_with_other_settings(comm):
    with mpikv.create(comm=comm) as kv:
        kv.init("w", np.zeros(4, F32))
        if kv.size == 1:
            kv.set_gradient_compression("2bit")
            return
        for mine, theirs in (("2bit", "1bit"), (None, "2bit"), ({"type": "2bit", "threshold": 0.25}, "2bit")):
            with pytest.raises(RankMismatch, match="set_gradient_compression"):
                kv.set_gradient_compression(mine if kv.rank == 0 else theirs)
            assert kv.compression is None
        kv.push("w", np.ones(4, F32))
        assert (kv.pull("w") == kv.size).all()
        with pytest.raises(RankMismatch, match=r"create: ranks disagree: compression 2bit.* on rank 0, None on rank 1"):
            mpikv.create(comm=comm, compression="2bit" if kv.rank == 0 else None)


@pytest.mark.feature("compression-bad-options")
def test_a_bad_setting_on_one_rank(comm):
    with mpikv.create(comm=comm, compression="fp16") as kv:
        bad = kv.rank == culprit(comm)
        with pytest.raises(ConfigError if bad else PeerFailed, match="threshold=0 is not"):
            kv.set_gradient_compression({"type": "2bit", "threshold": 0 if bad else 1})
        assert kv.compression.settings() == "fp16() with error feedback"
        with pytest.raises(ConfigError if bad else PeerFailed, match="did you mean '2bit'"):
            mpikv.create(comm=comm, compression="2bti" if bad else "2bit")


class Speechless(codecs.Float16):
    """Cannot describe itself."""

    def settings(self):
        raise LookupError("no words")


@pytest.mark.deadline(60)
def test_a_codec_that_cannot_describe_itself_on_one_rank(comm):
    bad = comm is None or comm.rank == comm.size - 1
    given = Speechless() if bad else codecs.Float16()
    with pytest.raises(LookupError if bad else PeerFailed, match="no words"):
        mpikv.create(comm=comm, compression=given)
    with mpikv.create(comm=comm) as kv:
        with pytest.raises(LookupError if bad else PeerFailed, match="no words"):
            kv.set_gradient_compression(given)
        assert kv.compression is None


class Wide(codecs.Float16):
    """Sends many bytes for each element."""

    width = 100

    def settings(self):
        return f"wide({self.width})"

    def nbytes(self, count):
        return self.width * count

    def encode(self, gradient, payload, residual=None):
        super().encode(gradient, payload[: 2 * gradient.size])

    def decode_add(self, payload, total):
        super().decode_add(payload[: 2 * total.size], total)


def test_payloads_that_no_message_holds_are_refused(comm):
    with mpikv.create(comm=comm, bucket_bytes=4096) as kv:
        kv.init("w", np.zeros(100, F32))
        with pytest.raises(Unsupported, match=r"64 elements packed by wide\(100\) take 6400 bytes.*bucket_bytes"):
            kv.set_gradient_compression(Wide())
        assert kv.compression is None
        kv.push("w", np.ones(100, F32))
        assert (kv.pull("w") == kv.size).all()


def test_a_store_that_cannot_have_its_codec_is_closed(comm):
    before = list(open_stores())
    with pytest.raises(Unsupported, match=r"packed by wide\(100\)"):
        mpikv.create(comm=comm, bucket_bytes=4096, compression=Wide())
    assert before == open_stores()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_widest_payloads_that_a_message_holds(comm, placement):
    """65 elements, which are one range, are cut as others are."""
    codec = Wide()
    codec.__dict__["width"] = 60
    sizes = (1, 63, 64, 65, 100, 127, 1000)
    with mpikv.create(comm=comm, placement=placement, bucket_bytes=4096, compression=codec) as kv:
        for size in sizes:
            kv.init(f"w{size}", np.zeros(size, F32))
            kv.push(f"w{size}", np.arange(size, dtype=F32))
            np.testing.assert_array_equal(kv.pull(f"w{size}"), kv.size * np.arange(size, dtype=F32))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", ["1bit", "topk", "lowrank"])
def test_slow_ranks_change_no_result(comm, over, name, placement):
    """Ranks pass each other between exchanges: memory that is used again too early would show."""
    options = {"comm": comm, "placement": placement, "bucket_bytes": 4096}
    with (
        store_over(lambda inner: Slow(inner, seed=3, longest=1e-3), **over, **options) as kv,
        mpikv.create(compression=name, transport="mpi" if comm else "auto", deterministic=True, **options) as other,
    ):
        kv.set_gradient_compression(name)
        for store in (kv, other):
            store.init("w", np.zeros((40, 60), F32))
        for step in range(3):
            array = gradients((40, 60), step, kv.size)[kv.rank, 0]
            for store in (kv, other):
                store.push("w", array)
            np.testing.assert_allclose(kv.pull("w"), other.pull("w"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["2bit", {"type": "topk", "ratio": 1.0}, {"type": "lowrank", "rank": 1}])
@pytest.mark.deadline(120)
def test_a_large_pushpull_brings_the_newest_values(comm, name):
    """Each bucket is delivered once all ranks have updated it, however late one of them is."""
    shape = (1024, 2304)
    with mpikv.create(comm=comm, compression=name) as kv:

        class Late(optimizers.Test):
            def rule(self, step, block):
                time.sleep(0.003 * (kv.rank == kv.size - 1))
                super().rule(step, block)

        kv.init("w", np.zeros(shape, F32))
        kv.set_optimizer(Late(learning_rate=1.0))
        for step in range(1, 4):
            out = np.empty(shape, F32)
            kv.pushpull("w", np.full(shape, step, F32), out=out)
            np.testing.assert_array_equal(out, kv.pull("w"))
