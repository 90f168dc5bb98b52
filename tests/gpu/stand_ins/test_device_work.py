"""Calls that nobody waits for on a GPU that is none: in the order of streams of the moment when they were issued."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.gpus import nccl_of, order_of, store_on

import mpikv
from mpikv import RowSparse, TransportError, ValueMismatch
from mpikv.store.kvstore import KVStore
from mpikv.testing.fakegpu import FakeGpu, FakeTensor
from mpikv.testing.fakestreams import RaceError
from mpikv.testing.store import on_host

ALL = pytest.mark.ranks(1, 2, 3, 4)
SIZE = 6000


@pytest.fixture
def gpu(gpu: FakeGpu) -> Iterator[FakeGpu]:
    yield gpu
    gc.collect()
    gpu.checker.assert_clean()


@pytest.fixture
def kv(gpu: FakeGpu, comm: Any) -> Iterator[KVStore]:
    with store_on(gpu, comm, timeout=20) as store:
        store.init("w", gpu.upload(np.zeros(SIZE, np.float32)))
        yield store


def held(kv: KVStore) -> threading.Event:
    """Hold the thread of a store before its next call until the event is set."""
    released, least = threading.Event(), kv._pending._least

    def wait(queued: int) -> int:
        assert released.wait(20)
        return least(queued)

    kv._pending._least = wait
    return released


def queued(work: Any) -> None:
    """Wait until a call is queued, as :meth:`Work.wait` does, but with no stream."""
    deadline = time.monotonic() + 20
    while not work.done:
        assert time.monotonic() < deadline
        time.sleep(1e-3)
    assert work.error is None


def full(gpu: FakeGpu, value: float) -> Any:
    return gpu.upload(np.full(SIZE, value, np.float32))


# --- The order of streams


@ALL
@pytest.mark.parametrize("rows", [False, True])
def test_it_comes_after_what_its_stream_had_to_do_and_nothing_else(gpu, kv, rows):
    """Neither waits for the other beyond that: not the store for what comes next, nor the caller for the call."""
    kv.init("rows", RowSparse([0], gpu.upload(np.ones((1, SIZE), np.float32)), (3, SIZE)))
    caller, released, stream = gpu.stream(), held(kv), order_of(kv).stream
    before = gpu.current().clock[stream.number]
    with caller:
        gradient, out = full(gpu, 3), gpu.empty((3, SIZE) if rows else (SIZE,), np.dtype(np.float32))
        given = RowSparse([1], gradient.reshape(1, SIZE), (3, SIZE)) if rows else gradient
        work = kv.pushpull("rows" if rows else "w", given, out, wait=False)
        issued, seen = caller.time, caller.clock.get(stream.number, 0)
        more = full(gpu, 0)
        more += 1
        released.set()
        queued(work)
        assert stream.clock[caller.number] == issued, "the call waits for what came after it"
        assert caller.clock.get(stream.number, 0) == seen, "the caller's stream waits for the call"
        assert gpu.find_stream(0).clock[stream.number] == before, "the default stream does"
        with pytest.raises(RaceError, match="nothing orders them"):
            out += 1
        gpu.checker.faults.clear()
        assert work.wait() is out
        out += 1
        gradient.fill(0)
        np.testing.assert_array_equal(on_host(out)[1] if rows else on_host(out), np.full(SIZE, 3 * kv.size + 1))


@ALL
def test_wait_orders_the_stream_of_whoever_waits(gpu, kv):
    issuing, one, other = (gpu.stream() for _ in range(3))
    with issuing:
        gradient = full(gpu, 2)
        work = kv.pushpull("w", gradient, wait=False)
    found = []

    def wait(stream):
        gpu.use()
        with stream:
            found.append(on_host(work.wait()))

    thread = threading.Thread(target=wait, args=(one,))
    thread.start()
    thread.join(20)
    wait(other)
    assert [values.tolist() for values in found] == [[2.0 * kv.size] * SIZE] * 2
    with issuing:
        work.wait()


@ALL
def test_arrays_of_a_call_that_is_refused_live_as_long(gpu, kv):
    """Rows in a list are summed before the ranks agree."""
    with gpu.stream():
        rows = gpu.upload(np.ones((2, SIZE), np.float32))
        kv.init("rows", RowSparse([0], rows[:1], (3, SIZE)))
        given = [RowSparse([1], rows[:1], (3, SIZE)), RowSparse([1], rows[1:], (3, SIZE))]
        work = kv.push("rows", given, priority="high", wait=False)
        del rows, given
        while not work.done:
            time.sleep(1e-3)
        gpu.checker.assert_clean()
        with pytest.raises(ValueMismatch, match="priority"):
            work.wait()


@ALL
def test_arrays_are_let_go_of(gpu, kv):
    with gpu.stream():
        given, out = full(gpu, 1), full(gpu, 0)
        lives = [weakref.ref(array) for array in (given, out)]
        kv.pushpull("w", given, out, wait=False).wait()
        lives += [weakref.ref(kv.pull("w", wait=False).wait())]
        del given, out
        for _ in range(gpu.lag + 1):  # each looks what is done
            kv.barrier()
        gc.collect()
        assert all(life() is None for life in lives)


@ALL
def test_memory_of_new_arrays_may_be_in_use_until_it_is_taken(gpu, kv):
    caller, released = gpu.stream(), held(kv)
    with caller:
        kv.push("w", full(gpu, 2), wait=False)
        work = kv.pull("w", wait=False)
        later = full(gpu, 0)
        later += 1
        released.set()
        out = work.wait()
        assert out._block.stream is caller
        np.testing.assert_array_equal(on_host(out), np.full(SIZE, 2 * kv.size))
        del work, out, later


@ALL
def test_any_other_call_orders_all_that_were_not_waited_for(gpu, kv):
    view = kv.view("w")
    for number, other in enumerate([kv.barrier, lambda: kv.view("w"), lambda: left(kv), lambda: kv.pull("w")], 1):
        with gpu.stream():
            out = full(gpu, 0)
            works = [kv.pushpull("w", full(gpu, number), out, wait=False) for _ in range(2)]
            other()
            assert works[1].done
            out += 1
            np.testing.assert_array_equal(on_host(out), np.full(SIZE, number * kv.size + 1))
            np.testing.assert_array_equal(on_host(view), np.full(SIZE, number * kv.size))


def left(kv):
    with kv.join():
        pass


@ALL
def test_a_store_comes_after_what_another_has_pending(gpu, comm, kv):
    """NCCL wants one order of all calls of a process, and each store has a thread of its own."""
    with store_on(gpu, comm, timeout=20) as other:
        other.init("w", full(gpu, 0))
        for verb in ("push", "pull"):
            for wait in (True, False):
                released = held(kv)
                works = [kv.push("w", full(gpu, 1), wait=False) for _ in range(3)]
                opening = threading.Timer(0.05, released.set)
                opening.start()
                arguments = ("w",) if verb == "pull" else ("w", full(gpu, 1))
                made = getattr(other, verb)(*arguments, wait=wait)
                assert all(work.done for work in works), f"{verb} with wait={wait} came first"
                if not wait:
                    made.wait()
                opening.join()


@ALL
def test_arrays_of_other_libraries_are_in_order_already(gpu, kv, monkeypatch):
    """What their library has to do when the call is made came after it."""
    adopted, adopt = [], gpu.adopt

    def noted(value: Any, ordered: bool = False) -> Any:
        adopted.append(ordered)
        return adopt(value, ordered)

    monkeypatch.setattr(gpu, "adopt", noted)
    gradient, out = FakeTensor(full(gpu, 1)), FakeTensor(full(gpu, 0))
    for wait in (True, False):
        adopted.clear()
        if (made := kv.pushpull("w", gradient, out, wait=wait)) is not out:
            assert made.wait() is out
        assert adopted
        assert set(adopted) == {not wait}
    np.testing.assert_array_equal(on_host(out.array), np.full(SIZE, kv.size))


# --- Ends


@ALL
def test_a_store_that_is_left_by_an_error_with_calls_pending(gpu, comm):
    kv = store_on(gpu, comm, timeout=2)
    kv.init("w", np.zeros(3))
    released = held(kv)
    work = kv.push("w", np.ones(3), wait=False)
    with pytest.raises(ZeroDivisionError), kv:
        _ = 1 / 0
    released.set()
    with pytest.raises(mpikv.MPIKVError):
        work.wait(20)
    with pytest.raises(mpikv.Closed, match="ZeroDivisionError"):
        kv.pull("w")
    if kv.size > 1:
        assert nccl_of(kv).communicators[0].state == "aborted"


@pytest.mark.ranks(1)
def test_a_failure_that_the_watchdog_finds_ends_the_store(comm: Any) -> None:
    class Failing(FakeGpu):
        def watch(self) -> None:
            raise TransportError("an illegal address")

    kv = store_on(gpu := Failing(), comm, timeout=20)

    def use_until_it_fails() -> None:
        kv.init("w", full(gpu, 0))
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            kv.push("w", full(gpu, 1))

    with pytest.raises(TransportError, match="an illegal address"):
        use_until_it_fails()
    with pytest.raises(mpikv.Closed, match="an illegal address"):
        kv.push("w", full(gpu, 1))
