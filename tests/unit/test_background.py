"""Calls that wait for their turns."""

from __future__ import annotations

from mpikv.cluster.background import Pending
from mpikv.cluster.runtime import present
from mpikv.testing import cluster


def test_who_waits_is_patient_while_calls_complete():
    def program(comm):
        pending = Pending(int)
        for _ in range(5):
            pending.add(0, lambda: "a call", lambda: present().nap(10.0, present().now() + 10.0))
        patient = pending.drain(15.0)
        pending.end()
        return patient

    assert cluster(1).run(program) == [True]
