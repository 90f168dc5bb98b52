"""The owner's side of updates on arrival, and the clocks of ranks, with requests in every order that hypothesis finds.

Each rank pushes its unit vector, so that a value says of each rank how many of its pushes it has.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpikv.async_store.owner import HalfUpdated, KeyOwner
from mpikv.async_store.ssp import SspClocks
from mpikv.engine.arena import Arena
from mpikv.engine.keys import KeyTable
from mpikv.optimizers import Test as Plainest
from mpikv.optimizers.updaters import CallableUpdater
from mpikv.transports.local import LocalTransport


class Owner:
    """A ledger of values that start as zeros, and what it answered."""

    def __init__(self, size, rounds, keys=("a",), updater=None, dtype=np.float64, elements=None):
        self.table, self.answers = KeyTable(), {}
        arena = Arena(LocalTransport(1 << 20), pooling=False)
        elements = size if elements is None else elements
        for key, place in zip(keys, arena.place([(np.dtype(dtype), elements)] * len(keys)), strict=True):
            self.table.add(key, (elements,), np.dtype(dtype), place)
        self.updater = updater or Plainest(learning_rate=1.0)
        self.ledger = KeyOwner(size, rounds, self.answer)
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


class Ranks:
    """What the ranks know: a rank pushes a key when its last push of it was answered, and stops when it has left."""

    def __init__(self, size, rounds, keys):
        self.size, self.rounds, self.keys = size, rounds, keys
        self.owner = Owner(size, rounds, keys)
        self.tickets, self.left = 0, set()
        self.sent = {(rank, key): 0 for rank in range(size) for key in keys}
        self.open, self.pulls = {}, {}

    def do(self, rank, key, verb):
        if rank in self.left:
            return
        ledger, row = self.owner.ledger, self.owner.table[key].index
        self.tickets += 1
        if verb == "push" and (rank, key) not in self.open:
            self.sent[rank, key] += 1
            self.open[rank, key] = self.tickets
            payload = unit(self.size, rank)
            ledger.push(rank, self.tickets, row, payload)
            payload[:] = np.nan  # the next letter
        elif verb == "pull":
            self.pulls[self.tickets] = rank, key, self.sent[rank, key]
            ledger.pull(rank, self.tickets, row)
        elif verb == "leave":
            self.left.add(rank)
            ledger.leave(rank)
        self.check()

    def check(self):
        answers = self.owner.answers
        self.open = {name: ticket for name, ticket in self.open.items() if ticket not in answers}
        working = set(range(self.size)) - self.left
        for key in self.keys:
            clocks = self.owner.value(key)[sorted(working)]
            if self.rounds and working:
                assert clocks.max() == clocks.min()
        for key in self.keys:
            parked = {rank for rank, other in self.open if other == key}
            assert not parked or (self.rounds and not working <= parked)
        for rank in range(self.size):
            keys = [key for other, key in self.open if other == rank]
            waited = {other for key in keys for other in working if (other, key) not in self.open}
            assert self.owner.ledger.awaited(rank) == sorted(waited)
        for ticket, (rank, key, pushed) in self.pulls.items():
            if ticket not in answers:
                assert (rank, key) in self.open, "a pull waits for a push of its rank only"
                continue
            asker, version, value = answers[ticket]
            assert (asker, value[rank]) == (rank, pushed), "a rank reads what it has pushed"
            assert version == value.sum() if not self.rounds else value.max() <= version <= value.sum()

    def end(self):
        for rank in range(self.size):
            self.do(rank, self.keys[0], "leave")
        assert not self.open
        assert set(self.pulls) <= set(self.owner.answers)
        for key in self.keys:
            assert self.owner.value(key).tolist() == [self.sent[rank, key] for rank in range(self.size)]


@given(st.data(), st.integers(1, 4), st.booleans())
def test_any_order_of_requests(data, size, rounds):
    ranks = Ranks(size, rounds, ("a", "b"))
    verbs = st.sampled_from(["push"] * 8 + ["pull"] * 4 + ["leave"])
    steps = st.lists(st.tuples(st.integers(0, size - 1), st.sampled_from("ab"), verbs), max_size=60)
    for step in data.draw(steps):
        ranks.do(*step)
    ranks.end()


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
            assert clocks.awaited(rank) == [other for other in working if done[other] < least] != []
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


@given(st.data(), st.integers(1, 4))
def test_without_a_lead_rounds_are_added_up_in_rank_order(data, size):
    random = np.random.default_rng(size)
    given_ = (random.standard_normal((3, size, 5)) * 10.0 ** random.integers(-8, 8, (3, size, 1))).astype(np.float32)
    sums = []
    updater = CallableUpdater(lambda key, total, stored: sums.append(total.copy()))
    owner = Owner(size, True, updater=updater, dtype=np.float32, elements=5)
    for number, round_ in enumerate(given_):
        for rank in data.draw(st.permutations(range(size))):
            owner.ledger.push(rank, number * size + rank, 0, round_[rank].copy())
        expected = round_[0].copy()
        for term in round_[1:]:
            expected = expected + term
        assert sums[number].tobytes() == expected.tobytes()
    assert len(sums) == 3


@pytest.mark.parametrize("rounds", [False, True])
def test_an_updater_that_raises_changes_nothing(rounds):
    def update(key, gradient, stored):
        stored += gradient
        if stored[0] == 2:
            raise ValueError("two")

    owner = Owner(1, rounds, updater=CallableUpdater(update), elements=3)
    for ticket in range(3):
        owner.ledger.push(0, ticket, 0, np.ones(3))
    assert [version for _, version, _ in owner.answers.values()] == [1, 1, 1]
    failures = [answer for _, _, answer in owner.answers.values()]
    assert failures[0] is None
    assert [str(failure) for failure in failures[1:]] == ["two", "two"]
    assert owner.value().tolist() == [1, 1, 1]


@pytest.mark.parametrize("rounds", [False, True])
def test_an_optimizer_that_fails_in_the_middle(rounds):
    """Nobody is told that nothing has changed, and who has waited for the value is not shown it."""

    class Breaking(Plainest):
        def rule(self, step, block):
            super().rule(step, block)
            raise MemoryError("no more")

    owner = Owner(2, rounds, updater=Breaking(learning_rate=1.0))
    if rounds:
        owner.ledger.push(0, 1, 0, unit(2, 0))
        owner.ledger.pull(0, 2, 0)
    with pytest.raises(HalfUpdated, match=r"key 'a' failed halfway: MemoryError.*may be half changed"):
        owner.ledger.push(1, 3, 0, unit(2, 1))
    assert owner.answers.keys() == ({1, 3} if rounds else {3})
    assert all(isinstance(answer, HalfUpdated) for _, _, answer in owner.answers.values())


def test_a_clock_never_goes_back():
    clocks = SspClocks(2, lambda rank, ticket, slowest: None)
    clocks.tick(0, 2)
    clocks.tick(0, 1)
    clocks.wait(1, 1, 3)
    assert clocks.awaited(1) == [0, 1]
    clocks.tick(1, 3)
    assert clocks.awaited(1) == [0]
    clocks.tick(0, 3)
    assert clocks.awaited(1) == []


def test_ranks_that_meet_start_anew():
    owner = Owner(2, True)
    owner.ledger.push(0, 1, 0, unit(2, 0))
    owner.ledger.leave(1)
    owner.ledger.push(0, 2, 0, unit(2, 0))
    assert owner.answers.keys() == {1, 2}
    owner.begin()
    owner.ledger.push(0, 3, 0, unit(2, 0))
    assert 3 not in owner.answers
    clocks = SspClocks(2, lambda rank, ticket, slowest: pytest.fail("rank 1 has not pushed"))
    clocks.tick(0, 5)
    clocks.leave(1)
    clocks.begin()
    clocks.wait(0, 1, 1)
    assert clocks.awaited(0) == [0, 1]
