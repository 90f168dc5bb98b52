"""The owner's side of updates on arrival, with requests in every order that hypothesis finds.

Each rank pushes its unit vector, so that a value says of each rank how many of its pushes it has.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpikv.arena import Arena
from mpikv.keys import KeyTable
from mpikv.ledger import Ledger
from mpikv.optimizers import Test as Plainest
from mpikv.transports.local import LocalTransport
from mpikv.updaters import CallableUpdater


class Owner:
    """A ledger of values that start as zeros, and what it answered."""

    def __init__(self, size, bound, keys=("a",), updater=None, dtype=np.float64, elements=None):
        self.table, self.answers = KeyTable(), {}
        arena = Arena(LocalTransport(1 << 20), pooling=False)
        elements = size if elements is None else elements
        for key, place in zip(keys, arena.place([(np.dtype(dtype), elements)] * len(keys)), strict=True):
            self.table.add(key, (elements,), np.dtype(dtype), place)
        self.updater = updater or Plainest(learning_rate=1.0)
        self.ledger = Ledger(size, bound, self.answer)
        self.begin()

    def begin(self):
        rows = {entry.index: entry for entry in self.table.entries()}
        self.ledger.begin(rows, self.table.counts, self.updater, self.check)

    def check(self):
        raise AssertionError("nothing was changed")

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

    def __init__(self, size, bound, keys):
        self.size, self.bound, self.keys = size, bound, keys
        self.owner = Owner(size, bound, keys)
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
            ledger.leave(rank, self.tickets)
        self.check()

    def check(self):
        answers = self.owner.answers
        self.open = {name: ticket for name, ticket in self.open.items() if ticket not in answers}
        working = [rank for rank in range(self.size) if rank not in self.left]
        for key in self.keys:
            clocks = self.owner.value(key)
            if self.bound is not None and working:
                assert clocks[working].max() - clocks[working].min() <= self.bound
        for rank, _ in self.open:
            assert self.owner.ledger.awaited(rank), "parked, and waits for nobody"
            assert rank not in self.owner.ledger.awaited(rank)
        for ticket, (rank, key, pushed) in self.pulls.items():
            if ticket not in answers:
                assert (rank, key) in self.open, "a pull waits for a push of its rank only"
                continue
            asker, version, value = answers[ticket]
            assert (asker, value[rank]) == (rank, pushed), "a rank reads what it has pushed"
            assert version == (value.max() if self.bound == 0 and not self.left else version)
            if self.bound != 0:
                assert version == value.sum()

    def end(self):
        for rank in range(self.size):
            self.do(rank, self.keys[0], "leave")
        assert not self.open
        assert set(self.pulls) <= set(self.owner.answers)
        for key in self.keys:
            assert self.owner.value(key).tolist() == [self.sent[rank, key] for rank in range(self.size)]


SIZES = st.integers(1, 4)
BOUNDS = st.sampled_from([None, 0, 1, 2, 5])


@given(st.data(), SIZES, BOUNDS)
def test_any_order_of_requests(data, size, bound):
    ranks = Ranks(size, bound, ("a", "b"))
    verbs = st.sampled_from(["push"] * 8 + ["pull"] * 4 + ["leave"])
    steps = st.lists(st.tuples(st.integers(0, size - 1), st.sampled_from("ab"), verbs), max_size=60)
    for step in data.draw(steps):
        ranks.do(*step)
    ranks.end()


@given(st.data(), st.integers(2, 4), st.sampled_from([1, 2, 5]))
def test_what_is_read_is_not_older_than_the_bound(data, size, bound):
    """While nobody has left: of every rank there are as many pushes as of the reader, but for the bound."""
    ranks = Ranks(size, bound, ("a",))
    for rank in data.draw(st.lists(st.integers(0, size - 1), max_size=80)):
        ranks.do(rank, "a", "push")
        ranks.do(rank, "a", "pull")
    for ticket, (rank, _, pushed) in ranks.pulls.items():
        if ticket in ranks.owner.answers:
            assert ranks.owner.answers[ticket][2].min() >= pushed - bound
            assert ranks.owner.answers[ticket][2][rank] == pushed


@given(st.data(), st.integers(1, 4))
def test_without_a_lead_rounds_are_added_up_in_rank_order(data, size):
    random = np.random.default_rng(size)
    given_ = (random.standard_normal((3, size, 5)) * 10.0 ** random.integers(-8, 8, (3, size, 1))).astype(np.float32)
    sums = []
    updater = CallableUpdater(lambda key, total, stored: sums.append(total.copy()))
    owner = Owner(size, 0, updater=updater, dtype=np.float32, elements=5)
    for number, round_ in enumerate(given_):
        for rank in data.draw(st.permutations(range(size))):
            owner.ledger.push(rank, number * size + rank, 0, round_[rank].copy())
        expected = round_[0].copy()
        for term in round_[1:]:
            expected = expected + term
        assert sums[number].tobytes() == expected.tobytes()
    assert len(sums) == 3


@pytest.mark.parametrize("bound", [None, 0, 1])
def test_an_updater_that_raises_changes_nothing(bound):
    def update(key, gradient, stored):
        stored += gradient
        if stored[0] == 2:
            raise ValueError("two")

    owner = Owner(1, bound, updater=CallableUpdater(update), elements=3)
    for ticket in range(3):
        owner.ledger.push(0, ticket, 0, np.ones(3))
    assert [version for _, version, _ in owner.answers.values()] == [1, 1, 1]
    failures = [answer for _, _, answer in owner.answers.values()]
    assert failures[0] is None
    assert [str(failure) for failure in failures[1:]] == ["two", "two"]
    assert owner.value().tolist() == [1, 1, 1]


def test_a_failed_push_counts_for_the_clock():
    """Else the ranks ahead would wait for a push that its rank has made."""
    owner = Owner(2, 1, updater=CallableUpdater(lambda key, gradient, stored: 1 / 0), elements=1)
    for ticket, rank in enumerate([0, 1, 0, 1, 0]):
        owner.ledger.push(rank, ticket, 0, np.ones(1))
    assert len(owner.answers) == 5


def test_ranks_that_meet_start_at_zero():
    owner = Owner(2, 1)
    owner.ledger.push(0, 1, 0, unit(2, 0))
    owner.ledger.push(0, 2, 0, unit(2, 0))
    assert owner.ledger.awaited(0) == [1]
    assert owner.ledger.awaited(1) == []
    owner.ledger.leave(1, 3)
    owner.ledger.leave(0, 4)
    owner.begin()
    owner.ledger.push(0, 5, 0, unit(2, 0))
    assert owner.answers.keys() == {1, 2, 3, 4, 5}
    owner.ledger.push(0, 6, 0, unit(2, 0))
    assert 6 not in owner.answers
