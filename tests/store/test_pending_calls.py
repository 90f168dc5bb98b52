"""Calls that nobody waits for give what they would have given, in one order on all ranks, and lose no error."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref

import numpy as np
import pytest
from support.commands import python

import mpikv
from mpikv import (
    Closed,
    KeyNotInitialized,
    PeerFailed,
    RankMismatch,
    Stalled,
    TransportError,
    Unsupported,
    ValueMismatch,
)
from mpikv.cli.launchers import clean
from mpikv.cluster.runtime import owned, present
from mpikv.testing import cluster

ALL = pytest.mark.ranks(1, 2, 3, 4)
SEVERAL = pytest.mark.ranks(2, 4)
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "mpi"])


@pytest.fixture
def kv():
    with mpikv.create(timeout=20) as store:
        store.init("w", np.zeros(2))
        yield store


def threads():
    return {thread for thread in threading.enumerate() if thread.name == "mpikv"}


@pytest.mark.processes
@ALL
@TRANSPORTS
@pytest.mark.feature("priority")
def test_the_most_urgent_of_what_is_pending_comes_first(comm, transport):
    begun, released, order = threading.Event(), threading.Event(), []

    def updater(key, total, stored):
        begun.set()
        assert released.wait(20)
        order.append(key)

    with mpikv.create(transport=transport, timeout=20) as kv:
        keys = ["first", "low", "none", "high", "list", "none too"]
        kv.init(keys, [np.zeros(1)] * len(keys))
        kv.set_updater(updater)
        works = [kv.push("first", np.ones(1), wait=False)]
        assert not kv.is_root or begun.wait(20)
        meet(comm)
        for key, priority in [("low", -1), ("none", 0), ("high", 7), ("list", [2]), ("none too", 0)]:
            works.append(kv.push(key, np.ones(1), priority=priority, wait=False))
        assert not works[0].done
        meet(comm)  # all ranks have issued all
        released.set()
        for work in works:
            assert work.wait(20) is None
        assert order == (["first", "high", "list", "none", "none too", "low"] if kv.is_root else [])


def meet(comm):
    if comm:
        comm.Barrier()


@ALL
def test_what_is_wrong_with_a_call_is_raised_by_wait(kv):
    works = [
        kv.push("w", np.ones(3 if kv.is_root else 2), wait=False),
        kv.push("w", np.ones(2), wait=False),
        kv.pull("unknown", wait=False),
    ]
    error = ValueMismatch if kv.is_root else PeerFailed
    with pytest.raises(error, match=r"key 'w' has shape \(3,\)"):
        works[0].wait()
    assert isinstance(works[0].error, error)
    works[1].wait()
    with pytest.raises(KeyNotInitialized):
        works[2].wait()
    np.testing.assert_array_equal(kv.pull("w"), np.full(2, float(kv.size)))


@ALL
@TRANSPORTS
def test_a_failure_that_nobody_has_seen_comes_in_place_of_the_next_call(transport):
    """Also where some ranks have seen it: the others' error is then told to them."""
    with mpikv.create(transport=transport, timeout=20) as kv:
        kv.init("w", np.ones(2))
        for seen_by in (None, kv.size - 1):
            work = kv.push("w", np.ones(3), wait=False)
            if kv.rank == seen_by:
                with pytest.raises(ValueMismatch):
                    work.wait()
            if kv.rank != seen_by:
                with pytest.raises(ValueMismatch, match="shape") as raised:
                    kv.push("w", np.full(2, 5.0))
                assert "nobody has waited" in raised.value.__notes__[-1]
            elif kv.size > 1:
                with pytest.raises(PeerFailed, match="rank 0 raised ValueMismatch"):
                    kv.push("w", np.full(2, 5.0))
            np.testing.assert_array_equal(kv.pull("w"), np.ones(2))


@ALL
def test_one_failure_stands_for_those_that_follow():
    with mpikv.create(timeout=20) as kv:
        kv.init("w", np.ones(2))
        for size in (3, 4, 5):
            kv.push("w", np.ones(size), wait=False)
        with pytest.raises(ValueMismatch, match=r"\(3,\)") as raised:
            kv.barrier()
        assert "2 later ones" in raised.value.__notes__[-1]
        kv.barrier()


@ALL
def test_looking_is_not_seeing_and_local_calls_take_no_error_away():
    with mpikv.create(timeout=20) as kv:
        kv.init("w", np.ones(2))
        kv.set_optimizer("sgd", learning_rate=1.0)
        work = kv.push("w", np.ones(3), wait=False)
        assert kv.version("w") == 0
        assert kv.view("w").shape == (2,)
        assert kv.optimizer is not None
        kv.set_learning_rate(2.0)
        assert work.done
        assert isinstance(work.error, ValueMismatch)
        assert "failed" in repr(work)
        with pytest.raises(ValueMismatch):
            kv.push("w", np.ones(2))
        kv.push("w", np.ones(2))
        np.testing.assert_array_equal(kv.pull("w"), np.full(2, 1.0 - 2 * kv.size))


@ALL
def test_settings_are_set_after_what_is_pending():
    with mpikv.create(timeout=20) as kv:
        kv.init("w", np.zeros(100_000))
        kv.set_optimizer("sgd", learning_rate=1.0)
        for _ in range(5):
            kv.push("w", np.ones(100_000), wait=False)
        kv.set_learning_rate(10.0)
        kv.push("w", np.ones(100_000), wait=False)
        assert kv.version("w") == 6
        np.testing.assert_array_equal(kv.pull("w"), np.full(100_000, -15.0 * kv.size))


@ALL
def test_an_updater_in_the_thread_cannot_use_the_store_nor_wait(kv):
    caught, issued = [], threading.Event()

    def updater(key, total, stored):
        assert issued.wait(20)
        for attempt in (lambda: kv.pull(key), lambda: kv.push(key, total, wait=False), lambda: later.wait(), kv.close):
            with pytest.raises(Unsupported) as raised:
                attempt()
            caught.append(str(raised.value))
        assert kv.version(key) == 0
        stored[:] = 3

    kv.set_updater(updater)
    work = kv.push("w", np.ones(2), wait=False)
    later = kv.pull("w", wait=False)
    issued.set()
    work.wait()
    np.testing.assert_array_equal(later.wait(), np.full(2, 3.0))
    assert len(caught) == (4 if kv.is_root else 0)


@ALL
def test_what_an_updater_raises_in_the_thread_reaches_every_rank(kv):
    def updater(key, total, stored):
        sys.exit(3)

    kv.set_updater(updater)
    with pytest.raises(SystemExit if kv.is_root else PeerFailed):
        kv.push("w", np.ones(2), wait=False).wait()
    # Nobody waits, and it comes in place of the next call, which must not run on any rank.
    kv.push("w", np.ones(2), wait=False)
    with pytest.raises(SystemExit if kv.is_root else PeerFailed):
        kv.barrier()
    kv.set_updater(None)
    kv.push("w", np.ones(2), wait=False)
    np.testing.assert_array_equal(kv.pull("w"), np.full(2, float(kv.size)))


@pytest.mark.processes
@ALL
def test_a_short_wait_ends_and_the_call_goes_on(kv):
    released = threading.Event()
    kv.set_updater(lambda key, total, stored: released.wait(20) and None)
    work = kv.push("w", np.ones(2), wait=False)
    if kv.is_root:  # on other ranks it ends as soon as the root goes on
        with pytest.raises(TimeoutError, match=r"push\('w'\) has not completed after 0.01 s"):
            work.wait(0.01)
        assert not work.done
    released.set()
    work.wait(20)


@ALL
def test_waiting_again_gives_the_same_and_keeps_nothing(kv):
    good, bad = kv.pushpull("w", np.ones(2), wait=False), kv.push("w", np.ones(3), wait=False)
    assert good.wait() is good.wait()
    lengths = set()
    for _ in range(5):
        try:
            bad.wait()
        except ValueMismatch as error:
            lengths.add(len(traceback.extract_tb(error.__traceback__)))
    assert len(lengths) == 1


@SEVERAL
@TRANSPORTS
def test_one_rank_waits_and_another_does_not(transport):
    with mpikv.create(transport=transport, timeout=20) as kv:
        kv.init("w", np.zeros(2))

        def issue():
            return kv.push("w", np.ones(2), wait=False) if kv.is_root else kv.pull("w")

        for _ in range(2):
            with pytest.raises(
                RankMismatch, match=r"0 calls next\(wait=False\).*pull.*rank 0 is at \S+py:\d+ in issue"
            ):
                issue().wait()
            np.testing.assert_array_equal(kv.pull("w", wait=False).wait(), np.zeros(2))
        for step in range(3):
            kv.push("w", np.full(2, float(step)), priority=step, wait=False)
        np.testing.assert_array_equal(kv.pull("w") % kv.size, np.zeros(2))


@SEVERAL
@TRANSPORTS
def test_ranks_issue_different_calls(transport):
    with mpikv.create(transport=transport, timeout=20) as kv:
        kv.init(["a", "b"], [np.zeros(2)] * 2)
        first = kv.push("a" if kv.is_root else "b", np.ones(2), wait=False)
        second = kv.push("a", np.ones(2), wait=False)
        with pytest.raises(RankMismatch, match=r"rank 0 calls push\('a'\)"):
            first.wait()
        second.wait()
        np.testing.assert_array_equal(kv.pull("a"), np.full(2, float(kv.size)))


@SEVERAL
@TRANSPORTS
def test_a_rank_that_does_not_come_ends_the_store(comm, transport):
    kv = mpikv.create(transport=transport, timeout=0.5)
    kv.init("w", np.zeros(2))
    if kv.is_root:
        works = [kv.push("w", np.ones(2), wait=False) for _ in range(3)]
        with pytest.raises(Stalled, match=r"waited .* s for"):
            works[0].wait()
        for work in works[1:]:
            with pytest.raises(Closed):
                work.wait()
        with pytest.raises(Closed):
            kv.pull("w")
    comm.Barrier()
    if not kv.is_root:
        with pytest.raises(TransportError):
            kv.push("w", np.ones(2), wait=False).wait()
        with pytest.raises(Closed):
            kv.push("w", np.ones(2), wait=False)


@pytest.mark.processes
@pytest.mark.ranks(3)
@pytest.mark.deadline(60)
@TRANSPORTS
def test_ranks_that_wait_in_their_thread_are_not_named_as_late(comm, transport):
    """While an updater keeps one rank, the others' own code is anywhere."""
    released = threading.Event()
    kv = mpikv.create(transport=transport, timeout=1)
    kv.init("w", np.zeros(2))
    kv.set_updater(lambda key, total, stored: released.wait(25) and None)
    work = kv.push("w", np.ones(2), wait=False)
    comm.Barrier()
    if not kv.is_root:
        while not work.done:
            time.sleep(0.01)
        with pytest.raises(Stalled) as raised:
            work.wait()
        assert set(raised.value.missing) <= {0}  # none where the root is too busy to answer in time
    comm.Barrier()
    released.set()
    if kv.is_root:
        with pytest.raises(TransportError):
            work.wait()
    kv.abandon("it has stalled")


@pytest.mark.processes
@pytest.mark.ranks(3)
@pytest.mark.deadline(60)
@TRANSPORTS
def test_a_late_rank_is_named_after_calls_aside(comm, transport):
    kv = mpikv.create(transport=transport, timeout=1)
    kv.init("w", np.zeros(2))
    kv.push("w", np.ones(2), wait=False).wait()
    kv.set_updater(lambda key, total, stored: comm.Ibarrier().Wait() and None)
    if kv.is_root:
        with pytest.raises(TransportError):
            kv.push("w", np.ones(2))
    else:
        with pytest.raises(Stalled, match=r"rank 0 .* is now at .*test_pending_calls.py:\d+ in <lambda>") as raised:
            kv.push("w", np.ones(2))
        assert raised.value.missing == (0,)
        comm.Ibarrier().Wait()


@ALL
def test_closing_waits_closes_and_then_raises():
    before = threads()
    kv = mpikv.create(timeout=20)
    kv.init("w", np.zeros(2))
    work = kv.push("w", np.ones(3), wait=False)
    with pytest.raises(ValueMismatch):
        kv.close()
    assert work.done
    with pytest.raises(Closed):
        kv.pull("w")
    kv.close()
    wait_for_threads(before)


@pytest.mark.processes
@ALL
def test_stores_that_always_wait_have_no_thread():
    before = threads()
    with mpikv.create(timeout=20) as kv:
        kv.init("w", np.zeros(2))
        kv.pushpull("w", np.ones(2))
        assert threads() == before
        kv.push("w", np.ones(2), wait=False).wait()
        assert len(threads() - before) == 1
    wait_for_threads(before)


def wait_for_threads(before):
    deadline = time.monotonic() + 10
    while threads() - before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Traced(np.ndarray):
    """An array whose life can be seen."""


@ALL
@pytest.mark.parametrize("size", [2, 3])
def test_the_arrays_of_a_call_are_let_go(size):
    """What it was given and what it returned, whether it went well or not."""
    with mpikv.create(timeout=20) as kv:
        kv.init(["w"], [np.zeros(2)])
        given, out = np.ones(size).view(Traced), np.ones(2).view(Traced)
        lives = [weakref.ref(given), weakref.ref(out)]
        work = kv.pushpull(["w"], [given], [out], wait=False)
        del given, out
        kv.drain()
        assert (work.error is None) == (size == 2)
        with pytest.raises(ValueMismatch) if size == 3 else contextlib.nullcontext():
            work.wait()
        del work
        gc.collect()
        assert [life() for life in lives] == [None, None]


@ALL
def test_shared_memory_is_freed_after_calls_aside():
    before = count_staging()
    for bad in (0, 1):
        kv = mpikv.create(timeout=20)
        kv.init("w", np.zeros(10_000))
        kv.buffer("w")
        if kv.size > 1:
            kv.pushpull("w", wait=False).wait()
        if bad:
            kv.push("w", np.ones(2), wait=False)
        with pytest.raises(ValueMismatch) if bad else contextlib.nullcontext():
            kv.close()
    assert count_staging() <= before  # that of earlier stores may be freed with this


def count_staging():
    gc.collect()
    return sum(memory() is not None for memory, _ in owned("promised memory"))


@SEVERAL
def test_calls_aside_are_refused_in_join():
    with mpikv.create(timeout=20) as kv:
        kv.init("w", np.zeros(1))
        error = Unsupported if kv.is_root else PeerFailed
        with pytest.raises(error, match=r"wait=False cannot be used in join\(\)"), kv.join():
            _ = [kv.push("w", np.ones(1), wait=False).wait() for _ in range(kv.is_root)]
        kv.push("w", np.ones(1), wait=False).wait()


@ALL
def test_bad_priorities_are_refused_by_the_call(kv):
    for priority in ("high", None, [1, 2], object(), float("inf"), float("nan")):
        with pytest.raises(ValueMismatch, match="priority"):
            kv.push("w", np.ones(2), priority=priority, wait=False).wait()


def test_several_threads_may_wait(kv):
    work = kv.pushpull("w", np.ones(2), wait=False)
    results = []
    waiters = [threading.Thread(target=lambda: results.append(work.wait(20))) for _ in range(4)]
    for waiter in waiters:
        waiter.start()
    for waiter in waiters:
        waiter.join(20)
    assert len(results) == 4
    assert all(result is results[0] for result in results)


UNFINISHED = """
import sys, threading
import numpy as np, mpikv
kv = mpikv.create(timeout=1)
kv.init("w", np.zeros(1))
kv.set_updater(lambda key, total, stored: threading.Event().wait())
kv.push("w", np.ones(1), wait=False)
sys.exit(7)
"""


@pytest.mark.processes
@pytest.mark.deadline(60)
def test_an_updater_that_never_returns_does_not_keep_the_program():
    ended = python("-c", UNFINISHED, timeout=30)
    assert ended.returncode == 7
    assert "calls with wait=False have not completed after 1 s" in ended.stderr


UNSEEN = """
import numpy as np, mpikv
kv = mpikv.create(timeout=1)
kv.init("w", np.zeros(1))
work = kv.push("w", np.ones(2), wait=False)
print("first")
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("last_lines", "status"),
    [
        ("", 1),
        ("work = None", 1),
        ("import logging; logging.disable()", 1),
        ("import atexit; atexit.register(print, 'the last word')", 1),
        ("import sys; sys.exit(3)", 1),
        ("work.wait(1)", 1),
        ("try: work.wait()\nexcept mpikv.ValueMismatch: pass", 0),
        ("try: kv.pull('w')\nexcept mpikv.ValueMismatch: pass", 0),
        ("try: kv.close()\nexcept mpikv.ValueMismatch: pass", 0),
    ],
)
def test_what_nobody_has_seen_fails_the_program(last_lines, status):
    ended = python("-c", UNSEEN + last_lines, timeout=30)
    assert ended.returncode == status, ended.stderr
    assert ended.stdout == "first\n" + ("the last word\n" if "atexit" in last_lines else "")
    told = "mpikv: at the end of the program: ValueMismatch" in ended.stderr
    assert (
        told
        == ("in push('w'), for which nobody has waited" in ended.stderr)
        == (status and "work.wait" not in last_lines)
    )


BEGINS = """
import sys, threading, numpy as np, mpikv
class Broken(mpikv.optimizers.SGD):
    def update(self, step, received, stored, state):
        1 / 0
kv = mpikv.create(timeout=1)
kv.init("w", np.zeros(1))
"""
PUSHES = 'kv.push("w", np.ones(1), wait=False)'
LEAVES = f"""
go = threading.Event()
kv.set_updater(lambda key, total, stored: go.wait() and None)
try:
    with kv:
        {PUSHES}; {PUSHES}
        raise KeyError
except KeyError:
    go.set()
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "told"),
    [
        (f"kv.set_optimizer(Broken())\n{PUSHES}", "ZeroDivisionError"),
        # The other ranks would wait for the end of one that does not come to its own.
        (
            f"kv.set_updater(lambda key, total, stored: sys.exit(0))\n{PUSHES}",
            "SystemExit: 0; updating key 'w'; in push('w')",
        ),
        (LEAVES, ""),
    ],
    ids=["ends the store", "exits", "leaves the block"],
)
def test_what_an_updater_has_raised_that_nobody_has_seen(program, told):
    ended = python("-c", BEGINS + program, timeout=30)
    assert ended.returncode == bool(told), ended.stderr
    assert not told or f"at the end of the program: {told}" in ended.stderr


FORKED = """
import os, threading
import numpy as np, mpikv
kv = mpikv.create(timeout=5)
kv.init("w", np.zeros(1))
go = threading.Event()
kv.set_updater(lambda key, total, stored: stored + go.wait())
work = kv.push("w", np.ones(1), wait=False)
child = os.fork()
if child == 0:
    try:
        work.wait()
    except mpikv.Closed as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
go.set()
work.wait()
"""


@pytest.mark.processes
@pytest.mark.deadline(60)
def test_a_forked_child_does_not_wait():
    ended = python("-c", FORKED, timeout=30)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "issued before a fork" in ended.stdout


@pytest.mark.processes
@pytest.mark.deadline(60)
def test_ctrl_c_ends_a_wait():
    program = UNFINISHED.replace("sys.exit(7)", "print(flush=True); work.wait()").replace("kv.push", "work = kv.push")
    with subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + program],
        env=clean(os.environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        process.stdout.readline()
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert "KeyboardInterrupt" in errors


def test_a_call_takes_the_store_in_one_step_with_the_end_of_those_before(monkeypatch):
    """Between the two another thread would issue one, which would run first, or in the middle of it."""

    def program(comm):
        order, passing, issued = [], present().event(), present().event()
        with mpikv.create(comm=comm) as kv:
            kv.init(["before", "call", "other"], [np.zeros(1)] * 3)
            kv.set_updater(lambda key, total, stored: order.append(key) or stored + total)
            work = kv.push("before", np.ones(1), wait=False)
            pass_to = kv._pending.claim_when_done

            def late(claim):
                # In each sleep all other threads of this rank run as far as they can.
                pass_to(lambda: (passing.set(), time.sleep(1), claim()))
                time.sleep(1)

            def issue():
                passing.wait()
                work.wait()
                kv.push("other", np.ones(1), wait=False)
                issued.set()

            monkeypatch.setattr(kv._pending, "claim_when_done", late)
            present().thread(issue, "other").start()
            kv.push("call", np.ones(1))
            monkeypatch.undo()
            issued.wait()
            kv.barrier()
        return order

    assert cluster(1).run(program) == [["before", "call", "other"]]
