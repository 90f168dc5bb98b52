"""The store p3: the values of dist_sync, where more urgent calls pass between the messages of a large one."""

from __future__ import annotations

import random
import sys
import threading
import time

import numpy as np
import pytest

import mpikv
from mpikv import (
    Closed,
    ConfigError,
    KeyNotInitialized,
    PeerFailed,
    RankMismatch,
    Unsupported,
    ValueMismatch,
    work,
)
from mpikv.exchange import Exchange
from mpikv.testing import Recording

# They hold messages of real threads back.
pytestmark = [pytest.mark.ranks(1, 2, 3, 4), pytest.mark.processes]

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "mpi", "hosts"])
# Elements of float64 in a message of 4096 bytes.
MESSAGE = 512
LARGE = 4 * MESSAGE
LATE = 300


class Held(Recording):
    """Writes down how large the messages of sums are, and holds some of them until the test goes on."""

    holds = ()
    """Which messages it holds, counted from 1."""

    def __init__(self, transport):
        super().__init__(transport)
        self.sums = []
        self.reached, self.released = threading.Semaphore(0), threading.Semaphore(0)

    def noted(self, send):
        self.sums.append(send.size)
        if len(self.sums) in self.holds:
            self.reached.release()
            assert self.released.acquire(timeout=20)

    def reduce(self, send, recv, root):
        self.noted(send)
        return super().reduce(send, recv, root)

    def allreduce(self, send, recv):
        self.noted(send)
        return super().allreduce(send, recv)

    def reduce_scatter(self, send, recv, counts):
        self.noted(send)
        return super().reduce_scatter(send, recv, counts)

    def all_to_all(self, send, counts):
        self.noted(send)
        return super().all_to_all(send, counts)


@pytest.fixture
def make(comm, monkeypatch):
    """Return what makes a store with messages of 4096 bytes, and the transport that holds them."""
    create = sys.modules["mpikv.create"]  # by this name the package has the function
    opened = create.open_transport

    def made(name="p3", **options):
        held = []

        def wrapped(*arguments):
            held.append(Held(opened(*arguments)))
            return held[0]

        with monkeypatch.context() as patch:
            patch.setattr(create, "open_transport", wrapped)
            kv = mpikv.create(name, **{"comm": comm, "timeout": 20, "bucket_bytes": 4096, **options})
        return kv, held[0]

    return made


@pytest.fixture
def meet(comm):
    return comm.Barrier if comm else lambda: None


def held_in(kv, held, meet, call):
    """Make a call with wait=False and hold its second message, once the store has begun nothing else."""
    kv.barrier()
    held.sums.clear()
    held.holds = (2,)
    made = call()
    assert held.reached.acquire(timeout=20)
    meet()
    return made


def let_go(held, meet):
    meet()  # all ranks have issued all
    held.released.release()


# --- The order


@TRANSPORTS
@pytest.mark.feature("p3-order")
def test_an_urgent_push_passes_the_messages_that_wait(make, meet, transport):
    kv, held = make(transport=transport)
    with kv:
        kv.init(["large", "late"], [np.zeros(LARGE), np.zeros(LATE)])
        large = held_in(kv, held, meet, lambda: kv.push("large", np.ones(LARGE), priority=-1, wait=False))
        late = kv.push("late", np.full(LATE, 2.0), wait=False)
        let_go(held, meet)
        late.wait(20)
        large.wait(20)
        assert held.sums == [MESSAGE, MESSAGE, LATE, MESSAGE, MESSAGE]
        np.testing.assert_array_equal(kv.pull("large"), np.full(LARGE, kv.size))
        np.testing.assert_array_equal(kv.pull("late"), np.full(LATE, 2.0 * kv.size))


@pytest.mark.feature("p3-order")
def test_calls_of_equal_or_less_urgency_wait(make, meet):
    kv, held = make()
    with kv:
        kv.init(["large", "late"], [np.zeros(LARGE), np.zeros(LATE)])
        held_in(kv, held, meet, lambda: kv.push("large", np.ones(LARGE), priority=2, wait=False))
        kv.push("late", np.ones(LATE), priority=1, wait=False)
        last = kv.push("late", np.ones(LATE), priority=2, wait=False)
        let_go(held, meet)
        last.wait(20)
        kv.barrier()
        assert held.sums == [MESSAGE] * 4 + [LATE, LATE]


@TRANSPORTS
@pytest.mark.feature("p3-order")
def test_no_call_passes_one_of_its_own_keys(make, meet, transport):
    """Nor, by way of another key, one that has to wait itself; what has other keys passes them all."""
    kv, held = make(transport=transport)
    with kv:
        kv.init(["large", "late", "other"], [np.zeros(LARGE), np.zeros(LATE), np.zeros(7)])
        held_in(kv, held, meet, lambda: kv.push("large", np.ones(LARGE), priority=-1, wait=False))
        large, late, other = np.full(LARGE, 2.0), np.full(LATE, 2.0), np.full(7, 2.0)
        kv.push({"late": late, "large": large}, priority=5, wait=False)
        kv.push("late", np.full(LATE, 3.0), priority=4, wait=False)
        kv.push(["other"], [other], priority=3, wait=False)
        pulled = kv.pull("large", priority=9, wait=False)
        let_go(held, meet)
        np.testing.assert_array_equal(pulled.wait(20), np.full(LARGE, kv.size))
        kv.barrier()
        assert held.sums[:5] == [MESSAGE, MESSAGE, 7, MESSAGE, MESSAGE]
        assert sum(held.sums[5:-1]) == LARGE + LATE
        assert held.sums[-1] == LATE
        np.testing.assert_array_equal(kv.pull("large"), np.full(LARGE, 2.0 * kv.size))
        np.testing.assert_array_equal(kv.pull("late"), np.full(LATE, 3.0 * kv.size))


@pytest.mark.parametrize(("most", "expected"), [(1, "aaaacbb"), (2, "aabbcaa"), (16, "aabcbaa")])
@pytest.mark.feature("p3-order")
def test_a_call_that_has_passed_is_passed_in_turn(make, meet, monkeypatch, most, expected):
    """Unless there are too many on the stack."""
    monkeypatch.setattr(work, "_MOST_BEGUN", most)
    kv, held = make()
    with kv:
        # Of other dtypes, so that each has messages of a size of its own.
        values = {"a": np.ones(LARGE), "b": np.ones(4 * MESSAGE, np.float32), "c": np.ones(9, np.int64)}
        kv.init(values)
        held_in(kv, held, meet, lambda: kv.push("a", values["a"], priority=1, wait=False))
        held.holds = (2, 3)
        works = [kv.push("b", values["b"], priority=2, wait=False)]
        let_go(held, meet)
        assert held.reached.acquire(timeout=20)
        works.append(kv.push("c", values["c"], priority=3, wait=False))
        let_go(held, meet)
        for one in works:
            one.wait(20)
        kv.barrier()
        assert "".join({MESSAGE: "a", 2 * MESSAGE: "b", 9: "c"}[size] for size in held.sums) == expected
        for key, value in values.items():
            np.testing.assert_array_equal(kv.pull(key), value * kv.size)


@pytest.mark.feature("p3-values")
@pytest.mark.parametrize("seed", range(4))
@TRANSPORTS
def test_random_programs(comm, transport, seed):
    """Beside numpy in one process; ranks issue at moments of their own. Keys that are called together are as urgent."""
    alike, own = random.Random(seed), random.Random(f"{seed} {comm and comm.rank}")
    groups = {-2: {"a": 9000, "b": 1500}, 0: {"c": 3000, "d": 1, "e": 0}, 1: {"f": 700, "g": 5000}, 5: {"h": 40}}
    sizes = {key: size for group in groups.values() for key, size in group.items()}
    stored = {key: np.zeros(size) for key, size in sizes.items()}
    promised = []
    with mpikv.create("p3", comm=comm, transport=transport, timeout=20, bucket_bytes=4096) as kv:
        kv.init(stored)
        if seed % 2:
            kv.set_optimizer("sgd", learning_rate=0.5)
        for _ in range(60):
            priority, group = alike.choice(list(groups.items()))
            keys = alike.sample(sorted(group), alike.randint(1, len(group)))
            verb, number = alike.choice(["push", "pull", "pushpull"]), alike.randint(-9, 9)
            values = [np.full(sizes[key], float(number * (kv.rank + 1))) for key in keys]
            if verb != "pull":
                total = number * kv.size * (kv.size + 1) / 2
                for key in keys:
                    stored[key] = stored[key] - 0.5 * total if seed % 2 else np.full(sizes[key], total)
            if verb == "push":
                promised.append((kv.push(keys, values, priority=priority, wait=False), None))
            elif verb == "pull":
                promised.append((kv.pull(keys, priority=priority, wait=False), [stored[key] for key in keys]))
            else:
                made = kv.pushpull(keys, values, priority=priority, wait=False)
                promised.append((made, [stored[key] for key in keys]))
            time.sleep(own.choice([0, 0, 0, 0.002]))
            if own.random() < 0.05:
                promised[-1][0].wait(20)
        for made, expected in promised:
            for one, right in zip(made.wait(20) or (), expected or (), strict=True):
                np.testing.assert_array_equal(one, right)
        for key, last in stored.items():
            np.testing.assert_array_equal(kv.pull(key), last)


# --- The values

UPDATERS = {
    "none": (None, True),
    "sgd": (("sgd", {"momentum": 0.5}), True),
    "adam": (("adam", {"wd": 0.1}), True),
    **{
        name: ((name, {}), True)
        for name in ("adadelta", "adagrad", "adamax", "adamw", "ftrl", "nadam", "rmsprop", "signum", "test")
    },
    "half": (("adam", {"multi_precision": True}), True),
    "lamb": (("lamb", {}), False),
    "lars": (("lars", {"momentum": 0.5}), False),
    "function": (lambda key, total, stored: stored - 0.25 * total, False),
    "2bit": (("sgd", {}), False),
}


@pytest.mark.feature("p3-values")
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("updater", UPDATERS)
@TRANSPORTS
def test_the_bits_of_dist_sync(make, meet, monkeypatch, transport, updater, streamed):
    """Whether a call is passed or not: those with sums of whole values, and compressed ones, are not."""
    if streamed:
        monkeypatch.setattr("mpikv.exchange._STREAMED_BYTES", 0)
    (given, passed), dtype = UPDATERS[updater], np.float16 if updater == "half" else np.float32
    sizes = {"large": 8000, "late": 150}
    options = {"transport": transport, "deterministic": transport == "mpi" and updater != "2bit"}
    results = []
    for name in ("p3", "dist_sync"):
        kv, held = make(name, **options, compression="2bit" if updater == "2bit" else None)
        with kv:
            kv.init({key: np.ones(size, dtype) for key, size in sizes.items()})
            if callable(given):
                kv.set_updater(given)
            elif given:
                kv.set_optimizer(given[0], **given[1])
            pulled = []
            for step in range(3):
                numbers = np.random.default_rng([kv.rank, step])
                values = {key: numbers.normal(size=size).astype(dtype) for key, size in sizes.items()}
                first = held_in(
                    kv, held, meet, lambda kv=kv, values=values: kv.pushpull("large", values["large"], wait=False)
                )
                late = kv.pushpull("late", values["late"], np.empty(150, dtype), priority=1, wait=False)
                let_go(held, meet)
                pulled += [late.wait(20).tobytes(), first.wait(20).tobytes()]
                kv.barrier()
                last = len(held.sums) - 1
                assert held.sums.index(min(held.sums)) == (2 if passed and name == "p3" else last), held.sums
            pulled += [kv.pull(key).tobytes() for key in sizes]
            results.append(pulled)
    assert results[0] == results[1]


@pytest.mark.feature("p3-trainer")
def test_a_trainer(comm):
    results = []
    for name in ("p3", "dist_sync"):
        params = {"w": np.ones((60, 70)), "b": np.zeros(3)}
        with mpikv.create(name, comm=comm, deterministic=True) as kv:
            trainer = mpikv.Trainer(params, "adam", {"learning_rate": 0.1}, kvstore=kv)
            for step in range(3):
                numbers = np.random.default_rng([kv.rank, step])
                trainer.set_grads({key: numbers.normal(size=value.shape) for key, value in params.items()})
                trainer.step(kv.size)
            assert trainer.update_on_kvstore
        results.append({key: value.tobytes() for key, value in params.items()})
    assert results[0] == results[1]


# --- Mistakes and the end


@TRANSPORTS
def test_an_urgent_call_that_fails_leaves_the_one_that_it_has_passed(make, meet, transport):
    kv, held = make(transport=transport)
    with kv:
        kv.init(["large", "late"], [np.zeros(LARGE), np.ones(LATE)])
        large = held_in(kv, held, meet, lambda: kv.push("large", np.ones(LARGE), priority=-1, wait=False))
        bad = kv.push("late", np.ones(LATE + (kv.rank == kv.size - 1)), priority=3, wait=False)
        unknown = kv.push("unknown", np.ones(2), priority=2, wait=False)
        other = kv.push("late", np.ones(LATE), wait=False) if kv.is_root else kv.pull("late", wait=False)
        let_go(held, meet)
        with pytest.raises(ValueMismatch if kv.rank == kv.size - 1 else PeerFailed, match="shape"):
            bad.wait(20)
        with pytest.raises(KeyNotInitialized):
            unknown.wait(20)
        if kv.size > 1:
            with pytest.raises(RankMismatch):
                other.wait(20)
        large.wait(20)
        np.testing.assert_array_equal(kv.pull("large"), np.full(LARGE, kv.size))
        np.testing.assert_array_equal(kv.pull("late"), np.full(LATE, 1.0))
        kv.push("late", np.ones(LATE))
        np.testing.assert_array_equal(kv.pull("late"), np.full(LATE, kv.size))


@pytest.mark.ranks(2, 3)
@TRANSPORTS
def test_ranks_with_other_priorities_part_nowhere(make, meet, transport):
    """Where one rank has nothing that may pass, or something else, nothing passes on any."""
    kv, held = make(transport=transport)
    with kv:
        kv.init(["large", "late", "other"], [np.zeros(LARGE), np.ones(LATE), np.ones(3)])
        large = held_in(kv, held, meet, lambda: kv.push("large", np.ones(LARGE), priority=-1, wait=False))
        works = [
            kv.push("late", np.ones(LATE), priority=2 if kv.is_root else 3, wait=False),
            kv.push("other", np.ones(3), priority=3 if kv.is_root else 2, wait=False),
        ]
        let_go(held, meet)
        large.wait(20)
        for one in works:
            with pytest.raises(RankMismatch):
                one.wait(20)
        np.testing.assert_array_equal(kv.pull("large"), np.full(LARGE, kv.size))
        np.testing.assert_array_equal(kv.pull("late"), np.ones(LATE))
        assert held.sums == [MESSAGE] * 4


@pytest.mark.ranks(2, 3)
@TRANSPORTS
def test_a_rank_that_is_ahead_and_has_other_priorities(make, meet, transport):
    """All have something that may pass, but not all among what all have issued."""
    kv, held = make(transport=transport)
    with kv:
        kv.init(["large", "late", "other"], [np.zeros(LARGE), np.ones(LATE), np.ones(3)])
        large = held_in(kv, held, meet, lambda: kv.push("large", np.ones(LARGE), wait=False))
        late = kv.push("late", np.ones(LATE), priority=3 if kv.is_root else -5, wait=False)
        works = [] if kv.is_root else [kv.push("other", np.ones(3), priority=9, wait=False)]
        let_go(held, meet)
        large.wait(20)
        works += [kv.push("other", np.ones(3), priority=9, wait=False)] if kv.is_root else []
        with pytest.raises(RankMismatch):
            late.wait(20)
        works[0].wait(20)
        np.testing.assert_array_equal(kv.pull("large"), np.full(LARGE, kv.size))
        np.testing.assert_array_equal(kv.pull("other"), np.full(3, kv.size))
        assert held.sums == [MESSAGE] * 4 + [3]


def test_a_call_within_one_that_was_passed_is_refused(make, meet, monkeypatch):
    """As within one that was not: what runs in it, as an optimizer's rule, cannot call the store."""
    kv, held = make()
    take, refused = Exchange._take, []

    def taking(exchange, *arguments):
        with pytest.raises(Unsupported, match="the store is in push"):
            kv.barrier()
        refused.append(True)
        take(exchange, *arguments)

    with kv:
        kv.init(["large", "late"], [np.zeros(LARGE), np.ones(LATE)])
        large = held_in(kv, held, meet, lambda: kv.push("large", np.ones(LARGE), wait=False))
        monkeypatch.setattr(Exchange, "_take", taking)
        kv.push("late", np.ones(LATE), priority=1, wait=False)
        let_go(held, meet)
        large.wait(20)
        monkeypatch.undo()
        assert len(refused) == 4
        assert held.sums[2] == LATE


def test_an_urgent_call_that_ends_the_store(make, meet, monkeypatch):
    kv, held = make()
    kv.init(["large", "late"], [np.zeros(LARGE), np.ones(LATE)])
    large = held_in(kv, held, meet, lambda: kv.push("large", np.ones(LARGE), priority=-1, wait=False))

    def failing(exchange, plan, targets):
        raise OSError("broken")

    monkeypatch.setattr(Exchange, "pull", failing)
    late = kv.pull("late", wait=False)
    let_go(held, meet)
    with pytest.raises(OSError, match="broken"):
        late.wait(20)
    with pytest.raises(Closed, match=r"push\('large'\): pull\('late'\), which has passed it, has ended the store"):
        large.wait(20)
    assert held.sums == [MESSAGE] * 2
    with pytest.raises(Closed):
        kv.barrier()


def test_the_end_of_a_store_waits_for_all(make, meet):
    kv, held = make()
    with kv:
        kv.init(["large", "late"], [np.zeros(LARGE), np.zeros(LATE)])
        works = [held_in(kv, held, meet, lambda: kv.push("large", np.ones(LARGE), wait=False))]
        works += [kv.push("late", np.ones(LATE), priority=1, wait=False)]
        works += [kv.pull("large", wait=False)]
        let_go(held, meet)
    assert all(one.done for one in works)
    np.testing.assert_array_equal(works[-1].wait(), np.full(LARGE, kv.size))


@pytest.mark.ranks(2, 4)
def test_in_join_all_wait(comm):
    with mpikv.create("p3", comm=comm, timeout=20, bucket_bytes=4096) as kv:
        kv.init("w", np.zeros(LARGE))
        error = Unsupported if kv.is_root else PeerFailed
        with pytest.raises(error, match=r"wait=False cannot be used in join\(\)"), kv.join():
            _ = [kv.push("w", np.ones(LARGE), wait=False).wait() for _ in range(kv.is_root)]
        with kv.join():
            for _ in range(1 + kv.rank):
                kv.push("w", np.ones(LARGE))
        np.testing.assert_array_equal(kv.pull("w"), np.ones(LARGE))


# --- How it is asked for


@pytest.mark.parametrize("name", ["p3", "P3", "dist", "DIST_SYNC", "local"])
@pytest.mark.feature("p3-name", "p3-variable")
def test_names_and_the_variable(make, meet, monkeypatch, name):
    if name.lower() != "p3":
        monkeypatch.setenv("DMLC_PS_VAN_TYPE", "P3")
    monkeypatch.setenv("MXNET_KVSTORE_SLICE_THRESHOLD", "2000")
    kv, held = make(name, bucket_bytes=None)
    with kv:
        assert kv.type == name.lower()
        kv.init("w", np.zeros(5000, np.float32))
        held.sums.clear()
        kv.push("w", np.ones(5000, np.float32))
        assert held.sums == ([5000] if name == "local" else [2000, 2000, 1000])


@pytest.mark.feature("p3-variable")
def test_the_number_of_elements(comm, monkeypatch):
    for text in ("many", "0", "-1", "1.5", "", "²", str(2**40)):
        monkeypatch.setenv("MXNET_KVSTORE_SLICE_THRESHOLD", text)
        with pytest.raises(ConfigError, match="is not a number of elements from 1 to"):
            mpikv.create("p3", comm=comm)
        mpikv.create("p3", comm=comm, bucket_bytes=4096).close()
        mpikv.create("dist_sync", comm=comm).close()


@pytest.mark.ranks(2, 3)
@pytest.mark.feature("p3-variable")
def test_ranks_with_other_variables(comm, monkeypatch):
    if comm.rank:
        monkeypatch.setenv("DMLC_PS_VAN_TYPE", "p3")
    with pytest.raises(RankMismatch, match="sliced False on rank 0, True on rank 1"):
        mpikv.create("dist_sync", comm=comm, bucket_bytes=4096)
