"""Messages between two ranks, against a model: for each sender, receiver and tag the messages come in order."""

from __future__ import annotations

import ctypes
import re
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from mpikv.cluster.process_group import ProcessGroup
from mpikv.cluster.runtime import present
from mpikv.cluster.status_board import StatusBoard
from mpikv.cluster.waiting import Waiting
from mpikv.collectives.mailbox import Mailbox, Message
from mpikv.errors import Closed, Stalled, TransportError, ValueMismatch
from mpikv.testing import cluster
from mpikv.transports import rings

RING = 1 << 12
WAYS = pytest.mark.parametrize(
    ("hosts", "large"), [(1, 1 << 40), (1, 300), (2, 0)], ids=["ring", "in place", "mpi"], indirect=["large"]
)


@pytest.fixture(autouse=True)
def _small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "_RING", RING)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(rings, "_LARGE", request.param)


class Process:
    """Reads the memory of this process, in which all simulated ranks are."""

    def is_readable(self, array: Any) -> bool:
        return bool(array.size != 301)

    def read(self, local_rank: int, address: int, into: Any) -> None:
        present().sleep(1e-6)
        ctypes.memmove(into.ctypes.data, address, into.nbytes)


class Calls:
    """Issues calls on a mailbox, and keeps their ends."""

    def __init__(self, comm: Any, timeout: float = 20.0, gone: Any = ()) -> None:
        self.group, self.timeout = ProcessGroup(comm), timeout
        self.board = StatusBoard(self.group)
        self.board.gone = lambda: gone
        streams = rings.Rings(self.group, Process()) if self.group.one_host else None
        self.box = Mailbox(self.group, self.board, str, streams)
        self.issued: list[Message] = []

    def send(self, data: Any, to: int, tag: int = 0) -> list[Any]:
        end: list[Any] = []
        self.issued.append(self.box.send(data, to, tag, lambda error, _: self._end(end, error)))
        return end

    def receive(self, into: Any, source: int | None, tag: int = 0) -> list[Any]:
        end: list[Any] = []
        self.issued.append(self.box.receive(into, source, tag, lambda *found: self._end(end, *found)))
        return end

    def _end(self, end: list[Any], *result: Any) -> None:
        assert not end, "a call ends once"
        end.extend(result)

    def wait(self) -> None:
        for message in self.issued:
            self.box.wait(message, self.timeout)

    def close(self) -> None:
        self.group.comm.Barrier()
        self.box.close()
        self.board.close()
        self.group.close()


def content(number: int, nbytes: int) -> Any:
    return np.random.default_rng(number).integers(0, 256, nbytes, np.uint8)


@pytest.mark.usefixtures("large")
@WAYS
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_random_messages(hosts: int, size: int, seed: int) -> None:
    """Calls are issued in any order, by two threads of each rank, and some receives have another length."""

    def program(comm: Any) -> None:
        draw = np.random.default_rng(seed)
        messages = defaultdict[tuple[int, int, int], list[tuple[int, int]]](list)
        for number in range(40):
            source, to, tag = (int(draw.integers(most)) for most in (size, size, 3))
            nbytes = 100 if tag == 2 else int(draw.choice([0, 1, 300, 301, RING - 16, RING, 5 * RING + 3]))
            messages[source, to, tag].append((number, nbytes))
        calls, own = Calls(comm), np.random.default_rng((seed, comm.rank))
        sends, receives, expected = [], [], []
        for (source, to, tag), row in messages.items():
            if source == comm.rank:
                sends.append([(content(*message), to, tag) for message in row])
            if to == comm.rank:
                receives.append([(source if tag < 2 else None, tag, *message) for message in row])

        def issue_sends() -> None:
            while rows := [row for row in sends if row]:
                calls.send(*rows[own.integers(len(rows))].pop(0))

        thread = present().thread(issue_sends, "sends")
        if seed % 2:
            thread.start()
        while rows := [row for row in receives if row]:
            source, tag, number, nbytes = rows[own.integers(len(rows))].pop(0)
            wrong = (number % 10 == 9 and tag < 2) * (1 - 2 * (number > 20 and nbytes > 0))
            into = np.zeros(nbytes + wrong, np.uint8)
            expected.append((calls.receive(into, source, tag), into, tag, number, nbytes, wrong))
            if own.integers(2):
                present().sleep(float(own.exponential(1e-4)))
        if not seed % 2:
            issue_sends()
        Waiting(100.0).until(lambda: not any(sends), tuple)
        if seed % 2:  # else the thread does all
            calls.wait()
        Waiting(100.0).until(lambda: all(message.end is None for message in calls.issued), tuple)
        anyhow = [into.tobytes() for _, into, tag, *_ in expected if tag == 2]
        for end, into, tag, number, nbytes, wrong in expected:
            error, source = end
            if wrong:
                assert isinstance(error, ValueMismatch)
                assert re.search(
                    rf"{source} has sent (more than {into.size}|{nbytes}) bytes, which are lost", str(error)
                )
            elif tag < 2:
                assert error is None
                assert into.tobytes() == content(number, nbytes).tobytes()
        theirs = [row for (_, to, tag), row in messages.items() if to == comm.rank and tag == 2]
        assert sorted(anyhow) == sorted(content(*message).tobytes() for row in theirs for message in row)
        for row in theirs:
            places = [anyhow.index(content(*message).tobytes()) for message in row]
            assert places == sorted(places), "messages of one sender overtake each other"
        calls.close()

    cluster(size, hosts=hosts, seed=seed).run(program)


@pytest.mark.usefixtures("large")
@WAYS
def test_a_message_that_does_not_come(hosts: int) -> None:
    """Its deadline begins with the wait for it."""

    def program(comm: Any) -> None:
        calls, into = Calls(comm, timeout=2.0), np.zeros(3, np.float32)
        if comm.rank == 0:
            ends = [calls.receive(into, 1, 7), calls.receive(into, None, 8)]
            present().sleep(5.0)
            calls.box.wait(calls.issued[0], 2.0, 0.5)
            assert 5.5 <= present().now() < 6
            assert ends == [[], []]
            calls.wait()
            error = ends[0][0]
            assert isinstance(error, Stalled)
            about = "" if hosts == 2 else "; rank 1 has made no call yet and is now at .*"
            words = rf"recv of 12 bytes with tag 7 from rank 1: waited 2.0 s{about}; if a rank is only slow, .*"
            assert re.fullmatch(words, str(error))
            assert error.missing == (1,)
            assert [end[0] for end in (ends[1], calls.send(into, 1))] == [error, error]
        calls.close()

    cluster(2, hosts=hosts).run(program)


def test_a_message_that_nobody_takes() -> None:
    """A small one waits in the ring."""

    def program(comm: Any) -> None:
        calls = Calls(comm, timeout=2.0)
        if comm.rank == 0:
            small, large = calls.send(np.zeros(100), 1, 3), calls.send(np.zeros(RING), 1)
            calls.wait()
            assert small == [None]
            assert str(large[0]).startswith(f"send of {8 * RING} bytes with tag 0 to rank 1: waited 2.0 s; rank 1 has")
        calls.close()

    cluster(2).run(program)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("large", [1], indirect=True)
def test_a_send_that_was_given_up_is_not_read() -> None:
    """Its array may have changed."""

    def program(comm: Any) -> None:
        calls = Calls(comm)
        if comm.rank == 1:
            end = calls.send(np.ones(4), 0)
            calls.box.abort("enough")
            assert isinstance(end[0], Closed)
        comm.Barrier()
        if comm.rank == 0:
            end = calls.receive(np.zeros(4), 1)
            calls.wait()
            assert str(end[0]) == "rank 1 has given up its send of 32 bytes"
        calls.close()

    cluster(2).run(program)


@pytest.mark.usefixtures("large")
@WAYS
def test_a_rank_that_has_given_up(hosts: int) -> None:
    """Calls with it end long before their deadline; what it has sent before still arrives."""

    def program(comm: Any) -> None:
        calls, into = Calls(comm), np.zeros(20)
        if comm.rank == 1:
            calls.send(np.ones(20), 0, tag=1)
            comm.Barrier()
            calls.box.abort("enough")
            calls.group.announce_end("enough")
        else:
            there = calls.receive(into, 1, tag=1)
            comm.Barrier()
            missing = [calls.receive(np.zeros(4), 1), calls.receive(np.zeros(4), None), calls.send(np.zeros(RING), 1)]
            before = present().now()
            calls.wait()
            assert present().now() - before < 2
            assert there == [None, 1]
            assert into.all()
            why = r"rank 1 has left: enough"
            words = rf"recv of 32 bytes with tag 0 from rank 1: (.* given up its messages \({why}\)|{why}) \[rank 0/2\]"
            assert re.fullmatch(words, str(missing[0][0]))
            assert isinstance(missing[0][0], TransportError)
        calls.close()

    cluster(2, hosts=hosts).run(program)


def test_an_end_that_fails_is_told_and_hides_no_other() -> None:
    def program(comm: Any) -> None:
        calls, told = Calls(comm), list[Any]()

        def fail(error: Any, _: int) -> None:
            told.append(error)
            if error is None:
                raise RuntimeError("a fault")

        calls.box.receive(np.zeros(1), comm.rank, 1, fail)
        end = calls.receive(np.zeros(1), comm.rank, 2)
        for tag in (1, 2):
            calls.send(np.zeros(1), comm.rank, tag)
        calls.wait()
        assert end == [None, comm.rank]
        assert list(map(str, told)) == ["None", "a fault"]
        calls.close()

    cluster(2).run(program)


def test_a_process_that_is_gone() -> None:
    """What it has sent before still arrives."""

    def program(comm: Any) -> None:
        calls, into = Calls(comm, gone=(1,)), np.zeros(100)
        if comm.rank == 1:
            calls.send(np.ones(100), 0)
        comm.Barrier()
        if comm.rank == 0:
            there, missing = calls.receive(into, 1), calls.receive(np.zeros(4), None)
            calls.wait()
            assert there == [None, 1]
            assert into.all()
            assert isinstance(missing[0], TransportError)
            assert str(missing[0]) == "recv of 32 bytes with tag 0 from any rank: the other process is gone [rank 0/2]"
        calls.close()

    cluster(2).run(program)


@pytest.mark.usefixtures("large")
@WAYS
def test_a_closed_mailbox_ends_its_calls(hosts: int) -> None:
    def program(comm: Any) -> None:
        calls = Calls(comm)
        ends = [calls.receive(np.zeros(2), 1 - comm.rank)]
        comm.Barrier()
        calls.box.abort("enough")
        ends += [calls.receive(np.zeros(2), None), calls.send(np.zeros(2), 0)]
        for end in ends:
            assert isinstance(end[0], Closed)
            assert str(end[0]) == f"enough [rank {comm.rank}/2]"
        calls.close()

    cluster(2, hosts=hosts).run(program)
