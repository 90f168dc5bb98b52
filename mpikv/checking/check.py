"""What the ranks of one checked communicator share: the agreement on its calls, deadlines, and what is left at the end.

It works on a duplicate of the communicator, so its messages never meet those of the program.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
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
from ..errors import MPIKVError, TransportError, text_of
from ..transports.requests import AbortableWaiting
from .facts import Facts
from .facts import text_of as text_of_fact
from .tickets import SharedTickets, Tickets

# Nonblocking calls that may wait for their comparison, and descriptions of calls that are kept.
_MOST_PENDING, _MOST_CALLS = 512, 4096
# Looks at a message before the board says that this rank waits for it.
_LOOKS = 200
# Requests that this rank has stopped waiting for. They keep the buffers alive: MPI may still read and write them.
_abandoned: list[Any] = []

Describe = Callable[[], tuple[str, Sequence[int]]]
"""Returns an operation in words, and the ranks without which it does not end, as far as one knows."""


class Operation(NamedTuple):
    """An operation that the program has to wait for."""

    request: Any
    describe: Describe
    place: tuple[str, int, str]
    """File, line and function of the program."""
    number: int = 0
    """That of its comparison; 0 for a message."""
    call: Call | None = None

    def where(self) -> str:
        """Return the place for the end of a line."""
        file, line, function = self.place
        return f" at {file}:{line} in {function}" if file else ""


class Check:
    """The checks of one communicator on this rank."""

    def __init__(self, group: ProcessGroup, config: Config, made_by: str) -> None:
        """Collective. ``made_by`` is the call that made the communicator."""
        self.group, self.config, self._made_by, self._made_at = group, config, made_by, place_here()
        self._process = os.getpid()
        self._board = StatusBoard(group)
        self._waits = AbortableWaiting(group.find_end, Waiting(config.timeout, config.warn_after, self._board.warn))
        self._tickets = (SharedTickets if group.one_host else Tickets)(group, self._waits)
        # An agreement asks for less than a whole transport.
        self._agreement = Agreement(self._tickets, group, self._board, verifies=True)  # type: ignore[arg-type]
        self._standing = Standing(self._agreement, group)
        self.leave = self._agreement.leave
        """Notes the end of a collective call."""
        self._calls: dict[tuple[Any, ...], Call] = {}
        self._pending = deque[Operation]()
        self._started: list[Operation] = []
        self._many_started = 64
        self._agreement.begin(self._call(made_by, ()))
        owned("checks").append(self)

    # --- Collective calls

    def begin(self, verb: str, facts: Facts) -> None:
        """Wait until every rank makes the same call. Collective.

        Raises:
            RankMismatch: ranks make different calls.
            Stalled: a rank did not come.
        """
        self._standing.check_usable()
        call = self._calls.get((verb, facts)) or self._call(verb, facts)
        try:
            while self._pending:
                self._compare_first(self._waits)
            self._agreement.begin(call)
        except BaseException as error:
            self._fail(verb, error)
            raise

    def post(self, verb: str, facts: Facts, request: Any, frame: FrameType) -> Operation:
        """Announce a nonblocking call that MPI has started; it is compared later. Local."""
        self._standing.check_usable()
        if len(self._pending) >= _MOST_PENDING:
            with self._failing(verb):
                self._compare_first(self._waits)
        call = self._calls.get((verb, facts)) or self._call(verb, facts)
        self._agreement.enter(call)
        self._agreement.leave()
        operation = self.track(request, lambda: (str(call), ()), frame, self._tickets.post(call.token), call)
        self._pending.append(operation)
        return operation

    def _call(self, verb: str, facts: Facts) -> Call:
        if len(self._calls) >= _MOST_CALLS:
            self._calls.clear()
        parts = [text_of_fact(fact) for fact in facts if fact not in (None, "")]
        label = ", ".join(parts)
        call = self._calls[verb, facts] = Call(verb, digest(f"{verb}({label})"), label, describe=lambda: parts)
        return call

    def look(self) -> None:
        """Compare the nonblocking calls that every rank has made by now. Local, unless they differ."""
        while self._pending and self._tickets.are_here(self._pending[0].number):
            self._compare_first(self._waits)

    def _compare_first(self, waits: AbortableWaiting) -> None:
        """Wait for all ranks to make the first call that is not compared, and compare it."""
        number, call = self._pending[0].number, self._pending[0].call
        self._tickets.await_all(number, waits)
        operation = self._pending.popleft()
        if call is None or self._tickets.are_equal(number):
            return
        self._agreement.place = operation.where
        try:
            self._agreement.settle(call, number)
        except MPIKVError as error:
            # MPI has begun calls that do not fit: no later one can be trusted.
            self._standing.end(error)
            raise
        finally:
            self._agreement.place = place_here

    # --- Messages and requests

    def track(
        self, request: Any, describe: Describe, frame: FrameType, number: int = 0, call: Call | None = None
    ) -> Operation:
        """Remember an operation that the program has to wait for. Local."""
        if len(self._started) >= self._many_started:
            self._started = [one for one in self._started if one.request]
            self._many_started = 2 * len(self._started) + 64
        place = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        self._started.append(Operation(request, describe, place, number, call))
        return self._started[-1]

    def complete(self, operation: Operation, is_done: Callable[[], object]) -> None:
        """Wait until an operation is done; of a collective call, until the ranks have compared it.

        Raises:
            RankMismatch: ranks made different calls.
            Stalled: the deadline passed.
        """
        if operation.call:
            with self._failing(str(operation.call)):
                while self._pending and self._pending[0].number <= operation.number:
                    self._compare_first(self._waits)
        self.wait(is_done, operation.describe, operation.request)

    def wait(self, is_done: Callable[[], object], describe: Describe, keep: Any = None) -> None:
        """Wait for a message. ``keep`` is kept alive after a failure.

        Raises:
            Stalled: the deadline passed.
        """
        for _ in range(_LOOKS):
            if is_done():
                return
        self._standing.check_usable()
        (text, peers), board = describe(), self._board
        last = board.current

        def is_done_now() -> bool:
            self.look()  # a rank that finds a difference needs the others' part
            return bool(is_done())

        board.write(board.number[0], note(f"{text_of_note(last)}, then {text}"))
        try:
            with self._failing(text):
                self._waits.until(is_done_now, lambda: peers)
        except BaseException:
            _abandoned.append(keep)
            raise
        board.write(board.number[0], last)

    @contextmanager
    def _failing(self, verb: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._fail(verb, error)
            raise

    def _fail(self, verb: str, error: BaseException) -> None:
        # MPI's own, as of a message that is too long, is the program's affair.
        if isinstance(error, (MPIKVError, KeyboardInterrupt)):
            self._standing.end_unless_settled(verb, error)
        hide_frames(error)

    # --- The end

    def close(self) -> None:
        """Release all. Collective; the ranks have agreed on it."""
        self._tell_left()
        owned("checks").remove(self)
        self._board.close()
        self.group.close()

    def _tell_left(self) -> None:
        """Log what the program has started and not waited for. Local."""
        for operation in self._started:
            if operation.request:
                log("rank %d never waited for %s%s", self.group.rank, operation.describe()[0], operation.where())

    def announce_end(self) -> None:
        """Make the end of the program this rank's next call, and log what was left. Local."""
        if self._made_by not in ("Init", "checked") and self.group.rank == 0:
            log("the communicator of %s%s was never freed", self._made_by, self._made_at)
        self._tell_left()
        call = Call("close", digest("close"))
        self._agreement.enter(call)
        number = self._tickets.post(call.token)
        self._pending.append(Operation(None, lambda: ("", ()), ("", 0, ""), number, call))

    def await_end(self) -> None:
        """Wait for the other ranks to end, without a deadline: a rank may compute alone, as in plain MPI. Collective.

        Raises:
            RankMismatch: a rank makes another call.
        """
        patience = AbortableWaiting(self.group.find_end, Waiting(float("inf")))
        while self._pending:
            self._compare_first(patience)

    @property
    def is_open(self) -> bool:
        """Whether this process made it, and no failure has ended it."""
        return os.getpid() == self._process and self._standing.is_usable


def end_checks() -> None:
    """Compare the end of the program with the other ranks' calls, and tell what was left. Collective: at the end of the
    program, or before the program ends MPI.
    """
    checks = [check for check in owned("checks") if check.is_open]
    owned("checks").clear()
    try:
        # All first: ranks may be in calls of any of these communicators.
        for check in checks:
            check.announce_end()
        for check in checks:
            check.await_end()
    except TransportError as error:
        log("the end of the program: %s", error)
    except MPIKVError as error:
        print_lines(f"{type(error).__name__}: {text_of(error)}", "mpikv: at the end of the program: ")
        fail_at_end()
