"""Where values lie in memory."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from mpikv.arena import Arena
from mpikv.transports.local import LocalTransport

FLOAT, HALF, INT = np.dtype(np.float64), np.dtype(np.float16), np.dtype(np.int32)


class Counting(LocalTransport):
    """Knows how often and how much memory was asked for, as one of four ranks."""

    size = 4

    def __init__(self, limit=1 << 20):
        super().__init__(limit)
        self.allocated = []

    def allocate(self, nbytes):
        self.allocated.append(nbytes)
        return super().allocate(nbytes)


@pytest.fixture
def arena():
    return Arena(Counting())


def spans(places):
    """Return the bytes of each place."""
    result = []
    for place in places:
        values = place.block.values[place.start : place.start + place.size]
        low = values.__array_interface__["data"][0]
        result.append((low, low + values.nbytes))
    return result


def test_small_values_of_a_dtype_lie_side_by_side(arena):
    first, second, third = arena.place([(FLOAT, 3), (FLOAT, 5), (FLOAT, 1)])
    assert first.block is second.block is third.block
    assert [place.start for place in (first, second, third)] == [0, 3, 8]


def test_dtypes_have_their_own_blocks(arena):
    first, second, third = arena.place([(FLOAT, 3), (INT, 5), (HALF, 5)])
    assert len({id(place.block) for place in (first, second, third)}) == 3
    assert [place.block.values.dtype for place in (first, second, third)] == [FLOAT, INT, HALF]


def test_large_values_have_their_own_blocks(arena):
    large, small, other = arena.place([(FLOAT, 1 << 20), (FLOAT, 3), (FLOAT, 1 << 14)])
    assert len({id(place.block) for place in (large, small, other)}) == 3
    assert large.block.values.size == 1 << 20
    assert large.block.cell == (1 << 20) // 8


@pytest.mark.parametrize("dtype", [FLOAT, HALF, INT, np.dtype(np.int8), np.dtype(np.complex128)])
def test_places_do_not_overlap_and_blocks_are_aligned(arena, dtype):
    random = np.random.default_rng(0)
    sizes = [int(size) for size in random.integers(0, 20000, 200)]
    places = arena.place([(dtype, size) for size in sizes])
    assert [place.size for place in places] == sizes
    ordered = sorted(span for span in spans(places) if span[0] != span[1])
    assert all(high <= low for (_, high), (low, _) in pairwise(ordered))
    for block in arena.blocks:
        assert block.values.__array_interface__["data"][0] % 64 == 0
        assert not block.values.any()
    assert [block.index for block in arena.blocks] == list(range(len(arena.blocks)))


def test_memory_never_moves(arena):
    first = arena.place([(FLOAT, 100)])
    before = spans(first)
    first[0].block.values[:100] = 7
    arena.place([(FLOAT, 1 << 18)] * 8)
    assert spans(first) == before
    assert (first[0].block.values[:100] == 7).all()


def test_a_released_place_is_given_to_a_value_of_its_size(arena):
    small, large = arena.place([(FLOAT, 10), (FLOAT, 1 << 20)])
    arena.release(small)
    arena.release(large)
    assert arena.place([(INT, 10), (FLOAT, 11)]) != [small, small]
    assert arena.place([(FLOAT, 10), (FLOAT, 1 << 20)]) == [small, large]
    again = arena.place([(FLOAT, 10)])
    assert again != [small]


def test_places_that_come_and_go_need_no_more_memory(arena):
    requests = [(FLOAT, 1 << 19), (FLOAT, 100), (INT, 1 << 20)]
    for place in arena.place(requests):
        arena.release(place)
    blocks, allocated = len(arena.blocks), sum(arena._transport.allocated)
    for _ in range(20):
        for place in arena.place(requests):
            arena.release(place)
    assert len(arena.blocks) == blocks
    assert sum(arena._transport.allocated) == allocated


def test_many_values_are_few_segments():
    """Each is a window of MPI, of which there are few thousand."""
    arena = Arena(Counting())
    for _ in range(300):
        arena.place([(FLOAT, 1 << 14)])
    assert len(arena._transport.allocated) < 25
    assert sum(arena._transport.allocated) < 2.5 * 300 * (8 << 14)


def test_one_list_is_one_segment():
    arena = Arena(Counting())
    arena.place([(FLOAT, 1 << 16)] * 50)
    assert len(arena._transport.allocated) == 1


def test_owners_have_about_equally_much(arena):
    random = np.random.default_rng(1)
    arena.place([(FLOAT, int(size)) for size in random.integers(1 << 14, 1 << 17, 60)])
    loads = [0] * 4
    for block in arena.blocks:
        loads[block.owner] += block.values.nbytes
    assert max(loads) < 1.5 * min(loads)


def test_grids():
    arena = Arena(LocalTransport(4096))
    (place,) = arena.place([(FLOAT, 1300)])
    assert place.block.cell == 512
    assert [place.block.grid(element) for element in (0, 511, 512, 1299)] == [
        (0, 512),
        (0, 512),
        (512, 1024),
        (1024, 1300),
    ]


def test_values_without_elements(arena):
    first, second, third = arena.place([(FLOAT, 0), (FLOAT, 3), (FLOAT, 0)])
    assert (first.size, second.start, third.start) == (0, 0, 3)
