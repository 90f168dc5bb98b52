"""The clocks of ranks, with requests in every order that hypothesis finds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpikv.async_store.ssp import SspClocks


@given(st.data(), st.integers(1, 4), st.integers(1, 5))
def test_clocks_never_differ_by_more_than_the_bound(data, size, bound):
    """Ranks that ask before each push, and are scheduled in any order, until each has made its pushes and left."""
    answered = set()
    clocks = SspClocks(size, lambda rank, ticket, slowest: answered.add((rank, ticket)))
    left, todo = set(), [data.draw(st.integers(0, 12)) for _ in range(size)]
    done, asked = [0] * size, [False] * size
    while len(left) < size:
        working = sorted(set(range(size)) - left)
        free = [rank for rank in working if not asked[rank] or (rank, done[rank]) in answered]
        assert free, "nobody can go on"
        behind = min(working, key=lambda rank: done[rank])
        assert behind in free, "who is furthest behind never waits"
        for rank in set(working) - set(free):
            least = done[rank] + 1 - bound
            assert clocks.list_awaited(rank) == [other for other in working if done[other] < least] != []
        rank = data.draw(st.sampled_from(free))
        if done[rank] == todo[rank]:
            left.add(rank)
            clocks.leave(rank)
        elif not asked[rank]:
            asked[rank] = True
            clocks.wait(rank, done[rank], done[rank] + 1 - bound)
        else:
            asked[rank] = False
            done[rank] += 1
            clocks.tick(rank, done[rank])
            now = [done[other] for other in working]
            assert max(now) - min(now) <= bound
            assert clocks.widest <= bound
    assert done == todo


def test_a_clock_never_goes_back():
    clocks = SspClocks(2, lambda rank, ticket, slowest: None)
    clocks.tick(0, 2)
    clocks.tick(0, 1)
    clocks.wait(1, 1, 3)
    assert clocks.list_awaited(1) == [0, 1]
    clocks.tick(1, 3)
    assert clocks.list_awaited(1) == [0]
    clocks.tick(0, 3)
    assert clocks.list_awaited(1) == []


def test_ranks_that_meet_start_anew():
    clocks = SspClocks(2, lambda rank, ticket, slowest: pytest.fail("rank 1 has not pushed"))
    clocks.tick(0, 5)
    clocks.leave(1)
    clocks.begin()
    clocks.wait(0, 1, 1)
    assert clocks.list_awaited(0) == [0, 1]
