"""What one rank has asked of the owners of keys, and what it has learnt from their answers.

It sends letters by a post and knows nothing of what owners do with them. What this rank asks of itself is a call, whose
answer comes back by :meth:`AsyncClient.take`, at once or from the thread that answers other ranks.
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
from ..transports.rpc import Endpoint

__all__ = ["NUMBERS", "PATIENCE", "Act", "AsyncClient", "Kind", "Outcome"]

NUMBERS = np.dtype(np.int64)
"""Of the answer to a question for ranks."""
PATIENCE = 1.0
"""Seconds that an owner has to say whom it waits for."""

Act: TypeAlias = "Callable[[Kind, int, int, Array | None], None]"
"""Does what this rank asks of itself: the kind, the ticket, a number, a body."""


class Kind(IntEnum):
    """What a letter asks for. Its number is a row of the table, or a clock."""

    PUSH = 0
    PULL = 1
    LEAVE = 2
    TICK = 3
    """The only one to which there is no answer; a LEAVE follows on it."""
    WAIT = 4
    WHO = 5


class Outcome(IntEnum):
    """How an answer begins."""

    WELL = 0
    RAISED = 1
    """The push has changed nothing."""
    HALFWAY = 2
    """The value is whatever it is."""


class _Wanted(NamedTuple):
    """An answer that has not come."""

    owner: int
    key: Key | None
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    take: Callable[[Array], None]
    """Given what was asked for, which may change afterwards."""


class AsyncClient:
    """The questions of one rank. All methods but :meth:`take` are for one thread."""

    def __init__(self, rank: int, post: Endpoint | None, act: Act, waiting: Waits) -> None:
        """Without a post this rank owns everything."""
        self._rank, self._post, self._act, self._waiting = rank, post, act, waiting
        self._tickets = self._epoch = 0
        self._wanted: dict[int, _Wanted] = {}
        self._failures: dict[Key, BaseException] = {}
        self.seen: dict[Key, int] = {}
        """The versions that keys had when this rank last heard of them."""
        self.slowest = 0
        """The last that was heard of the rank that is furthest behind."""

    def begin(self, epoch: int) -> None:
        """Start anew, when all ranks have met and nothing is wanted: letters carry this number from now on."""
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
    ) -> int:
        """Send a request; return the ticket under which its answer will come."""
        self._tickets = ticket = self._tickets + 1
        key, number = (None, number) if entry is None else (entry.key, entry.index)
        dtype, shape = (NUMBERS, (-1,)) if entry is None else (entry.dtype, entry.shape)
        if kind != Kind.TICK:
            self._wanted[ticket] = _Wanted(owner, key, dtype, shape, take)
        if owner != self._rank:
            assert self._post is not None
            self._post.request(owner, (kind, self._epoch, ticket, number), body)
        else:
            # An update may overwrite it.
            self._act(kind, ticket, number, None if body is None else body.copy())
        return ticket

    def wait(self, tickets: Sequence[int]) -> None:
        """Wait for answers.

        Raises:
            Stalled: they do not come before the deadline; it names the owners that do not answer, and the ranks for
                which others wait.
        """
        if any(ticket in self._wanted for ticket in tickets):
            self._waiting.until(lambda: self._has_heard(tickets), self._whom)

    def wait_for_all(self) -> None:
        """Wait until nothing is wanted, questions whose answers came too late for their asker included."""
        self.hear()
        if self._wanted:
            self._waiting.until(lambda: self._has_heard(list(self._wanted)), self._whom)

    def _has_heard(self, tickets: Iterable[int]) -> bool:
        self.hear()
        return not any(ticket in self._wanted for ticket in tickets)

    def hear(self) -> None:
        """Take the answers that have arrived."""
        if self._post is None:
            return
        if self._post.failure is not None:
            failure = self._post.failure
            raise TransportError(f"the thread that answers other ranks has ended: {failure!r}") from failure
        while (letter := self._post.reply()) is not None:
            ticket, version, outcome = letter.head[:3]
            wanted = self._wanted.get(ticket)
            if wanted is None or wanted.owner != letter.source:
                raise TransportError(f"rank {letter.source} sent a reply without a request")
            if outcome == Outcome.WELL:
                self.take(ticket, version, letter.body.view(wanted.dtype).reshape(-1))
                continue
            said = f"rank {letter.source}, the owner of key {wanted.key!r}, raised {bytes(letter.body).decode()}"
            if outcome == Outcome.HALFWAY:
                raise TransportError(f"{said}, in a push of this rank")
            error = PeerFailed(f"{said} in a push of this rank; that push did not change the value", letter.source)
            self.take(ticket, version, error)

    def take(self, ticket: int, version: int, answer: Array | BaseException | None) -> None:
        """Take an answer: the bytes of a value, in any shape, what a push has raised, or nothing."""
        wanted = self._wanted[ticket]
        if isinstance(answer, BaseException):
            assert wanted.key is not None
            self._failures[wanted.key] = answer
        elif answer is not None and answer.size:
            wanted.take(answer.reshape(wanted.shape))
        if wanted.key is None:
            self.slowest = max(self.slowest, version)
        else:
            self.seen[wanted.key] = version
        # Last: then another thread may go on.
        del self._wanted[ticket]

    def raise_failures(self, keys: Iterable[Key] | None = None) -> None:
        """Raise what pushes of keys, or of any, have raised and nobody was told of yet."""
        names = [key for key in list(self._failures if keys is None else keys) if key in self._failures]
        failures = [self._failures.pop(name) for name in names]
        if len(failures) > 1:
            noted(failures[0], f"{len(failures) - 1} more pushes have failed")
        if failures:
            raise failures[0]

    def _whom(self) -> list[int]:
        """Find out for which ranks this one waits: owners that do not answer, and those for whom owners wait."""
        found: list[int] = []
        asked: dict[int, int] = {}
        silent = set()
        for owner in sorted({wanted.owner for wanted in list(self._wanted.values())}):
            try:
                asked[self.ask(Kind.WHO, owner, take=lambda ranks: found.extend(ranks.tolist()))] = owner
            except Stalled:  # this rank's own updater runs
                del self._wanted[self._tickets]
                silent.add(owner)
        with suppress(Stalled):
            Waiting(PATIENCE).until(lambda: self._has_heard(asked), tuple)
        # What was not answered stays wanted: the communicator is not freed while letters are on their way.
        silent.update(owner for ticket, owner in asked.items() if ticket in self._wanted)
        return sorted({*found, *silent})
