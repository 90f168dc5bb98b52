"""Messages between two ranks, against a model: for each sender, receiver and tag the messages come in order."""

import ctypes
import re
import weakref
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from mpikv.cluster.process_group import ProcessGroup
from mpikv.cluster.runtime import present
from mpikv.cluster.status_board import StatusBoard
from mpikv.cluster.waiting import Waiting
from mpikv.errors import Closed, Stalled, TransportError, ValueMismatch
from mpikv.testing import cluster
from mpikv.transports import rings
from mpikv.transports.mailbox import Mailbox, Message

RING, LARGE, INTERRUPTED = 1 << 12, 1 << 18, 1 << 19
WAYS = pytest.mark.parametrize(
    ("hosts", "large"), [(1, 1 << 40), (1, 300), (2, 0)], ids=["ring", "in place", "mpi"], indirect=["large"]
)


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(rings, "_RING", RING)
    monkeypatch.setattr(rings, "_LARGE", getattr(request, "param", LARGE))


class Process:
    """Reads the memory of this process, in which all simulated ranks are."""

    def is_readable(self, array: Any) -> bool:
        return bool(array.size != 301)

    def read(self, local_rank: int, address: int, into: Any) -> None:
        if into.size == INTERRUPTED:
            raise KeyboardInterrupt
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
        self.rings, self.issued = streams and weakref.ref(streams), list[Message]()

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
        assert calls.send(np.zeros(1), size)[0] is not None, "there is no such rank, and only that call ends"
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
            present().sleep(float(own.exponential(1e-4) * own.integers(2)))
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
                sent = rf"(more than {into.size}|{nbytes})"
                assert re.search(rf"{source} has sent {sent} bytes, which are lost", str(error))
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
            about = "" if hosts == 2 else "; rank 1 has begun no collective call yet and is now at .*"
            words = rf"recv of 12 bytes with tag 7 from rank 1: waited 2.0 s{about}; if a rank is only slow, .*"
            assert re.fullmatch(words, str(error))
            assert error.missing == (1,)
            assert [end[0] for end in (ends[1], calls.send(into, 1))] == [error, error]
        calls.close()
        if comm.rank == 1:  # without an error, whose frames refer to it
            del calls.box
            assert not (calls.rings and calls.rings()), "a closed mailbox keeps its memory"

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


def test_a_send_that_was_given_up_is_not_read() -> None:
    """Its array may have changed."""

    def program(comm: Any) -> None:
        calls = Calls(comm)
        if comm.rank == 1:
            end = calls.send(np.ones(LARGE), 0)
            calls.box.abort("enough")
            assert isinstance(end[0], Closed)
        comm.Barrier()
        if comm.rank == 0:
            ends = [calls.send(np.zeros(LARGE), 0), *(calls.receive(np.zeros(LARGE), rank) for rank in (0, 1))]
            calls.wait()
            assert str(ends.pop()[0]) == f"rank 1 has given up its send of {8 * LARGE} bytes"
            assert ends == [[None], [None, 0]], "what has ended before has no error"
        calls.close()

    cluster(2).run(program)


def test_an_interrupt_ends_all_calls() -> None:
    def program(comm: Any) -> None:
        calls, array = Calls(comm), np.zeros(INTERRUPTED, np.uint8)
        calls.send(array, comm.rank)
        with pytest.raises(KeyboardInterrupt):
            calls.receive(array, comm.rank)
        assert str(calls.send(array, 0)[0]) == f"interrupted by KeyboardInterrupt() [rank {comm.rank}/2]"
        calls.close()

    cluster(2).run(program)


@WAYS
@pytest.mark.parametrize("dies", [False, True])
def test_a_rank_that_has_given_up(hosts: int, dies: bool) -> None:
    """Calls with it end long before their deadline; what it has sent before still arrives."""

    def program(comm: Any) -> None:
        gone = (1, 2) if dies and hosts == 1 else ()
        calls, into = Calls(comm, gone=gone), np.zeros(20)
        if comm.rank:
            calls.send(np.ones(20), 0, tag=1)
            for turn in (1, 2):  # rank 2 leaves after it has learnt of the other
                comm.Barrier()
                if comm.rank == turn and not gone:
                    Waiting(20.0).until(lambda: comm.rank == 1 or bool(calls.group.find_end()), tuple)
                    calls.box.abort("enough")
                    calls.group.announce_end("enough")
        else:
            there = calls.receive(into, 2, tag=1)
            comm.Barrier()
            comm.Barrier()
            missing = [calls.receive(np.zeros(4), 2), calls.receive(np.zeros(4), None), calls.send(np.zeros(RING), 2)]
            before = present().now()
            calls.wait()
            assert present().now() - before < 2
            assert there == [None, 2]
            assert into.all()
            # On one host the error names the first rank that has left.
            why = "the other process is gone" if gone else rf"(.* messages \()?rank [{hosts}2] has left: enough\)?"
            assert re.fullmatch(rf"recv of 32 bytes with tag 0 from rank 2: {why} \[rank 0/3\]", str(missing[0][0]))
            assert isinstance(missing[0][0], TransportError)
        calls.close()

    cluster(3, hosts=hosts).run(program)


@pytest.mark.parametrize("waits", [False, True])
def test_an_end_that_fails_is_told_and_hides_no_other(caplog: pytest.LogCaptureFixture, waits: bool) -> None:
    """Neither if the thread finds it, nor if a waiting caller does; each time it waits for the other."""

    def program(comm: Any) -> None:
        calls, told, end = Calls(comm), list[Any](), list[Any]()

        def fail(error: Any, _: int) -> None:
            told.append(error)
            Waiting(20.0).until(lambda: bool(end), tuple)
            raise RuntimeError("a fault")

        if comm.rank == 0:
            end = calls.receive(np.zeros(1), 1, 2)
            calls.box.wait(calls.box.receive(np.zeros(1), 1, 1, fail), 20.0, 20.0 * waits)
            Waiting(20.0).until(lambda: bool(end), tuple)
            assert [*end, *map(str, told)] == [None, 1, "None", "a fault"]
            assert "tag 1 from rank 1: an error was told, and its caller failed" in caplog.text
        for tag in (1, 2) * comm.rank:
            present().sleep(0.1)
            calls.send(np.zeros(1), 0, tag)
        calls.close()

    cluster(2).run(program)


@WAYS
def test_a_closed_mailbox_ends_its_calls(hosts: int) -> None:
    def program(comm: Any) -> None:
        calls = Calls(comm)
        ends = [calls.receive(np.zeros(2), 1 - comm.rank)]
        comm.Barrier()
        calls.box.abort("enough")
        ends += [calls.receive(np.zeros(2), None), calls.send(np.zeros(2), 0)]
        assert {repr(end[0]) for end in ends} == {f"Closed('enough [rank {comm.rank}/2]')"}
        calls.close()

    cluster(2, hosts=hosts).run(program)
