"""Large arrays that the ranks of a host read where they lie: what a store promises about them holds all the same."""

import time

import numpy as np
import pytest

import mpikv
from mpikv.cluster.process_group import ProcessGroup
from mpikv.errors import PeerFailed, Stalled
from mpikv.protocols import Sum
from mpikv.transports.cma import Attached, CopyChoice, attach

SIZE = 100_003
"""Elements: several buckets of the smallest size that is lent."""

# Ranks read each other by the system, and share files, whatever library has started them.
pytestmark = [pytest.mark.ranks(2, 3, 4), pytest.mark.one_library]


@pytest.fixture(params=["all lend", "some lend", "by time"])
def kv(request, comm, monkeypatch):
    """A store of which some ranks are slow to read what the others have lent."""
    if request.param != "by time":
        way = int(request.param == "all lend" or comm.rank % 2)
        monkeypatch.setattr(CopyChoice, "next", lambda faster: way)
    with create(comm, bucket_bytes=128 << 10) as store:
        read = Attached.read

        def read_late(attached, place, address, into):
            time.sleep(2e-3 * (comm.rank == 1))
            read(attached, place, address, into)

        monkeypatch.setattr(Attached, "read", read_late)
        yield store


def reads_in_place(store):
    """Return whether ranks read each other's large arrays where they lie."""
    return store._exchange.transport.single_copy


def create(comm, **settings):
    store = mpikv.create("dist_sync", comm=comm, **settings)
    if not reads_in_place(store):
        store.close()
        pytest.skip("the system does not let ranks read each other's memory")
    return store


def push_and_change(kv, array, expected):
    """Push an array, change it as soon as it may be, and compare the value."""
    kv.push("w", array)
    array.fill(np.nan)
    np.testing.assert_array_equal(kv.pull("w"), expected)


def given(rank, number=0):
    return np.random.default_rng((rank, number)).integers(-1000, 1000, SIZE).astype(np.float64)


def total(kv, number=0):
    return sum(given(rank, number) for rank in range(kv.num_workers))


def test_a_pushed_array_may_be_changed_at_once(kv):
    kv.init("w", np.zeros(SIZE))
    for number in range(3):
        push_and_change(kv, given(kv.rank, number), total(kv, number))


def test_an_array_that_is_pushed_and_pulled_into(kv):
    kv.init("w", np.zeros(SIZE))
    for number in range(3):
        array = given(kv.rank, number)
        kv.pushpull("w", array)
        np.testing.assert_array_equal(array, total(kv, number))


def test_in_place_where_values_are_delivered_while_others_are_summed(kv):
    keys = list(range(12))
    kv.init(keys, [np.zeros(SIZE)] * 12)
    arrays = [given(kv.rank, key) for key in keys]
    kv.pushpull(keys, arrays)
    for key in keys:
        np.testing.assert_array_equal(arrays[key], total(kv, key))


def test_only_some_ranks_bring_arrays_that_can_be_read_so(kv):
    kv.init("w", np.zeros(SIZE))
    for number in range(3):
        array = np.repeat(given(kv.rank, number), 2)[::2] if (kv.rank + number) % 2 else given(kv.rank, number)
        push_and_change(kv, array, total(kv, number))


def test_a_root_that_owns_everything(kv, comm):
    with mpikv.create("dist_sync", comm=comm, placement="root", root=comm.size - 1) as other:
        other.init("w", np.zeros(SIZE))
        for number in range(3):
            push_and_change(other, given(kv.rank, number), total(kv, number))


class Twice:
    """Has an array summed, and changes it as soon as it has the sum."""

    elementwise = feedback = False

    def settings(self):
        return "twice"

    def state(self, shape):
        return {}

    def exchange(self, gradient, shape, state, residual=None):
        own = gradient.copy()
        total = yield Sum(gradient)
        gradient.fill(np.nan)
        return total, own


def test_a_codec_that_uses_its_array_again(kv):
    kv.init("w", np.zeros(SIZE, np.float32))
    kv.set_gradient_compression(Twice())
    for number in range(3):
        kv.push("w", given(kv.rank, number).astype(np.float32))
        np.testing.assert_array_equal(kv.pull("w"), total(kv, number))


def test_ranks_that_have_left(kv):
    """They bring no arrays."""
    kv.init("w", np.zeros(SIZE))
    with kv.join():
        for number in range(1 + kv.rank):
            array = given(kv.rank, number)
            kv.push("w", array)
            array.fill(np.nan)
    np.testing.assert_array_equal(kv.pull("w"), given(kv.num_workers - 1, kv.num_workers - 1))


def test_an_updater_that_raises(kv):
    kv.init("w", np.zeros(SIZE))
    kv.set_updater(lambda key, pushed, stored: 1 // 0)
    for number in range(2):
        array = given(kv.rank, number)
        with pytest.raises((ZeroDivisionError, PeerFailed)):
            kv.push("w", array)
        array.fill(np.nan)
    np.testing.assert_array_equal(kv.pull("w"), np.zeros(SIZE))


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_optimizer(kv, comm, deterministic):
    value, rate = np.zeros(SIZE), 0.5
    with mpikv.create("dist_sync", comm=comm, bucket_bytes=128 << 10, deterministic=deterministic) as other:
        other.init("w", value)
        other.set_optimizer(mpikv.optimizers.create("sgd", learning_rate=rate))
        for number in range(3):
            array, out = given(kv.rank, number), np.empty(SIZE)
            other.pushpull("w", array, out)
            array.fill(np.nan)
            value = value - rate * total(kv, number)
            np.testing.assert_array_equal(out, value)


def test_an_updater_of_whole_values(kv):
    kv.init("w", np.zeros(SIZE))
    kv.set_updater(lambda key, pushed, stored: np.add(stored, 2 * pushed, out=stored))
    push_and_change(kv, given(kv.rank), 2 * total(kv))


def test_calls_that_nobody_waits_for(kv):
    keys = list(range(4))
    kv.init(keys, [np.zeros(SIZE)] * 4)
    if not kv._group.threads:
        pytest.skip("MPI allows one thread only")
    arrays = [given(kv.rank, key) for key in keys]
    works = [kv.push(key, arrays[key], wait=False) for key in keys]
    for key, work in zip(keys, works, strict=True):
        work.wait()
        arrays[key].fill(np.nan)
    for key in keys:
        np.testing.assert_array_equal(kv.pull(key), total(kv, key))


def test_another_process_of_the_same_number(comm, monkeypatch):
    """What can be read must be what was to be found."""
    group = ProcessGroup(comm)
    monkeypatch.setattr(Attached, "read", lambda attached, place, address, into: into.fill(1))
    assert attach(group) is None
    group.close()


def test_turned_off(comm, monkeypatch):
    monkeypatch.setenv("MPIKV_SINGLE_COPY", "0")
    with mpikv.create("dist_sync", comm=comm) as kv:
        assert not reads_in_place(kv)


def test_an_array_that_cannot_be_lent(kv, comm, monkeypatch):
    """As memory of a device."""
    kv.init("w", np.zeros(SIZE))
    secret = [given(kv.rank), given(kv.rank, 1)]
    call = Attached.is_readable

    def is_readable(attached, array):
        return not any(np.may_share_memory(array, other) for other in secret) and call(attached, array)

    monkeypatch.setattr(Attached, "is_readable", is_readable)
    for number, array in enumerate(secret):
        push_and_change(kv, array, total(kv, number))


@pytest.mark.deadline(120)
def test_ranks_that_give_up_while_another_reads(comm, monkeypatch, folder):
    """What they then do to their arrays must not get into a sum unseen."""
    read = Attached.read

    def read_too_late(attached, place, address, into):
        while comm.rank == 1 and into.nbytes > 16 and len(list(folder.iterdir())) < comm.size - 1:
            time.sleep(0.01)
        read(attached, place, address, into)

    monkeypatch.setattr(Attached, "read", read_too_late)
    monkeypatch.setattr(CopyChoice, "next", lambda faster: 1)
    kv = create(comm, timeout=2)
    kv.init("w", np.zeros(SIZE))
    array = given(comm.rank)
    with pytest.raises(Stalled):
        kv.push("w", array)
    array.fill(np.nan)
    (folder / str(comm.rank)).touch()
    comm.Barrier()
