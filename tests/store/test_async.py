"""Updates on arrival: no push is lost or counted twice, reads are whole and no older than the bound, and nobody hangs.

A rank's gradient is often its unit vector, so that a value says of each rank how many of its pushes it has.
"""

import os
import re
import sys
import time
from contextlib import nullcontext

import numpy as np
import pytest
from support import commands

import mpikv
from mpikv import (
    Closed,
    ConfigError,
    KeyNotInitialized,
    PeerFailed,
    RankMismatch,
    Stalled,
    TransportError,
    Unsupported,
    ValueMismatch,
)

ALL = pytest.mark.ranks(1, 2, 3, 4)
SEVERAL = pytest.mark.ranks(2, 3, 4)
BOUNDS = pytest.mark.parametrize("staleness", [None, 1, 3])
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "mpi"])


def create(**options):
    return mpikv.create(**{"name": "dist_async", "timeout": 20, **options})


@pytest.fixture
def staleness():
    return None


@pytest.fixture
def kv(staleness):
    with create(staleness=staleness) as store:
        yield store


def unit(kv):
    gradient = np.zeros(kv.size)
    gradient[kv.rank] = 1
    return gradient


def push_and_pull(kv, key, value):
    """Learn what comes of a push: by itself, or by the pull at the latest."""
    kv.push(key, value)
    kv.pull(key)


def push_often(kv):
    for _ in range(4):
        kv.pushpull("w", np.ones(2), out=np.empty(2))


def adding(kv, **values):
    """Let pushes add up, to these values."""
    kv.init(values)
    kv.set_optimizer("test", learning_rate=1.0, rescale_grad=-1.0)


# --- What is promised


@ALL
def test_a_pushpull_of_a_list_reads_all_before_it_fills(kv):
    adding(kv, a=np.zeros(2), b=np.zeros(2), c=np.zeros(2))
    kv.barrier()
    if kv.is_root:
        one, ten, six = (np.full(2, number) for number in (1.0, 10.0, 6.0))
        kv.pushpull(["a", "b", "c"], [one, ten, six], out=[ten, six, one])
        assert [ten[0], six[0], one[0]] == [1, 10, 6]
    kv.barrier()
    assert [kv.pull(key)[0] for key in "abc"] == [1, 10, 6]


@pytest.mark.feature("async-push")
@ALL
@BOUNDS
@pytest.mark.parametrize("transport", ["shm", "mpi", "hierarchical"])
def test_every_push_counts_once(staleness, transport):
    """Integers, whose sums are exact; every rank makes another number of pushes of each key, in an order of its own.

    In lists some requests and replies just fill a message, do not fit into it any more, or travel alone.
    """
    sizes = {"scalar": (), "few": (5,), "many": (7, 11), "large": (30_000,), "none": (0,)}
    sizes |= {"half": (4088,), "rest": (4088,), "full": (8184,), "long": (8185,)}
    numbers = {name: 3 + 2 * place for place, name in enumerate(sizes)}
    with create(staleness=staleness, transport=transport) as kv:
        kv.init({name: np.ones(shape) for name, shape in sizes.items()})
        adding(kv)
        random = np.random.default_rng(kv.rank)
        order = [name for name in sizes for _ in range(numbers[name])] + [*sizes] * kv.rank
        for step, name in enumerate(random.permutation(order).tolist()):
            mine = np.full(sizes[name], kv.rank + 1.0)
            if step % 4 == kv.rank % 4:
                value = kv.pushpull(name, mine)
                assert value.size == 0 or (value == value.flat[0]).all(), "half an update"
            else:
                kv.push(name, mine)
        for _ in range(3):
            names = random.permutation([*sizes]).tolist()
            given = [np.full(sizes[name], kv.rank + 1.0) for name in names]
            kv.push(names, given)
            values = kv.pushpull(names, given)
            assert all((value == value.flat[0]).all() for value in values if value.size)
        kv.barrier()
        for (name, shape), value in zip(sizes.items(), kv.pull([*sizes]), strict=True):
            counts = [numbers[name] + rank + 6 for rank in range(kv.size)]
            total = 1 + sum(count * (rank + 1) for rank, count in enumerate(counts))
            np.testing.assert_array_equal(value, np.full(shape, float(total)))
            assert kv.version(name) == sum(counts)


@ALL
@BOUNDS
def test_settings_that_change(kv):
    """By a call of all ranks, for the pushes after it: each takes the step of its time, however late a rank comes."""
    kv.init("w", np.zeros(2))
    kv.set_optimizer("sgd", learning_rate=1.0)
    for step in range(3):
        time.sleep(0.05 * (kv.rank == kv.size - 1))
        kv.set_learning_rate(10.0**-step)
        kv.push("w", np.ones(2))
    kv.barrier()
    np.testing.assert_allclose(kv.pull("w"), [-1.11 * kv.size] * 2, rtol=1e-12)
    kv.optimizer.momentum = 0.5
    with pytest.raises(ConfigError, match=r"push: an option .* call kv\.barrier\(\) on every rank first"):
        kv.push("w", np.ones(2))
    with pytest.raises((ConfigError, PeerFailed), match=r"keep .*momentum.* per element"):
        kv.barrier()
    kv.optimizer.momentum = 0.0
    kv.optimizer.learning_rate = 1.0
    kv.barrier()
    kv.push("w", np.full(2, 0.11))
    kv.barrier()
    np.testing.assert_allclose(kv.pull("w"), [-1.22 * kv.size] * 2, rtol=1e-12)
    for rate, text in ((-1.0, "learning_rate"), ("fast", "learning_rate")):
        with pytest.raises(ConfigError, match=text):
            kv.set_learning_rate(rate)
    assert kv.optimizer.learning_rate == 1.0


@SEVERAL
def test_settings_that_differ(kv):
    """Are found by the next collective call, and pushed with by nobody."""
    kv.init("clocks", np.zeros(kv.size))
    kv.set_optimizer("test", learning_rate=1.0)
    with pytest.raises(RankMismatch, match=r"calls set_learning_rate\(0.5\).* calls set_learning_rate\(2.0\)"):
        kv.set_learning_rate(2.0 if kv.rank == 1 else 0.5)
    assert kv.optimizer.learning_rate == 1.0
    if kv.rank == 1:
        kv.optimizer.learning_rate = 2.0
        with pytest.raises(ConfigError, match="an option of the optimizer was changed"):
            kv.push("clocks", unit(kv))
    else:
        kv.push("clocks", unit(kv))
    with pytest.raises(RankMismatch, match=r"rank 1 calls barrier\(\) \(item 0: updater .*=1.0.*=2.0"):
        kv.barrier()
    kv.optimizer.learning_rate = 1.0
    kv.barrier()
    assert kv.pull("clocks").tolist() == [-float(rank != 1) for rank in range(kv.size)]


@pytest.mark.feature("async-staleness")
@SEVERAL
@pytest.mark.parametrize("staleness", [1, 2])
def test_no_rank_is_further_ahead_than_the_bound(kv, staleness):
    """One rank is slow. What it reads has at most the bound more of the others, and theirs not less than that of it."""
    keys = ["clocks", "of another owner", "of a third"]
    adding(kv, **dict.fromkeys(keys, np.zeros(kv.size)))
    slow = kv.rank == kv.size - 1
    for count in range(1, 31):
        if slow:
            time.sleep(0.004)
        kv.push(keys, [unit(kv)] * 3)
        kv.push([], [])
        for clocks in kv.pull(keys):
            assert clocks[kv.rank] == count
            assert clocks.max() - clocks.min() <= staleness
    kv.barrier()
    np.testing.assert_array_equal(kv.pull("clocks"), np.full(kv.size, 30.0))
    assert kv.version("clocks") == 30 * kv.size
    largest = kv.statistics()["staleness"]["largest"]
    assert largest <= staleness
    # The owner has seen the others wait for the slow one.
    assert not kv.is_root or largest == staleness


@SEVERAL
def test_without_a_bound_nobody_waits(kv, comm):
    adding(kv, clocks=np.zeros(kv.size))
    if kv.rank:
        for _ in range(20):
            kv.push("clocks", unit(kv))
        assert kv.pull("clocks")[kv.rank] == 20
    comm.Barrier()  # rank 0 has pushed nothing
    kv.barrier()
    assert kv.pull("clocks").tolist() == [0.0] + [20.0] * (kv.size - 1)


@ALL
@BOUNDS
def test_a_rank_that_has_left_is_not_waited_for(kv):
    adding(kv, clocks=np.zeros(kv.size))
    for _ in range(4):  # in unequal portions
        for _ in range(1 + 3 * kv.rank):
            kv.push("clocks", unit(kv))
        kv.barrier()
    clocks = kv.pull("clocks")
    kv.barrier()
    assert clocks.tolist() == [4.0 + 12 * rank for rank in range(kv.size)]
    for _ in range(1 + 3 * kv.rank):
        kv.pushpull("clocks", unit(kv), out=np.empty(kv.size))


@pytest.mark.processes
@SEVERAL
@pytest.mark.parametrize("own", [5e-3, 1e-5])
def test_threads_change_places_often_while_one_answers(comm, own):
    """The program's own interval is back at the end of the last store, and stays if it is shorter.

    Python keeps whole microseconds of it.
    """
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(own)
        with create():
            with create():
                assert sys.getswitchinterval() == pytest.approx(min(own, 2e-5), rel=0.05)
            assert sys.getswitchinterval() == pytest.approx(min(own, 2e-5), rel=0.05)
        assert sys.getswitchinterval() == pytest.approx(own, rel=0.05)
        with create():
            sys.setswitchinterval(2e-3)
        assert sys.getswitchinterval() == pytest.approx(2e-3, rel=0.05)
    finally:
        sys.setswitchinterval(before)


@pytest.mark.processes
@SEVERAL
@BOUNDS
def test_a_push_does_not_wait_for_its_update(kv, folder):
    """The owner updates the value only once the push has returned, as a file tells."""

    def update(key, value, stored):
        until = time.monotonic() + 12
        while not (folder / "pushed").exists():
            assert time.monotonic() < until, "the push waits for its update"
            time.sleep(0.01)
        stored += value

    kv.init("w", np.zeros(2))  # of rank 0, as the first key
    kv.set_updater(update)
    if kv.rank == 1:
        kv.push("w", np.ones(2))
        (folder / "pushed").touch()
    kv.barrier()
    assert kv.pull("w").tolist() == [1, 1]


@pytest.mark.processes
@pytest.mark.ranks(2)
def test_an_answer_waits_for_no_other_update():
    """The second push waits for one slow update, and not for all that came in the same message."""
    with create(timeout=2.5) as kv:
        kv.init([*range(12)], [np.zeros(1)] * 12)
        kv.set_updater(lambda key, value, stored: time.sleep(0.5) or stored + value)
        if not kv.is_root:  # the owner of the even keys
            kv.push([*range(0, 12, 2)], [np.ones(1)] * 6)
            kv.push(0, np.ones(1))
        time.sleep(4)
        assert kv.pull(0)[0] == 2


@pytest.mark.processes
@SEVERAL
@pytest.mark.parametrize("work", ["python", "numpy", "sleep"])
@TRANSPORTS
def test_an_owner_answers_while_it_computes(folder, work, transport):
    """It is in no call of the store, nor of MPI, until the others are done with it, as their files tell."""
    with create(transport=transport) as kv:
        kv.init("w", np.zeros(50_000))  # of rank 0, as the first key
        adding(kv)
        if kv.rank == 0:
            until = time.monotonic() + 12
            while len(os.listdir(folder)) < kv.size - 1 and time.monotonic() < until:
                if work == "python":
                    sum(range(1000))
                elif work == "numpy":
                    np.sqrt(np.arange(200_000.0)).sum()
                else:
                    time.sleep(0.1)
            assert len(os.listdir(folder)) == kv.size - 1, "the others have waited for this rank"
        else:
            for _ in range(5):
                kv.pushpull("w", np.ones(50_000))
            (folder / str(kv.rank)).touch()
        kv.barrier()
        np.testing.assert_array_equal(kv.pull("w"), np.full(50_000, 5.0 * (kv.size - 1)))


@pytest.mark.processes
@SEVERAL
@TRANSPORTS
def test_an_idle_rank_takes_no_core(transport):
    """Not even after long messages, and then it wakes up again."""
    with create(transport=transport) as kv:
        adding(kv, small=np.zeros(4), large=np.zeros(400_000))
        for turn in range(2):
            kv.push(["small", "large"], [np.ones(4), np.ones(400_000)])
            kv.barrier()
            assert kv.pull("large")[0] == (turn + 1) * kv.size
            kv.barrier()
            before = time.process_time()
            time.sleep(1)
            assert time.process_time() - before < 0.004
            kv.barrier()


@SEVERAL
@BOUNDS
def test_a_push_that_comes_before_its_owner_is_ready(kv, monkeypatch):
    """The owner is the last to leave a collective call. What others push is applied by what was agreed on there."""
    begin = kv._begin
    if kv.is_root:
        monkeypatch.setattr(kv, "_begin", lambda: (time.sleep(0.1), begin()))
    began = time.monotonic()
    adding(kv, clocks=np.zeros(kv.size))
    kv.push("clocks", unit(kv))
    kv.init("clocks", np.ones(kv.size), overwrite=True)
    kv.push("clocks", unit(kv))
    assert kv.pull("clocks")[kv.rank] == 2
    kv.barrier()
    assert time.monotonic() - began < 5  # no early request waits for a later one
    assert kv.pull("clocks").tolist() == [2] * kv.size


@pytest.mark.feature("async-pull")
@ALL
def test_reads_are_whole(kv):
    """Of a value that takes long to copy, while others change it."""
    adding(kv, w=np.zeros(400_000))
    last = 0.0
    for _ in range(15):
        kv.push("w", np.ones(400_000))
        value = kv.pull("w")
        assert (value == value[0]).all()
        assert value[0] == kv.version("w") > last
        last = value[0]
    kv.barrier()
    assert kv.version("w") == 15 * kv.size


# --- All forms


@pytest.mark.feature("async-push")
@ALL
@BOUNDS
def test_an_updater_gets_what_was_pushed(kv):
    keys = []

    def update(key, given, stored):
        keys.append((key, given.copy()))
        return stored + 2 * given

    kv.init(["v", "w"], [np.zeros((2, 2)), np.zeros(3)])
    kv.set_updater(update)
    kv.push("w", np.ones(3))
    kv.barrier()
    assert kv.pull("w").tolist() == [2 * kv.size] * 3
    owner = 1 % kv.size
    assert [(key, given.tolist()) for key, given in keys] == [("w", [1, 1, 1])] * kv.size * (kv.rank == owner)


@ALL
@TRANSPORTS
def test_collective_calls_see_all_that_was_pushed(transport):
    with create(transport=transport) as kv:
        adding(kv, a=np.zeros(3), b=np.zeros(3))
        kv.push(["a", "b"], [np.ones(3)] * 2)
        kv.set_optimizer("test", learning_rate=0.5, rescale_grad=-1.0)
        kv.push("a", np.full(3, 4.0))
        assert kv.broadcast("c", np.full(2, 7.0)).tolist() == [7, 7]
        assert kv.pull("a").tolist() == [3 * kv.size] * 3
        assert [kv.version(key) for key in "abc"] == [2 * kv.size, kv.size, 0]
        kv.set("a", np.full(3, 8.0))
        kv.push("a", np.ones(3))
        kv.init("b", np.ones(5), overwrite=True)
        kv.delete("c")
        assert kv.keys() == ("a", "b")
        assert kv.pull("a").tolist() == [8 + 0.5 * kv.size] * 3
        assert kv.pull("b").tolist() == [1] * 5
        assert not kv.any_rank(False)
        assert kv.is_capable("async")
        assert (kv.type, kv.staleness, kv.placement) == ("dist_async", None, "owners")


@ALL
@TRANSPORTS
def test_checkpoints(transport, folder):
    """A store of either kind goes on from the other's file."""
    path = folder / "async.mpikv"

    def open_store(name):
        return mpikv.create(name, transport=transport, timeout=20)

    def push(kv):
        """Make pushes whose updates depend on those before: all ranks push the same, so that their order is one."""
        for step in range(3):
            kv.push("w", np.arange(5.0) * (step + 1))
            kv.barrier()
        return 3 * (kv.size if kv.type == "dist_async" else 1)

    for first, second in (("dist_async", "dist_sync"), ("dist_sync", "dist_async"), ("dist_async", "dist_async")):
        with open_store(first) as kv:
            kv.init(["other", "w"], [np.zeros(100), np.ones(5)])
            kv.set_optimizer("adam", learning_rate=0.1)
            before = push(kv)
            kv.save(path)
            saved = kv.pull("w")
            kv.barrier()  # else another rank may push already
            push(kv)
            expected = kv.pull("w")
        with open_store(second) as kv:
            kv.load(path)
            assert kv.version("w") == before
            np.testing.assert_array_equal(kv.pull("w"), saved)
            kv.barrier()
            after = before + push(kv)
            assert kv.version("w") == after
            if first == second:
                np.testing.assert_array_equal(kv.pull("w"), expected)


@ALL
def test_a_group_of_ranks(ranks):
    with create(staleness=1) as kv:
        part = kv.group([0])
        if part is not None:
            with part:
                assert (part.size, part.staleness, part.type) == (1, 1, "dist_async")
                adding(part, w=np.zeros(2))
                assert part.pushpull("w", np.ones(2)).tolist() == [1, 1]


@pytest.mark.feature("async-trainer")
@ALL
@BOUNDS
@pytest.mark.parametrize("on_store", [None, False])
def test_a_trainer_is_refused(kv, on_store):
    """Its rescale_grad belongs to one step of one rank, and an owner updates for other ranks outside of its own."""
    trainer = mpikv.Trainer({"w": np.ones(3)}, "sgd", {}, kv, update_on_kvstore=on_store)
    with pytest.raises(Unsupported, match=r"start: the store .* does not know the batch size"):
        trainer.start()
    assert kv.keys() == ()


# --- What goes wrong


@pytest.mark.feature("async-updater-required")
@ALL
def test_a_push_without_an_updater(kv):
    """Is refused on the rank that makes it, and the others do not notice."""
    kv.init("w", np.ones(2))
    if kv.rank == kv.size - 1:
        with pytest.raises(ConfigError, match=r"push: no updater is set, .*call set_optimizer"):
            kv.push("w", np.ones(2))
    assert kv.pull("w").tolist() == [1, 1]
    adding(kv)
    kv.push("w", np.ones(2))
    kv.barrier()
    assert kv.pull("w").tolist() == [1 + kv.size] * 2


@ALL
@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda kv: kv.push("v", np.ones(2)), KeyNotInitialized, "push: key 'v' was never"),
        (lambda kv: kv.pull("v"), KeyNotInitialized, "pull: key 'v' was never"),
        (lambda kv: kv.push("w", np.ones(3)), ValueMismatch, "push: value of key 'w' has shape"),
        (lambda kv: kv.push("w"), ValueMismatch, "push: no value for key 'w'"),
        (lambda kv: kv.push(["w", "x"], [np.ones(2), np.ones(9)]), ValueMismatch, "key 'x' has shape"),
        (lambda kv: kv.pull("w", out=np.ones(3)), ValueMismatch, "pull: the array to fill of key 'w' has shape"),
        (
            lambda kv: kv.pushpull("w", np.ones(2), out=np.ones(3)),
            ValueMismatch,
            "pushpull: the array to fill of key 'w'",
        ),
        (lambda kv: kv.push("w", np.ones(2), priority="high"), ValueMismatch, "push: priority is an int"),
        (lambda kv: kv.push("w", np.ones(2), wait=False), Unsupported, "wait=False"),
        (lambda kv: kv.buffer("w"), Unsupported, "buffer: the store 'dist_async' has no such call"),
        (lambda kv: kv.view("w"), Unsupported, "view"),
        (lambda kv: kv.join(), Unsupported, "join"),
        (lambda kv: kv.set_gradient_compression("fp16"), Unsupported, "set_gradient_compression"),
    ],
)
def test_bad_calls_concern_one_rank(kv, call, kind, text):
    adding(kv, w=np.ones(2), x=np.ones(2))
    if kv.rank == kv.size - 1:
        with pytest.raises(kind, match=text) as caught:
            call(kv)
        assert type(caught.value) is kind
    kv.push(["w", "x"], [np.ones(2)] * 2)
    kv.barrier()
    assert kv.pull("w").tolist() == kv.pull("x").tolist() == [1 + kv.size] * 2


@ALL
@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"staleness": 0}, ConfigError, "staleness=0 lets no rank .* 'dist_sync'"),
        ({"staleness": True}, ConfigError, "staleness=True"),
        ({"staleness": 1.0}, ConfigError, "staleness=1.0"),
        ({"staleness": np.True_}, ConfigError, "staleness=.*True"),
        ({"name": "dist_sync", "staleness": 1}, ConfigError, "staleness=1 is for 'dist_async'"),
        ({"placement": "root"}, Unsupported, "placement: not in asynchronous mode"),
        ({"deterministic": True}, Unsupported, "deterministic"),
        ({"compression": "fp16"}, Unsupported, "compression"),
    ],
)
def test_stores_that_cannot_be_made(options, kind, text):
    with pytest.raises(kind, match=f"create: {text}"):
        create(**options)


@pytest.mark.feature("async-names")
@ALL
def test_names():
    for name in ("dist_async", "Dist_Async", "dist_async_device", "dist_device_async"):
        with create(name=name) as kv:
            assert isinstance(kv, mpikv.AsyncKVStore)
            assert kv.type == name.lower()


@ALL
def test_an_option_of_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("MPIKV_PLACEMENT", "root")
    with pytest.raises(Unsupported, match="create: MPIKV_PLACEMENT, deterministic: not in asynchronous mode"):
        create(deterministic=True)


@SEVERAL
def test_ranks_that_differ_about_the_bound(comm):
    with pytest.raises(RankMismatch, match="staleness 1 on rank 0, 2 on rank 1"):
        create(staleness=1 + (comm.rank == 1))


@SEVERAL
def test_collective_calls_that_differ(comm):
    """With pushes on the way: all raise, nothing is lost, and the store goes on."""
    with create(staleness=1) as kv:
        adding(kv, clocks=np.zeros(kv.size))
        odd = kv.rank == kv.size - 1
        for shape in (2, 3):
            kv.push("clocks", unit(kv))
            with pytest.raises(RankMismatch, match="ranks disagree"):
                kv.init("w", np.zeros(shape if odd else shape + 1))
            kv.push("clocks", unit(kv))
            with pytest.raises(RankMismatch, match=r"calls barrier|calls vote"):
                kv.any_rank(True) if odd else kv.barrier()
        with pytest.raises(KeyError if odd else PeerFailed, match="never initialized"):
            kv.set("v" if odd else "clocks", np.zeros(kv.size))
        kv.push("clocks", unit(kv))
        kv.barrier()
        assert kv.pull("clocks").tolist() == [5] * kv.size


def guarded(key, given, stored):
    if (given < 0).any():
        stored += 100  # which must not be seen
        raise ValueError("a negative gradient")
    stored += given


@ALL
@BOUNDS
def test_an_updater_that_raises(kv):
    """The rank that has pushed is told, the others are not, and the value is as before."""
    kv.init(["v", "w"], [np.zeros(2), np.zeros(2)])  # of ranks 0 and 1
    kv.set_updater(guarded)
    odd, owner = kv.rank == kv.size - 1, kv.rank == 1 % kv.size
    if owner:
        text = "a negative gradient"
    else:
        text = f"rank {1 % kv.size}, the owner of key 'w', raised ValueError: a negative gradient .*test_async.py:"
    expected = pytest.raises(ValueError if owner else PeerFailed, match=text) if odd else nullcontext()
    with expected:
        push_and_pull(kv, "w", np.ones(2) * (-9 if odd else 1))
    kv.pull("v")
    kv.barrier()
    assert kv.pull("w").tolist() == [kv.size - 1.0] * 2
    kv.barrier()
    kv.push("w", np.ones(2))
    kv.barrier()
    assert kv.pull("w").tolist() == [2 * kv.size - 1.0] * 2


@SEVERAL
@BOUNDS
def test_a_push_that_is_interrupted_counts(kv):
    """By Ctrl-C in an update of the pushing rank, once another owner has its part: all ranks go on."""

    def update(key, value, stored):
        if value[0] < 0:
            raise KeyboardInterrupt
        stored += value

    kv.init(["a", "b"], [np.zeros(2)] * 2)  # of ranks 0 and 1
    kv.set_updater(update)
    odd = kv.rank == 1
    with pytest.raises(KeyboardInterrupt) if odd else nullcontext():
        kv.push(["b", "a"], [np.full(2, -1.0 if odd else 1.0), np.ones(2)])
    with pytest.raises(KeyboardInterrupt if odd else PeerFailed):
        kv.barrier()
    kv.barrier()
    assert (kv.pull("a")[0], kv.pull("b")[0]) == (kv.size, kv.size - 1)


@pytest.mark.ranks(1, 2)
def test_an_optimizer_that_fails_in_the_middle():
    """The rank that pushes is told; nobody is told that nothing has changed, and the others wait in vain."""

    class Breaking(mpikv.optimizers.Test):
        def rule(self, step, block):
            super().rule(step, block)
            raise MemoryError("no more")

    kv = create(timeout=2.0)
    kv.init("w", np.zeros(2))
    kv.set_optimizer(Breaking(learning_rate=1.0))
    pushes = kv.rank == kv.size - 1
    text = r"key 'w' failed halfway: MemoryError.*may be half changed" if pushes else r"waited [2-9]\.\d s for"
    with pytest.raises(TransportError, match=text):
        push_and_pull(kv, "w", np.ones(2)) if pushes else kv.barrier()


@SEVERAL
def test_a_failed_push_is_told_by_a_collective_call(kv):
    kv.init("w", np.zeros(2))
    kv.set_updater(guarded)
    last = kv.size - 1
    if kv.rank == last:
        kv.push("w", -np.ones(2))
    with pytest.raises(PeerFailed, match="a negative gradient") as caught:
        kv.barrier()
    assert caught.value.rank == (0 if kv.rank == last else last)
    kv.barrier()
    assert kv.pull("w").tolist() == [0, 0]


@SEVERAL
def test_a_store_after_one_in_which_ranks_were_late(caplog):
    """A rank that warns asks the others, and names the owner that updates, with the updater's line. It names none that
    waits for the owner, too. Nothing of that comes to the next store.
    """

    def update(key, given, stored):
        time.sleep(1.4 if key == owner else 0)
        stored += given

    for _ in range(2):
        with create(warn_after=0.1, staleness=1) as kv:
            owner = kv.size - 1
            kv.init(list(range(kv.size)), [np.zeros(4)] * kv.size)
            kv.set_updater(update)
            for _ in range(2 if kv.rank != owner else 0):
                kv.push(owner if kv.is_root else 0, np.ones(4))
            assert kv.rank == owner or re.search(rf"rank {owner} [^;]*test_async.py:\d+ in update", caplog.text)
            assert "push: rank 0" not in caplog.text
        with create() as kv:
            kv.init("w", np.full(4, 5.0))
            for _ in range(10):
                assert kv.pull("w").tolist() == [5.0] * 4


@ALL
def test_an_updater_that_calls_the_store(kv):
    kv.init("w", np.zeros(2))
    kv.set_updater(lambda key, given, stored: kv.pull("w"))
    with pytest.raises(Unsupported if kv.is_root else PeerFailed, match="an updater cannot call the store"):
        push_and_pull(kv, "w", np.ones(2))
    kv.barrier()
    assert kv.pull("w").tolist() == [0, 0]


@pytest.mark.processes
@SEVERAL
def test_a_late_rank_is_named(comm):
    """By those that wait for its pushes, although it owns nothing that they ask for."""
    kv = create(staleness=2, timeout=2.0)
    adding(kv, w=np.zeros(2))
    late = kv.size - 1
    if kv.rank != late:
        time.sleep(kv.is_root)  # it counts pushes, and has to be there when the others ask for whom they wait
        with pytest.raises(Stalled, match=rf"waited [2-9]\.\d s for ranks \[{late}\]") as caught:
            push_often(kv)
        # Where its code is can be seen on its host only.
        assert len(kv._group.hosts) > 1 or re.search(rf"rank {late} .*test_async.py", str(caught.value))
        assert caught.value.missing == (late,)
        with pytest.raises(Closed, match="Stalled"):
            kv.pull("w")
    comm.Barrier()
    if kv.rank == late:
        with pytest.raises(Stalled):
            kv.barrier()
    comm.Barrier()


@SEVERAL
def test_a_rank_that_does_not_come_to_a_collective_call(comm):
    kv = create(timeout=1.0)
    adding(kv, w=np.zeros(2))
    kv.push("w", np.ones(2))
    if kv.rank != 1:
        with pytest.raises(Stalled, match=r"barrier: waited [1-9]\.\d s for "):
            kv.barrier()
    comm.Barrier()
    kv.abandon("the test is over")


@ALL
def test_rows_are_refused():
    with mpikv.create("dist_async") as kv:
        rows = mpikv.RowSparse([1], np.ones((1, 2)), (3, 2))
        with pytest.raises(mpikv.Unsupported, match="init of a RowSparse"):
            kv.init("w", rows)
        kv.init("w", np.zeros((3, 2)))
        kv.set_optimizer("sgd")
        with pytest.raises(mpikv.Unsupported, match="takes no RowSparse"):
            kv.push("w", rows)
        with pytest.raises(mpikv.Unsupported, match="row_sparse_pull"):
            kv.row_sparse_pull("w", row_ids=[1])
        assert not kv.is_capable("sparse")
        kv.barrier()
        np.testing.assert_array_equal(kv.pull("w"), np.zeros((3, 2)))


# --- Ends of jobs


def job(folder, text, ranks, limit=40, **variables):
    """Run a script on some ranks; return its status, what it wrote, and seconds."""
    script = folder / "script.py"
    script.write_text(f"import mpikv, numpy as np, os, signal, sys, time\ntold = __file__ + '.told'\n{text}")
    started = time.monotonic()
    done = commands.mpikv("run", "-n", ranks, script, timeout=limit, **variables)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - started


LOOP = """
kv = mpikv.create("dist_async", staleness={staleness}, timeout=3)
kv.init(["a", "b", "c"], [np.zeros({size})] * 3)
kv.set_optimizer("test", learning_rate=1.0)
for step in range(200000):
    if step == 20 and kv.rank == 1:
        {fault}
    kv.pushpull(["a", "b", "c"], [np.ones({size}) for _ in range(3)])
"""


@pytest.mark.processes
@pytest.mark.deadline(120)
@pytest.mark.parametrize("staleness", [None, 1])
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1|one of the ranks .* was killed"),
        ("os._exit(0)", "rank 1"),
        ("raise OSError('no data')", r"\[rank 1/3\] OSError: no data"),
        # The third rank may be late, too: it waits for the second.
        ("signal.raise_signal(signal.SIGSTOP)", r"waited [3-9]\.\d s for ranks \[(1|2|1, 2)\], in .*: rank [12] began"),
    ],
)
def test_a_rank_that_dies_ends_the_job(tmp_path, fault, text, staleness):
    status, said, seconds = job(tmp_path, LOOP.format(fault=fault, staleness=staleness, size=5), 3)
    assert status != 0
    assert re.search(text, said), said
    assert seconds < 30


@pytest.mark.processes
@pytest.mark.deadline(120)
@pytest.mark.parametrize("size", [5, 400_000])
@pytest.mark.parametrize("end", ["raised and caught", "not closed", "left early"])
def test_the_end_of_the_program_does_not_hang(tmp_path, size, end):
    """With messages on their way, small ones and such that need both sides."""
    last = {
        "raised and caught": "kv.abandon('the test is over')",
        "not closed": "pass",
        "left early": "if kv.rank == 1: sys.exit(0)",
    }[end]
    text = f"""
kv = mpikv.create("dist_async", timeout=3)
kv.init(["a", "b", "c"], [np.zeros({size})] * 3)
kv.set_optimizer("test", learning_rate=1.0)
for step in range(3):
    kv.push(["a", "b", "c"], [np.ones({size})] * 3)
kv.barrier()
kv.push(["a", "b", "c"], [np.ones({size})] * 3)
{last}
"""
    status, said, seconds = job(tmp_path, text, 3)
    assert status == 0, said
    assert seconds < 30


# Of both libraries, as if ranks were on hosts of their own.
NETWORK = {"MPIR_CVAR_NOLOCAL": "1", "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self"}


@pytest.mark.processes
@pytest.mark.deadline(240)
def test_the_end_of_the_program_over_a_network(tmp_path):
    """Large letters are still on their way when a thread stops to receive: nothing is freed into which MPI writes."""
    text = """
from mpikv.transports import rpc

def gone(self):
    if self.coming:
        print("freed while a letter of rank", self.coming, "comes", flush=True)

rpc._Inbox.__del__ = gone
kv = mpikv.create("dist_async", timeout=5, transport="mpi")
kv.init([f"k{i}" for i in range(8)], [np.zeros(2_000_000)] * 8)
kv.set_optimizer("test", learning_rate=1.0)
kv.barrier()
if kv.rank == 0:
    time.sleep(0.05 * np.random.rand())
else:
    for i in range(8):
        kv.push(f"k{i}", np.ones(2_000_000))
kv.abandon("the test is over")
"""
    for _ in range(3):
        status, said, seconds = job(tmp_path, text, 2, **NETWORK)
        assert status == 0, said
        assert "freed" not in said
        assert seconds < 30


@pytest.mark.processes
@pytest.mark.deadline(120)
def test_a_long_push_arrives_without_a_further_call(tmp_path):
    """MPI sends it in pieces, inside of calls that the sleeping thread of its sender has to make."""
    text = """
kv = mpikv.create("dist_async")
kv.init("w", np.zeros(2_000_000))
kv.set_optimizer("test", learning_rate=1.0)
kv.barrier()
time.sleep(0.5)
if kv.rank == 1:
    kv.push("w", np.ones(2_000_000))
    until = time.monotonic() + 20
    while not (arrived := os.path.exists(told)) and time.monotonic() < until: time.sleep(0.05)
    print("arrived:", arrived)
else:
    while not kv.pull("w")[0]: time.sleep(0.05)
    open(told, "w").close()
kv.close()
"""
    status, said, _ = job(tmp_path, text, 2, **NETWORK)
    assert status == 0, said
    assert "arrived: True" in said


@pytest.mark.processes
@pytest.mark.deadline(120)
@pytest.mark.parametrize("call", ["pass", "kv.barrier()", "kv.close()"])
def test_an_updater_that_does_not_return_ends_the_job(tmp_path, call):
    """Also where its owner's program comes to its end: MPI would wait for the others, who wait for the owner."""
    text = f"""
def stuck(key, given, stored):
    while True: time.sleep(0.5)

kv = mpikv.create("dist_async", timeout=2)
kv.init("w", np.zeros(4))
kv.set_updater(stuck)
if kv.rank == 1:
    try:
        kv.push("w", np.ones(4))
        kv.pull("w")
    except mpikv.Stalled as error:
        print("caught", error, flush=True)
else:
    time.sleep(0.5)
    try:
        {call}
    except mpikv.Stalled as error:
        print("caught", error, flush=True)
    kv.abandon("given up")
"""
    status, said, seconds = job(tmp_path, text, 2)
    assert status != 0
    assert re.search(r"caught pull: waited [2-9]\.\d s for ranks \[0\]", said), said
    # The owner's own error names its updater, and not only the rank that waits for it.
    assert call != "kv.barrier()" or re.search(r"caught barrier: .* rank 0 .* in stuck; rank 1 began", said), said
    assert seconds < 30


class RowMeans(mpikv.optimizers.Optimizer):
    """An update that is not one of each element by itself."""

    elementwise = False

    def update(self, step, total, value, state):
        value -= total.mean(axis=-1, keepdims=True)


@ALL
def test_an_optimizer_of_whole_values_sees_their_shape(kv):
    kv.init("w", np.zeros((2, 3)))
    kv.set_optimizer(RowMeans())
    kv.push("w", np.arange(6.0).reshape(2, 3))
    kv.pull("w")
    kv.barrier()
    np.testing.assert_array_equal(kv.pull("w"), -kv.size * np.array([[1.0] * 3, [4.0] * 3]))


@pytest.mark.processes
@pytest.mark.deadline(120)
def test_a_thread_that_ends_says_so_at_once(tmp_path):
    """Its rank computes, and will not call the store for long."""
    text = """
class Breaking(mpikv.optimizers.Optimizer):
    def rule(self, step, block): raise MemoryError("no more")

kv = mpikv.create("dist_async", timeout=2)
kv.init("w", np.zeros(4))
kv.set_optimizer(Breaking())
if kv.rank == 1:
    try:
        kv.push("w", np.ones(4))
        kv.pull("w")
    except mpikv.TransportError as error:
        print("caught", error, flush=True)
    open(told, "w").close()
else:
    while not os.path.exists(told): time.sleep(0.01)
    time.sleep(1)
    print("computed", file=sys.stderr, flush=True)
    try:
        kv.barrier()
    except mpikv.TransportError as error:
        print("caught too", error, flush=True)
"""
    _, said, seconds = job(tmp_path, text, 2)
    assert re.search(r"the thread of rank 0 that answers other ranks has ended.*HalfUpdated[\s\S]*computed", said), said
    assert re.search(r"caught p\w+: rank 0, the owner of key 'w', raised HalfUpdated: .* failed halfway", said), said
    assert re.search(r"caught too barrier: the thread that answers other ranks has ended", said), said
    assert seconds < 30
