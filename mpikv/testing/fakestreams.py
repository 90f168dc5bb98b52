"""Streams of a GPU that is none, and a checker of the order in which they use memory.

Work is done at once, so that results can be compared. What is wrong with the order of work shows in the checker, which
knows what a GPU would have been free to do: each stream has a vector clock, an event takes a copy of it, and waiting
joins them. An access that is not ordered after the last conflicting one is a :class:`RaceError`, whatever numpy made of
it; so is memory that goes back to its allocator while a use of it is not ordered before the stream of its allocation,
whose next work may be given it, and a use of memory that is not ordered after what that stream had to do when it was
taken.

Work on a stream that is captured is recorded, and checked and done at each launch of its graph; what CUDA forbids
meanwhile is a :class:`MisuseError`. A stream that waits for an event of a capture is captured, too, until the capture
ends. At a launch each of these is a stream of the graph's own, so that work is in order only where events order it.

Source: happens-before by vector clocks, as in Flanagan and Freund, "FastTrack: Efficient and Precise Dynamic Race
Detection", PLDI 2009.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..errors import TransportError

if TYPE_CHECKING:
    from .fakegpu import FakeGpu

__all__ = [
    "Access",
    "Block",
    "Blocker",
    "Checker",
    "FakeEvent",
    "FakeGraph",
    "FakeMark",
    "FakeStream",
    "MisuseError",
    "RaceError",
    "Recorded",
]

# Bytes of NaN in each kind of float, so that what was never written is noticed.
_JUNK = 0xFF


class RaceError(AssertionError):
    """Work of a GPU that nothing orders uses the same memory."""


class MisuseError(AssertionError):
    """A GPU, or NCCL, was called as it must not be."""


class Clock(dict[int, int]):
    """How much of the work of each stream, by its number, is known to be done."""

    def join(self, other: Mapping[int, int]) -> None:
        """Know what the other knows, too."""
        for number, count in other.items():
            if count > self.get(number, 0):
                self[number] = count


class Access(NamedTuple):
    """A use of the bytes ``[low, high)`` of an allocation."""

    low: int
    high: int
    writes: bool
    stream: int
    time: int
    """Of the stream's clock."""
    work: str

    def __str__(self) -> str:
        return f"{self.work} on stream {self.stream} {'writes' if self.writes else 'reads'}"

    def without(self, low: int, high: int) -> Iterator[Access]:
        """Yield what is left of it beside a range."""
        if self.low < low:
            yield self._replace(high=min(self.high, low))
        if self.high > high:
            yield self._replace(low=max(self.low, high))


class Checker:
    """Finds uses of memory that nothing orders."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        """All that was found, also what could not be raised where it happened."""
        # Collecting garbage inside of a call may free memory, in the same thread.
        self.lock = threading.RLock()
        self._hosts: dict[int, Clock] = {}

    def host(self) -> Clock:
        """Return what this thread of the host knows to be done."""
        return self._hosts.setdefault(threading.get_ident(), Clock())

    def work(self, stream: FakeStream, work: str, uses: Sequence[tuple[Block, int, int, bool]]) -> None:
        """Note work that uses bytes of allocations, and whether it writes them."""
        with self.lock:
            clock = stream.clock
            clock.join(self.host())
            clock[stream.number] = clock.get(stream.number, 0) + 1
            for block, low, high, writes in uses:
                if low < high:
                    self._use(block, Access(low, high, writes, stream.number, clock[stream.number], work), clock)

    def _use(self, block: Block, access: Access, clock: Clock) -> None:
        kept: list[Access] = []
        for other in block.accesses:
            if other.high <= access.low or access.high <= other.low:
                kept.append(other)
                continue
            if (access.writes or other.writes) and clock.get(other.stream, 0) < other.time:
                self.fault(f"{access} what {other}, and nothing orders them")
            # Whatever must come after the other one must come after this one, which comes after it.
            covers = access.writes or (not other.writes and other.stream == access.stream)
            kept.extend(other.without(access.low, access.high) if covers else [other])
        block.accesses = [*kept, access]

    def free(self, accesses: Sequence[Access], stream: FakeStream) -> None:
        """Note that memory went back to the allocator, for what comes next on the stream of its allocation."""
        with self.lock:
            clock = Clock(stream.clock)
            # What any thread has seen done is done: a watchdog lets go of it then, and whoever refers to it last may be
            # another thread.
            for seen in self._hosts.values():
                clock.join(seen)
            for access in accesses:
                if clock.get(access.stream, 0) < access.time:
                    self.faults.append(
                        f"memory of stream {stream.number} was freed while {access.work} on stream {access.stream} "
                        "uses it, and nothing orders them"
                    )

    def fault(self, text: str) -> None:
        """Note a fault, and raise it."""
        self.faults.append(text)
        raise RaceError(text)

    def assert_clean(self) -> None:
        """Raise if anything was found."""
        if self.faults:
            raise RaceError("; ".join(self.faults))


class Block:
    """One allocation."""

    def __init__(self, gpu: FakeGpu, nbytes: int, base: int) -> None:
        self.memory = np.full(nbytes, _JUNK, np.uint8)
        self.base, self.stream = base, gpu.current()
        # It is what the stream has let go of, and may be in use there yet.
        self.accesses = [Access(0, nbytes, True, self.stream.number, self.stream.time, "what had the memory before")]
        self._gpu = gpu

    def __del__(self) -> None:
        self._gpu.released(self)


class Recorded(NamedTuple):
    """Work that was recorded."""

    stream: int
    """The number of the stream that it was given to."""
    work: str
    uses: Sequence[tuple[weakref.ref[Block], int, int, bool]]
    """As :meth:`Checker.work` is given them, but that a graph keeps no memory."""
    run: Callable[[], object]
    """Does it, with numpy's arrays."""


class Edge(NamedTuple):
    """A point in a stream that was recorded, or a wait for one."""

    stream: int
    point: int
    """Its number in the graph."""
    waits: bool


class FakeGraph:
    """Recorded work."""

    def __init__(self, gpu: FakeGpu, stream: FakeStream) -> None:
        self._gpu, self.stream = gpu, stream
        self.steps: list[Recorded | Edge] = []
        self.streams = {stream.number: stream}
        """The streams that are captured, by their numbers."""
        self.ended = self.closed = False
        # Those of the graph that stand for them, but for the first.
        self._own: dict[int, FakeStream] = {}

    @property
    def joined(self) -> bool:
        """Whether all that was recorded is in order before what the first stream is given next."""
        clocks: dict[int, Clock] = {number: Clock() for number in self.streams}
        points: dict[int, Clock] = {}
        for step in self.steps:
            if isinstance(step, Edge) and step.waits:
                clocks[step.stream].join(points[step.point])
            elif isinstance(step, Edge):
                points[step.point] = Clock(clocks[step.stream])
            else:
                clocks[step.stream][step.stream] = clocks[step.stream].get(step.stream, 0) + 1
        last = clocks[self.stream.number]
        return all(last.get(number, 0) == clock.get(number, 0) for number, clock in clocks.items())

    def launch(self) -> None:
        if self.closed:
            raise TransportError(f"the graph recorded on {self._gpu.name} was discarded")
        if self._gpu.current().capture is not None:
            raise MisuseError("a graph is launched in a capture")
        points: dict[int, FakeEvent] = {}
        for step in self.steps:
            stream = self._stream(step.stream)
            if isinstance(step, Recorded):
                self._run(stream, step)
            elif step.waits:
                stream.wait(points[step.point])
            else:
                points[step.point] = stream.record()

    def _stream(self, number: int) -> FakeStream:
        if number == self.stream.number:
            return self._gpu.current()
        return self._own.get(number) or self._own.setdefault(number, self._gpu.stream())

    def _run(self, stream: FakeStream, step: Recorded) -> None:
        found = [(block(), *use) for block, *use in step.uses]
        if lost := [block for block, *_ in found if block is None]:
            raise MisuseError(f"{step.work} of a graph uses memory that was freed ({len(lost)} allocations)")
        self._gpu.checker.work(stream, step.work, found)  # type: ignore[arg-type]  # none is None
        step.run()

    def close(self) -> None:
        self.closed = True


class Blocker:
    """Work that does not come to its end as long as ``blocked``."""

    def __init__(self) -> None:
        self.blocked = True


class FakeEvent:
    """A point in the work of a stream."""

    def __init__(
        self,
        gpu: FakeGpu,
        clock: Clock,
        blockers: Sequence[Blocker],
        capture: FakeGraph | None = None,
        point: int = 0,
    ) -> None:
        self.clock, self.blockers, self.capture, self.point = clock, tuple(blockers), capture, point
        self._gpu, self._lag = gpu, gpu.lag

    @property
    def done(self) -> bool:
        self._gpu.check_used("an event is asked for")
        self._gpu.check_running("an event is asked for")
        if self.capture is not None:
            raise MisuseError("an event is asked for that was recorded in a capture")
        if any(blocker.blocked for blocker in self.blockers):
            return False
        if self._lag:
            self._lag -= 1
            return False
        with self._gpu.checker.lock:
            self._gpu.checker.host().join(self.clock)
        return True


class FakeMark:
    """A point in the work of a stream, of which the time is known."""

    def __init__(self, stream: FakeStream) -> None:
        stream.record()
        self._stream, self._time = stream, time.perf_counter()

    def seconds_to(self, later: FakeMark) -> float:
        """Wait for a later mark, and return the seconds between them."""
        later._stream.synchronize()
        return later._time - self._time


class FakeStream:
    """A queue of work."""

    def __init__(self, gpu: FakeGpu, number: int) -> None:
        self.number = number
        # The default stream's handle is 0, as CUDA's.
        self.handle = number << 12
        self.clock = Clock()
        self.blockers: list[Blocker] = []
        self.capture: FakeGraph | None = None
        """What work is recorded in, as long as it is."""
        self._gpu = gpu

    @property
    def time(self) -> int:
        """How much work it has been given."""
        return self.clock.get(self.number, 0)

    def begin_capture(self) -> None:
        if not self.handle or self.capture is not None:
            raise MisuseError(f"a capture begins on {self!r}, the default stream or one that is captured")
        self.capture = FakeGraph(self._gpu, self)

    def end_capture(self) -> FakeGraph:
        graph = self.capture
        if graph is None or graph.stream is not self:
            raise MisuseError(f"a capture ends on {self!r} that did not begin")
        graph.ended = True
        for stream in graph.streams.values():
            stream.capture = None
        if not graph.joined:
            raise TransportError(f"work of {self._gpu.name} could not be recorded: a stream was not joined")
        if self._gpu.capture_fails:
            raise TransportError(f"work of {self._gpu.name} could not be recorded: {self._gpu.capture_fails}")
        return graph

    def record(self) -> FakeEvent:
        checker = self._gpu.checker
        if self.capture is not None:
            point = len(self.capture.steps)
            self.capture.steps.append(Edge(self.number, point, waits=False))
            return FakeEvent(self._gpu, Clock(), (), self.capture, point)
        with checker.lock:
            checker.work(self, "record", ())
            return FakeEvent(self._gpu, Clock(self.clock), self.blockers)

    def wait(self, event: FakeEvent) -> None:
        if (graph := event.capture) and not graph.ended and self.handle and self.capture in (None, graph):
            self.capture = graph
            graph.streams[self.number] = self
            graph.steps.append(Edge(self.number, event.point, waits=True))
            return
        if self.capture is not graph:
            raise MisuseError(f"{self!r} waits for an event, and one of both is in a capture")
        with self._gpu.checker.lock:
            self.clock.join(event.clock)
            self.blockers += [blocker for blocker in event.blockers if blocker.blocked]

    def synchronize(self) -> None:
        self._gpu.check_used("a stream is waited for")
        self._gpu.check_running("a stream is waited for")
        while any(blocker.blocked for blocker in self.blockers):
            time.sleep(1e-3)
        self.blockers.clear()
        with self._gpu.checker.lock:
            self._gpu.checker.host().join(self.clock)

    def __enter__(self) -> FakeStream:
        self._gpu.enter(self)
        return self

    def __exit__(self, *failure: object) -> None:
        self._gpu.leave()

    def __repr__(self) -> str:
        return f"<FakeStream {self.number}>"
