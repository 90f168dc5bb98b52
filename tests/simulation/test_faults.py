"""What goes wrong by plan in simulated ranks, and what the library says of it on the others."""

import math
import operator
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv.errors import notes
from mpikv.testing import (
    Cut,
    Deadlock,
    Delay,
    Differ,
    FullDisk,
    Kill,
    Leave,
    Missed,
    Pause,
    Planted,
    Raise,
    cluster,
    draw_faults,
)
from mpikv.testing.explore import explore


def trains(comm: Any, steps: int = 100, report: Callable[[int], None] = lambda step: None) -> str:
    """Push and pull; return what the store says of the others."""
    kv = mpikv.create(comm=comm, timeout=10.0)
    kv.init("w", np.zeros(1))
    try:
        for step in range(steps):
            kv.push("w", np.ones(1))
            kv.pull("w")
            report(step)
    except mpikv.MPIKVError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


@pytest.mark.parametrize("seed", range(5))
def test_a_killed_rank_runs_no_more(seed: int) -> None:
    reached = []

    def program(comm: Any) -> str:
        return trains(comm, 1000, lambda step: reached.append(step) if comm.rank == 1 else None)

    texts = cluster(3, seed=seed, faults=[Kill(rank=1, at=300)]).run(program)
    assert texts[1] is None
    assert 0 < len(reached) < 1000
    assert all(texts[rank].startswith("Stalled: pu") for rank in (0, 2))
    assert any("[1]" in texts[rank] for rank in (0, 2))


def test_a_killed_rank_that_catches_everything_does_nothing_more() -> None:
    done = []

    def program(comm: Any) -> str:
        buffer = bytearray(1)
        while time.monotonic() < 100.0:
            try:
                time.sleep(1.0)
                comm.Isend(b"x", comm.rank)
                comm.Recv(buffer, comm.rank, 0)
                done.append(comm.rank)
            except BaseException:  # what ends the rank, too
                comm.Isend(b"x", comm.rank)
                done.append("sent")
        return "done"

    def never_ends(comm: Any) -> str:
        while comm.rank == 1 or time.monotonic() < 100.0:
            with suppress(BaseException):
                time.sleep(1.0)
        return "done"

    assert cluster(2, faults=[Kill(1, 50)]).run(program) == ["done", None]
    assert 0 < done.count(1) < done.count(0)
    assert "sent" not in done
    assert cluster(2, faults=[Kill(1, 50)]).run(never_ends) == ["done", None]


@pytest.mark.parametrize(
    ("fault", "seconds"),
    [(Pause(1, 20, 7.0), 7.0), (Delay(0, 1, 0.2), 0.2), (Cut((0,), 0.0, 3.0), 3.0), (Cut((1,), 0.001, 3.0), 3.0)],
)
@pytest.mark.parametrize("size", [2, 4])
def test_what_is_late_arrives(fault: Any, seconds: float, size: int) -> None:
    """In messages between hosts, and in collective operations where each host has one rank."""

    def program(comm: Any) -> tuple[float, float]:
        with mpikv.create(comm=comm) as kv:
            kv.init("w", np.zeros(4))
            for _ in range(10):
                kv.push("w", np.ones(4))
                time.sleep(0.001)
            total = float(kv.pull("w").sum())
        return total, time.monotonic()

    totals, ends = zip(*cluster(size, hosts=2, faults=[fault]).run(program), strict=True)
    assert totals == (4.0 * size,) * size
    assert max(ends) >= seconds


def test_a_cut_that_does_not_end_is_a_deadlock_or_a_stall() -> None:
    def program(comm: Any) -> None:
        comm.Isend(b"x", 1 - comm.rank)
        buffer = bytearray(1)
        comm.Recv(buffer, 1 - comm.rank, 0)

    with pytest.raises(Deadlock, match="rank 0, rank 1"):
        cluster(2, hosts=2, faults=[Cut((0,))]).run(program)


@pytest.mark.parametrize("hosts", [1, 3])
@pytest.mark.parametrize("fault", [Raise(1, 60), Leave(1, 60)])
def test_a_rank_that_raises_or_leaves_is_named_by_the_others(fault: Any, hosts: int) -> None:
    texts = cluster(3, hosts=hosts, seed=1, faults=[fault]).run(trains)
    assert texts[1] is None
    for text in texts[0], texts[2]:
        assert text.startswith("Stalled: pu")
        assert ("rank 1 began call" if hosts == 1 else "its rank 1 is late or gone") in text
        assert "its process is gone" in text or hosts == 3


@pytest.mark.parametrize(
    ("size", "hosts", "silent", "lost", "rest"),
    [
        (12, 12, 1, ["late or gone"] * 8, "3 more hosts have"),
        (18, 9, 16, ["late or gone"], "1 more host has"),
        (18, 9, 18, ["its process is gone"], "1 more host has"),
    ],
)
def test_a_message_tells_of_some_hosts(size: int, hosts: int, silent: int, lost: Sequence[str], rest: str) -> None:
    """First of lost ranks. The second rank of a host is late. From ``silent`` on all are, or else the last leaves."""

    def program(comm: Any) -> str:
        kv = mpikv.create(comm=comm, timeout=1)
        if comm.rank == size - 1 and silent == size:
            return ""
        time.sleep(5 * (comm.rank >= silent or comm.rank % 2))
        with pytest.raises(mpikv.Stalled) as caught:
            kv.barrier()
        return str(caught.value)

    *told, last = cluster(size, hosts=hosts).run(program)[0].split("; ")[:9]
    expected = [*lost, *["begun no collective call yet and is now at"] * (8 - len(lost))]
    assert list(map(operator.contains, told, expected)) == [True] * 8, told
    assert last == f"{rest} late ranks"


@pytest.mark.parametrize("name", ["dist_sync", "dist_async"])
def test_a_rank_that_calls_something_else_is_told_on_all(name: str) -> None:
    def program(comm: Any) -> tuple[str, float]:
        with mpikv.create(name, comm=comm, timeout=10.0) as kv:
            kv.init("w", np.ones(1))
            with pytest.raises(mpikv.RankMismatch) as failure:
                kv.delete("w")
            return str(failure.value), float(kv.pull("w")[0])

    for text, value in cluster(3, hosts=2, faults=[Differ(rank=1, call=2)]).run(program):
        assert "rank 0 calls delete('w'); rank 1 calls barrier()" in text
        assert value == 1


FAULTS = [Kill(0, 0), Kill(1, 0), Raise(1, 0), Leave(1, 0)]
FAULTS += [FullDisk(0, 0), FullDisk(2, 0), Pause(1, 0, 3.0), Differ(1, 0)]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{type(fault).__name__}{fault.rank}")
@pytest.mark.parametrize("at", range(40, 99, int(os.environ.get("SAVE_STEP", "11"))))
def test_a_save_that_is_not_waited_for_is_whole_or_absent(fault: Any, at: int, tmp_path: Path) -> None:
    """Whatever happens between its call and its end; no rank waits for ever, and none misses an error."""
    path = str(tmp_path / "w.safetensors")
    fault = replace(fault, **({"call": at // 8} if isinstance(fault, Differ) else {"at": at}))
    over = [0.0]

    def program(comm: Any) -> str:
        kv = mpikv.create(comm=comm, timeout=10.0)
        kv.init("w", np.zeros(100))
        kv.save(path)
        try:
            with kv:
                for number in range(1, 7):
                    work = kv.save(path, wait=False) if number % 3 == 0 else None
                    kv.push("w", np.full(100, number / 3))
                    kv.push("w", np.full(100, number / 3))
                    if number % 2 and work is not None:
                        work.wait()
                        over.append(number - 1.0)
                kv.load(path)
                over.append(5.0)
                for _ in range(60):
                    kv.barrier()
        except (OSError, mpikv.MPIKVError, Planted) as error:
            return f"{type(error).__name__}: {error}"
        return "done"

    texts = cluster(3, seed=at, faults=[fault]).run(program)

    def resumes(comm: Any) -> float:
        with mpikv.create(comm=comm) as kv:
            kv.load(path)
            value = kv.pull("w")
        assert (value == value[0]).all()
        return float(value[0])

    (value,) = set(cluster(2).run(resumes))
    assert value in (0.0, 2.0, 5.0)
    assert value >= max(over)
    if not isinstance(fault, Kill):  # which leaves a draft, for the next job to remove
        assert [each.name for each in tmp_path.iterdir()] == ["w.safetensors"]
    if isinstance(fault, Pause):
        assert texts == ["done"] * 3
    elif isinstance(fault, FullDisk) and "done" not in texts:
        assert all("No space left on device" in text for text in texts)
    else:
        known = ("done", "Stalled", "PeerFailed", "RankMismatch", "Planted", "CheckpointError")
        assert all(text is None or text.startswith(known) for text in texts)


@pytest.mark.filterwarnings("ignore::mpikv.testing.Missed")
@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("fault", [Raise, Kill])
def test_a_rank_that_ends_in_a_save_or_a_close_is_named_by_the_others(fault: Any, rank: int, tmp_path: Path) -> None:
    """Also where they find that it has taken its draft away, and want to tell each other; and in their last steps."""

    def program(comm: Any) -> str:
        try:
            with mpikv.create(comm=comm, timeout=10.0) as kv:
                kv.init("w", np.zeros(100))
                for _ in range(2):
                    kv.save(tmp_path / "w")
                    kv.push("w", np.ones(100))
        except (mpikv.MPIKVError, Planted) as error:
            return f"{type(error).__name__}: {error}"
        return "done"

    for at in range(28, 64):
        texts = cluster(3, seed=at, faults=[fault(rank, at)]).run(program)
        others = [text for other, text in enumerate(texts) if other != rank]
        assert all(text == "done" or f"ranks [{rank}]" in text or f"rank {rank} raised" in text for text in others)


def test_faults_are_drawn_by_a_seed() -> None:
    assert draw_faults(3, 4, 2) == draw_faults(3, 4, 2)
    drawn = {type(fault) for seed in range(100) for fault in draw_faults(seed, 4, 2)}
    assert drawn == {Kill, Pause, Raise, Leave, Differ, FullDisk, Delay, Cut}


# Of types that a checker would refuse.
NO_POINT: Any = 1.5
NO_HOSTS: Any = 0
IMPOSSIBLE = [Kill(2, 1), Kill(0, 0), Kill(0, NO_POINT), Pause(0, 1, -1.0), Pause(0, 1, math.nan), Differ(0, 0)]
IMPOSSIBLE += [Delay(0, 2, 1.0), Delay(0, 1, math.nan)]
IMPOSSIBLE += [Cut((2,)), Cut(()), Cut(NO_HOSTS), Cut((0,), 2.0, 1.0), Cut((0,), math.nan)]


@pytest.mark.parametrize("fault", IMPOSSIBLE)
def test_a_fault_that_cannot_strike_is_refused(fault: Any) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(repr(fault))} cannot strike 2 ranks on 2 hosts"):
        cluster(2, hosts=2, faults=[fault])


def test_clusters_in_two_threads_keep_their_own_plans() -> None:
    """The first to begin ends while the second runs, whose call comes after that."""
    first_runs, second_runs, first_ended = (threading.Event() for _ in range(3))

    def run(begun: threading.Event, until: threading.Event) -> None:
        def program(comm: Any) -> None:
            begun.set()
            until.wait(5)
            with mpikv.create(comm=comm) as kv, pytest.raises(mpikv.RankMismatch, match="rank 1 calls barrier"):
                kv.init("w", np.zeros(2))

        cluster(2, faults=[Differ(1, 1)]).run(program)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(run, first_runs, second_runs)
        first_runs.wait(5)
        second = pool.submit(run, second_runs, first_ended)
        first.result(10)
        first_ended.set()
        second.result(10)


LATE = [Kill(1, 10**6), Raise(1, 10**6), Leave(0, 10**6), Pause(0, 10**6, 1.0), FullDisk(0, 10**6), Differ(1, 100)]


@pytest.mark.parametrize("fault", LATE)
def test_a_fault_that_does_not_strike_is_told(fault: Any) -> None:
    with pytest.warns(Missed, match=f"{re.escape(repr(fault))}. did not strike in cluster"):
        cluster(2, faults=[fault]).run(lambda comm: comm.Barrier())

    def fails(comm: Any) -> None:
        comm.Barrier()
        raise KeyError(comm.rank)

    with pytest.raises(KeyError) as failure:
        cluster(2, faults=[fault]).run(fails)
    assert any("did not strike" in note for note in notes(failure.value))


def test_explore_does_not_tell_of_drawn_faults_that_come_late() -> None:
    assert explore(lambda comm: None, range(20), faults=True) is None
