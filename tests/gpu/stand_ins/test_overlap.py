"""What happens at once, on GPUs that are none, while a call of several messages is made, and what keeps its order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.gpus import order_of, store_on

from mpikv import optimizers
from mpikv.errors import MPIKVError
from mpikv.store.kvstore import KVStore
from mpikv.testing.fakegpu import FakeGpu
from mpikv.testing.fakestreams import FakeStream
from mpikv.testing.store import on_host

SEVERAL = pytest.mark.ranks(2, 3)
SIZES = (9000, 300, 12000, 5, 7000)
"""Of float32: eight messages or so of 16 KiB, of which some are parts of one array."""
SMALL = (3000,) * 9
"""Messages that are parts of several arrays, so that each is packed."""


class Done(NamedTuple):
    """Work of a GPU, in the order in which it was queued."""

    work: str
    stream: int
    time: int
    known: dict[int, int]
    """How much of each stream's work comes before it."""

    def comes_after(self, other: Done) -> bool:
        return self.known.get(other.stream, 0) >= other.time


@contextmanager
def noted(gpu: FakeGpu) -> Iterator[list[Done]]:
    """Give a block the list of the work that a GPU is given in it."""
    done: list[Done] = []
    inner = gpu.checker.work

    def work(stream: FakeStream, name: str, uses: Any) -> None:
        inner(stream, name, uses)
        if name != "record":
            done.append(Done(name, stream.number, stream.time, dict(stream.clock)))

    gpu.checker.work = work  # type: ignore[method-assign]
    try:
        yield done
    finally:
        gpu.checker.work = inner  # type: ignore[method-assign]


class Job:
    """A store on a GPU with values of several messages, and arrays to be pushed and filled."""

    def __init__(
        self, comm: Any, placement: str = "sharded", updater: bool = True, sizes: Sequence[int] = SIZES, **options: Any
    ) -> None:
        self.gpu = FakeGpu(comm.rank if comm else 0)
        self.kv: KVStore = store_on(self.gpu, comm, placement=placement, **options)
        self.keys = [f"k{number}" for number in range(len(sizes))]
        self.kv.init(self.keys, [np.zeros(size, np.float32) for size in sizes])
        if updater:
            self.kv.set_optimizer(optimizers.SGD(learning_rate=1.0, momentum=0.5))
        self.sources = [self.gpu.upload(np.full(size, 1, np.float32)) for size in sizes]
        self.outs = [self.gpu.upload(np.full(size, 7, np.float32)) for size in sizes]

    def pushpull(self) -> None:
        self.kv.pushpull(self.keys, self.sources, out=self.outs)

    def end(self) -> None:
        self.kv.close()
        self.gpu.checker.assert_clean()


def named(done: list[Done], work: str) -> list[Done]:
    return [each for each in done if each.work == work]


# --- What is at the same time


@pytest.mark.ranks(1)
@pytest.mark.parametrize("sizes", [SIZES, SMALL], ids=["large", "small"])
def test_one_rank_copies_once_before_an_update_or_in_place_of_it(comm: Any, sizes: Sequence[int]) -> None:
    copies = []
    for updater in (True, False):
        job = Job(comm, updater=updater, sizes=sizes)
        with noted(job.gpu) as done:
            job.kv.push(job.keys, job.sources)
        messages = len(named(done, "update"))
        copies.append(len(named(done, "copy")))
        assert (job.kv.pull(job.keys[-1]).get() == (-1 if updater else 1)).all()
        job.end()
    assert copies == [messages, messages]
    assert messages > 5


@SEVERAL
def test_messages_travel_while_others_are_updated_and_copied(comm: Any) -> None:
    """Each waits for no more than it needs: NCCL always has the next message before it is done with one."""
    job = Job(comm)
    with noted(job.gpu) as done:
        job.pushpull()
    sums, updates, gathers = (named(done, work) for work in ("reduceScatter", "update", "allGather"))
    assert len(sums) == len(gathers) > 5
    # Of the last message, which is shorter, a rank may own nothing.
    assert len(sums) - 1 <= len(updates) <= len(sums)
    # One copy out for each message, of which all but the last two come while others are given.
    copies = [each for each in named(done, "copy") if each.comes_after(gathers[0])]
    assert len(copies) >= len(gathers)
    assert not copies[0].comes_after(gathers[2])
    assert len({each.stream for each in (*sums, *gathers)}) == 1
    assert {each.stream for each in (*sums, *gathers)}.isdisjoint(each.stream for each in updates)
    for number, update in enumerate(updates):
        assert update.comes_after(sums[number])
        assert gathers[number].comes_after(update)
        if number + 1 < len(sums):
            assert not sums[number + 1].comes_after(update), "a sum waits for the update of the message ahead of it"
            assert not update.comes_after(sums[number + 1]), "an update waits for the sum of the next message"
        if number:
            assert not update.comes_after(gathers[number - 1]), "an update waits for the message ahead of it"
    job.end()


@SEVERAL
def test_a_pull_copies_what_has_come_while_more_comes(comm: Any) -> None:
    job = Job(comm)
    for _ in range(2):
        job.kv.push(job.keys, job.sources)
        with noted(job.gpu) as done:
            job.kv.pull(job.keys, job.outs)
    gathers, copies = named(done, "allGather"), named(done, "copy")
    assert len(gathers) == len(copies) > 5
    for number, copy in enumerate(copies[:-1]):
        assert copy.comes_after(gathers[number])
        assert not copy.comes_after(gathers[number + 1])
        assert not gathers[number + 1].comes_after(copy)
    for out in job.outs:
        assert (on_host(out) == job.kv.size * -2.5).all()
    job.end()


@SEVERAL
@pytest.mark.parametrize("keys", [slice(None), slice(1, 2)])
def test_after_a_push_a_caller_may_change_what_he_pushed_and_waits_for_nothing_else(comm: Any, keys: slice) -> None:
    job = Job(comm)
    names, sources, caller = job.keys[keys], job.sources[keys], job.gpu.stream()
    caller.wait(job.gpu.current().record())
    for _ in range(2):
        with caller, noted(job.gpu) as done:
            job.kv.push(names, sources)
            for source in sources:
                source += 1
    changes, updates = named(done, "add"), named(done, "update")
    assert len(changes) == len(sources)
    assert sum(comm.allgather(len(updates))) > 0
    assert not any(change.comes_after(update) for change in changes for update in updates[-1:])
    for sum_ in named(done, "reduceScatter")[-1:]:
        assert all(change.comes_after(sum_) for change in changes)
    job.end()


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("placement", ["root", "sharded", "replicated"])
def test_keys_with_rates_of_their_own_are_updated_by_no_more_launches(comm: Any, placement: str) -> None:
    updates = []
    for rates in ({}, {f"k{number}": 1 / (1 + number % 3) for number in range(0, 40, 2)}):
        job = Job(comm, placement, sizes=[number % 7 + 1 for number in range(40)])
        job.kv.set_optimizer(optimizers.Adam(learning_rate=0.5, wd=0.25, lr_mult=rates))
        with noted(job.gpu) as done:
            job.pushpull()
        updates.append(len(named(done, "update")))
        job.end()
    assert updates[0] == updates[1] <= 1
    assert sum(comm.allgather(updates[0]) if comm else updates) > 0


# --- Faults


class Skipping:
    """Streams that pass over some of the waits that they are told, counted from 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, skipped: Sequence[int]) -> None:
        self.waiting: list[FakeStream] = []
        """The stream of each wait."""
        wait = FakeStream.wait

        def counted(stream: FakeStream, event: Any) -> None:
            self.waiting.append(stream)
            if len(self.waiting) not in skipped:
                wait(stream, event)

        monkeypatch.setattr(FakeStream, "wait", counted)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("verb", ["pushpull", "push", "pull"])
@pytest.mark.deadline(120)
def test_each_wait_that_is_left_out_is_found(comm: Any, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the stand-in, in the call, or when its caller goes on; so none is there for nothing."""
    failed, transfers = without_waits(comm, verb, monkeypatch, [])
    assert not failed
    assert len(transfers) > 8
    each = [[number] for number, _ in enumerate(transfers, 1)]
    if verb == "pull":
        # Of these the first or the second brings the last update, and others but the copies of other messages.
        of_transfers = [number for number, is_transfer in enumerate(transfers, 1) if is_transfer]
        each = [one for one in each if one[0] not in of_transfers] + [of_transfers]
    for numbers in each:
        failed, _ = without_waits(comm, verb, monkeypatch, numbers)
        assert any(comm.allgather(failed)), f"nobody misses wait {numbers} of {len(transfers)}"


def without_waits(
    comm: Any, verb: str, monkeypatch: pytest.MonkeyPatch, left_out: Sequence[int]
) -> tuple[bool, list[bool]]:
    """Make a call without some of its waits; return whether that is found, and whether each wait is a transfer's."""
    job = Job(comm, timeout=1.0, sizes=SMALL)
    order: Any = order_of(job.kv)
    job.pushpull()
    job.kv.push(job.keys, job.sources)
    calls: dict[str, Callable[[], Any]] = {
        "pushpull": job.pushpull,
        "push": lambda: job.kv.push(job.keys, job.sources),
        "pull": lambda: job.kv.pull(job.keys, job.outs),
    }
    caller, failed = job.gpu.stream(), False
    caller.wait(job.gpu.current().record())
    with monkeypatch.context() as patch, caller:
        if verb == "push":
            job.kv.pull(job.keys, job.outs)
        for array in (*job.sources, *job.outs):
            array.fill(1)
        skipping = Skipping(patch, left_out)
        try:
            calls[verb]()
            for array in job.sources if verb == "push" else job.outs:
                array.fill(2)
        except (AssertionError, MPIKVError):
            failed = True
    failed |= bool(job.gpu.checker.faults)
    job.kv.abandon("for a test")
    job.gpu.checker.faults.clear()
    comm.Barrier()
    return failed, [stream is order._transfers for stream in skipping.waiting]
