"""Calls that wait for their turns, and those that pass others."""

from __future__ import annotations

import threading

import pytest

from mpikv.errors import Closed
from mpikv.runtime import present
from mpikv.testing import cluster
from mpikv.work import Pending


class Passing:
    """A call of key ``a`` and urgency 1, which lets others pass once they are queued."""

    def __init__(self):
        self.pending, self.made, self.error = Pending(int), [], None
        self.begun, self.queued = threading.Event(), threading.Event()
        self.pending.add(1, lambda: "slow", self.run, {"a"})
        assert self.begun.wait(10)

    def run(self):
        self.begun.set()
        self.queued.wait()
        try:
            self.pending.give_way(int, bool)
        except Closed as error:
            self.error = error
        self.made.append("slow")

    def add(self, urgent, name, key, run=None):
        return self.pending.add(urgent, lambda: name, run or (lambda: self.made.append(name)), {key})

    def end(self):
        self.queued.set()
        assert self.pending.drain(10)
        self.pending.end()


@pytest.fixture
def passing():
    made = Passing()
    yield made
    made.end()


def test_more_urgent_calls_of_other_keys_pass(passing):
    for urgent, name, key in (
        (0, "less", "b"),
        (1, "equal", "c"),
        (2, "same", "a"),
        (2, "more", "d"),
        (3, "most", "e"),
    ):
        passing.add(urgent, name, key)
    passing.end()
    assert passing.made == ["most", "more", "slow", "same", "equal", "less"]
    assert passing.error is None


def test_a_call_that_passes_may_end_the_store(passing):
    passing.add(2, "bad", "b", lambda: 1 // 0)
    passing.add(2, "next", "c")
    passing.end()
    assert passing.made == ["slow", "next"]
    assert str(passing.error) == "slow: bad, which has passed it, has ended the store"


def test_who_waits_is_patient_while_calls_complete():
    def program(comm):
        pending = Pending(int)
        for _ in range(5):
            pending.add(0, lambda: "a call", lambda: present().nap(10.0, present().now() + 10.0))
        patient = pending.drain(15.0)
        pending.end()
        return patient

    assert cluster(1).run(program) == [True]
