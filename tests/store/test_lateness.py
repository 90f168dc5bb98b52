"""Where the time of real ranks goes. Simulated ranks plant the causes: tests/simulation/test_lateness.py."""

import time
from typing import Any

import numpy as np
import pytest

import mpikv

pytestmark = pytest.mark.ranks(1, 2, 3)
STEPS, SLEEP = 10, 0.03


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_the_late_rank_is_named(comm: Any, transport: str) -> None:
    """The last rank sleeps, for longer than a busy machine delays the others."""
    with mpikv.create(comm=comm, transport=transport) as kv:
        kv.init("w", np.zeros(3))
        for _ in range(STEPS):
            compute(0.001)
            if kv.rank == kv.size - 1:
                time.sleep(SLEEP)
            kv.push("w", np.ones(3))
        kv.barrier()
        found = kv.statistics()
    if kv.size == 1:
        assert "ranks" not in found
        return
    *others, last = found["ranks"]
    assert len(others) == kv.size - 1
    assert found["late"]["rank"] == kv.size - 1
    assert found["late"]["text"].startswith(f"rank {kv.size - 1} made the others wait ")
    known = sum(rank["last"] for rank in found["ranks"])
    assert known >= 7  # of other hosts the first eight calls, with that of create
    assert last["input"] >= SLEEP * (known - 2)
    assert last["computing"] < last["input"]
    assert all(rank["waiting"] > last["waiting"] for rank in others)


@pytest.mark.processes
def test_computing_is_processor_time(comm: Any) -> None:
    with mpikv.create(comm=comm) as kv:
        for _ in range(STEPS):
            compute(0.02)
            kv.barrier()
        found = kv.statistics()
    for rank in found.get("ranks", []):
        assert rank["computing"] >= STEPS * 0.018
