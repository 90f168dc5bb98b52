"""Values that travel packed: what ranks hold is what casts, simulated for all ranks in one process, make of the exact
values, and the owners go on with those.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpikv
from mpikv.cluster.process_group import ProcessGroup
from mpikv.cluster.status_board import StatusBoard
from mpikv.config import Config
from mpikv.testing.faulty import store_over
from mpikv.testing.wrappers import Recording, Wrapper
from mpikv.transports import open_transport

from .test_compression import QUANTISERS, Simulated, gradients

pytestmark = pytest.mark.ranks(2, 3, 4)

F32 = np.float32
CASTS = ("bf16", "fp16")


@pytest.fixture(params=["mpi", "hierarchical"])
def transport(request):
    return request.param


def both(name):
    return {"type": name, "compress_pull": True}


class Simulation:
    """One value with SGD: the exact one, and what ranks hold of it."""

    def __init__(self, start, name):
        self.exact, self.held, self.name = start.copy(), start.copy(), name
        self.cast, self.sums = QUANTISERS[name], Simulated(QUANTISERS[name])

    def push(self, arrays):
        self.exact = self.exact - self.sums.total(arrays) * F32(0.5)

    def pull(self):
        self.held = self.held + self.cast(self.exact - self.held)
        return self.held

    def given(self, value, how):
        other = Simulation(value, self.name)
        if how in ("set", "broadcast"):  # which leave residuals
            other.sums = self.sums
        return other


def give(kv, how, key, value):
    if how == "delete":
        kv.delete(key)
        kv.init(key, value)
    elif how == "init":
        kv.init(key, value, overwrite=True)
    else:
        getattr(kv, how)(key, value)


@settings(max_examples=10, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9000), min_size=1, max_size=5),
    name=st.sampled_from(CASTS),
    placement=st.sampled_from(["root", "sharded"]),
    over=st.sampled_from(["mpi", "hierarchical"]),
    bucket_bytes=st.sampled_from([4096, 1 << 20]),
    data=st.data(),
)
@pytest.mark.parametrize("transport", ["hierarchical"])
@pytest.mark.deadline(60)
def test_any_pushes_and_pulls(comm, transport, sizes, name, placement, over, bucket_bytes, data):
    """A key that is not pulled is left as it is, though it lies in the same message."""
    starts = [np.random.default_rng(size).standard_normal(size).astype(F32) for size in sizes]
    expected = [Simulation(start, name) for start in starts]
    options = {"transport": over, "placement": placement, "bucket_bytes": bucket_bytes, "compression": both(name)}
    with mpikv.create(comm=comm, **options) as kv:
        kv.init(list(range(len(sizes))), starts)
        kv.set_optimizer("sgd", learning_rate=0.5)
        subsets = st.lists(st.sampled_from(range(len(sizes))), min_size=1, unique=True)
        for step in range(4):
            keys = data.draw(subsets)
            arrays = [gradients(sizes[key], step, kv.size) for key in keys]
            kv.push(keys, [array[kv.rank, 0] for array in arrays])
            for key, array in zip(keys, arrays, strict=True):
                expected[key].push(array)
            # What gives others their values, which may lie on both sides, leaves pushes that nobody has seen.
            for key in data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True), label="given"):
                given = np.random.default_rng([step, key]).standard_normal(sizes[key]).astype(F32)
                how = data.draw(st.sampled_from(["set", "broadcast", "init", "delete"]), label=f"how {key}")
                give(kv, how, key, given)
                expected[key] = expected[key].given(given, how)
            stale = {key for key in keys if data.draw(st.booleans(), label=f"pull {key}")}
            for key in sorted(stale):
                np.testing.assert_array_equal(kv.pull(key), expected[key].pull())
        for key, each in enumerate(expected):
            held = each.held.copy()
            kept = kv.pull(key)
            assert np.array_equal(kept, held) or np.array_equal(kept, each.pull())
        kv.set_gradient_compression(None)
        for key, each in enumerate(expected):
            np.testing.assert_array_equal(kv.pull(key), each.exact)


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("streamed", [False, True])
def test_pushpull_of_several_messages(comm, transport, name, streamed, monkeypatch):
    if streamed:
        monkeypatch.setattr("mpikv.engine.plan._STREAMED_BYTES", 0)
    sizes = {"large": 30_000, "small": 70, "other": 90}
    with mpikv.create(comm=comm, transport=transport, bucket_bytes=1 << 14, compression=both(name)) as kv:
        values = {key: np.linspace(-1, 1, size, dtype=F32) for key, size in sizes.items()}
        expected = {key: Simulation(value, name) for key, value in values.items()}
        kv.init(values)
        kv.set_optimizer("sgd", learning_rate=0.5)
        for step in range(3):
            arrays = {key: gradients(size, step, kv.size) for key, size in sizes.items()}
            kv.pushpull({key: each[kv.rank, 0] for key, each in arrays.items()}, out=values)
            for key, each in expected.items():
                each.push(arrays[key])
                np.testing.assert_array_equal(values[key], each.pull())
                np.testing.assert_array_equal(kv.view(key), each.held)


@pytest.mark.parametrize("placement", ["root", "sharded"])
def test_values_from_before_the_compression_are_packed_too(comm, transport, placement):
    with mpikv.create(comm=comm, transport=transport, placement=placement) as kv:
        kv.init("w", np.zeros(500, F32))
        kv.set_optimizer("sgd", learning_rate=1.0)
        kv.set_gradient_compression(both("bf16"))
        kv.push("w", np.full(500, {0: -1.0, 1: -(2.0**-10)}.get(kv.rank, 0.0), F32))
        np.testing.assert_array_equal(kv.pull("w"), np.ones(500, F32))


@pytest.mark.parametrize("placement", ["root", "sharded"])
def test_a_pull_leaves_the_values_between_its_keys(comm, transport, placement):
    with mpikv.create(comm=comm, transport=transport, placement=placement, compression=both("bf16")) as kv:
        kv.init(["a", "b", "c"], [np.zeros(100, F32)] * 3)
        kv.set_optimizer("sgd", learning_rate=1.0)
        for pulled in (["a", "b", "c"], ["a", "c"]):
            kv.push(["a", "b", "c"], [np.full(100, -1, F32)] * 3)
            kv.pull(pulled)
        np.testing.assert_array_equal(kv.view("b"), np.full(100, kv.size, F32))


@pytest.mark.parametrize("name", CASTS)
def test_sums_without_an_updater_are_rounded_once_more(comm, transport, name):
    with mpikv.create(comm=comm, transport=transport, placement="sharded", compression=both(name)) as kv:
        simulated = [Simulated(QUANTISERS[name]) for _ in range(2)]
        kv.init(["a", "b"], [np.full(1000, 1 / 3, F32), np.full(500, 1 / 3, F32)])
        for step in range(3):
            arrays = [gradients(size, step, kv.size) for size in (1000, 500)]
            # Every second time what lies behind is not in the call.
            keys = ["a", "b"][: 2 - step % 2]
            kv.push(keys, [each[kv.rank, 0] for each in arrays[: len(keys)]])
            for key, each, sums in zip(keys, arrays, simulated, strict=False):
                np.testing.assert_array_equal(kv.pull(key), QUANTISERS[name](sums.total(each)))
        between = kv.pull("b")
        kv.init("c", np.full(700, 1 / 3, F32))
        kv.push(["a", "c"], [np.ones(1000, F32), np.ones(700, F32)])
        kv.pull(["a", "c"])
        np.testing.assert_array_equal(kv.pull("b"), between)


@pytest.mark.parametrize("updater", ["function", "lamb", "adam"])
def test_every_updater_has_the_exact_value(comm, transport, updater):
    """The owners' values are those of a store that packs its pushes alone, to the last bit."""
    results = []
    for compression in (both("bf16"), "bf16"):
        with mpikv.create(comm=comm, transport=transport, compression=compression) as kv:
            kv.init(["w", "b"], [np.linspace(-1, 1, 3000, dtype=F32), np.ones(3, F32)])
            if updater == "function":
                kv.set_updater(lambda key, given, stored: np.subtract(stored, 0.3 * given, out=stored))
            else:
                kv.set_optimizer(updater, learning_rate=0.01)
            for step in range(3):
                arrays = [gradients(size, step, kv.size)[kv.rank, 0] for size in (3000, 3)]
                kv.push(["w", "b"], arrays)
                pulled = kv.pull(["w", "b"])
                for each in pulled:
                    held = np.frombuffer(b"".join(comm.allgather(each.tobytes())), F32).reshape(kv.size, -1)
                    assert (held == held[0]).all()
            kv.set_gradient_compression(None)
            results.append([pulled, kv.pull(["w", "b"])])
    (rounded, exact), (expected, same) = results
    for one, other, held, plain in zip(exact, same, rounded, expected, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(held, plain, rtol=0, atol=2e-3)
    assert not np.array_equal(rounded[0], expected[0])


def test_an_updater_that_fails_changes_nothing(comm, transport):
    with mpikv.create(comm=comm, transport=transport, compression=both("bf16")) as kv:
        fails = []

        def update(key, given, stored):
            stored += given / 3
            if fails:
                raise ValueError("no")

        kv.init("w", np.zeros(100, F32))
        kv.set_updater(update)
        kv.push("w", np.ones(100, F32))
        before = kv.pull("w")
        fails.append(1)
        with pytest.raises(ValueError if kv.is_root else mpikv.PeerFailed, match="no"):
            kv.push("w", np.ones(100, F32))
        np.testing.assert_array_equal(kv.pull("w"), before)
        kv.set_gradient_compression(None)
        np.testing.assert_array_equal(kv.pull("w"), np.full(100, F32(kv.size) / 3, F32))


def test_what_is_set_or_half_is_not_rounded(comm, transport):
    third = np.full(300, 1 / 3, F32)
    with mpikv.create(comm=comm, transport=transport, compression=both("bf16")) as kv:
        kv.init({"w": third, "half": np.full(300, 1 / 3, np.float16)})
        kv.set_optimizer("sgd", learning_rate=1 / 3)
        np.testing.assert_array_equal(kv.pull("w"), third)
        kv.push(["w", "half"], [np.ones(300, F32), np.ones(300, np.float16)])
        change = F32(1 / 3) * F32(kv.size)
        assert np.array_equal(kv.pull("w"), third - change) is (kv.size == 3)
        np.testing.assert_array_equal(
            kv.pull("half"), (third.astype(np.float16).astype(F32) - change).astype(np.float16)
        )
        kv.set("w", third)
        np.testing.assert_array_equal(kv.pull("w"), third)
        kv.push("w", np.zeros(300, F32))
        np.testing.assert_array_equal(kv.pull("w"), third)
        kv.set_optimizer("sgd", learning_rate=0.5)
        np.testing.assert_array_equal(kv.pull("w"), third)


@pytest.mark.parametrize("how", ["set", "broadcast", "init", "delete"])
@pytest.mark.parametrize("placement", ["root", "sharded"])
def test_what_lies_between_keys_that_are_given_values_stays(comm, transport, placement, how):
    with mpikv.create(comm=comm, transport=transport, placement=placement, compression=both("bf16")) as kv:
        kv.init(["a", "b", "c"], [np.zeros(100, F32)] * 3)
        kv.set_optimizer("sgd", learning_rate=1 / 3)
        rate, exact = F32(1 / 3), np.zeros(100, F32)
        for pulled in (False, True):
            kv.push("b", np.ones(100, F32))
            exact -= F32(kv.size) * rate
            if pulled:
                kv.pull("b")
            if how == "delete":
                kv.delete(["a", "c"])
                kv.init(["a", "c"], [np.full(100, 5, F32)] * 2)
            elif how == "init":
                kv.init(["a", "c"], [np.full(100, 5, F32)] * 2, overwrite=True)
            else:
                getattr(kv, how)(["a", "c"], [np.full(100, 5, F32)] * 2)
            held = kv.pull("b")
            np.testing.assert_allclose(held, exact, rtol=2**-8)
            everyone = comm.allgather(held.tobytes())
            assert everyone == [everyone[0]] * kv.size
            np.testing.assert_array_equal(kv.pull(["a", "c"]), np.full((2, 100), 5, F32))
        kv.set_gradient_compression(None)
        np.testing.assert_array_equal(kv.pull("b"), exact)


@pytest.mark.parametrize("placement", ["root", "sharded"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_leaves_with_the_exact_value(comm, transport, placement, bad):
    """Every rank learns of it, and of the number that an updater makes of it."""
    with mpikv.create(comm=comm, transport=transport, placement=placement, compression=both("fp16")) as kv:
        kv.init(["w", "between", "v"], [np.ones(300, F32)] * 3)
        kv.set_optimizer("sgd", learning_rate=0.5)
        value = np.ones(300, F32)
        value[7] = bad
        kv.set("w", value)
        kv.push(["w", "v", "between"], [np.ones(300, F32)] * 3)
        for _ in range(2):
            w, v = kv.pull(["w", "v"])
            np.testing.assert_array_equal(w, value - F32(0.5 * kv.size))
            np.testing.assert_array_equal(v, np.full(300, 1 - 0.5 * kv.size, F32))
        np.testing.assert_array_equal(kv.pull("between"), v)


def test_an_updater_that_makes_numbers_again(comm, transport):
    with mpikv.create(comm=comm, transport=transport, compression=both("bf16")) as kv:
        kv.init("w", np.ones(4, F32))
        kv.set_updater(lambda key, given, stored: stored.fill(given[0] if given[0] < 100 else np.inf))
        for pushed, expected in ((99.0, np.inf), (1.0, float(kv.size))):
            kv.push("w", np.full(4, pushed, F32))
            np.testing.assert_array_equal(kv.pull("w"), np.full(4, expected, F32))


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("placement", ["root", "sharded"])
@pytest.mark.parametrize("assigned", [False, True])
def test_changes_that_a_cast_cannot_say(comm, transport, name, placement, assigned):
    """They are not cut, and not late: what is pulled once is right."""
    with mpikv.create(comm=comm, transport=transport, placement=placement, compression=both(name)) as kv:
        kv.init(["w", "v"], [np.zeros(1000, F32)] * 2)
        if not assigned:
            kv.set_optimizer("sgd", learning_rate=1.0)
        mine = np.full(1000, 2.0, F32)
        mine[500] = 60_000
        other = np.full(1000, 0.25, F32)
        for step in (1, 2):
            kv.push(["w", "v"], [mine, other])
            times = kv.size if assigned else -step * kv.size
            rtol = 2**-8 if name == "bf16" else 0
            w, v = kv.pull(["w", "v"])
            np.testing.assert_allclose(w, [2.0 * times] * 500 + [mine[500] * times] + [2.0 * times] * 499, rtol=rtol)
            np.testing.assert_array_equal(v, other * F32(times))
            everyone = comm.allgather(w.tobytes())
            assert everyone == [everyone[0]] * kv.size


@pytest.mark.parametrize("place", [0, -1])
def test_a_change_that_one_of_several_owners_cannot_say(comm, transport, place):
    """The elements of a message are divided among the ranks, and one of them is too large for it."""
    options = {"comm": comm, "transport": transport, "placement": "sharded", "bucket_bytes": 1 << 14}
    with mpikv.create(**options, compression=both("fp16")) as kv:
        kv.init("w", np.zeros(1 << 12, F32))
        kv.set_optimizer("sgd", learning_rate=1.0)
        mine = np.ones(1 << 12, F32)
        mine[place] = 60_000
        kv.push("w", mine)
        np.testing.assert_array_equal(kv.pull("w"), -kv.size * mine)


@pytest.mark.parametrize("name", CASTS)
def test_a_run_goes_on_as_the_one_that_loads_its_file(comm, transport, name, folder):
    """The gradient depends on what is pulled, so that all that ranks hold counts."""
    options = {"comm": comm, "transport": transport, "compression": both(name)}
    with mpikv.create(**options) as kv, mpikv.create(**options) as other:
        kv.init("w", np.linspace(-1, 1, 500, dtype=F32))
        kv.set_optimizer("sgd", learning_rate=0.1, momentum=0.9)

        def train(store):
            weight = store.pull("w")
            for _ in range(3):
                store.push("w", np.sin(3 * weight) + F32(store.rank))
                weight = store.pull("w")
            return weight

        train(kv)
        kv.save(folder / "checkpoint")
        other.load(folder / "checkpoint")
        assert kv.pull("w").tobytes() == other.pull("w").tobytes()
        assert train(kv).tobytes() == train(other).tobytes()


@pytest.mark.parametrize("name", CASTS)
def test_a_checkpoint_has_the_exact_values(comm, transport, name, folder):
    path = folder / "w.mpikv"
    with mpikv.create(comm=comm, transport=transport, compression=both(name)) as kv:
        start = np.linspace(-1, 1, 5000, dtype=F32)
        expected = Simulation(start, name)
        kv.init("w", start)
        kv.set_optimizer("sgd", learning_rate=0.5)
        for step in range(3):
            arrays = gradients(5000, step, kv.size)
            kv.push("w", arrays[kv.rank, 0])
            expected.push(arrays)
            if step != 1:
                np.testing.assert_array_equal(kv.pull("w"), expected.pull())
        kv.save(path)
        np.testing.assert_array_equal(kv.pull("w"), expected.exact)
        for there in (False, True):
            with mpikv.create(comm=comm, transport=transport, compression=both(name)) as other:
                if there:
                    other.init("w", np.zeros(5000, F32))
                other.load(path)
                np.testing.assert_array_equal(other.pull("w"), expected.exact)
                other.push("w", np.zeros(5000, F32))
        with mpikv.create(comm=comm) as plain:
            plain.load(path)
            np.testing.assert_array_equal(plain.pull("w"), expected.exact)


def test_a_rank_without_work_takes_part(comm, transport):
    with mpikv.create(comm=comm, transport=transport, compression=both("bf16")) as kv:
        kv.init("w", np.zeros(500, F32))
        kv.set_optimizer("sgd", learning_rate=0.5)
        with kv.join():
            for _ in range(1 + kv.rank):
                kv.pushpull("w", np.ones(500, F32), np.zeros(500, F32))
        pushes = sum(1 + rank for rank in range(kv.size))
        np.testing.assert_array_equal(kv.pull("w"), np.full(500, -0.5 * pushes, F32))


class Counted(Wrapper):
    """Counts how often ranks agree."""

    agreements = 0

    def before(self, call):
        self.agreements += call == "agree"


@pytest.mark.parametrize("placement", ["root", "sharded"])
@pytest.mark.parametrize("change", [1.0, 1e36])
def test_ranks_agree_once(comm, over, placement, change):
    """What a cast cannot say is told with the values: on the host a pull asks no rank for it beforehand."""
    with store_over(Counted, comm=comm, placement=placement, **over) as kv:
        kv.set_gradient_compression(both("fp16"))
        kv.init("w", np.zeros(500, F32))
        kv.set_optimizer("sgd", learning_rate=change)
        kv.push("w", np.ones(500, F32))
        before = kv._transport.agreements
        np.testing.assert_allclose(kv.pull("w"), np.full(500, -change * kv.num_workers, F32), rtol=1e-3)
        assert kv._transport.agreements == before + 1


class Weighed(Recording):
    """Adds up the bytes of what is gathered and broadcast, too."""

    nbytes = 0

    def all_gather(self, buffer, counts):
        self.nbytes += buffer.nbytes
        super().all_gather(buffer, counts)

    def broadcast(self, buffer, root):
        self.nbytes += buffer.nbytes
        super().broadcast(buffer, root)


@pytest.mark.parametrize(("placement", "call"), [("root", "broadcast"), ("sharded", "all_gather")])
def test_half_as_many_bytes_travel_by_the_same_call(comm, transport, simulate_ranks_per_host, placement, call):
    sent = []
    for compression in ("bf16", both("bf16")):
        config = Config.read(transport=transport, placement=placement)
        group = ProcessGroup(comm, simulate_ranks_per_host if transport == "hierarchical" else 0)
        weighed = Weighed(open_transport(group, config))
        with mpikv.KVStore(group, StatusBoard(group), weighed, config) as kv:
            kv.set_gradient_compression(compression)
            kv.init("w", np.zeros(1_000_000, F32))
            kv.set_optimizer("sgd", learning_rate=0.5)
            kv.push("w", np.ones(1_000_000, F32))
            weighed.nbytes, _ = 0, weighed.take()
            assert (kv.pull("w") == -0.5 * kv.size).all()
            assert set(weighed.take()) == {call}
            sent.append(weighed.nbytes)
    assert sent[0] == 4_000_000
    assert 2_000_000 <= sent[1] < 2_001_000


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", ["2bit", "1bit", "topk", "lowrank"])
def test_codecs_that_do_not_fit(comm, name):
    with mpikv.create(comm=comm) as kv:
        with pytest.raises(mpikv.Unsupported, match=r"compress_pull is for fp16 and bf16, not for"):
            kv.set_gradient_compression(both(name))
        assert kv.compression is None
    with pytest.raises(mpikv.Unsupported, match="compress_pull"):
        mpikv.create(comm=comm, compression=both(name))


@pytest.mark.ranks(1, 2, 3)
def test_what_is_said_of_it(comm):
    with mpikv.create(comm=comm, compression=both("bf16")) as kv:
        assert kv.statistics()["compression"]["chosen"] == "bf16() with error feedback in both directions"
        assert kv.compression == mpikv.codecs.CompressedPull(kv.compression.codec)
        part = kv.group([0])
        if part is not None:
            assert part.compression == kv.compression
            part.close()
        for bad in ({"type": "bf16", "compress_pull": 1}, {"type": "bf16", "both_direction": True}):
            with pytest.raises((TypeError, mpikv.ConfigError), match="compress_pull"):
                kv.set_gradient_compression(bad)
        with pytest.raises(mpikv.ConfigError, match="of compression 'auto' is not a codec"):
            kv.set_gradient_compression({"type": "auto", "codec": both("bf16")})
        kv.set_gradient_compression("bf16")
        assert kv.statistics()["compression"]["chosen"] == "bf16() with error feedback"


def test_other_directions_on_another_rank(comm, transport):
    with mpikv.create(comm=comm, transport=transport) as kv:
        with pytest.raises(mpikv.RankMismatch, match="both directions"):
            kv.set_gradient_compression(both("bf16") if kv.is_root else "bf16")
        assert kv.compression is None


@pytest.mark.ranks(1, 2)
def test_nothing_travels_in_shared_memory(comm):
    """There a pull is exact."""
    with mpikv.create(comm=comm, compression=both("bf16")) as kv:
        kv.init("w", np.full(300, 1 / 3, F32))
        kv.set_optimizer("sgd", learning_rate=0.25)
        kv.push("w", np.ones(300, F32))
        np.testing.assert_array_equal(kv.pull("w"), np.full(300, 1 / 3, F32) - F32(0.25 * kv.size))


@pytest.mark.parametrize("placement", ["root", "sharded"])
def test_rows_are_not_pulled(comm, transport, placement):
    """Their owners have other values than those that ranks are to hold."""
    with mpikv.create(comm=comm, transport=transport, placement=placement, compression=both("bf16")) as kv:
        kv.init("w", np.ones((4, 3), F32))
        kv.set_optimizer("sgd", learning_rate=0.5)
        kv.push("w", np.ones((4, 3), F32))
        with pytest.raises(mpikv.Unsupported, match="pull the whole value"):
            kv.row_sparse_pull("w", row_ids=[1])
        np.testing.assert_array_equal(kv.pull("w"), np.full((4, 3), 1 - kv.num_workers / 2))


@pytest.mark.parametrize("placement", ["root", "sharded"])
@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_rows_that_are_given_are_exact_values(comm, transport, placement, optimizer):
    """Also in the place of a key that had others."""
    ids, shape = [1, 4], (6, 3)
    whole = np.zeros(shape, F32)
    whole[ids] = 2.001
    with mpikv.create(comm=comm, transport=transport, placement=placement, compression=both("bf16")) as kv:
        if optimizer:
            kv.set_optimizer(optimizer, learning_rate=0.5)
        kv.init("old", np.full(shape, 99, F32))
        kv.delete("old")
        kv.init("w", mpikv.RowSparse(ids, whole[ids], shape))
        np.testing.assert_array_equal(kv.pull("w"), whole)
        if optimizer:
            kv.push("w", np.ones(shape, F32))
            whole -= F32(kv.num_workers / 2)
        kv.set_gradient_compression(None)
        np.testing.assert_array_equal(kv.pull("w"), whole)
