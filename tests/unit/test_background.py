"""Calls that wait for their turns."""

import pytest

from mpikv.cluster.background import Pending, Work, urgency
from mpikv.cluster.runtime import present
from mpikv.testing import cluster


def test_who_waits_is_patient_while_calls_complete():
    def program(comm):
        pending = Pending(int)
        for _ in range(5):
            pending.add(Work(pending, 0, lambda: "a call", lambda: present().nap(10.0, present().now() + 10.0), None))
        patient = pending.drain(15.0)
        pending.end()
        return patient

    assert cluster(1).run(program) == [True]


def test_no_call_begins_while_another_thread_is_in_one():
    def program(comm):
        begun = []
        free = present().now() + 10.0
        pending = Pending(int, busy=lambda: present().now() < free)
        pending.add(Work(pending, 0, lambda: "a call", lambda: begun.append(present().now()), None))
        pending.drain()
        pending.end()
        return begun[0] - free

    assert 0 <= cluster(1).run(program)[0] < 0.1


@pytest.mark.parametrize(
    ("priority", "highest"),
    [(3, 3), (-2, -2), ([1, 5, 2], 5), ((-3, -1), -1), ([], 0), ("high", 0), ([1, None], 0), (float("inf"), 0)],
)
def test_a_call_is_as_urgent_as_its_most_urgent_key_and_one_that_will_be_refused_as_any(priority, highest):
    assert urgency(priority) == highest
