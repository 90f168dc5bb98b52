"""What goes wrong in kv.join(), and what lies in it; random programs compare the values, see test_differential.py."""

import numpy as np
import pytest
from support.oracle import swap

import mpikv
from mpikv import Closed, PeerFailed, RankMismatch, Stalled, TransportError, Unsupported
from mpikv.cluster.mpi_library import library_of
from mpikv.cluster.tracebacks import place_of
from mpikv.testing.faulty import store_over
from mpikv.testing.wrappers import Wrapper

ALL = pytest.mark.ranks(1, 2, 3, 4)
SEVERAL = pytest.mark.ranks(2, 3, 4)


@pytest.fixture
def kv(comm, transport):
    with mpikv.create(comm=comm, transport=transport, timeout=10, bucket_bytes=4096) as store:
        yield store


def in_block(kv, work=lambda: None):
    with kv.join():
        work()


def is_last(kv):
    return kv.rank == kv.size - 1


@SEVERAL
@pytest.mark.parametrize("verb", ["push", "pushpull"])
def test_a_call_that_failed_before_the_block(kv, verb):
    """What a rank had prepared for it is not what it brings once it has left."""
    kv.init("w", np.zeros(5))
    with pytest.raises((mpikv.ValueMismatch, PeerFailed), match="shape"):
        getattr(kv, verb)("w", np.full(6 if is_last(kv) else 5, 7.0))
    in_block(kv, lambda: is_last(kv) and getattr(kv, verb)("w", np.ones(5)))
    np.testing.assert_array_equal(kv.pull("w"), np.ones(5))


@SEVERAL
@pytest.mark.parametrize("verb", ["push", "pushpull"])
def test_errors_with_buffers(kv, verb):
    """Whatever goes wrong, a rank that has left gets its buffers back."""

    def update(key, given, stored):
        stored += given
        if broken:
            raise ZeroDivisionError("a mistake in the updater")

    broken = [True]
    kv.init("w", np.full(600, 5.0))
    kv.set_updater(update)
    buffer, last = kv.buffer("w"), kv.size - 1
    buffer.fill(kv.rank + 1)
    with pytest.raises((ZeroDivisionError, PeerFailed), match="a mistake in the updater"):
        in_block(kv, lambda: kv.is_root or getattr(kv, verb)("w"))
    if kv.size > 2:
        work = {0: lambda: None, last: lambda: kv.push("w", np.ones(600))}
        with pytest.raises(RankMismatch, match="from the buffers"):
            in_block(kv, work.get(kv.rank, lambda: kv.push("w")))
    with pytest.raises((mpikv.ValueMismatch, PeerFailed), match="shape"):
        in_block(kv, lambda: kv.is_root or kv.push("w", np.ones(7)))
    broken.clear()
    np.testing.assert_array_equal(buffer, np.full(600, kv.rank + 1.0))
    np.testing.assert_array_equal(kv.pull("w"), np.full(600, 5.0))
    in_block(kv, lambda: kv.is_root or getattr(kv, verb)("w"))
    np.testing.assert_array_equal(kv.pull("w"), np.full(600, 5.0 + kv.size * (kv.size + 1) / 2 - 1))
    np.testing.assert_array_equal(buffer, np.full(600, kv.rank + 1.0))


@pytest.mark.ranks(2, 3)
def test_large_values(comm, transport):
    """From 8 MiB on a pushpull delivers early."""
    size = (8 << 20) // 4 + 1000
    with mpikv.create(comm=comm, transport=transport) as kv:
        kv.init("w", np.zeros(size, np.float32))
        with kv.join():
            for turn in range(1 + kv.rank):
                value = np.ones(size, np.float32)
                kv.pushpull("w", value)
                assert (value == kv.size - turn).all()
        assert (kv.pull("w") == 1).all()


@SEVERAL
def test_blocks_in_a_block(kv):
    """The inner one waits for all; those who have no work left are in neither."""
    kv.init("w", np.zeros(2))
    with kv.join():
        with kv.join():
            for _ in range(kv.rank):
                kv.push("w", np.ones(2))
        assert (kv.pull("w") == 1).all()
        with pytest.raises(Unsupported, match="wait=False"):  # the outer one goes on
            kv.push("w", np.ones(2), wait=False)
        for _ in range(kv.size - kv.rank):
            kv.push("w", np.full(2, 2.0))
    np.testing.assert_array_equal(kv.pull("w"), np.full(2, 2.0))


@SEVERAL
def test_other_stores_in_the_block(kv, comm):
    """A private store is nobody else's concern; one of all ranks has a block of its own."""
    kv.init("w", np.zeros(2))
    with mpikv.create(comm=comm, timeout=10) as other:
        other.init("v", np.zeros(2))
        with mpikv.create(comm=library_of(comm).COMM_SELF) as own, kv.join():
            own.init("mine", np.zeros(2))
            for turn in range(kv.rank):
                own.push("mine", np.full(2, float(turn)))
                kv.push("w", own.pull("mine"))
        with other.join():
            for _ in range(kv.size - kv.rank):
                other.push("v", np.ones(2))
        np.testing.assert_array_equal(kv.pull("w"), np.full(2, kv.size - 2.0))
        np.testing.assert_array_equal(other.pull("v"), np.ones(2))


@SEVERAL
def test_two_stores_cannot_be_left_at_once(comm, transport):
    """A rank waits in the inner block and cannot take part in calls of the outer store; a deadline ends that."""
    outer, inner = (mpikv.create(comm=comm, transport=transport, timeout=0.4, warn_after=100) for _ in range(2))
    outer.init("w", np.zeros(2))

    def work():
        for _ in range(1 + is_last(outer)):
            outer.push("w", np.ones(2))

    with pytest.raises(Stalled), outer.join():
        in_block(inner, work)
    comm.Barrier()
    for store in (outer, inner):
        store.abandon("its ranks are not in step")


# --- Errors


@SEVERAL
@pytest.mark.parametrize(
    "verb", ["init", "set", "broadcast", "delete", "buffer", "set_updater", "set_optimizer", "overwrite", "updater"]
)
def test_calls_that_cannot_be_joined(kv, verb):
    kv.init("w", np.full(2, 5.0))
    calls = {
        "init": lambda: kv.init("v", np.ones(2)),
        "overwrite": lambda: kv.init("w", np.ones(3), overwrite=True),
        "set": lambda: kv.set("w", np.ones(2)),
        "broadcast": lambda: kv.broadcast("w", np.ones(2)),
        "delete": lambda: kv.delete("w"),
        "buffer": lambda: kv.buffer("w"),
        "set_updater": lambda: kv.set_updater(swap),
        "set_optimizer": lambda: kv.set_optimizer("sgd"),
        "updater": lambda: kv.updater(swap),
    }
    last = kv.size - 1
    with pytest.raises(RankMismatch, match=rf"rank {last} calls .*left join\(\).*nothing was changed"):
        in_block(kv, calls[verb] if kv.rank == last else lambda: None)
    assert kv.keys() == ("w",)
    np.testing.assert_array_equal(kv.pull("w"), np.full(2, 5.0))
    kv.push("w", np.ones(2))
    np.testing.assert_array_equal(kv.pull("w"), np.full(2, kv.size))


@SEVERAL
def test_a_pending_call_that_ends_the_store_before_the_block(comm):
    class Broken(Wrapper):
        broken = False

        def before(self, call):
            if self.broken and call in self.data:
                raise TransportError("the cable is cut")

    made = []
    kv = store_over(lambda inner: made.append(Broken(inner)) or made[0], comm=comm, transport="mpi", timeout=5)
    kv.init("w", np.zeros(2))
    made[0].broken = True
    work = kv.push("w", np.ones(2), wait=False)
    with pytest.raises(Closed, match=r"ended in an earlier call.*the cable is cut"), kv.join():
        pytest.fail("the block of a store that has ended")
    with pytest.raises(TransportError, match="the cable is cut"):
        work.wait()
    with pytest.raises(Closed):
        kv.pull("w")


@pytest.mark.processes
@SEVERAL
def test_an_error_of_the_script_while_others_have_left(comm, transport, simulate_ranks_per_host):
    """They wait for the rank in vain, and are told where it is. Uncaught, the error would have ended the job."""
    kv = mpikv.create(comm=comm, transport=transport, timeout=1.0, warn_after=100)
    kv.init("w", np.zeros(2))
    last = kv.size - 1
    if kv.rank == last:
        with pytest.raises(ArithmeticError, match="mine"), kv.join():
            raise ArithmeticError("mine")
        comm.Barrier()
        with pytest.raises(Stalled, match="given up"):
            kv.pull("w")
    else:
        host, of_last = (rank // simulate_ranks_per_host for rank in (kv.rank, last))
        there = transport != "hierarchical" or host == of_last or last > of_last * simulate_ranks_per_host
        told = rf"rank {last} began call #1 init\('w'\) last" if there else f"host .* does not answer: its rank {last}"
        with pytest.raises(Stalled, match=rf"^join: waited .*{told}") as caught:
            in_block(kv)
        assert caught.value.missing == (last,)
        comm.Barrier()
    with pytest.raises(Closed, match="the store ended in an earlier call"):
        kv.pull("w")


@SEVERAL
@pytest.mark.parametrize("placement", ["root", "sharded", "replicated"])
@pytest.mark.parametrize("verb", ["push", "pushpull"])
def test_a_learning_rate_that_changes_after_others_have_left(comm, transport, placement, verb):
    """Those who have left would update their part with the old rate."""
    with mpikv.create(comm=comm, transport=transport, placement=placement, timeout=10) as kv:
        kv.init("w", np.zeros(40000))
        kv.set_optimizer("sgd", learning_rate=1.0)

        def work():
            getattr(kv, verb)("w", np.ones(40000))
            if is_last(kv):
                kv.set_learning_rate(0.5)
                getattr(kv, verb)("w", np.ones(40000))

        with pytest.raises((RankMismatch, PeerFailed), match=r"learning_rate=0\.5.*nothing was changed"):
            in_block(kv, work)
        kv.set_learning_rate(1.0)
        np.testing.assert_array_equal(kv.pull("w"), np.full(40000, -float(kv.size)))
        with kv.join():
            for _ in range(1 + is_last(kv)):
                kv.push("w", np.ones(40000))
        np.testing.assert_array_equal(kv.pull("w"), np.full(40000, -2.0 * kv.size - 1))


@SEVERAL
def test_a_schedule_that_raises_on_a_rank_that_has_left(kv):
    def schedule(count):
        if count == 2 and kv.is_root and broken:
            raise LookupError("no rate for 2")
        return 1.0

    broken = [True]
    kv.init("w", np.zeros(2))
    kv.set_optimizer("sgd", lr_scheduler=schedule)

    def work():
        for _ in range(1 + (not kv.is_root)):
            kv.push("w", np.ones(2))

    with pytest.raises((LookupError, PeerFailed), match="no rate for 2") as caught:
        in_block(kv, work)
    assert isinstance(caught.value, LookupError if kv.is_root else PeerFailed)
    np.testing.assert_array_equal(kv.pull("w"), np.full(2, -float(kv.size)))
    broken.clear()
    kv.push("w", np.ones(2))
    np.testing.assert_array_equal(kv.pull("w"), np.full(2, -2.0 * kv.size))


@ALL
def test_a_closed_store(comm, transport):
    kv = mpikv.create(comm=comm, transport=transport)
    for _ in range(2):
        with pytest.raises(Closed, match=r"^join: the store was closed"):
            in_block(kv, kv.close)


@pytest.mark.processes
@SEVERAL
def test_a_store_that_ended_in_the_block(comm, transport):
    kv = mpikv.create(comm=comm, transport=transport, timeout=1.0, warn_after=100)

    def work():
        if is_last(kv):
            comm.Barrier()
        with pytest.raises(Stalled):
            kv.barrier()
        if not is_last(kv):
            comm.Barrier()

    with pytest.raises(Closed, match="the store ended in an earlier call"):
        in_block(kv, work)


@pytest.mark.ranks(2, 3)
def test_the_end_of_a_block_points_at_the_block(kv):
    """And not at Python's own code, which has called the store there."""
    kv.init("w", np.zeros(2))
    with pytest.raises(RankMismatch) as caught:
        in_block(kv, (lambda: kv.set("w", np.ones(2))) if kv.rank == 1 else lambda: None)
    assert f" at {__file__}:" in place_of(caught.value)
