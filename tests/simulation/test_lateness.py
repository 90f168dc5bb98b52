"""Planted causes of lateness on simulated ranks: statistics name the rank and the cause within 20 steps."""

import random
import time
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv.testing import Delay, Planted, Raise, cluster, spend

CAUSES = ("collector", "compute", "cores", "disk", "input", "swap")
STEPS = 20


def train(comm: Any, seed: int, late: int = -1, cause: str = "") -> dict[str, Any]:
    """Make 20 steps of uneven length, with one rank that takes longer for a cause; return the statistics of rank 0."""
    draw = random.Random(f"{seed} {comm.rank}")
    with mpikv.create(comm=comm) as kv:
        kv.init("w", np.zeros(10))
        for _ in range(STEPS):
            spend(draw.uniform(0.008, 0.012))
            spend(draw.uniform(0.001, 0.003), "input")
            if kv.rank == late:
                spend(draw.uniform(0.005, 0.01), cause)
            kv.push("w", np.ones(10))
            kv.pull("w")
        kv.barrier()
        return kv.statistics()


@pytest.mark.deadline(120)
@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize(("size", "seeds"), [(2, 8), (3, 8), (8, 3), (32, 1)])
def test_the_late_rank_and_the_cause_are_named(size: int, seeds: int, hosts: int) -> None:
    rank_right = cause_right = 0
    cases = [(seed, cause) for seed in range(seeds) for cause in CAUSES]
    for seed, cause in cases:
        late = random.Random(f"{seed} {cause}").randrange(size)
        program = partial(train, seed=seed, late=late, cause=cause)
        results = cluster(size, hosts=hosts, seed=seed).run(program)
        found = [result["late"] for result in results]
        rank_right += all(one is not None and one["rank"] == late for one in found)
        cause_right += all(one is not None and one["cause"] == cause for one in found)
    assert rank_right >= 0.99 * len(cases)
    assert cause_right >= 0.95 * len(cases)


@pytest.mark.parametrize("seed", range(8))
def test_a_slow_link_between_two_of_three_hosts_is_named(seed: int) -> None:
    slow = Delay(0, 1, 0.01), Delay(1, 0, 0.01)
    late = cluster(6, hosts=3, seed=seed, faults=slow).run(partial(train, seed=seed))[0]["late"]
    assert late["cause"] == "exchange"
    assert late["rank"] in range(4)


def test_even_ranks_hold_up_nobody() -> None:
    def step_alike(comm: Any) -> Any:
        with mpikv.create(comm=comm) as kv:
            for _ in range(STEPS):
                spend(0.01)
                kv.barrier()
            return kv.statistics()["late"]

    assert cluster(3).run(step_alike) == [None] * 3


@pytest.mark.parametrize("hosts", [1, 2])
def test_sums_are_right_over_many_calls(hosts: int) -> None:
    """Rank 1 is last in each call, by so much that nothing else counts."""

    def program(comm: Any) -> Any:
        with mpikv.create(comm=comm) as kv:
            for _ in range(700):
                spend(0.03 if kv.rank == 1 else 0.01)
                kv.barrier()
            return kv.statistics()["ranks"]

    known = 640 if hosts > 1 else 700  # other hosts' are known up to a call before
    for ranks in cluster(4, hosts=hosts).run(program):
        assert sum(rank["last"] for rank in ranks) in (known - 1, known)
        assert ranks[1]["last"] >= known - 2
        assert [round(rank["computing"] / known, 3) for rank in ranks] == [0.01, 0.03, 0.01, 0.01]
        assert ranks[1]["held_up"] == pytest.approx(0.02 * known, rel=0.02)


def test_a_report_names_the_late_rank(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIKV_REPORT", "1")

    def program(comm: Any) -> None:
        with mpikv.create(comm=comm) as kv:
            for _ in range(200):
                spend(0.02 if kv.rank == 2 else 0.01)
                kv.barrier()

    cluster(3).run(program)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    text = "rank 2 made the others wait 50% of the last 1 s; it computes 2.0 times as long as the median"
    assert lines[-1] == text


@pytest.mark.parametrize("at", range(17, 27))
def test_a_rank_that_leaves_between_hosts_is_found_at_once(at: int) -> None:
    """These points lie around calls 8 and 16, where hosts tell each other."""

    def program(comm: Any) -> float:
        began = time.monotonic()
        with suppress(mpikv.Stalled, Planted), mpikv.create(comm=comm, timeout=60) as kv:
            for _ in range(40):
                kv.barrier()
        return time.monotonic() - began

    assert max(cluster(3, hosts=3, faults=[Raise(1, at)]).run(program)) < 2


def test_a_rank_that_refuses_its_call_early_is_not_late() -> None:
    def program(comm: Any) -> Any:
        with mpikv.create(comm=comm) as kv:
            kv.init("w", np.zeros(2))
            for _ in range(STEPS):
                if kv.rank:
                    spend(0.01)
                with pytest.raises(mpikv.PeerFailed if kv.rank else ValueError):
                    kv.push("w", np.ones(2 if kv.rank else 3))
            return kv.statistics()["ranks"]

    for ranks in cluster(3).run(program):
        assert ranks[0]["last"] < STEPS / 2
        assert ranks[0]["waiting"] == pytest.approx(0.01 * STEPS, rel=0.2)
