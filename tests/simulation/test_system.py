"""What a simulated rank has of its own: time, warnings, files; and that real threads keep theirs."""

import gc
import os
import re
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv.cluster.calls import note
from mpikv.cluster.process_group import ProcessGroup
from mpikv.cluster.status_board import StatusBoard
from mpikv.testing import cluster

REAL = time.sleep, time.time, time.monotonic, time.perf_counter, os.replace, os.pwritev


def push_alone(kv: mpikv.KVStore) -> None:
    kv.init("w", np.zeros(3))
    kv.set_optimizer("sgd", learning_rate=1.0)
    if kv.rank == kv.size - 1:
        kv.push("w", np.ones(3))


def wait_for_owner(kv: mpikv.KVStore) -> None:
    kv.init("w", np.zeros(3))
    kv.set_updater(lambda key, given, stored: time.sleep(8.0) or given)
    if kv.rank:
        kv.push("w", np.ones(3))


def meet(kv: mpikv.KVStore) -> None:
    for _ in range(3):
        kv.barrier()


@pytest.mark.parametrize(
    ("store", "size", "hosts", "before", "told"),
    [
        ("dist_sync", 4, 2, lambda kv: None, "rank 3 has begun no collective call yet"),
        ("dist_async", 2, 1, push_alone, "rank 1 began call #4 push last"),
        ("dist_sync", 2, 1, meet, r"rank 1 began call #3 barrier\(\) last"),
        ("dist_async", 5, 1, wait_for_owner, r"rank 0 began [^;]* in <lambda>; rank 1 .*; 1 more rank is late"),
    ],
    ids=["on another host", "after a call of its own", "after equal calls", "with four that wait for an updater"],
)
def test_a_late_rank_is_told_with_its_last_call(
    caplog: pytest.LogCaptureFixture,
    store: str,
    size: int,
    hosts: int,
    before: Callable[[mpikv.KVStore], None],
    told: str,
) -> None:
    def program(comm: Any) -> None:
        with mpikv.create(store, comm=comm, timeout=100.0) as kv:
            before(kv)
            if kv.rank == size - 1:
                time.sleep(30.0)
            kv.barrier()

    cluster(size, hosts=hosts).run(program)
    (said,) = [text for text in caplog.messages if text.startswith("rank 0 has waited 5.")]
    assert re.search(rf"barrier\(\): {told}", said)
    assert "does not answer" not in caplog.text


@pytest.mark.parametrize("hosts", [1, 3])
def test_a_rank_that_has_given_up_is_not_taken_for_one_that_keeps_others_waiting(hosts: int) -> None:
    """When the time of several is up at once, each names who is late, and not one that it has just waited with."""

    def program(comm: Any) -> list[tuple[int, ...]]:
        group = ProcessGroup(comm)
        board, named = StatusBoard(group), []
        board.record.begin(note("barrier()"))
        for gives_up in (False, True):
            comm.Barrier()
            if comm.rank == 1 and gives_up:
                board.give_up()
            time.sleep(10.0 if comm.rank else 5.0)
            if comm.rank == 0:
                named.append(board.report(())[0])
        comm.Barrier()
        board.close()
        group.close()
        return named

    assert cluster(3, hosts=hosts).run(program)[0] == [(1, 2), (2,)]


def test_all_clocks_go_together() -> None:
    def program(comm: Any) -> list[float]:
        clocks = [time.time, time.monotonic, time.perf_counter]
        clocks += [
            lambda: time.time_ns() / 1e9,
            lambda: time.monotonic_ns() / 1e9,
            lambda: time.perf_counter_ns() / 1e9,
        ]
        before = [clock() for clock in clocks]
        time.sleep(1000 * (comm.rank + 1))
        return [clock() - start for clock, start in zip(clocks, before, strict=True)]

    for rank, passed in enumerate(cluster(2).run(program)):
        assert passed == pytest.approx([1000 * (rank + 1)] * 6)
    with pytest.raises(ValueError, match="must be non-negative"):
        cluster(1).run(lambda comm: time.sleep(-1))


def test_real_threads_keep_the_real_functions() -> None:
    slept: list[float] = []

    def sleeps() -> None:
        started = time.monotonic()
        time.sleep(0.05)
        slept.append(time.monotonic() - started)

    def program(comm: Any) -> None:
        thread = threading.Thread(target=sleeps)
        thread.start()
        thread.join()

    cluster(1).run(program)
    assert 0.05 <= slept[0] < 10
    assert (time.sleep, time.time, time.monotonic, time.perf_counter, os.replace, os.pwritev) == REAL


def test_ranks_do_not_see_each_others_warnings() -> None:
    def program(comm: Any) -> tuple[list[str], bool]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("error" if comm.rank == 1 else "always")
            for number in range(5):
                time.sleep(comm.rank * 0.1)
                try:
                    warnings.warn(f"{number} of {comm.rank}", stacklevel=1)
                except UserWarning:
                    assert comm.rank == 1
                comm.Barrier()
            time.sleep(comm.rank)
        warnings.simplefilter("ignore")  # of this rank, to its end
        return [str(each.message) for each in caught], comm.rank == 1

    filters, shown = list(warnings.filters), warnings.showwarning
    for seed in range(5):
        for rank, (caught, strict) in enumerate(cluster(3, seed=seed).run(program)):
            assert caught == ([] if strict else [f"{number} of {rank}" for number in range(5)])
        assert (warnings.filters, warnings.showwarning) == (filters, shown)


def test_the_test_sees_warnings_that_ranks_let_pass() -> None:
    with pytest.warns(UserWarning, match="of rank 2"):
        cluster(3).run(lambda comm: comm.rank == 2 and warnings.warn("of rank 2", stacklevel=1))


def test_what_ranks_write_to_disk_comes_in_an_order_that_a_seed_draws(tmp_path: Path) -> None:
    def order(seed: int) -> tuple[int, ...]:
        events: list[int] = []

        def program(comm: Any) -> None:
            own = tmp_path / f"{comm.rank}"
            own.write_text(str(comm.rank))
            events.append(comm.rank)
            os.replace(own, tmp_path / "last")
            events.append(comm.rank)

        cluster(2, seed=seed).run(program)
        assert (tmp_path / "last").read_text() in "01"
        return tuple(events)

    one_waits_in_its_rename = {(0, 1, 0, 1), (0, 1, 1, 0), (1, 0, 0, 1), (1, 0, 1, 0)}
    assert {order(seed) for seed in range(60)} == {(0, 0, 1, 1), (1, 1, 0, 0)} | one_waits_in_its_rename
    assert [order(seed) for seed in range(5)] == [order(seed) for seed in range(5)]


def test_no_garbage_is_collected_in_the_thread_of_another_rank() -> None:
    ended_by: list[int] = []

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            ended_by.append(threading.get_ident())

    def program(comm: Any) -> int:
        Cycle()
        comm.Barrier()
        kept = [[number] for number in range(100_000)]  # else enough to have garbage collected
        assert ended_by == []
        assert len(kept) == 100_000
        return threading.get_ident()

    threads = cluster(3).run(program)
    assert gc.isenabled()
    gc.collect()
    assert len(ended_by) == 3
    assert not set(ended_by) & set(threads)


def test_stores_that_are_left_open_end_with_the_run() -> None:
    def program(comm: Any) -> None:
        kv = mpikv.create(comm=comm)
        kv.init("w", np.zeros(3))
        kv.push("w", np.ones(3), wait=False).wait()

    cluster(3, hosts=2).run(program)
    gc.collect()
    assert cluster(2).run(lambda comm: comm.allgather(comm.rank)) == [[0, 1]] * 2
