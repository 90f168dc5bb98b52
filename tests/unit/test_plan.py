"""How lists of keys are cut into messages."""

import gc
from itertools import pairwise
from weakref import ref

import numpy as np
import pytest

from mpikv.arrays.arrays import zeros
from mpikv.compute.kernels import NumpyKernels
from mpikv.engine.arena import Arena, Block, Place
from mpikv.engine.grid import Grid
from mpikv.engine.keys import Entry, KeyTable
from mpikv.engine.placement import Replicated, Sharded
from mpikv.engine.plan import Plan, Planner, Plans, label
from mpikv.transports.local import LocalTransport

LIMIT = 4096
FLOAT, HALF, INT = np.dtype(np.float64), np.dtype(np.float16), np.dtype(np.int32)


class Seat(LocalTransport):
    """One of several ranks, for what is decided without moving data."""

    def __init__(self, rank, size):
        super().__init__(LIMIT)
        self.rank, self.size = rank, size


def entries(requests, seat=None, slots=None):
    """Return entries for (key, shape, dtype)."""
    arena, table = Arena(seat or Seat(0, 1)), KeyTable()
    places = arena.place([(dtype, int(np.prod(shape))) for _, shape, dtype in requests])
    for block in arena.blocks:
        block.state = {name: np.zeros(block.values.size, dtype) for name, dtype in (slots or {}).items()}
    made = zip(requests, places, strict=True)
    return [table.add(key, shape, dtype, place) for (key, shape, dtype), place in made]


class Quiet:
    """An updater that is never run."""

    may_raise = assigns = by_key = False

    def __init__(self, whole, state):
        self.elementwise, self._state = not whole, state

    def slots(self, dtype):
        return {name: array.dtype for name, array in self._state.items()}

    def bind(self, total, value, state):
        return lambda step: None


def plan_of(chosen, seat=None, placement=Replicated, whole=False):
    seat = seat or Seat(0, 1)
    updater = Quiet(whole, chosen[0].place.block.state if chosen else {})
    return Plan(Planner(seat, placement(seat), updater, NumpyKernels(), zeros(2 * LIMIT)), chosen)


def test_neighbours_are_one_message():
    made = entries([(f"k{number}", (10,), FLOAT) for number in range(20)])
    plan = plan_of(made)
    assert len(plan.buckets) == 1
    assert len(plan.buckets[0].pieces) == 20
    assert plan.rows == plan.buckets[0].items == slice(0, 20)
    assert plan.buckets[0].gapless
    assert len(plan.buckets[0].updates) == 20
    assert len(plan.buckets[0].joint_updates) == 1


def test_keys_with_equal_steps_are_bound_together():
    """Binding each key by itself would take longer than all else that a first push does."""
    bound = []
    plan = plan_of(entries([(f"k{number}", (10,), FLOAT) for number in range(20)]))
    plan.planner.updater.bind = lambda total, value, state: bound.append(value.size)
    plan.prepare()
    assert bound == [200]
    plan.prepare_updates()
    assert bound == [200, *[10] * 20]


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("elements", [1, 1000, 4096])
def test_shards_are_of_one_size(size, elements):
    """But for the last ones, and begin where no two ranks write to one line of a cache."""
    counts = Sharded(Seat(0, size)).shard(0, elements, (0, elements), (0,) * (size + 1), 0).counts
    assert sum(counts) == elements
    assert max(counts) < elements / size + 64
    assert all(edge % 64 == 0 for edge in np.cumsum(counts) if edge < elements)


@pytest.mark.parametrize("low", [0, 2**31 - 700, 2**33 + 5, 2**40])
def test_offsets_beyond_32_bits(low):
    """Memory that is never touched: offsets, buckets and shares far into a block."""
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.int8), (2**41,), (0,), writeable=False)
    block = Block(0, huge, Grid(huge.size, LIMIT, (0, 0, 2**41, 2**41)), Seat(1, 3), (0, 0), False)
    entry = Entry("w", 0, (10000,), np.dtype(np.int8), Place(block, low, 10000), huge[low : low + 10000])
    plan = plan_of([entry], Seat(1, 3), Sharded)
    assert sum(bucket.value.size for bucket in plan.buckets) == 10000
    for bucket in plan.buckets:
        assert sum(bucket.shard.counts) == bucket.value.size
    positions = [(piece.begin, piece.end) for bucket in plan.buckets for piece in bucket.pieces]
    assert positions[0][0] == 0
    assert positions[-1][1] == 10000
    assert all(end == begin for (_, end), (begin, _) in pairwise(positions))
    edges = {low + begin for begin, _ in positions[1:]}
    assert all(edge % LIMIT == 0 for edge in edges)


@pytest.mark.parametrize(("placement", "ahead"), [(Sharded, 3), (Replicated, 0)])
def test_a_transport_with_messages_in_flight_gets_them_ahead_of_the_first_update(placement, ahead):
    """But for sums at every rank, which MPI makes."""

    class Flying(Seat):
        ahead = 3
        apart = sent = wait_for = note_read = LocalTransport.close

    plan = plan_of(entries([("w", (10 * LIMIT,), FLOAT)], seat := Flying(0, 2)), seat, placement)
    plan.prepare()
    assert [ready is None for _, ready in plan.schedule] == ahead * [True] + len(plan.buckets) * [False]
    assert plan.overlaps is (ahead > 0)


def test_labels():
    assert label(["w"]) == "'w'"
    assert label([1, 2]) == "[1, 2]"
    assert label(list(range(10))) == "[0, … 10 keys … 9]"
    assert label([]) == "[]"


class TestPlans:
    """What is kept of them."""

    @pytest.fixture
    def made(self):
        return entries([(number, (2,), FLOAT) for number in range(1000)])

    def test_lists_are_kept_up_to_a_number_of_keys(self, made, monkeypatch):
        """Those that are dropped give their memory back at once, without the garbage collector."""
        monkeypatch.setattr("mpikv.engine.plan._MOST_KEYS", 1000)
        plans, lists = Plans(), []
        gc.collect()
        gc.disable()
        try:
            for length in range(2, 200):
                plan = plan_of(made[:length])
                plan.prepare()
                plans.add(plan, 100)
                lists.append(ref(plan))
            del plan
            kept = [plan for made in lists if (plan := made()) is not None]
        finally:
            gc.enable()
        assert [len(plan.keys) for plan in kept] == list(range(200 - len(kept), 200))
        assert 0 < sum(len(plan.keys) for plan in kept) <= 1000
        assert all(plans.lists.get(plan.keys) is plan for plan in kept)

    def test_single_keys_and_lists_of_nearly_all_are_kept(self, made, monkeypatch):
        """However many there are: they are no more than the store has."""
        monkeypatch.setattr("mpikv.engine.plan._MOST_KEYS", 10)
        plans, lists = Plans(), [plan_of(made[:800]), plan_of(made[200:]), plan_of(made)]
        for entry in made:
            plans.add(plan_of([entry]), 1000)
        for _ in range(3):
            for each in lists:
                assert plans.lists.get(each.keys) is each or plans.add(each, 1000) is None
        assert [plans.lists.get(each.keys) for each in lists] == lists
        assert list(plans.single) == list(range(1000))
        plans.clear()
        assert not plans.single
        assert plans.lists.get(lists[0].keys) is None
