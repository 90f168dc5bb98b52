"""What a GPU may do at once in a call of several messages: by the events that streams record and wait for."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
import pytest

import mpikv
from mpikv import optimizers
from mpikv.compute.cuda import kernels
from mpikv.compute.cuda.gpu import CupyGpu, CupyStream
from mpikv.transports.nccl import NcclTransport

pytestmark = [pytest.mark.gpu, pytest.mark.deadline(60)]

SEVERAL = pytest.mark.ranks(2, 3)
SIZES = (9000, 300, 12000, 5, 7000)
"""Of float32: eight messages or so of 16 KiB, of which some are parts of one array."""
SMALL = (3000,) * 9
"""Messages that are parts of several arrays, so that each is packed."""


class Use(NamedTuple):
    """Of memory, by its addresses."""

    low: int
    high: int
    writes: bool

    def races(self, other: Use) -> bool:
        return (self.writes or other.writes) and self.low < other.high and other.low < self.high


def uses(arrays: Iterable[Any], writes: bool = False) -> list[Use]:
    return [Use(array.data.ptr, array.data.ptr + array.nbytes, writes) for array in arrays]


class Done(NamedTuple):
    """Work of a GPU, in the order in which it was queued."""

    work: str
    stream: int
    time: int
    known: dict[int, int]
    """How much of each stream's work comes before it, as in vector clocks."""
    uses: Sequence[Use]

    def comes_after(self, other: Done) -> bool:
        return self.known.get(other.stream, 0) >= other.time


class Log(list[Any]):
    """What streams are told: work with its uses of memory, and events that they record or wait for."""

    def __init__(self, cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        events, marks = itertools.count(), dict[int, int]()
        record, wait, update = CupyStream.record, CupyStream.wait, kernels._Updates.__call__
        call, copy = NcclTransport._call, CupyGpu.copy

        def recorded(stream: CupyStream) -> Any:
            event: Any = record(stream)
            marks[event.beneath.ptr] = next(events)  # which may have been another one's
            self.append(("record", stream.handle, marks[event.beneath.ptr]))
            return event

        def waited(stream: CupyStream, event: Any) -> None:
            self.append(("wait", stream.handle, marks[event.beneath.ptr]))
            wait(stream, event)

        def called(
            mover: Any, function: Any, source: int = 0, into: int = 0, *more: int, on_stream: bool = True
        ) -> None:
            if not on_stream:
                call(mover, function, *more, on_stream=False)
                return

            @wraps(function)
            def noted(*given: int) -> None:
                name, count = function.__name__, more[0] * (1 if function.__name__ in ("allGather", "broadcast") else 4)
                sent, got = (count * (mover.size if name == each else 1) for each in ("reduceScatter", "allGather"))
                self.note(name, given[-1], [Use(source, source + sent, False), Use(into, into + got, True)])
                function(*given)

            call(mover, noted, source, into, *more)

        def copied(gpu: CupyGpu, targets: Sequence[Any], sources: Sequence[Any]) -> None:
            self.note("copy", gpu.current().handle, [*uses(sources), *uses(targets, True)])
            copy(gpu, targets, sources)

        def updated(bound: Any, steps: Any) -> None:
            total, value, state = bound._whole
            changed = uses([value, *state.values()], True)
            self.note("update", int(cupy.cuda.get_current_stream().ptr), [*uses([total]), *changed])
            update(bound, steps)

        for kind, name, replaced in (
            (CupyStream, "record", recorded),
            (CupyStream, "wait", waited),
            (NcclTransport, "_call", called),
            (CupyGpu, "copy", copied),
            (kernels._Updates, "__call__", updated),
        ):
            monkeypatch.setattr(kind, name, replaced)

    def note(self, work: str, stream: int, used: Sequence[Use] = ()) -> None:
        self.append((work, stream, used))

    def done(self, left_out: Container[int] = ()) -> list[Done]:
        """Return all work; what comes before it if some waits are left out, by their places in the log."""
        clocks, marks, found = defaultdict[int, dict[int, int]](dict), dict[int, dict[int, int]](), list[Done]()
        for place, (what, stream, more) in enumerate(self):
            clock = clocks[stream]
            if what == "record":
                marks[more] = dict(clock)
            elif what != "wait":
                clock[stream] = clock.get(stream, 0) + 1
                found.append(Done(what, stream, clock[stream], dict(clock), more))
            elif place not in left_out:
                for number, time in marks.get(more, {}).items():
                    clock[number] = max(time, clock.get(number, 0))
        return found

    def of(self, work: str) -> list[Done]:
        return [each for each in self.done() if each.work == work]


def has_race(done: Sequence[Done]) -> bool:
    """Return whether two uses of the same memory have no order."""
    return any(
        one.races(other)
        for before, after in itertools.combinations(done, 2)
        if not after.comes_after(before)
        for one, other in itertools.product(before.uses, after.uses)
    )


class Job:
    """A store on a GPU with values of several messages, and arrays to be pushed and filled."""

    def __init__(self, cupy: Any, updater: bool = True, sizes: Sequence[int] = SIZES, **options: Any) -> None:
        self.kv = mpikv.create("nccl", **{"placement": "sharded", "bucket_bytes": 1 << 14, **options})
        self.keys = [f"k{number}" for number in range(len(sizes))]
        self.kv.init(self.keys, [np.zeros(size, np.float32) for size in sizes])
        if updater:
            self.kv.set_optimizer(optimizers.SGD(learning_rate=1.0, momentum=0.5))
        self.sources, self.outs = ([cupy.full(size, one, "f4") for size in sizes] for one in (1, 7))


@pytest.fixture
def log(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Log:
    return Log(cupy, monkeypatch)


@pytest.mark.parametrize("sizes", [SIZES, SMALL], ids=["large", "small"])
def test_one_rank_copies_once_before_an_update_or_in_place_of_it(cupy: Any, log: Log, sizes: Sequence[int]) -> None:
    copies = []
    for updater in (True, False):
        job = Job(cupy, updater, sizes)
        log.clear()
        job.kv.push(job.keys, job.sources)
        copies.append(len(log.of("copy")))
        if updater:
            messages = len(log.of("update"))
        assert (job.kv.pull(job.keys[-1]) == (-1 if updater else 1)).all()
        job.kv.close()
    assert copies == [messages, messages]
    assert messages > 5


@SEVERAL
def test_messages_travel_while_others_are_updated_and_copied(cupy: Any, log: Log) -> None:
    """Each waits for no more than it needs: NCCL always has the next message before it is done with one."""
    job = Job(cupy)
    log.clear()
    job.kv.pushpull(job.keys, job.sources, out=job.outs)
    sums, updates, gathers = (log.of(work) for work in ("reduceScatter", "update", "allGather"))
    assert len(sums) == len(gathers) > 5
    # Of the last message, which is shorter, a rank may own nothing.
    assert len(sums) - 1 <= len(updates) <= len(sums)
    # One copy out for each message, of which all but the last two come while others are given.
    copies = [each for each in log.of("copy") if each.comes_after(gathers[0])]
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
    job.kv.close()


@SEVERAL
def test_a_pull_copies_what_has_come_while_more_comes(cupy: Any, log: Log) -> None:
    job = Job(cupy)
    for _ in range(2):
        job.kv.push(job.keys, job.sources)
        log.clear()
        job.kv.pull(job.keys, job.outs)
    gathers, copies = log.of("allGather"), log.of("copy")
    assert len(gathers) == len(copies) > 5
    for number, copy in enumerate(copies[:-1]):
        assert copy.comes_after(gathers[number])
        assert not copy.comes_after(gathers[number + 1])
        assert not gathers[number + 1].comes_after(copy)
    for out in job.outs:
        assert (out.get() == job.kv.size * -2.5).all()
    job.kv.close()


@SEVERAL
@pytest.mark.parametrize("keys", [slice(None), slice(1, 2)])
def test_after_a_push_a_caller_may_change_what_he_pushed_and_waits_for_nothing_else(
    cupy: Any, log: Log, keys: slice
) -> None:
    job = Job(cupy)
    with cupy.cuda.Stream(non_blocking=True) as caller:
        for _ in range(2):
            log.clear()
            job.kv.push(job.keys[keys], job.sources[keys])
        log.note("change", caller.ptr)
    (change,) = log.of("change")
    assert not any(change.comes_after(update) for update in log.of("update")[-1:])
    assert all(change.comes_after(each) for each in log.of("reduceScatter")[-1:])
    job.kv.close()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("placement", ["root", "sharded", "replicated"])
def test_keys_with_rates_of_their_own_are_updated_by_no_more_launches(cupy: Any, log: Log, placement: str) -> None:
    for rates in ({}, {f"k{number}": 1 / (1 + number % 3) for number in range(0, 40, 2)}):
        job = Job(cupy, sizes=[number % 7 + 1 for number in range(40)], placement=placement)
        job.kv.set_optimizer(optimizers.Adam(learning_rate=0.5, wd=0.25, lr_mult=rates))
        log.clear()
        job.kv.pushpull(job.keys, job.sources, out=job.outs)
        assert len(log.of("update")) == (placement == "replicated" or job.kv.is_root or placement == "sharded")
        job.kv.close()


# --- Faults


@pytest.mark.ranks(2)
@pytest.mark.parametrize("verb", ["pushpull", "push", "pull"])
def test_each_wait_that_is_left_out_is_a_race(cupy: Any, log: Log, verb: str) -> None:
    """In the call, or when its caller goes on; so none is there for nothing."""
    job = Job(cupy, sizes=SMALL)
    keys, sources, outs = job.keys, job.sources, job.outs
    job.kv.pushpull(keys, sources, out=outs)
    log.clear()
    with cupy.cuda.Stream(non_blocking=True) as caller:
        job.kv.pushpull(keys, sources, out=outs)
        job.kv.push(keys, sources)
        if verb == "push":
            job.kv.pull(keys, out=outs)
        log.note("fill", caller.ptr, uses([*sources, *outs], True))
        first = len(log)
        if verb == "pushpull":
            job.kv.pushpull(keys, sources, out=outs)
        elif verb == "push":
            job.kv.push(keys, sources)
        else:
            job.kv.pull(keys, out=outs)
        log.note("fill", caller.ptr, uses(sources if verb == "push" else outs, True))
    assert not has_race(log.done())
    waits = [place for place, (what, *_) in enumerate(log) if what == "wait" and place >= first]
    each = [{place} for place in waits]
    if verb == "pull":
        # Of these the first or the second brings the last update, and others but the copies of other messages.
        of_transfers = {place for place in waits if log[place][1] == log.of("allGather")[0].stream}
        each = [one for one in each if not one & of_transfers] + [of_transfers]
    assert len(waits) > 8
    assert [one for one in each if not has_race(log.done(one))] == []
    job.kv.close()
