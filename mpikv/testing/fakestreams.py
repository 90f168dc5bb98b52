"""Fake GPU streams, and a checker for the order of their memory accesses.

Work runs at once, so that tests can compare results. The checker finds errors of order: it knows the freedom of a real
GPU. Each stream has a vector clock; an event copies it, and a wait joins the copy. These are a :class:`RaceError`,
whatever numpy has computed:

- an access that is not ordered after the last conflicting one;
- memory freed while one of its uses is not ordered before the allocating stream: that stream's next work may get it;
- a use of memory that is not ordered after the allocating stream's work at the time of the allocation.

It records no graphs: those of CUDA run on the emulated GPU.

Source: happens-before by vector clocks, as in Flanagan and Freund, "FastTrack: Efficient and Precise Dynamic Race
Detection", PLDI 2009.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np

from ..errors import TransportError

if TYPE_CHECKING:
    from .fakegpu import FakeGpu

__all__ = ["Access", "Block", "Blocker", "Checker", "FakeEvent", "FakeStream", "MisuseError", "RaceError"]

# Fill for new memory: NaN in each kind of float, so that a test notices a read of unwritten memory.
_JUNK = 0xFF


class RaceError(AssertionError):
    """Two unordered uses of the same memory by a GPU's work."""


class MisuseError(AssertionError):
    """A forbidden call of a GPU or of NCCL."""


class Clock(dict[int, int]):
    """For each stream's number, how much of its work is known to be done."""

    def join(self, other: Mapping[int, int]) -> None:
        """Add the knowledge of another clock."""
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
    """Time on the stream's clock."""
    work: str

    def __str__(self) -> str:
        return f"{self.work} on stream {self.stream} {'writes' if self.writes else 'reads'}"

    def without(self, low: int, high: int) -> Iterator[Access]:
        """Yield its parts outside of a range."""
        if self.low < low:
            yield self._replace(high=min(self.high, low))
        if self.high > high:
            yield self._replace(low=max(self.low, high))


class Checker:
    """Finds unordered uses of memory."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        """All faults, including those that could not be raised in place."""
        # Reentrant: garbage collection inside of a call may free memory, in the same thread.
        self.lock = threading.RLock()
        self._hosts: dict[int, Clock] = {}

    def host(self) -> Clock:
        """Return the clock of this thread of the host."""
        return self._hosts.setdefault(threading.get_ident(), Clock())

    def work(self, stream: FakeStream, work: str, uses: Sequence[tuple[Block, int, int, bool]]) -> None:
        """Record work, its bytes of allocations, and whether it writes them."""
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
            # Drop the older access: later work that must follow it must follow this one, which follows it.
            covers = access.writes or (not other.writes and other.stream == access.stream)
            kept.extend(other.without(access.low, access.high) if covers else [other])
        block.accesses = [*kept, access]

    def free(self, accesses: Sequence[Access], stream: FakeStream) -> None:
        """Record that memory was freed; the allocating stream's next work may get it."""
        with self.lock:
            clock = Clock(stream.clock)
            # If any thread has seen work done, it is done. A watchdog then drops its reference, and the last reference
            # may be in another thread.
            for seen in self._hosts.values():
                clock.join(seen)
            for access in accesses:
                if clock.get(access.stream, 0) < access.time:
                    self.faults.append(
                        f"memory of stream {stream.number} was freed while {access.work} on stream {access.stream} "
                        "uses it, and nothing orders them"
                    )

    def fault(self, text: str) -> None:
        """Record a fault, and raise it."""
        self.faults.append(text)
        raise RaceError(text)

    def assert_clean(self) -> None:
        """Raise if there are faults."""
        if self.faults:
            raise RaceError("; ".join(self.faults))


class Block:
    """One allocation."""

    def __init__(self, gpu: FakeGpu, nbytes: int, base: int) -> None:
        self.memory = np.full(nbytes, _JUNK, np.uint8)
        self.base, self.stream = base, gpu.current()
        # The stream has freed this memory earlier, and may still use it.
        self.accesses = [Access(0, nbytes, True, self.stream.number, self.stream.time, "what had the memory before")]
        self._gpu = gpu

    def __del__(self) -> None:
        self._gpu.released(self)


class Blocker:
    """Work that does not end as long as ``blocked``."""

    def __init__(self) -> None:
        self.blocked = True


class FakeEvent:
    """A point in a stream's work."""

    def __init__(self, gpu: FakeGpu, clock: Clock, blockers: Sequence[Blocker]) -> None:
        self.clock, self.blockers = clock, tuple(blockers)
        self._gpu, self._lag = gpu, gpu.lag

    @property
    def done(self) -> bool:
        self._gpu.check_used("an event is asked for")
        if any(blocker.blocked for blocker in self.blockers):
            return False
        if self._lag:
            self._lag -= 1
            return False
        with self._gpu.checker.lock:
            self._gpu.checker.host().join(self.clock)
        return True


class FakeStream:
    """A queue of work."""

    def __init__(self, gpu: FakeGpu, number: int) -> None:
        self.number = number
        # The default stream has number 0, so its handle is 0, as CUDA's.
        self.handle = number << 12
        self.clock = Clock()
        self.blockers: list[Blocker] = []
        self._gpu = gpu

    @property
    def time(self) -> int:
        """The amount of work queued so far."""
        return self.clock.get(self.number, 0)

    def begin_capture(self) -> None:
        raise TransportError(f"work of {self._gpu.name} cannot be recorded: it is none")

    def end_capture(self) -> NoReturn:
        raise MisuseError(f"a capture ends on {self!r} that did not begin")

    def record(self) -> FakeEvent:
        checker = self._gpu.checker
        with checker.lock:
            checker.work(self, "record", ())
            return FakeEvent(self._gpu, Clock(self.clock), self.blockers)

    def wait(self, event: FakeEvent) -> None:
        with self._gpu.checker.lock:
            self.clock.join(event.clock)
            self.blockers += [blocker for blocker in event.blockers if blocker.blocked]

    def synchronize(self) -> None:
        self._gpu.check_used("a stream is waited for")
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
