"""Threads of a rank: the same bits as without them, and no more threads than the rank has cores."""

import os
import threading
import time
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv import optimizers

pytestmark = pytest.mark.ranks(1, 2, 3)
SIZE = (5 << 20) // 4 + 77
"""Elements of float32: each of three ranks owns more than a MiB of a message of 4 MiB."""
UPDATERS = {
    "none": None,
    "sgd": lambda: optimizers.SGD(learning_rate=0.1, momentum=0.9, clip_gradient=2.0),
    "adam": lambda: optimizers.Adam(learning_rate=0.1, wd=0.01),
    "lamb": lambda: optimizers.LAMB(learning_rate=0.1),
}


def lanes() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "mpikv lane"}


def train(comm: Any, threads: int, monkeypatch: Any, updater: Any, dtype: str, **options: Any) -> list[Any]:
    """Return the values that pushes of arrays, of lists and pulls leave on this rank."""
    monkeypatch.setenv("MPIKV_THREADS", str(threads))
    random = np.random.default_rng(comm.rank if comm else 0)
    with mpikv.create("dist_sync", comm=comm, bucket_bytes=4 << 20, **options) as kv:
        if updater is not None:
            kv.set_optimizer(updater)
        keys = ["long", "wide", "short"]
        shapes = [SIZE, (3, SIZE // 3), (7, 5)]
        kv.init(keys, [np.ones(shape, dtype) for shape in shapes])
        outs = [np.zeros(shape, dtype) for shape in shapes]
        for turn in range(2):
            brought = [random.standard_normal(shape).astype(dtype) for shape in shapes]
            kv.pushpull(keys, brought, out=outs)
            kv.push(keys, [[each, each[::-1]] for each in brought])
            kv.push(keys[turn], brought[turn])
        return [*outs, *kv.pull(keys)]


@pytest.mark.parametrize(("updater", "dtype"), [*dict.fromkeys(UPDATERS, "float32").items(), ("sgd", "float16")])
def test_threads_leave_all_bits(comm: Any, monkeypatch: Any, updater: str, dtype: str) -> None:
    make = UPDATERS[updater]
    alone, shared = (train(comm, threads, monkeypatch, make and make(), dtype) for threads in (1, 3))
    for one, other in zip(alone, shared, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("module", ["mpikv.optimizers", "__main__"])
def test_a_rule_of_a_user_stays_in_the_callers_thread(comm: Any, monkeypatch: Any, module: str) -> None:
    monkeypatch.setenv("MPIKV_THREADS", "3")
    with mpikv.create("dist_sync", comm=comm, bucket_bytes=4 << 20) as kv:
        threads = list[int]()

        class Counting(optimizers.SGD):
            """A rule that minds the order of blocks, or one of this package."""

            __module__ = module

            def rule(self, step: Any, block: Any) -> None:
                threads.append(threading.get_ident())
                time.sleep(0.01)  # so that no thread does the work of two

        kv.set_optimizer(Counting())
        kv.init("w", np.zeros(SIZE, np.float32))
        kv.push("w", np.ones(SIZE, np.float32))
        assert threading.get_ident() in threads
        assert len(set(threads)) == (1 if module == "__main__" else 3)


@pytest.mark.ranks(1)
@pytest.mark.processes
@pytest.mark.parametrize("count", [1, 2])
def test_a_rank_has_as_many_threads_as_cores(comm: Any, count: int) -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) < count:
        pytest.skip("this machine has one core")
    os.sched_setaffinity(0, sorted(cores)[:count])
    try:
        before = lanes()
        with mpikv.create("dist_sync", comm=comm) as kv:
            kv.init("w", np.zeros(SIZE, np.float32))
            kv.pushpull("w", np.ones(SIZE, np.float32))
            assert len(lanes() - before) == count - 1
    finally:
        os.sched_setaffinity(0, cores)
