"""Streams of bytes between each two ranks of a host: rings in shared memory, one for each sender and receiver.

A large message is not written to the ring if the receiver can read it in place. Its sender then waits until the
receiver has counted it. Each message is a generator, which yields where it cannot go on yet. A rank that can do nothing
else sleeps, and the ranks that write for it or make room for it ring its bell.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

import numpy as np

from ..cluster.runtime import present
from ..cluster.shared_memory import find_flag_fence, sleep_on, wake_sleepers
from ..errors import TransportError
from ..protocols import Array, Group
from .cma import Attached

# Bytes of one ring, and of all rings of a host: with many ranks each has less.
_RING, _ALL_RINGS, _LEAST_RING = 256 << 10, 16 << 20, 4 << 10
# Words of a ring before its bytes, in a pair of cache lines for each side: the sender writes how many bytes it has
# written and whether it has given up, the receiver how many it has read, and how many messages in place.
_WRITTEN, _GIVEN_UP, _READ, _TAKEN, _HEAD, _LINE = 0, 1, 16, 17, 32, 128
# Bytes from which on a message is read in place. Up to 8 ranks, shorter ones fit in a ring, and their senders need not
# wait.
_LARGE = 256 << 10
# Seconds to sleep at once. It bounds a lost wake-up: two ranks that ring at the same moment may make one sound, and
# x86-64, without a barrier here, may look at a ring before others see its own writes.
_NAP = 1e-3


def ring_bytes(size: int) -> int:
    """Return the bytes of a ring where each of ``size`` ranks has one to every rank: fewer with more ranks, within
    bounds. Local.

    >>> [ring_bytes(size) for size in (2, 16, 100)]
    [262144, 65536, 4096]
    """
    return min(max(_ALL_RINGS // size**2 // 128 * 128, _LEAST_RING), _RING)


class _Ring:
    """Bytes on their way from one rank to another."""

    def __init__(self, memory: Array, order: Callable[[], object]) -> None:
        """Lay a ring over shared memory; ``order()`` orders this thread's loads and stores. Local."""
        self.words, self._bytes, self._order = memory[: 8 * _HEAD].data.cast("q"), memory[8 * _HEAD :], order

    def write(self, data: Array) -> int:
        """Write as many of the bytes to the ring as have room; return their number. By the sender alone. Local."""
        size, written = self._bytes.size, self.words[_WRITTEN]
        count = min(data.size, size - (written - self.words[_READ]))
        if count:
            self._order()  # not before the reader has read what was there
            at = written % size
            first = min(count, size - at)
            self._bytes[at : at + first] = data[:first]
            if first < count:
                self._bytes[: count - first] = data[first:count]
            self._order()  # the bytes before their number
            self.words[_WRITTEN] = written + count
        return count

    def read(self, into: Array) -> tuple[int, bool]:
        """Move bytes from the ring to an array, as many as are there and fit; return (their number, whether the ring
        was full). By the receiver alone. Local.
        """
        size, read = self._bytes.size, self.words[_READ]
        count = min(into.size, self.words[_WRITTEN] - read)
        if count:
            self._order()
            at = read % size
            first = min(count, size - at)
            into[:first] = self._bytes[at : at + first]
            if first < count:
                into[first:count] = self._bytes[: count - first]
            self._order()
            self.words[_READ] = read + count
            self._order()  # it may have filled the ring meanwhile, and seen no room
        return count, count > 0 and self.words[_WRITTEN] - read == size


class Rings:
    """The rings of one rank. All methods but the constructor are local. The memory goes with the object."""

    def __init__(self, group: Group, reader: Attached | None) -> None:
        """Allocate the rings of all ranks, and their bells, in shared memory. Collective.

        By ``reader``, equal on all ranks, receivers read large messages in place.
        """
        self._reader, size = reader, group.size
        # Pages that are never written take no memory.
        memory = group.allocate(size * _LINE + size**2 * (8 * _HEAD + ring_bytes(size)), pages_now=False)
        self._bells, self._address = memory[: size * _LINE].data.cast("i")[:: _LINE // 4], memory.ctypes.data
        """A word for each rank, which changes when there is something new for it."""
        self._rank, self._seen, self._order = group.rank, 0, find_flag_fence() or (lambda: None)
        rings = memory[size * _LINE :].reshape(size, size, -1)
        self._to = [_Ring(part, self._order) for part in rings[group.rank]]
        self._from = [_Ring(part, self._order) for part in rings[:, group.rank]]

    def send(self, to: int, tag: int, data: Array) -> Iterator[None]:
        """Return a generator that sends a message: it yields where it must wait, and ends when the array may change.
        One at a time to each rank. Local.
        """
        ring = self._to[to]
        in_place = data.nbytes >= _LARGE and self._reader is not None and self._reader.is_readable(data)
        awaited = ring.words[_TAKEN] + in_place
        head = np.array([tag, data.nbytes, data.ctypes.data if in_place else 0]).view(np.uint8)
        for part in (head, data[:0] if in_place else data):
            while (part := part[ring.write(part) :]).size:
                self._ring(to)
                yield
        self._ring(to)
        while ring.words[_TAKEN] < awaited:
            yield

    def receive_head(self, source: int) -> Generator[None, None, list[int]]:
        """Receive [tag, length, address or 0] of a rank's next message, by a generator that yields to wait. Local."""
        head = np.empty(3, np.int64)
        yield from self._read(source, head.view(np.uint8))
        return head.tolist()  # type: ignore[no-any-return]  # a list of three integers

    def receive(self, source: int, address: int, into: Array) -> Iterator[None]:
        """Receive the body for the head just received, by a generator that yields to wait; TransportError if the body
        lay in the sender's memory, and the sender gave it up. Local.

        Raises:
            TransportError: it was to be read in place, and its sender has given up.
        """
        words = self._from[source].words
        if not address:
            yield from self._read(source, into)
            return
        if self._reader is not None and not words[_GIVEN_UP]:
            self._reader.read(source, address, into)
            self._order()
        if words[_GIVEN_UP]:  # its array may have changed meanwhile
            raise TransportError(f"rank {source} has given up its send of {into.nbytes} bytes")
        self._order()
        words[_TAKEN] += 1
        self._ring(source)

    def _read(self, source: int, into: Array) -> Iterator[None]:
        """Fill an array from a rank's ring, by a generator that yields while bytes are missing; wake the sender."""
        while into.size:
            count, was_full = self._from[source].read(into)
            into = into[count:]
            if was_full:
                self._ring(source)
            if into.size:
                yield

    def _ring(self, rank: int) -> None:
        """Ring a rank's bell, and wake all its threads that sleep. Local."""
        self._order()  # what it is woken for comes before the bell
        self._bells[rank] = (self._bells[rank] + 1) & 0x7FFFFFFF
        wake_sleepers(self._address + rank * _LINE)

    def look(self) -> None:
        """Remember this rank's bell, so that :meth:`sleep` ends if another rank has rung since. Local."""
        self._seen = self._bells[self._rank]

    def sleep(self, _: float) -> None:
        """Sleep until another rank has rung for this one since :meth:`look`, a millisecond at most. Local."""
        here = present()
        if here.world is None:
            sleep_on(self._address + self._rank * _LINE, self._seen, _NAP)
        else:
            here.nap(_NAP, here.now() + _NAP, lambda: self._bells[self._rank] != self._seen)

    def give_up(self) -> None:
        """Mark all messages that this rank sends as lost, for their receivers to find. Does not wait."""
        for ring in self._to:
            ring.words[_GIVEN_UP] = 1
        self._order()

    def find_lost(self) -> list[int]:
        """Return the ranks that have marked their messages to this one as lost. Does not wait."""
        return [rank for rank, ring in enumerate(self._from) if ring.words[_GIVEN_UP]]
