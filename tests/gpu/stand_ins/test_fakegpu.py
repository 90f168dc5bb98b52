"""The stand-in for a GPU finds races, and nothing else."""

from __future__ import annotations

from contextlib import nullcontext
from threading import Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpikv.testing.fakegpu import FakeGpu
from mpikv.testing.fakestreams import FakeEvent, FakeStream, RaceError

STREAMS, SIZE = 3, 4


@pytest.fixture
def gpu() -> FakeGpu:
    """Return a GPU whose checker may find faults."""
    return FakeGpu()


def on(stream: FakeStream, array: Any) -> None:
    with stream:
        array += 1


@pytest.mark.parametrize("by", ["", "event", "done", "download"])
def test_memory_is_freed_when_its_use_is_done(gpu, by):
    """Because its stream waits for that, or a thread has seen it."""
    other, array, found = gpu.stream(), gpu.upload(np.zeros(4)), []
    other.wait(gpu.current().record())
    on(other, array)
    event = other.record()

    def look() -> None:
        gpu.watch()
        found.extend([event.done, event.done])

    if by == "event":
        gpu.current().wait(event)
    elif by == "done":
        thread = Thread(target=look)
        thread.start()
        thread.join()
        assert found == [False, True]
    elif by == "download":
        with other:
            gpu.download(array, np.empty(4))
    del array
    said = "memory of stream 0 was freed while add on stream 1 uses it"
    with nullcontext() if by else pytest.raises(RaceError, match=said):
        gpu.checker.assert_clean()


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("use"), st.integers(0, STREAMS - 1), st.integers(0, SIZE - 1), st.integers(1, SIZE), st.booleans()
        ),
        st.tuples(st.just("record"), st.integers(0, STREAMS - 1)),
        st.tuples(st.just("wait"), st.integers(0, STREAMS - 1), st.integers(0, 20)),
        st.tuples(st.just("synchronize"), st.integers(0, STREAMS - 1)),
    ),
    min_size=15,
    max_size=60,
)


@given(steps)
@settings(max_examples=300)
def test_races_are_those_of_a_graph_of_what_comes_before_what(program):
    """The oracle keeps every use for ever, and for each a set of all that comes before it."""
    gpu = FakeGpu(lag=0)
    array = gpu.upload(np.zeros(SIZE, np.uint8))
    gpu.current().synchronize()
    streams = [gpu.stream() for _ in range(STREAMS)]
    events: list[tuple[FakeEvent, frozenset[int]]] = []
    uses: list[tuple[int, int, bool]] = []
    before = [frozenset[int]()] * STREAMS
    host = frozenset[int]()
    for what, number, *more in program:
        stream = streams[number]
        if what == "use":
            low, length, writes = more
            high = min(SIZE, low + length)
            before[number] |= host
            racing = any(
                (writes or other_writes) and low < other_high and other_low < high and other not in before[number]
                for other, (other_low, other_high, other_writes) in enumerate(uses)
            )
            part = array[low:high]
            with stream, pytest.raises(RaceError) if racing else nullcontext():
                gpu.launch("use", [part] * (not writes), [part] * writes)
            if not racing:  # else it has not happened
                before[number] |= {len(uses)}
                uses.append((low, high, writes))
        elif what == "record":
            before[number] |= host
            events.append((stream.record(), before[number]))
        elif what == "wait" and events:
            event, done = events[more[0] % len(events)]
            stream.wait(event)
            before[number] |= done
        elif what == "synchronize":
            stream.synchronize()
            host |= before[number]
