"""Simulated ranks: results, failures, time, faults, and what is answered to bad use."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv import runtime
from mpikv.testing.explore import explore, load, main
from mpikv.testing.simulation import (
    Cut,
    Deadlock,
    Delay,
    Hung,
    Kill,
    Pause,
    SimulatedError,
    cluster,
    draw_faults,
)
from mpikv.testing.simulation.scheduler import Scheduler

SIZES = [(1, 1), (2, 1), (3, 2), (4, 4), (9, 3)]


@pytest.mark.parametrize(("size", "hosts"), SIZES)
def test_results_come_in_rank_order(size: int, hosts: int) -> None:
    def program(comm: Any) -> tuple[int, int, list[int]]:
        return comm.rank, comm.size, comm.allgather(comm.rank**2)

    squares = [rank**2 for rank in range(size)]
    assert cluster(size, hosts=hosts).run(program) == [(rank, size, squares) for rank in range(size)]


@pytest.mark.parametrize(("size", "hosts"), SIZES)
@pytest.mark.parametrize("name", ["dist_sync", "p3", "horovod", "dist_async"])
def test_stores_are_those_of_real_ranks(name: str, size: int, hosts: int) -> None:
    def program(comm: Any) -> Any:
        with mpikv.create(name, comm=comm) as kv:
            if name == "horovod":
                return kv.pushpull("g", np.full(3, kv.rank + 1.0))
            kv.init("w", np.zeros(3))
            kv.set_optimizer("sgd", learning_rate=1.0)
            kv.push("w", np.full(3, kv.rank + 1.0))
            kv.barrier()
            return -kv.pull("w")

    total = size * (size + 1) / 2
    assert all((value == total).all() for value in cluster(size, hosts=hosts).run(program))


@pytest.mark.parametrize(("hosts", "transport"), [(1, "shm"), (2, "hosts"), (4, "mpi")])
def test_hosts_choose_the_transport(hosts: int, transport: str) -> None:
    def program(comm: Any) -> tuple[str, int]:
        with mpikv.create(comm=comm) as kv:
            return kv.transport, kv.local_rank

    assert cluster(4, hosts=hosts).run(program) == [(transport, rank % (4 // hosts)) for rank in range(4)]


def test_groups_of_some_ranks() -> None:
    def program(comm: Any) -> list[float]:
        sums = []
        with mpikv.create(comm=comm) as kv:
            for store in (kv.group([0, 2]), mpikv.create(comm=comm.library.COMM_SELF)):
                if store is not None:
                    with store:
                        store.init("w", np.zeros(1))
                        store.push("w", np.ones(1))
                        sums.append(float(store.pull("w")[0]))
        return sums

    assert cluster(3).run(program) == [[2.0, 1.0], [1.0], [2.0, 1.0]]


def order_of_events(seed: int) -> list[int]:
    events: list[int] = []

    def program(comm: Any) -> None:
        for _ in range(5):
            events.append(comm.rank)
            runtime.present().give_way()

    cluster(4, seed=seed).run(program)
    return events


def test_a_seed_decides_the_order() -> None:
    assert order_of_events(1) == order_of_events(1)
    assert len({tuple(order_of_events(seed)) for seed in range(10)}) == 10


def test_a_minute_takes_no_time() -> None:
    def program(comm: Any) -> float:
        with mpikv.create(comm=comm, timeout=100.0) as kv:
            if kv.rank == 1:
                runtime.present().sleep(60.0)
            kv.barrier()
            return runtime.present().now()

    started = time.monotonic()
    assert all(60 <= moment < 61 for moment in cluster(3).run(program))
    assert time.monotonic() - started < 5


def test_a_late_rank_is_waited_for_until_the_deadline(caplog: pytest.LogCaptureFixture) -> None:
    def program(comm: Any) -> str:
        kv = mpikv.create(comm=comm, timeout=30.0)
        if kv.rank == 1:
            runtime.present().sleep(40.0)
        with pytest.raises(mpikv.Stalled) as failure:
            kv.barrier()
        return str(failure.value)

    texts = cluster(2).run(program)
    assert texts[0].startswith("barrier: waited 30.0 s for ranks [1]")
    assert "rank 0 has waited 5.0 s" in caplog.text


def test_the_first_failure_is_raised_with_the_others_noted() -> None:
    def program(comm: Any) -> None:
        if comm.rank == 2:
            raise KeyError("of rank 2")
        comm.Barrier()

    with pytest.raises(KeyError, match="of rank 2") as failure:
        cluster(3, seed=5).run(program)
    notes = "\n".join(failure.value.__notes__)
    assert "cluster(3, hosts=1, seed=5)" in notes
    assert "all tasks wait for each other" in notes
    assert "test_cluster.py" in notes
    assert "in program" in notes


@pytest.mark.parametrize("seed", range(5))
def test_a_killed_rank_runs_no_more(seed: int) -> None:
    reached = []

    def program(comm: Any) -> str:
        kv = mpikv.create(comm=comm, timeout=10.0)
        kv.init("w", np.zeros(1))
        try:
            for step in range(1000):
                kv.push("w", np.ones(1))
                if comm.rank == 1:
                    reached.append(step)
        except mpikv.Stalled as error:
            return str(error)
        return ""

    texts = cluster(3, seed=seed, faults=[Kill(rank=1, at=300)]).run(program)
    assert texts[1] is None
    assert 0 < len(reached) < 1000
    assert any("[1]" in texts[rank] for rank in (0, 2))


@pytest.mark.parametrize("fault", [Pause(1, 60, 7.0), Delay(0, 1, 0.2), Cut((0,), 0.0, 3.0), Cut((1,), 0.001, 3.0)])
def test_what_is_late_arrives(fault: Any) -> None:
    def program(comm: Any) -> float:
        with mpikv.create(comm=comm) as kv:
            kv.init("w", np.zeros(4))
            for _ in range(10):
                kv.push("w", np.ones(4))
            return float(kv.pull("w").sum())

    assert cluster(4, hosts=2, faults=[fault]).run(program) == [16.0] * 4


def test_a_cut_that_does_not_end_is_a_deadlock_or_a_stall() -> None:
    def program(comm: Any) -> None:
        comm.Isend(b"x", 1 - comm.rank)
        buffer = bytearray(1)
        comm.Recv(buffer, 1 - comm.rank, 0)

    with pytest.raises(Deadlock, match="rank 0, rank 1"):
        cluster(2, hosts=2, faults=[Cut((0,))]).run(program)


def test_messages_of_one_rank_do_not_overtake_each_other() -> None:
    def program(comm: Any) -> list[int]:
        if comm.rank:
            for number in range(20):
                comm.Isend(bytes([number]), 0, 3)
            return []
        received = []
        for _ in range(20):
            buffer = bytearray(1)
            comm.Recv(buffer, 1, 3)
            received.append(buffer[0])
        return received

    assert all(cluster(2, seed=seed).run(program)[0] == list(range(20)) for seed in range(5))


def leaves(comm: Any) -> None:
    if comm.rank:
        comm.Barrier()


def differs(comm: Any) -> None:
    comm.Barrier() if comm.rank else comm.Dup()


@pytest.mark.parametrize(
    ("program", "error", "text"),
    [
        (leaves, Deadlock, "all tasks wait for each other, without a deadline: rank 1, rank 2"),
        (differs, SimulatedError, "ranks call different operations: "),
    ],
)
def test_what_would_hang_is_named(program: Callable[..., None], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        cluster(3).run(program)


def test_a_rank_without_a_scheduling_point_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "patience", 0.2)
    ended = False

    def spins(comm: Any) -> None:
        while not ended:
            pass

    with pytest.raises(Hung, match=r"(?s)without a scheduling point.*in spins"):
        cluster(2).run(spins)
    ended = True


def test_a_communicator_of_another_rank_is_refused() -> None:
    seen = []

    def program(comm: Any) -> None:
        seen.append(comm)
        comm.Barrier()
        mpikv.create(comm=seen[1 - seen.index(comm)])

    with pytest.raises(mpikv.ConfigError, match=r"is not of this rank: this thread is <simulated communicator, rank"):
        cluster(2).run(program)
    with pytest.raises(mpikv.ConfigError, match="this thread is no simulated rank"):
        mpikv.create(comm=seen[0])


@pytest.mark.ranks(2)
def test_a_real_communicator_is_refused(comm: Any) -> None:
    with pytest.raises(mpikv.ConfigError, match="pass the communicator that the program is given"):
        cluster(2).run(lambda simulated: mpikv.create(comm=comm))


@pytest.mark.parametrize(("size", "hosts"), [(0, 1), (2, 3), (2, 0)])
def test_a_host_has_a_rank(size: int, hosts: int) -> None:
    with pytest.raises(ValueError, match="every host has at least one rank"):
        cluster(size, hosts=hosts)


def test_faults_are_drawn_by_a_seed() -> None:
    assert draw_faults(3, 4, 2) == draw_faults(3, 4, 2)
    drawn = {type(fault) for seed in range(60) for fault in draw_faults(seed, 4, 2)}
    assert drawn == {Kill, Pause, Delay, Cut}


SCRIPT = """
import mpikv, numpy as np
with mpikv.create() as kv:
    kv.init("w", np.zeros(2))
    kv.push("w", np.ones(2))
    assert kv.pull("w").sum() == 2 * kv.size

def fails(comm, seed):
    assert seed < 7 or comm.rank < comm.size - 1, "planted"
"""


def test_explore_runs_scripts_and_finds_the_first_seed(tmp_path: Any, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert main([str(script), "--ranks", "3", "--seeds", "0:3"]) == 0
    assert "3 seeds passed" in capfd.readouterr().out
    assert main([f"{script}:fails", "--ranks", "2:5", "--hosts", "1:2", "--seeds", "0:20"]) == 1
    assert "seed 7 fails on" in capfd.readouterr().err
    found = explore(load(f"{script}:fails"), range(20), ranks=(2, 5), hosts=(1, 2))
    assert found is not None
    assert found[0].seed == 7
