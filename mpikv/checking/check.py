"""What the ranks of one checked communicator share: the agreement on its calls, deadlines, and what is left at the end.

It works on a duplicate of the communicator, so its messages never meet those of the program.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, NamedTuple

from ..cluster.agreement import Agreement
from ..cluster.calls import Call, note, text_of_note
from ..cluster.printing import log, print_lines
from ..cluster.process_group import ProcessGroup
from ..cluster.runtime import owned
from ..cluster.shutdown import fail_at_end
from ..cluster.status_board import StatusBoard
from ..cluster.tracebacks import hide_frames, place_here
from ..cluster.waiting import Waiting
from ..collectives.communicator import Standing
from ..config import Config
from ..engine.plan import digest
from ..errors import MPIKVError, Stalled, TransportError, text_of
from ..transports.requests import AbortableWaiting
from .facts import Facts, text_of as fact_text
from .tickets import SentTickets, SharedTickets, Tickets

# Nonblocking calls that may wait for their comparison, and descriptions of calls that are kept.
_MOST_PENDING, _MOST_CALLS = 512, 4096
# Looks at a message before the board says that this rank waits for it.
_LOOKS = 200
# Requests that this rank has stopped waiting for. They keep the buffers alive: MPI may still read and write them.
_abandoned: list[Any] = []


class Place(NamedTuple):
    """A line of the program."""

    code: CodeType
    line: int

    def __str__(self) -> str:
        return f" at {self.code.co_filename}:{self.line} in {self.code.co_name}"


class Posted(NamedTuple):
    """A nonblocking collective call that the ranks have not compared."""

    call: Call
    number: int
    place: Place


class Started(NamedTuple):
    """An operation that the program has to wait for."""

    request: Any
    text: str
    peers: Sequence[int]
    """The ranks without which it does not end, as far as one knows."""
    place: Place
    number: int = 0
    """That of its comparison; 0 for a message."""


class Check:
    """The checks of one communicator on this rank."""

    def __init__(self, group: ProcessGroup, config: Config, made_by: str) -> None:
        """Collective. ``made_by`` is the call that made the communicator."""
        self.group, self.config, self._made_by, self._made_at = group, config, made_by, place_here()
        self._process, self.is_world = os.getpid(), made_by == "Init"
        self.board = StatusBoard(group)
        self._waits = AbortableWaiting(group, Waiting(config.timeout, config.warn_after, self.board.warn))
        self._tickets: Tickets = (SharedTickets if group.one_host else SentTickets)(group, self._waits)
        # A Protocol of transports asks for more than an agreement needs.
        self._agreement = Agreement(self._tickets, group, self.board, verifies=True)  # type: ignore[arg-type]
        self._standing = Standing(self._agreement, group)
        self._calls: dict[tuple[Any, ...], Call] = {}
        self._pending = deque[Posted]()
        self._started: list[Started] = []
        self._most_started = 64
        self._agreement.begin(_described(made_by, ()))
        owned("checks").append(self)

    # --- Collective calls

    def begin(self, verb: str, facts: Facts) -> None:
        """Wait until every rank makes the same call. Collective.

        Raises:
            RankMismatch: ranks make different calls.
            Stalled: a rank did not come.
        """
        self._standing.check_usable()
        call = self._calls.get((verb, facts)) or self._describe(verb, facts)
        try:
            if self._pending:
                self._compare_until(self._pending[-1].number)
            self._agreement.begin(call)
        except BaseException as error:
            self._standing.end_unless_settled(verb, error)
            hide_frames(error)
            raise

    def post(self, verb: str, facts: Facts, request: Any, place: Place) -> Started:
        """Announce a nonblocking call that MPI has started; it is compared later. Local."""
        self._standing.check_usable()
        if len(self._pending) >= _MOST_PENDING:
            self._compare_until(self._pending[0].number)
        call = self._calls.get((verb, facts)) or self._describe(verb, facts)
        self._agreement.enter(call)
        self._pending.append(Posted(call, self._tickets.post(call.token), place))
        return self.track(request, str(call), (), place, self._pending[-1].number)

    def _describe(self, verb: str, facts: Facts) -> Call:
        if len(self._calls) >= _MOST_CALLS:
            self._calls.clear()
        call = self._calls[verb, facts] = _described(verb, facts)
        return call

    def look(self) -> None:
        """Compare the nonblocking calls that every rank has made by now. Local, unless they differ."""
        while self._pending and self._tickets.are_here(self._pending[0].number):
            self._compare(self._pending.popleft())

    def _compare_until(self, number: int) -> None:
        """Wait for the comparison of a nonblocking call, and of those before it."""
        while self._pending and self._pending[0].number <= number:
            self._tickets.await_all(self._pending[0].number)
            self._compare(self._pending.popleft())

    def _compare(self, posted: Posted) -> None:
        if self._tickets.are_equal(posted.number):
            return
        self._agreement.place = posted.place.__str__
        try:
            self._agreement.settle(posted.call, posted.number)
        except BaseException as error:
            # MPI has begun calls that do not fit: no later one can be trusted.
            if isinstance(error, MPIKVError):
                self._standing.end(error)
            raise
        finally:
            self._agreement.place = place_here

    # --- Messages and requests

    def track(self, request: Any, text: str, peers: Sequence[int], place: Place, number: int = 0) -> Started:
        """Remember an operation that the program has to wait for. Local."""
        if len(self._started) >= self._most_started:
            self._started = [one for one in self._started if one.request]
            self._most_started = 2 * len(self._started) + 64
        started = Started(request, text, peers, place, number)
        self._started.append(started)
        return started

    def complete(self, started: Started, is_done: Callable[[], object]) -> None:
        """Wait until an operation is done; of a collective call, until the ranks have compared it.

        Raises:
            RankMismatch: ranks made different calls.
            Stalled: the deadline passed.
        """
        if started.number:
            with_errors = self._standing
            try:
                self._compare_until(started.number)
            except BaseException as error:
                with_errors.end_unless_settled(started.text, error)
                hide_frames(error)
                raise
        self.wait(is_done, started.text, started.peers, started.request)

    def wait(self, is_done: Callable[[], object], text: str, peers: Sequence[int], keep: Any = None) -> None:
        """Wait for a message. ``keep`` is kept alive after a failure.

        Raises:
            Stalled: the deadline passed.
        """
        for _ in range(_LOOKS):
            if is_done():
                return
        self._standing.check_usable()
        before = self.board.current

        def is_done_now() -> bool:
            self.look()  # a rank that finds a difference needs the others' part
            return bool(is_done())

        self.board.write(self.board.number[0], note(f"{text_of_note(before)}, then {text}"))
        try:
            self._waits.until(is_done_now, lambda: peers)
        except BaseException as error:
            _abandoned.append(keep)
            self._standing.end_unless_settled(text, error)
            hide_frames(error)
            raise
        self.board.write(self.board.number[0], before)

    def peers(self, rank: int) -> Sequence[int]:
        """Return the ranks of which one sends a message from ``rank``, which may be any. Local."""
        return (rank,) if 0 <= rank < self.group.size else tuple(self.group.others)

    # --- The end

    def close(self) -> None:
        """Release all. Collective; the ranks have agreed on it."""
        self._tell_left()
        owned("checks").remove(self)
        self.board.close()
        self.group.close()

    def _tell_left(self) -> None:
        """Log what the program has started and not waited for. Local."""
        for started in self._started:
            if started.request:
                log("rank %d never waited for %s%s", self.group.rank, started.text, started.place)

    def _announce_end(self) -> None:
        if not self.is_world and self.group.rank == 0:
            log("the communicator of %s%s was never freed", self._made_by, self._made_at)
        self._tell_left()
        call = Call("close", digest("close"))
        self._agreement.enter(call)
        self._pending.append(Posted(call, self._tickets.post(call.token), _NO_PLACE))

    def _await_end(self) -> None:
        """Wait for the other ranks to end, without a deadline: a rank may compute alone, as in plain MPI. Collective.

        Raises:
            RankMismatch: a rank makes another call.
        """
        patience = AbortableWaiting(self.group, Waiting(float("inf")))
        while self._pending:
            self._tickets.await_all(self._pending[0].number, patience)
            self._compare(self._pending.popleft())

    @property
    def is_open(self) -> bool:
        """Whether this process made it, and no failure has ended it."""
        return os.getpid() == self._process and self._standing.is_usable


class _NoPlace(Place):
    def __str__(self) -> str:
        return ""


_NO_PLACE = _NoPlace(_NoPlace.__str__.__code__, 0)


def _described(verb: str, facts: Facts) -> Call:
    parts = [fact_text(fact) for fact in facts if fact not in (None, "")]
    text = f"{verb}({', '.join(parts)})"
    return Call(verb, digest(text), ", ".join(parts), describe=lambda: parts)


def place_of_caller(depth: int = 2) -> Place:
    """Return the line that called the caller of this function. Local."""
    frame = sys._getframe(depth)
    return Place(frame.f_code, frame.f_lineno)


def end_checks() -> None:
    """Compare the end of the program with the other ranks' calls, and tell what was left. Collective: at the end of the
    program, or before the program ends MPI.
    """
    checks = [check for check in owned("checks") if check.is_open]
    owned("checks").clear()
    try:
        # All first: ranks may be in calls of any of these communicators.
        for check in checks:
            check._announce_end()
        for check in checks:
            check._await_end()
    except (TransportError, Stalled) as error:
        log("the end of the program: %s", error)
    except MPIKVError as error:
        print_lines(f"{type(error).__name__}: {text_of(error)}", "mpikv: at the end of the program: ")
        fail_at_end()
