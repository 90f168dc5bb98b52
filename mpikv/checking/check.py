"""What the ranks of one checked communicator share: the agreement on its calls, deadlines, and what is left at the end.

It works on a duplicate of the communicator, so its messages never meet those of the program.
"""

from __future__ import annotations

import os
import reprlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary

from ..cluster.agreement import Agreement
from ..cluster.calls import ANY, Call, note, text_of_note
from ..cluster.printing import log, print_lines
from ..cluster.process_group import ProcessGroup
from ..cluster.runtime import owned
from ..cluster.shutdown import abandon, end_job, fail_at_end
from ..cluster.status_board import StatusBoard
from ..cluster.tracebacks import hide_frames, place_here
from ..cluster.waiting import Waiting
from ..collectives.communicator import Standing
from ..config import Config
from ..engine.plan import digest
from ..errors import MPIKVError, RankMismatch, TransportError, text_of
from ..transports import open_gpu_transport
from ..transports.mpi import Tickets
from ..transports.requests import AbortableWaiting, Requests
from .facts import call_of
from .tickets import MOST_PENDING, SharedTickets

# Looks at a message before the board says that this rank waits for it.
_LOOKS = 200

Describe = Callable[[], tuple[str, Sequence[int]]]
"""Returns an operation in words, and the ranks without which it does not end, as far as one knows."""


def _describe_origin(group: ProcessGroup, made_by: str) -> str:
    """Return words about a communicator for messages: its call and place, and its ranks if they are not all. Local."""
    ranks = group.comm.group.Translate_ranks(None, group.mpi.COMM_WORLD.group) if group.size > 1 else [0]
    those = f", whose ranks are {reprlib.repr(ranks)} of COMM_WORLD" if ranks != [*range(group.size)] else ""
    return f" on the communicator of {made_by}{place_here()}{those}"


class Check(Standing):
    """The checks of one communicator on this rank."""

    def __init__(self, group: ProcessGroup, config: Config, made_by: str) -> None:
        """Open a status board and tickets, compare ``made_by`` over ranks, the name of the call that made the
        communicator, and register the check for :func:`end_checks`. Collective.
        """
        self.group, self.config = group, config
        # Of one that the program has made: several may be in use.
        self._about = "" if made_by in ("Init", "checked") else _describe_origin(group, made_by)
        self._process, self._thread = os.getpid(), get_ident()
        self._board = StatusBoard(group, config.report, self._about)
        waits = _make_waits(group, Waiting(config.timeout, config.warn_after, self._board.warn))
        self._tickets = (SharedTickets if group.one_host else Tickets)(group, waits)
        control: Any = self._tickets  # an agreement asks for less than a whole transport, as does that of GPUs
        super().__init__(Agreement(control, group, self._board), group)
        self.leave = self._agreement.record.leave
        """Notes the end of a collective call."""
        self.calls = dict[Any, Call]()
        """Calls of buffers, by what they follow from."""
        self._pending = deque[tuple[int, Call, str]]()
        # Those that the program has dropped are in _dropped, by what it did not wait for.
        self._started = WeakValueDictionary[int, Any]()
        self._dropped = dict[str, None]()
        self.refused: Call | None = None
        """A call that mpi4py has refused on this rank, and that all have begun: the others are in MPI."""
        self.gpus: Any = None
        self.join_gpus = partial(open_gpu_transport, group, config, warn=self._board.warn, control=control)
        self._agreement.begin(call_of(made_by, ()))
        owned("checks").append(self)

    # --- Collective calls

    def begin(self, call: Call, problem: Exception | None = None) -> None:
        """Compare a call, after earlier nonblocking ones; raise on all if they differ or one has a problem. Collective.

        Ranks with a ``problem`` raise it. The caller ends the call by :attr:`leave`. A repetition of a call that mpi4py
        has refused here is not compared again: the other ranks are in it.

        Raises:
            PeerFailed: another rank has a problem.
            RankMismatch: ranks make different calls.
            Stalled: a rank did not come.
        """
        if self._failure:
            self.check_usable()
        self._thread = get_ident()
        if self.refused:
            self._resume(call)
            return
        while self._pending:
            self._compare_first()
        try:
            if problem is not None:
                self._agreement.refuse(call, problem)
            # It is on its way to the other ranks while this one takes note of the call.
            self._tickets.early = self._tickets.post(call.token)
            self._agreement.begin(call)
        except BaseException as error:
            self._fail(call.verb, error)
            raise

    def _resume(self, call: Call) -> None:
        """Forget that mpi4py refused the last call. If it did, and ``call`` is another one, end the checks, tell the
        other ranks, and raise RankMismatch. Local.
        """
        refused, self.refused = self.refused, None
        if refused and (call.verb != refused.verb or len({call.token, refused.token} - {ANY}) > 1):
            text = f"mpi4py refused {refused} on this rank; others may be in it, and cannot meet {call}"
            self.end(error := self._agreement.at_rank(call.verb, RankMismatch(text)))
            raise error

    def post(self, call: Call, start: Callable[[], Any], frame: FrameType) -> Any:
        """Start a nonblocking call, post it to be compared later, and return its request. Local; but with 512 calls not
        compared yet, it first waits for all ranks, to compare one.
        """
        self.check_usable()
        self._thread = get_ident()
        self._resume(call)
        if len(self._pending) >= MOST_PENDING:
            self._compare_first()
        request = start()
        self._agreement.record.begin(call.note)
        self.leave()
        self.track(request, lambda: (str(call), ()), frame, self._tickets.post(call.token))
        self._pending.append((request.number, call, request.place))
        return request

    def look(self) -> None:
        """Compare the nonblocking calls that every rank has made by now. Local, unless they differ."""
        # A thread that only has messages must not compare what another one posts.
        while self._pending and self._thread == get_ident() and self._tickets.are_here(self._pending[0][0]):
            self._compare_first()

    def _compare_first(self) -> None:
        """Wait for all ranks' posts of the oldest uncompared call; if unlike, end the checks and raise. Collective."""
        number, call, place = self._pending[0]
        try:
            equal = self._tickets.meet(number)
            self._pending.popleft()
            if not equal:
                self._agreement.compare_reports(call, number, place)
        except BaseException as error:
            if isinstance(error, RankMismatch):
                self.end(error)  # MPI has begun calls that do not fit: no later one can be trusted
            self._fail(call.verb, error)
            raise

    # --- Messages and requests

    def track(self, request: Any, describe: Describe, frame: FrameType, number: int = 0) -> Any:
        """Set a request's place, number and description on it, remember it as not waited for, and return it. Local.

        ``number`` is that of its comparison; a message has none.
        """
        request.check, request.describe, request.number = self, describe, number
        request.place = f" at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        self._started[id(request)] = request
        return request

    def drop(self, request: Any) -> None:
        """Remember, for the log at the end, a request that the program dropped unfinished; keep no buffer. Local."""
        self._dropped[f"{request.describe()[0]}{request.place}"] = None

    def await_request(self, request: Any, is_done: Callable[[], object]) -> None:
        """Wait until a request's operation is done; first compare the nonblocking calls up to it over ranks.

        Raises:
            RankMismatch: ranks made different calls.
            Stalled: the deadline passed.
        """
        while self._pending and self._pending[0][0] <= request.number:
            self._compare_first()
        self.wait(is_done, request.describe, request)

    def wait(self, is_done: Callable[[], Any], describe: Describe, keep: Any = None) -> Any:
        """Wait until ``is_done()`` is true, and return its value; meanwhile compare calls that all ranks have posted.
        Stalled, at the deadline, ends the checks; ``keep`` then lives on, as MPI may use its buffer.

        The status board shows the wait. An error of ``is_done`` is raised, and ends nothing.

        Raises:
            Stalled: the deadline passed.
        """
        for _ in range(_LOOKS):
            if done := is_done():
                return done
        self.check_usable()
        (text, peers), record = describe(), self._agreement.record
        last, is_main, failure = record.note_of(record.calls), self._thread == get_ident(), None

        def is_done_now() -> bool:
            """Compare calls that all ranks have posted; return whether the wait is over, perhaps by an error."""
            nonlocal done, failure
            self.look()  # a rank that finds a difference needs the others' part
            try:
                done = is_done()
            except Exception as error:  # MPI's own, as of a message that is too long, is the program's affair
                failure = error
            return bool(done) or failure is not None

        if is_main:
            record.rewrite(note(f"{text_of_note(last)}, then {text}"))
        try:
            self._tickets.waiting.until(is_done_now, lambda: peers)
        except BaseException as error:
            abandon([keep])
            self._fail(text, error)
            raise
        finally:
            if is_main:
                record.rewrite(last)
        if failure is not None:
            raise failure
        return done

    def _fail(self, verb: str, error: BaseException) -> None:
        """Add the communicator to a RankMismatch's text; end checks and tell ranks, unless all know. Does not raise."""
        if isinstance(error, RankMismatch) and self._about not in str(error):
            error.args = (f"{error}{self._about}",)
        if isinstance(error, (MPIKVError, KeyboardInterrupt)):
            self.end_unless_settled(f"{verb}{self._about}", error)
        hide_frames(error)

    # --- The end

    def close(self) -> None:
        """Log requests never waited for, leave them to MPI, and free what the checks hold. Collective."""
        self._tell_left()
        if self.gpus is not None and self.gpus.mover is not None:
            self.gpus.mover.close()
        for request in self._started.values():
            request.check = None  # MPI's from now on: it completes what a freed communicator has begun
        owned("checks").remove(self)
        self._board.close()
        self.group.close()

    def _tell_left(self) -> None:
        """Log each request that the program has started and never waited for. Local."""
        for request in [one for one in self._started.values() if one]:
            self.drop(request)
        for text in self._dropped:
            log("rank %d never waited for %s", self.group.rank, text)

    def announce_end(self) -> None:
        """Post the end of the program as the next call, and log requests never waited for. End the job if the other
        ranks are in a call that mpi4py refused here. Local; does not wait.
        """
        if self._about and self.group.rank == 0:
            log("%s was never freed", self._about.removeprefix(" on "))
        self._tell_left()
        call = Call("close", digest("close"))
        if self.refused:
            why = f"rank {self.group.rank} ends, and the others are in {self.refused}, which mpi4py refused there"
            log("%s", why)
            end_job(why)
        self._agreement.record.begin(call.note)
        self._pending.append((self._tickets.post(call.token), call, ""))
        # Without a deadline: another rank may compute alone, as in plain MPI.
        self._tickets.waiting = _make_waits(self.group, Waiting(float("inf")))

    def await_end(self) -> None:
        """Compare calls not compared yet, last the end that :meth:`announce_end` has posted; no deadline. Collective.

        Raises:
            RankMismatch: a rank makes another call.
        """
        while self._pending:
            self._compare_first()

    @property
    def is_open(self) -> bool:
        """Whether the checks go on: this process, not its parent, began them, and no failure has ended them."""
        return os.getpid() == self._process and self._failure is None


def _make_waits(group: ProcessGroup, waiting: Waiting) -> Requests:
    """Return a waiter that raises once another rank gives up waiting or ends its calls. Local."""
    return Requests(group, AbortableWaiting(group.find_end, waiting))


def end_checks() -> None:
    """End all checks: wait for all ranks' ends, without a deadline; log what was left. Raise nothing: a mismatch is
    printed, and makes the exit status 1. Collective.

    It is called at the end of the program, or before the program ends MPI.
    """
    checks = [check for check in owned("checks") if check.is_open and not check.group.mpi.Is_finalized()]
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
