"""The order in which early requests are served, and the asynchronous client, without MPI."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpikv.async_store.client import AsyncClient, Kind
from mpikv.cluster.waiting import Waiting
from mpikv.engine.arena import Arena
from mpikv.engine.keys import KeyTable
from mpikv.errors import PeerFailed, Stalled, TransportError
from mpikv.transports.local import LocalTransport
from mpikv.transports.rpc import Request, serve_ready

NOTHING = np.empty(0, np.uint8)


@given(st.data(), st.lists(st.integers(0, 3), max_size=20))
def test_letters_of_one_rank_stay_in_order(data, sources):
    """However often, and between which two of them, what was too early becomes welcome."""
    counts = dict.fromkeys(range(4), 0)
    arriving, left, served = [], [], []
    for source in sources:
        counts[source] += 1
        arriving.append(Request(source, [counts[source]], NOTHING))

    def serve(request):
        if not data.draw(st.booleans()):
            return False
        served.append(request)
        return True

    for request in arriving:
        left = serve_ready([*left, request], serve)
        left = serve_ready(left, serve)
    left = serve_ready(left, lambda request: not served.append(request))
    assert left == []
    for source in range(4):
        assert [request.head[0] for request in served if request.source == source] == [*range(1, counts[source] + 1)]


class Endpoint:
    """Keeps requests; replies are put in by the test."""

    def __init__(self):
        self.failure, self.requests, self.replies = None, [], []

    def request(self, rank, head, body=None):
        self.requests.append((rank, *head))

    def flush(self):
        pass

    def take_replies(self):
        return [self.replies.pop(0)] if self.replies else []


def make_client(timeout=0.05, **options):
    endpoint = Endpoint()

    def act(kind, ticket, number, body, tick):
        if kind == Kind.WHO:
            raise Stalled("an update of this rank runs", [0])

    return endpoint, AsyncClient(0, endpoint, act, Waiting(timeout, **options))


def answer(source, *head, body=NOTHING):
    return Request(source, [*head, *[0] * (8 - len(head))], body)


def test_a_question_that_is_answered_late_is_waited_for():
    """Its answer would otherwise come to the next store, whose communicator is the same to MPI."""
    warned = []
    endpoint, client = make_client(5.0, warn_after=0.01, warn=lambda waited, missing: warned.append(missing))
    looks = itertools.count()
    take_replies = endpoint.take_replies
    ticket = client.ask(Kind.LEAVE, 1)

    def answered():  # first the awaited answer, to the question for whom none in time
        if warned and next(looks) == 3:
            endpoint.replies.append(answer(1, ticket))
        return take_replies()

    endpoint.take_replies = answered
    client.wait([ticket])
    assert warned == [[1]]
    kinds = [(kind, ticket) for _, kind, _, ticket, *_ in endpoint.requests]
    (_, left), (who, asked) = kinds
    assert (left, who) == (ticket, Kind.WHO)
    assert asked in client._outstanding
    endpoint.replies.append(answer(1, asked, body=np.array([3]).view(np.uint8)))
    client.wait_for_all()
    assert not client._outstanding


@pytest.mark.parametrize(("silent", "missing"), [(True, (0,)), (False, (2, 3))])
def test_who_is_waited_for(silent, missing):
    """The owner that is this rank itself, in an update; else the ranks that are behind."""
    endpoint, client = make_client()
    ticket = client.ask(Kind.LEAVE, 1)
    if silent:
        client.ask(Kind.LEAVE, 0)
    request = endpoint.request

    def ask(rank, head, body=None):
        request(rank, head, body)
        endpoint.replies.append(answer(rank, head[2], body=np.array([2, 3]).view(np.uint8)))

    endpoint.request = ask
    with pytest.raises(Stalled) as caught:
        client.wait([ticket])
    assert caught.value.missing == missing


@pytest.mark.parametrize(("source", "other"), [(1, 1), (2, 0)])
def test_an_answer_to_nothing_is_an_error(source, other):
    endpoint, client = make_client()
    ticket = client.ask(Kind.LEAVE, 1)
    endpoint.replies.append(answer(source, ticket + other))
    with pytest.raises(TransportError, match=f"rank {source} sent a reply without a request"):
        client.receive()


def test_failures_are_raised_by_calls_that_name_the_key():
    table = KeyTable()
    places = Arena(LocalTransport(1 << 20), pooling=False).place([(np.dtype(float), 2)] * 3)
    for key, place in zip("abc", places, strict=True):
        table.add(key, (2,), np.dtype(float), place)
    endpoint, client = make_client()
    text = np.frombuffer(b"ValueError: too large", np.uint8)
    for key in "abc":
        ticket = client.ask(Kind.PUSH, 1, table[key], np.ones(2))
        endpoint.replies.append(answer(1, ticket, 4, 0, key != "b", body=text))
    endpoint.replies[1] = endpoint.replies[1]._replace(body=NOTHING)
    client.receive()
    client.raise_failures(["b"])
    with pytest.raises(PeerFailed, match="rank 1, the owner of key 'a', raised ValueError: too large in a push"):
        client.raise_failures(["b", "a"])
    client.raise_failures(["b", "a"])
    with pytest.raises(PeerFailed, match="key 'c'"):
        client.raise_failures()
    client.raise_failures()
    assert client.seen == {"a": 4, "b": 4, "c": 4}
    endpoint.replies.append(answer(1, client.ask(Kind.PUSH, 1, table["a"], np.ones(2)), 4, 0, 2, body=text))
    with pytest.raises(TransportError, match="too large"):
        client.receive()
