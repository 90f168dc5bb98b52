"""Where values lie in memory."""

import os
import weakref
from itertools import pairwise

import numpy as np
import pytest

import mpikv
from mpikv.arrays.arrays import address_of
from mpikv.engine.arena import Arena
from mpikv.transports.local import LocalTransport

FLOAT, HALF, INT = np.dtype(np.float64), np.dtype(np.float16), np.dtype(np.int32)


class Counting(LocalTransport):
    """Knows how often and how much memory was asked for, as one of four ranks."""

    size = 4

    def __init__(self, limit=1 << 20):
        super().__init__(limit)
        self.allocated, self._memory, self.left = [], [], 1 << 40

    def allocate(self, nbytes):
        if nbytes > self.left:
            raise MemoryError
        self.allocated.append(nbytes)
        memory = super().allocate(nbytes)
        self._memory.append((nbytes, weakref.ref(memory.base)))
        return memory

    def held(self):
        """Return the bytes of what something refers to."""
        return sum(nbytes for nbytes, memory in self._memory if memory() is not None)


@pytest.fixture
def transport():
    return Counting()


@pytest.fixture
def arena(transport):
    return Arena(transport)


def spans(places):
    """Return the bytes of each place."""
    every = (place.block.values[place.start : place.start + place.size] for place in places)
    return [(address_of(values), address_of(values) + values.nbytes) for values in every]


def test_small_values_of_a_dtype_lie_side_by_side(arena):
    first, second, third = arena.place([(FLOAT, 3), (FLOAT, 5), (FLOAT, 1)])
    assert first.block is second.block is third.block
    assert [place.start for place in (first, second, third)] == [0, 3, 8]


def test_a_value_gets_the_smallest_hole_that_fits(arena):
    places = arena.place([(FLOAT, size) for size in (300, 1, 200, 1, 250, 1, 900)])
    before = spans(places)
    arena.release(places[::2])
    assert spans(arena.place([(FLOAT, 220)]))[0][0] == before[4][0]
    assert arena.place([(FLOAT, 260)])[0].start == places[0].start


def test_holes_that_touch_are_one(arena):
    first, second, third, _ = arena.place([(FLOAT, 100)] * 4)
    for place in (first, third, second):
        arena.release([place])
    (joined,) = arena.place([(FLOAT, 300)])
    assert (joined.block, joined.start) == (first.block, first.start)


def test_a_new_block_has_nothing_of_the_one_before(arena):
    """Its memory is that of another, and its state, its residuals and its buffers are not."""
    (place,) = arena.place([(FLOAT, 1 << 17)])
    place.block.ensure_state({"mean": FLOAT})
    place.block.state["mean"][:] = 7
    place.block.residuals.append(place.block.memory.zeros(4))
    where = spans([place])
    arena.release([place])
    (again,) = arena.place([(FLOAT, 1 << 17)])
    assert spans([again]) == where
    assert (again.block.state, again.block.residuals) == ({}, [])


def test_what_lacks_memory_changes_nothing(arena, transport):
    places = arena.place([(FLOAT, 10), (FLOAT, 1 << 18), (INT, 7)])
    before, loads = spans(places), list(arena._load)
    transport.left = 0
    with pytest.raises(MemoryError), arena.restored_on_memory_error():
        arena.place([(FLOAT, 9), (FLOAT, 1 << 18), (FLOAT, 1 << 24)], leaving=places)
    transport.left = 1 << 40
    assert arena._load == loads
    arena.release(places)
    assert spans(arena.place([(FLOAT, 10), (FLOAT, 1 << 18), (INT, 7)])) == before


@pytest.mark.parametrize("seed", range(int(os.environ.get("MPIKV_ARENA_SEEDS", "5"))))
def test_values_that_come_and_go(seed):
    """No two meet, each is kept as it was written, and memory stays near the most that was needed at one time."""
    draw = np.random.default_rng(seed)
    transport, live = Counting(), {}
    arena = Arena(transport, pooling=bool(seed % 4))
    most = 0
    for step in range(200):
        dtype = (FLOAT, HALF, INT)[draw.integers(3)]
        sizes = 2 ** draw.uniform(-1, (10, 16, 19)[draw.integers(3)], draw.integers(1, 4))
        sizes = [int(size) for size in np.repeat(sizes, draw.integers(1, 4))]
        leaving = [int(key) for key in draw.permutation(list(live))[: draw.integers(0, 5)]]
        given = [live.pop(key)[0] for key in leaving]
        if step % 3:
            places = arena.place([(dtype, size) for size in sizes], given)
            live |= {1000 * step + number: (place, step % 97) for number, place in enumerate(places)}
            for place in places:
                values = place.block.values[place.start : place.start + place.size]
                assert place.block.old or not values.any()
                assert address_of(place.block.values) % 64 == 0
                values[:] = step % 97
        else:
            arena.release(given)
        del given
        arena.shrink()
        for place, content in live.values():
            assert (place.block.values[place.start : place.start + place.size] == content).all(), f"seed {seed}"
        taken = sorted(spans(place for place, _ in live.values()))
        assert all(high <= low for (_, high), (low, _) in pairwise(span for span in taken if span[0] < span[1]))
        most = max(most, sum(high - low for low, high in taken))
        assert transport.held() <= 3 * most + (4 << 20), f"seed {seed}"
    arena.release([place for place, _ in live.values()])
    live.clear()
    arena.shrink()
    assert arena.blocks == ()
    del place, places, values
    assert transport.held() <= 8 << 20
    assert arena._load == [0] * 4


def test_a_value_that_grows_leaves_its_memory():
    with mpikv.create() as kv:
        kv.init("w", np.zeros(1 << 20))
        before = weakref.ref(kv.view("w").base.base)
        kv.init("w", np.zeros(1 << 22), overwrite=True)
        assert before() is None


def test_many_values_are_few_segments(arena, transport):
    """Each is a window of MPI, of which there are few thousand."""
    for _ in range(300):
        arena.place([(FLOAT, 1 << 14)])
    assert len(transport.allocated) < 25
    assert sum(transport.allocated) < 2.5 * 300 * (8 << 14)


def test_one_list_is_one_segment(arena, transport):
    arena.place([(FLOAT, 1 << 16)] * 50)
    assert len(transport.allocated) == 1


def test_owners_have_about_equally_much(arena):
    random = np.random.default_rng(1)
    arena.place([(FLOAT, int(size)) for size in random.integers(1 << 14, 1 << 17, 60)])
    loads = [0] * 4
    for block in arena.blocks:
        loads[block.grid.owner(0)] += block.values.nbytes
    assert max(loads) < 1.5 * min(loads)


def test_grids():
    arena = Arena(LocalTransport(4096))
    (place,) = arena.place([(FLOAT, 1300)])
    assert place.block.grid.cell_size == 512
    assert [place.block.grid.cell(element) for element in (0, 511, 512, 1299)] == [
        (0, 512),
        (0, 512),
        (512, 1024),
        (1024, 1300),
    ]
