"""What was waited for in vain is kept, and the other ranks are told."""

import contextlib
import time

import pytest

from mpikv.cluster import shutdown
from mpikv.cluster.waiting import Waiting
from mpikv.errors import Stalled, TransportError
from mpikv.transports.requests import Requests


class Group:
    def __init__(self, comm):
        self.comm, self.left, self.others = comm, "", [0, 2]

    def find_end(self):
        return self.left

    def translated(self, doing):
        return contextlib.nullcontext()

    def witness(self):
        pass

    def send_notice(self, text, ranks, tag):
        self.comm.told += ranks


class Comm:
    """Rank 1 of 3."""

    rank, size = 1, 3

    def __init__(self):
        self.told, self.gone, self.probes = [], False, 0

    def Iprobe(self, tag=None):  # noqa: N802
        self.probes += 1
        return self.gone


class Request:
    """Complete after so many polls."""

    def __init__(self, polls):
        self.polls = polls

    def Test(self):  # noqa: N802
        self.polls -= 1
        return self.polls <= 0

    @classmethod
    def Testall(cls, given):  # noqa: N802
        return all(request.Test() for request in given)


NEVER = 1 << 60


@pytest.fixture
def comm():
    return Comm()


@pytest.fixture
def unfinished(monkeypatch):
    kept: list[object] = []
    monkeypatch.setattr(shutdown, "_abandoned", kept)
    return kept


@pytest.mark.parametrize("polls", [(), (1,), (300,), (1, 1), (5, 400)])
def test_nothing_is_left_of_what_is_complete(comm, unfinished, polls):
    given = [Request(number) for number in polls]
    Requests(Group(comm), Waiting(30)).complete(*given)
    assert all(request.polls <= 0 for request in given)
    assert (unfinished, comm.told) == ([], [])


@pytest.mark.parametrize("others", [[], [Request(1)]])
def test_a_deadline(comm, unfinished, others):
    late = Request(NEVER)
    with pytest.raises(Stalled, match=r"waited \d\.\d s for other ranks"):
        Requests(Group(comm), Waiting(0.1)).complete(late, *others)
    assert comm.told == [0, 2]
    assert unfinished == [late, *others]


def test_another_rank_has_given_up(comm, unfinished):
    comm.gone, started = True, time.monotonic()
    with pytest.raises(Stalled, match="other ranks have given up"):
        Requests(Group(comm), Waiting(30)).complete(Request(NEVER))
    assert time.monotonic() - started < 5
    assert len(unfinished) == 1
    with pytest.raises(Stalled, match="other ranks have given up"):
        Requests(Group(comm), Waiting(30)).check()


def test_another_rank_has_given_up_as_a_third_has_left(comm, unfinished):
    """Which says more than that."""
    group = Group(comm)
    comm.gone, group.left = True, "rank 2 has left: why"
    with pytest.raises(TransportError, match="rank 2 has left: why"):
        Requests(group, Waiting(30)).complete(Request(NEVER))


def test_what_was_started_before_an_error_is_kept(comm, unfinished):
    request = Request(1)

    def interrupted():
        with Requests(Group(comm), Waiting(30)).started() as started:
            started.append(request)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert comm.told == [0, 2]
    assert request in unfinished


def test_messages_go_on_during_a_wait_for_something_else(comm):
    """Only calls of MPI carry on what MPI has begun, and others may wait for it."""
    polls = iter([False] * 500 + [True])
    Requests(Group(comm), Waiting(30)).until(lambda: next(polls), tuple)
    assert comm.probes >= 500


def test_a_wait_for_something_else_tells_the_others_too(comm, unfinished):
    with pytest.raises(Stalled) as caught:
        Requests(Group(comm), Waiting(0.05)).until(lambda: False, lambda: [2])
    assert caught.value.missing == (2,)
    assert comm.told == [0, 2]
