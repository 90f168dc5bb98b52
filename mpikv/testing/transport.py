"""The contract of transports, as tests.

Subclass :class:`TransportContract` in a test module and give the factory::

    @pytest.mark.ranks(2, 3, 4)
    class TestShm(TransportContract):
        def make(self, group, limit, timeout):
            return ShmTransport(group, limit, Waiting(timeout))
"""

from __future__ import annotations

import hashlib
import json
import time
import tracemalloc
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from ..arrays.arrays import accumulator, add
from ..cluster.process_group import ProcessGroup
from ..errors import Stalled, TransportError
from ..protocols import Array, Carries, Group, Transfers, Transport

__all__ = ["TransportContract"]

NAMES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
BYTE = np.dtype(np.uint8)
GUARD = 8
"""Elements before and after memory that a transport writes to; it must not change them."""
LARGEST_TOKEN = (1 << 62) - 1


class TransportContract:
    """The promises of :class:`mpikv.protocols.Transport`. Sums must equal numpy's exactly. Every rank can make all
    ranks' inputs from a seed, and sums them by itself.
    """

    limit = 4096
    """The limit of the transport under test, in bytes."""

    def group(self, comm: Any) -> Group:
        """Return a new group of the ranks, perhaps on several hosts. Collective."""
        return ProcessGroup(comm)

    def make(self, group: Group, limit: int, timeout: float) -> Transport:
        """Return a new transport. Collective."""
        raise AssertionError("a subclass of TransportContract defines make()")

    @pytest.fixture
    def transport(self, comm: Any) -> Iterator[Transport]:
        """Return a transport for this test alone."""
        group = self.group(comm)
        transport = self.make(group, self.limit, 20.0)
        yield transport
        transport.close()
        group.close()

    def test_facts(self, transport: Transport, comm: Any) -> None:
        assert (transport.rank, transport.size) == ((comm.rank, comm.size) if comm else (0, 1))
        assert transport.limit == self.limit
        assert isinstance(transport.name, str)
        assert transport.shared is (transport.sharing_size > 1 and transport.sharing_size == transport.size)
        assert 0 <= transport.sharing_rank < transport.sharing_size <= transport.size
        assert transport.sharing_size > 1 or not transport.single_copy

    def test_sends_may_be_changed_soon(self, transport: Transport) -> None:
        """At once; or after a fence, if other ranks may still read them."""
        dtype, size = np.dtype(np.int64), self.limit // 8
        for number in range(30):
            with Exchange(transport, dtype, size, seed=number, prepared=False) as exchange:
                if transport.rank == number % transport.size:
                    time.sleep(1e-3)
                exchange.addends = transport.allreduce(exchange.send, exchange.recv)
                exchange.expect(exchange.sum)
                if transport.single_copy:
                    transport.fence()
                exchange.spoil()

    def test_ranks_that_share_memory(self, comm: Any) -> None:
        group = self.group(comm)
        transport = self.make(group, self.limit, 20.0)
        facts = [
            json.loads(text) for text in group.gather(json.dumps([transport.sharing_size, transport.sharing_rank]))
        ]
        sharing = sharers(group, transport)
        assert len({size for size, _ in facts}) == 1, "decisions that follow from it differ between ranks"
        assert [facts[rank][1] for rank in sharing] == list(range(len(sharing)))
        assert transport.sharing_size >= len(sharing)
        transport.close()
        group.close()

    def test_reduce(self, transport: Transport) -> None:
        for dtype in dtypes():
            for root in range(transport.size):
                for size in sizes(transport.limit, dtype):
                    with Exchange(transport, dtype, size, seed=root) as exchange:
                        exchange.addends = transport.reduce(exchange.send, exchange.recv, root)
                        if transport.rank == root:
                            exchange.expect(exchange.sum)

    def test_reduce_ignores_recv_of_other_ranks(self, transport: Transport) -> None:
        for root in range(transport.size):
            with Exchange(transport, np.dtype(np.int32), 7, seed=root) as exchange:
                none = placed(transport, np.empty(0, np.int32))
                exchange.addends = transport.reduce(
                    exchange.send, exchange.recv if transport.rank == root else none, root
                )
                if transport.rank == root:
                    exchange.expect(exchange.sum)

    def test_allreduce(self, transport: Transport) -> None:
        for dtype in dtypes():
            for size in sizes(transport.limit, dtype):
                with Exchange(transport, dtype, size, seed=1) as exchange:
                    exchange.addends = transport.allreduce(exchange.send, exchange.recv)
                    exchange.expect(exchange.sum)

    def test_allreduce_has_the_same_bits_on_each_rank(self, comm: Any) -> None:
        group = self.group(comm)
        transport = self.make(group, self.limit, 20.0)
        for dtype in (np.float32, np.float64):
            send = np.random.default_rng(transport.rank).standard_normal(401).astype(dtype)
            recv = placed(transport, np.empty_like(send))
            total = sum_of(transport, transport.allreduce(placed(transport, send), recv), recv)
            assert len(set(group.gather(hashlib.sha256(total.tobytes()).hexdigest()))) == 1
        transport.close()
        group.close()

    def test_reduce_scatter(self, transport: Transport) -> None:
        for dtype in dtypes():
            for size in sizes(transport.limit, dtype):
                for counts in divisions(size, transport.size):
                    low = sum(counts[: transport.rank])
                    with Exchange(transport, dtype, size, seed=2, received=counts[transport.rank]) as exchange:
                        exchange.addends = transport.reduce_scatter(exchange.send, exchange.recv, counts)
                        assert transport.sharing_size == 1 or len(exchange.addends) > 1
                        exchange.expect(exchange.sum[low : low + counts[transport.rank]])

    def test_all_to_all(self, transport: Transport) -> None:
        for number, size in enumerate((0, 1, 8, 65, 1000, transport.limit)):
            for counts in divisions(size, transport.size):
                low = sum(counts[: transport.rank])
                sends = [values(BYTE, size, (7, size, rank)) for rank in range(transport.size)]
                parts = transport.all_to_all(self.prepared(transport, sends, number % 2 == 0), counts)
                assert len(parts) == transport.size
                for part, send in zip(parts, sends, strict=True):
                    assert_same(read(transport, part), send[low : low + counts[transport.rank]])

    def test_all_to_all_of_everything(self, transport: Transport) -> None:
        for number, size in enumerate((0, 1, 65, transport.limit)):
            sends = [values(BYTE, size, (8, size, rank)) for rank in range(transport.size)]
            parts = transport.all_to_all(self.prepared(transport, sends, number % 2 == 0), None)
            for part, send in zip(parts, sends, strict=True):
                assert_same(read(transport, part), send)

    def prepared(self, transport: Transport, sends: Sequence[Array], in_send_buffer: bool) -> Array:
        """Return this rank's send, in the send buffer or in read-only memory."""
        send = sends[transport.rank]
        if in_send_buffer:
            send_buffer = transport.send_buffers[transport.slot][: send.size]
            write(transport, send_buffer, send)
            return send_buffer
        send.flags.writeable = False
        return placed(transport, send)

    def test_all_gather(self, transport: Transport) -> None:
        for dtype in dtypes():
            longest = 3 * transport.limit // dtype.itemsize + 5
            for size in (*sizes(transport.limit, dtype), longest):
                for counts in divisions(size, transport.size):
                    whole = values(dtype, size, (3, size))
                    low = sum(counts[: transport.rank])
                    own = slice(low, low + counts[transport.rank])
                    buffer, check = guarded(transport, dtype, size)
                    write(transport, buffer[own], whole[own])
                    transport.all_gather(buffer, counts)
                    assert_same(read(transport, buffer), whole)
                    check()

    def test_broadcast(self, transport: Transport) -> None:
        for dtype in dtypes():
            longest = 3 * transport.limit // dtype.itemsize + 5
            for root in range(transport.size):
                for size in (*sizes(transport.limit, dtype), longest):
                    whole = values(dtype, size, (4, size, root))
                    buffer, check = guarded(transport, dtype, size)
                    if transport.rank == root:
                        write(transport, buffer, whole)
                    transport.broadcast(buffer, root)
                    assert_same(read(transport, buffer), whole)
                    check()

    def test_sends_may_be_the_send_buffer_or_not(self, transport: Transport) -> None:
        dtype = np.dtype(np.float32)
        for number in range(12):
            prepared = (number + transport.rank) % 2 == 0
            with Exchange(transport, dtype, 1 + 37 * number, seed=number, prepared=prepared) as exchange:
                exchange.addends = transport.allreduce(exchange.send, exchange.recv)
                exchange.expect(exchange.sum)

    def test_sums_that_were_shown_by_an_agreement(self, transport: Transport) -> None:
        dtype = np.dtype(np.float64)
        for number in range(20):
            with Exchange(transport, dtype, 1 + 17 * number, seed=number, prepared=True) as exchange:
                if number % 3 == 0:
                    # A mismatch counts as no fence: the sum must wait for all as usual.
                    assert transport.agree(transport.rank, send_ready=True) is (transport.size == 1)
                else:
                    assert transport.agree(7, send_ready=True)
                if number % 2:
                    exchange.addends = transport.allreduce(exchange.send, exchange.recv)
                else:
                    exchange.addends = transport.reduce(exchange.send, exchange.recv, number % transport.size)
                if number % 2 or transport.rank == number % transport.size:
                    exchange.expect(exchange.sum)

    def test_only_the_exchange_after_an_agreement_was_shown(self, transport: Transport) -> None:
        """A slow rank prepares a second sum, or one after a mismatch; the others must not take it for ready."""
        dtype, size = np.dtype(np.float64), 200
        pairs = [("allreduce", "reduce"), ("reduce", "allreduce"), ("reduce", "reduce"), ("all_to_all", "reduce")]
        for number in range(30):
            slow = number // len(pairs) % transport.size == transport.rank
            verbs = pairs[number % len(pairs)]
            refused = number % 3 == 0
            with Exchange(transport, dtype, size, seed=number, prepared=True) as exchange:
                if refused:
                    assert transport.agree(transport.rank, send_ready=True) is (transport.size == 1)
                    write(transport, exchange.send, np.zeros(size, dtype))
                    time.sleep(2e-3 * slow)
                    write(transport, exchange.send, values(dtype, size, (number, size, transport.rank)))
                else:
                    assert transport.agree(7, send_ready=True)
                self.summed(transport, exchange, verbs[0])
            time.sleep(2e-3 * slow)
            with Exchange(transport, dtype, size, seed=number + 100, prepared=True) as exchange:
                self.summed(transport, exchange, verbs[1])

    def summed(self, transport: Transport, exchange: Exchange, verb: str) -> None:
        """Run a sum to the last rank, to all, or as addends of all, and compare."""
        root = transport.size - 1
        if verb == "reduce":
            exchange.addends = transport.reduce(exchange.send, exchange.recv, root)
        elif verb == "allreduce":
            exchange.addends = transport.allreduce(exchange.send, exchange.recv)
        else:
            parts = transport.all_to_all(exchange.send.view(BYTE), None)
            exchange.addends = [part.view(exchange.recv.dtype) for part in parts]
        if verb != "reduce" or transport.rank == root:
            exchange.expect(exchange.sum)

    def test_a_send_buffer_may_remain_unused(self, transport: Transport) -> None:
        write(transport, transport.send_buffers[transport.slot], np.full(self.limit, 255, np.uint8))
        with Exchange(transport, np.dtype(np.int64), 33, seed=5, prepared=False) as exchange:
            write(transport, transport.send_buffers[transport.slot], np.full(self.limit, 255, np.uint8))
            exchange.addends = transport.allreduce(exchange.send, exchange.recv)
            exchange.expect(exchange.sum)

    def test_many_exchanges_while_one_rank_is_slow(self, transport: Transport) -> None:
        """No barrier between them: memory reused too early is overwritten while a slow rank still reads it."""
        random = np.random.default_rng(6)
        dtype, size = np.dtype(np.int64), self.limit // 8
        for number in range(120):
            slow, verb = random.integers(transport.size), random.integers(5)
            naps, root = random.random(2) * 2e-3, int(random.integers(transport.size))
            counts = divisions(size, transport.size)[number % 3]
            own = counts[transport.rank]
            part = own if verb == 2 else size
            with Exchange(transport, dtype, size, number, received=part, prepared=number % 2 == 0) as exchange:
                if transport.rank == slow:
                    time.sleep(naps[0])
                if verb == 0:
                    exchange.addends = transport.reduce(exchange.send, exchange.recv, root)
                    if transport.rank == root:
                        exchange.expect(exchange.sum)
                elif verb == 1:
                    exchange.addends = transport.allreduce(exchange.send, exchange.recv)
                    exchange.expect(exchange.sum)
                elif verb == 2:
                    exchange.addends = transport.reduce_scatter(exchange.send, exchange.recv, counts)
                    low = sum(counts[: transport.rank])
                    exchange.expect(exchange.sum[low : low + own])
                elif verb == 3:
                    parts = transport.all_to_all(exchange.send.view(np.uint8), [8 * count for count in counts])
                    low = sum(counts[: transport.rank])
                    found = np.add.reduce([read(transport, part).view(dtype) for part in parts])
                    assert_same(found, exchange.sum[low : low + own])
                else:
                    write(transport, exchange.recv, values(dtype, size, (number, transport.rank)))
                    transport.broadcast(exchange.recv, root)
                    exchange.expect(values(dtype, size, (number, root)))
                if transport.rank == slow:
                    time.sleep(naps[1])

    def test_messages_in_flight(self, transport: Transport) -> None:
        """Sums are used, and spread, while later ones are on their way; in each turn another rank is late."""
        if not isinstance(transport, Transfers):
            pytest.skip("waits for each message")
        dtype, size, turns = np.dtype(np.int64), self.limit // 8, 60
        memory, random = transport.allocate(turns * self.limit).view(dtype), np.random.default_rng(9)
        sums, spread = deque[tuple[Any, ...]](), deque[tuple[Any, ...]]()
        with transport.apart():
            for turn in range(turns + 2 * transport.ahead):
                if transport.rank == random.integers(transport.size):
                    time.sleep(1e-3)
                if turn < turns:
                    counts = divisions(size, transport.size)[turn % 3]
                    exchange = Exchange(transport, dtype, size, turn, received=counts[transport.rank])
                    exchange.addends = transport.reduce_scatter(exchange.send, exchange.recv, counts)
                    sums.append((transport.sent(), exchange, counts, memory[turn * size : (turn + 1) * size]))
                if sums and turn >= transport.ahead:
                    sent, exchange, counts, value = sums.popleft()
                    transport.wait_for(sent)
                    low = sum(counts[: transport.rank])
                    write(transport, value[low : low + counts[transport.rank]], exchange.received())
                    transport.all_gather(value, counts)
                    spread.append((transport.sent(), exchange, value))
                if spread and turn >= 2 * transport.ahead:
                    sent, exchange, value = spread.popleft()
                    transport.wait_for(sent)
                    assert_same(read(transport, value), exchange.sum)
        assert not sums
        assert not spread

    def test_messages_between_two_ranks(self, transport: Transport) -> None:
        """In their order, of any length, also to a rank that sends nothing."""
        if not isinstance(transport, Carries):
            pytest.skip("carries no messages between two ranks")
        for turn in range(3):
            sizes = {
                (source, rank): [
                    1 + (source + 3 * rank + turn + number) % 5 * 30_000 for number in range(source + turn)
                ]
                for source in range(transport.size)
                for rank in range(transport.size)
            }
            sends, receives = list[tuple[int, Array]](), list[tuple[int, Array]]()
            for (source, rank), lengths in sizes.items():
                for number, length in enumerate(lengths):
                    if source == transport.rank:
                        sends.append((rank, np.full(length, 7 * source + number, np.uint8)))
                    if rank == transport.rank:
                        receives.append((source, np.zeros(length, np.uint8)))
            transport.carry(sends, receives)
            numbers = [
                number for (_, rank), each in sizes.items() if rank == transport.rank for number in range(len(each))
            ]
            for (source, memory), number in zip(receives, numbers, strict=True):
                assert (memory == 7 * source + number).all()

    def test_allocated_memory(self, transport: Transport) -> None:
        blocks: list[Array] = []
        for nbytes in (1, 63, 64, 65, 4096, 1 << 20):
            memory = transport.allocate(nbytes)
            assert memory.dtype == np.uint8
            assert memory.shape == (nbytes,)
            assert self.address(transport, memory) % 64 == 0
            assert not read(transport, memory).any()
            transport.fence()
            if transport.sharing_rank == 0:
                write(transport, memory, np.full(nbytes, len(blocks) + 1, np.uint8))
            blocks.append(memory)
        transport.fence()
        for number, memory in enumerate(blocks):
            assert (read(transport, memory) == number + 1).all(), "allocations overlap, or are not shared"
        transport.fence()

    def address(self, transport: Transport, array: Array) -> int:
        """Return an array's address."""
        address: int = array.__array_interface__["data"][0]
        return address

    def test_who_sees_what_is_written_to_allocated_memory(self, comm: Any) -> None:
        group = self.group(comm)
        transport = self.make(group, self.limit, 20.0)
        memory = transport.allocate(8 * transport.size).view(np.int64)
        for turn in range(1, 50):
            own = slice(transport.rank, transport.rank + 1)
            write(transport, memory[own], np.array([turn * 100 + transport.rank]))
            transport.fence()
            for rank in range(transport.size):
                seen = rank in sharers(group, transport)
                assert read(transport, memory)[rank] == (turn * 100 + rank if seen else 0)
            transport.fence()
        del memory
        transport.close()
        group.close()

    def test_allocated_memory_is_filled_from_its_owners(self, transport: Transport) -> None:
        """Only the owner writes an element, never a neighbour. Ranks overtake each other."""
        random = np.random.default_rng(7)
        memory = transport.allocate(3 * transport.limit + 256)
        for number, dtype in enumerate(dtypes()):
            longest = 3 * transport.limit // dtype.itemsize + 5
            for size in (*sizes(transport.limit, dtype), longest):
                start = 64 // dtype.itemsize * (number % 2) + number % 3
                buffer = memory[: (start + size) * dtype.itemsize].view(dtype)[start:]
                for turn, counts in enumerate([*divisions(size, transport.size), None]):
                    naps, root = random.random(transport.size) * 3e-4, int(random.integers(transport.size))
                    owned = (
                        [size if rank == root else 0 for rank in range(transport.size)] if counts is None else counts
                    )
                    low = sum(owned[: transport.rank])
                    whole = values(dtype, size, (8, size, turn))
                    assert transport.agree(turn), "until then, others read what is overwritten now"
                    time.sleep(naps[transport.rank])
                    own = slice(low, low + owned[transport.rank])
                    write(transport, buffer[own], whole[own])
                    if counts is None:
                        transport.broadcast(buffer, root)
                    else:
                        transport.all_gather(buffer, counts)
                    assert_same(read(transport, buffer), whole)

    def test_agree(self, transport: Transport) -> None:
        for token in (0, 1, 12345678901234567, LARGEST_TOKEN):
            assert transport.agree(token) is True

    def test_agree_finds_every_difference(self, transport: Transport) -> None:
        for odd in range(transport.size):
            for token, other in ((0, 1), (LARGEST_TOKEN, 0), (7, LARGEST_TOKEN), (1 << 53, (1 << 53) + 1)):
                equal = transport.agree(other if transport.rank == odd else token)
                assert equal is (transport.size == 1)
                assert transport.agree(token) is True

    def test_agree_is_a_fence(self, comm: Any) -> None:
        group = self.group(comm)
        transport = self.make(group, self.limit, 20.0)
        memory, sharing = transport.allocate(8 * transport.size).view(np.int64), list(sharers(group, transport))
        for turn in range(1, 50):
            write(transport, memory[transport.rank : transport.rank + 1], np.array([turn]))
            assert transport.agree(turn)
            assert (read(transport, memory)[sharing] == turn).all()
            assert transport.agree(turn)
        del memory
        transport.close()
        group.close()

    def test_a_late_rank_is_noticed(self, comm: Any) -> None:
        group = self.group(comm)
        transport = self.make(group, self.limit, 0.3)
        late = transport.size - 1
        assert transport.agree(1)
        if transport.size > 1 and transport.rank != late:
            started = time.monotonic()
            with pytest.raises(Stalled) as caught:
                transport.agree(2)
            assert 0.25 < time.monotonic() - started < 5
            assert isinstance(caught.value, TransportError)
        group.gather("all ranks but the late one have given up")
        transport.close()
        group.close()

    def test_close_is_idempotent(self, comm: Any) -> None:
        group = self.group(comm)
        transport = self.make(group, self.limit, 20.0)
        transport.allocate(100)
        assert transport.agree(3)
        for _ in range(3):
            transport.close()
        group.close()

    def test_sums_allocate_nothing(self, comm: Any) -> None:
        limit = 1 << 20
        group = self.group(comm)
        transport = self.make(group, limit, 20.0)
        for dtype in (np.dtype(np.float32), np.dtype(np.float16)):
            send = np.ones(limit // dtype.itemsize, dtype)
            recv = np.empty(send.size, accumulator(dtype))
            counts = divisions(send.size, transport.size)[0]
            tracemalloc.start()
            try:
                transport.allreduce(send, recv)
                transport.reduce(send, recv, 0)
                transport.reduce_scatter(send, recv[: counts[transport.rank]], counts)
                transport.all_to_all(send.view(np.uint8), [count * dtype.itemsize for count in counts])
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert peak < limit // 8, f"{peak} bytes were allocated for sums of {limit}"
        transport.close()
        group.close()


class Exchange:
    """One sum: this rank's send, and the expected sum. At the end the send must be unchanged."""

    def __init__(
        self,
        transport: Transport,
        dtype: np.dtype[Any],
        size: int,
        seed: int,
        received: int | None = None,
        prepared: bool | None = None,
    ) -> None:
        sends = [values(dtype, size, (seed, size, rank)) for rank in range(transport.size)]
        self.sum = total(sends)
        self._original = sends[transport.rank]
        self.addends: Sequence[Array] = ()
        self._transport = transport
        self.recv, self._check = guarded(transport, accumulator(dtype), size if received is None else received)
        if prepared or (prepared is None and seed % 2):
            self.send = transport.send_buffers[transport.slot][: size * dtype.itemsize].view(dtype)
            write(transport, self.send, self._original)
            self._private = False
        else:
            send = self._original.copy()
            send.flags.writeable = False
            self.send, self._private = placed(transport, send), True

    def expect(self, result: Array) -> None:
        """Compare the received sum."""
        assert_same(self.received(), result)

    def received(self) -> Array:
        """Return the sum of the addends, or the received sum."""
        return sum_of(self._transport, self.addends, self.recv)

    def spoil(self) -> None:
        """Change this rank's send."""
        if self._transport.memory.is_host:
            self.send.flags.writeable = True
        write(self._transport, self.send, read(self._transport, self.send) + 1)
        self._private = False

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *failure: object) -> None:
        if failure[0] is None:
            self._check()
            if self._private:
                assert_same(read(self._transport, self.send), self._original)


def sum_of(transport: Transport, addends: Sequence[Array], recv: Array) -> Array:
    """Return the sum of addends, on the host; if the transport has summed already, they are undefined."""
    if not addends or addends[0] is recv:
        return read(transport, recv)
    total = np.empty(recv.shape, recv.dtype)
    add([read(transport, term) for term in addends], 0, total.size, total)
    return total


def write(transport: Transport, target: Array, content: Array) -> None:
    """Fill the transport's memory with a host array, in the order of its calls."""
    memory = transport.memory
    memory.order.run(memory.copy, (target,), (memory.source(content),))


def read(transport: Transport, array: Array) -> Array:
    """Return an array of the transport's memory as a host array, after all calls so far."""
    memory = transport.memory
    found: Array = memory.order.run(memory.to_host, array)
    return found


def placed(transport: Transport, content: Array) -> Array:
    """Return a host array in the transport's memory: itself, or a copy."""
    return transport.memory.source(content)


def sharers(group: Group, transport: Transport) -> Sequence[int]:
    """Return the ranks that share this rank's allocated memory."""
    return group.host_ranks if transport.sharing_size > 1 else (transport.rank,)


def dtypes() -> list[np.dtype[Any]]:
    """Return all supported dtypes; bfloat16 needs the package ml_dtypes."""
    try:
        import ml_dtypes
    except ImportError:
        return [np.dtype(name) for name in NAMES if name != "bfloat16"]
    return [np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in NAMES]


def sizes(limit: int, dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Return sizes in elements: one, odd, around a cache line, and the largest message."""
    return (1, 3, 65, 127, limit // dtype.itemsize)


def divisions(size: int, ranks: int) -> list[list[int]]:
    """Return divisions of elements among ranks: even, all to one rank, and uneven with empty parts."""
    even = [size * (rank + 1) // ranks - size * rank // ranks for rank in range(ranks)]
    last = [0] * (ranks - 1) + [size]
    uneven = [0] * ranks
    uneven[0], uneven[ranks // 2] = size // 3, uneven[ranks // 2] + size - size // 3
    uneven[0] += size - sum(uneven)
    return [even, last, uneven]


def values(dtype: np.dtype[Any], size: int, seed: Sequence[int]) -> Array:
    """Return numbers with exact sums: any integers, since these wrap, and small multiples of 1/2."""
    random = np.random.default_rng(seed)
    if dtype.kind == "b":
        return np.asarray(random.integers(0, 4, size) == 0)
    if dtype.kind in "iu":
        return np.frombuffer(random.bytes(size * dtype.itemsize), dtype)
    halves = random.integers(-20, 20, (2, size)) / 2
    return np.asarray(halves[0] + 1j * halves[1] if dtype.kind == "c" else halves[0]).astype(dtype)


def total(sends: Sequence[Array]) -> Array:
    """Return the sum of the arrays in the transport's accumulator dtype."""
    result = sends[0].astype(accumulator(sends[0].dtype))
    for send in sends[1:]:
        result = result + send
    return result


def guarded(transport: Transport, dtype: np.dtype[Any], size: int) -> tuple[Array, Any]:
    """Return memory to write to, and a function that checks the memory beside it."""
    whole = np.ones(size + 2 * GUARD, dtype)
    whole[GUARD : GUARD + size] = 0
    memory = placed(transport, whole)

    def check() -> None:
        found = read(transport, memory)
        beside = np.concatenate([found[:GUARD], found[GUARD + size :]])
        assert (beside == np.ones(1, dtype)).all(), "memory beside the array was written"

    return memory[GUARD : GUARD + size], check


def assert_same(result: Array, expected: Array) -> None:
    """Compare dtypes, shapes and elements."""
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    if result.dtype == np.bool_:  # numpy takes every byte but 0 for True; compare the bytes
        result, expected = result.view(np.uint8), expected.view(np.uint8)
    if result.tobytes() != expected.tobytes():
        np.testing.assert_array_equal(result, expected)
