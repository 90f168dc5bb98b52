"""The owner's side of updates on arrival, and the clocks of ranks, with requests in every order that hypothesis finds.

Each rank pushes its unit vector, so that a value says of each rank how many of its pushes it has.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpikv.async_store.owner import HalfUpdated, KeyOwner
from mpikv.async_store.ssp import SspClocks
from mpikv.engine.arena import Arena
from mpikv.engine.keys import KeyTable
from mpikv.optimizers import Test as Plainest
from mpikv.transports.local import LocalTransport


class Owner:
    """A ledger of values that start as zeros, and what it answered."""

    def __init__(self, size, keys=("a",), updater=None, dtype=np.float64, elements=None):
        self.table, self.answers = KeyTable(), {}
        arena = Arena(LocalTransport(1 << 20), pooling=False)
        elements = size if elements is None else elements
        for key, place in zip(keys, arena.place([(np.dtype(dtype), elements)] * len(keys)), strict=True):
            self.table.add(key, (elements,), np.dtype(dtype), place)
        self.updater = updater or Plainest(learning_rate=1.0)
        self.ledger = KeyOwner(self.answer)
        self.begin()

    def begin(self):
        self.ledger.begin(self.table, self.updater)

    def answer(self, rank, ticket, version, answer):
        assert ticket not in self.answers
        copy = answer.copy() if isinstance(answer, np.ndarray) else answer
        self.answers[ticket] = rank, version, copy

    def value(self, key="a"):
        return self.table[key].value


def unit(size, rank):
    gradient = np.zeros(size)
    gradient[rank] = -1  # the rule subtracts
    return gradient


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


def test_an_optimizer_that_fails_in_the_middle():
    """Nobody is told that nothing has changed."""

    class Breaking(Plainest):
        def rule(self, step, block):
            super().rule(step, block)
            raise MemoryError("no more")

    owner = Owner(2, updater=Breaking(learning_rate=1.0))
    with pytest.raises(HalfUpdated, match=r"key 'a' failed halfway: MemoryError.*may be half changed"):
        owner.ledger.push(1, 3, 0, unit(2, 1))
    assert isinstance(owner.answers[3][-1], HalfUpdated)


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
