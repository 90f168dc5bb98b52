"""The client of one rank: its requests to the owners of keys, and their answers.

It sends requests through an endpoint; :mod:`mpikv.async_store.owner` runs them. A request of this rank to itself is a
function call. Its answer comes through :meth:`AsyncClient.take`, at once or later from the thread that answers other
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..cluster.waiting import Waiting, Waits
from ..engine.keys import Entry
from ..errors import PeerFailed, Stalled, TransportError, noted
from ..protocols import Array, Key
from ..transports.rpc import Endpoint, Request

NUMBERS = np.dtype(np.int64)
"""Dtype of an answer that lists ranks."""
PATIENCE = 1.0
"""Seconds that an owner has to name the ranks it waits for."""

Tick: TypeAlias = tuple[int, int]
"""What an owner tells the keeper of the clocks once it has applied its part of a push: the number of the push among
those of its rank, and how many owners apply parts of it."""
Act: TypeAlias = "Callable[[Kind, int, int, Array | None, Tick | None], None]"
"""Runs a request of this rank to itself, by kind, ticket, number, body and tick."""


class Kind(IntEnum):
    """The kind of a request. Its number is a row of the key table, or a clock."""

    PUSH = 0
    PULL = 1
    LEAVE = 2
    TICK = 3
    """For the keeper of the clocks, from an owner, and without an answer. Its number is the rank that has pushed."""
    WAIT = 4
    WHO = 5
    """Asks for the ranks behind that the asking one waits for."""
    PUSHPULL = 6
    """A push that is answered by the value: one message each way instead of two."""


class Outcome(IntEnum):
    """The last field of an answer, after ticket, version and the clock of the slowest rank."""

    WELL = 0
    RAISED = 1
    """The push failed; value and state are unchanged."""
    HALFWAY = 2
    """The push failed in the middle; value and state are undefined."""


class _Outstanding(NamedTuple):
    """An answer under way."""

    owner: int
    key: Key | None
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    take: Callable[[Array], None]
    """Called with the answer's array; the array may be overwritten afterwards."""


class AsyncClient:
    """The requests of one rank to owners. One thread calls all methods but :meth:`take`."""

    def __init__(self, rank: int, endpoint: Endpoint | None, act: Act, waiting: Waits) -> None:
        """Keep the arguments; send nothing. ``endpoint`` is None if this rank owns all keys; ``act`` runs requests of
        this rank to itself. Local.
        """
        self._rank, self._endpoint, self._act, self._waiting = rank, endpoint, act, waiting
        self._tickets = self._epoch = 0
        self._outstanding: dict[int, _Outstanding] = {}
        self._failures: dict[Key, BaseException] = {}
        self._arrived: list[Request] = []
        """The replies of a message that are not taken yet, the first one last."""
        self.seen: dict[Key, int] = {}
        """The version of each key in the last answer about it."""
        self.slowest = 0
        """The clock of the slowest active rank in the last answer of the rank that keeps the clocks."""

    def begin(self, epoch: int) -> None:
        """Start anew after a collective call: forget versions and clocks; mark later requests by ``epoch``. Local.

        No request is outstanding.
        """
        self._epoch, self.slowest = epoch, 0
        self.seen.clear()

    def ask(
        self,
        kind: Kind,
        owner: int,
        entry: Entry | None = None,
        body: Array | None = None,
        take: Callable[[Array], None] = lambda array: None,
        number: int = 0,
        tick: Tick | None = None,
    ) -> int:
        """Collect a request for another rank, sent by the next :meth:`receive` at the latest, or run one to this rank,
        perhaps after a wait for its lock. Return the ticket; ``take`` gets the answer's array, now or later.
        """
        self._tickets = ticket = self._tickets + 1
        key, number = (None, number) if entry is None else (entry.key, entry.index)
        dtype, shape = (NUMBERS, (-1,)) if entry is None else (entry.dtype, entry.shape)
        # Before the request: for a key of this rank the answer comes during the call below.
        self._outstanding[ticket] = _Outstanding(owner, key, dtype, shape, take)
        try:
            if owner != self._rank:
                assert self._endpoint is not None
                self._endpoint.request(owner, (kind, self._epoch, ticket, number, *(tick or ())), body)
            else:
                if self._endpoint is not None:
                    self._endpoint.flush()  # others work while this rank does
                self._act(kind, ticket, number, body, tick)
        except BaseException:
            # Its answer has come, or will not. Where another rank has the request already, the store ends.
            self._outstanding.pop(ticket, None)
            raise
        return ticket

    def wait(self, tickets: Sequence[int]) -> None:
        """Wait until these tickets' answers are taken; a failed push is kept, not raised. Stalled after the deadline,
        with the ranks waited for.

        Raises:
            Stalled: they do not come before the deadline; it names the silent owners, or the ranks that hold others up.
        """
        if any(ticket in self._outstanding for ticket in tickets):
            self._waiting.until(lambda: self._has_answers(tickets), self._awaited_ranks)

    def wait_for_all(self) -> None:
        """Wait for all outstanding answers and take them, those to timed-out questions, too; Stalled as of wait()."""
        self.receive()
        if self._outstanding:
            self._waiting.until(lambda: self._has_answers(list(self._outstanding)), self._awaited_ranks)

    def _has_answers(self, tickets: Iterable[int]) -> bool:
        """Take the answers that have come; return whether none of these tickets is left. Does not wait."""
        self.receive()
        return not any(ticket in self._outstanding for ticket in tickets)

    def receive(self) -> None:
        """Send collected requests, take arrived answers; TransportError if the endpoint or a reply failed. Local."""
        # A rank that owns all keys has no messages, only calls.
        if self._endpoint is None:
            return
        if (failure := self._endpoint.failure) is not None:
            raise TransportError(f"the thread that answers other ranks has ended: {failure!r}") from failure
        self._endpoint.flush()
        # All that have come, not one: answers of several owners come in any order. They are kept: one that cannot be
        # taken, as for an array that is read-only by now, raises and leaves those after it.
        while self._arrived or (found := self._endpoint.take_replies()):
            self._arrived = self._arrived or found[::-1]
            reply = self._arrived.pop()
            ticket, version, slowest, outcome = reply.head[:4]
            outstanding = self._outstanding.get(ticket)
            # Never guess: a reply to another request would fill the wrong array.
            if outstanding is None or outstanding.owner != reply.source:
                raise TransportError(f"rank {reply.source} sent a reply without a request")
            if outcome == Outcome.WELL:
                self.take(ticket, version, slowest, reply.body.view(outstanding.dtype).reshape(-1))
                continue
            text = f"rank {reply.source}, the owner of key {outstanding.key!r}, raised {bytes(reply.body).decode()}"
            if outcome == Outcome.HALFWAY:
                raise TransportError(f"{text}, in a push of this rank")
            error = PeerFailed(f"{text} in a push of this rank; that push did not change the value", reply.source)
            self.take(ticket, version, slowest, error)

    def take(self, ticket: int, version: int, slowest: int, answer: Array | BaseException | None) -> None:
        """End a request: note version and clock; fill its array, or keep its error by key for raise_failures(). Local.

        Two threads may call it at once, for different tickets.
        """
        outstanding = self._outstanding[ticket]
        if isinstance(answer, BaseException):
            assert outstanding.key is not None
            self._failures[outstanding.key] = answer
        elif answer is not None and answer.size:
            outstanding.take(answer.reshape(outstanding.shape))
        # An owner that keeps no clocks says 0.
        self.slowest = max(self.slowest, slowest)
        if outstanding.key is not None:
            self.seen[outstanding.key] = version
        # Last: another thread takes the missing ticket as the sign that the answer is stored.
        del self._outstanding[ticket]

    def raise_failures(self, keys: Iterable[Key] | None = None) -> None:
        """Forget the failed pushes of these keys, or of all; raise the first, if any, and count the others. Local."""
        names = [key for key in list(self._failures if keys is None else keys) if key in self._failures]
        failures = [self._failures.pop(name) for name in names]
        if len(failures) > 1:
            noted(failures[0], f"{len(failures) - 1} more pushes have failed")
        if failures:
            raise failures[0]

    def _awaited_ranks(self) -> list[int]:
        """Ask owners, for a second, whom this rank awaits; return the silent ones, or else late ranks. May wait."""
        behind, silent, asked = set[int](), set[int](), dict[int, int]()
        for rank in sorted({outstanding.owner for outstanding in list(self._outstanding.values())}):
            try:
                asked[self.ask(Kind.WHO, rank, take=lambda ranks: behind.update(ranks.tolist()))] = rank
            except Stalled:  # this rank's updater runs and holds the lock
                silent.add(rank)
        with suppress(Stalled):
            Waiting(PATIENCE).until(lambda: self._has_answers(asked), tuple)
        # Unanswered questions stay outstanding: the communicator must not be freed with messages in flight.
        silent.update(rank for ticket, rank in asked.items() if ticket in self._outstanding)
        return sorted(silent or behind)
