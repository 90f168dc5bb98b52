"""The door of a store: it lets in one call at a time, and none after the end.

A failure ends the store if the other ranks do not know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import Enum
from functools import partial
from typing import Any, TypeAlias, TypeVar

from ..arrays.arrays import run_quietly
from ..cluster.agreement import Agreement
from ..cluster.background import Pending
from ..cluster.calls import JOINED, Call, CallReport, note
from ..cluster.tracebacks import hidden_from_pytest, hide_frames, hiding_frames
from ..engine.plan import label
from ..errors import Closed, Stalled, TransportError, Unsupported, brief, is_marked, text_of
from ..optimizers.updaters import check_outside
from ..protocols import Memory

__tracebackhide__ = hidden_from_pytest
Result = TypeVar("Result")
_Prepare: TypeAlias = "Callable[[CallReport, ExitStack], Callable[[], Any] | None]"

# Characters of the arguments of a call in a message.
_MOST_SHOWN = 80


class State(Enum):
    """The calls that a store lets in."""

    OPEN = "all calls"
    JOINING = "calls that the ranks wait for, in a block of join"
    ENDED = "none"


class Door:
    """Lets the calls of one store in."""

    def __init__(
        self, agreement: Agreement, memory: Memory, alone: bool, pending: Pending, abandon: Callable[[str, bool], None]
    ) -> None:
        """Let in all calls. ``abandon(why, tell)`` makes the store unusable; ``tell``: tell the other ranks. Local."""
        self._agreement, self._memory, self._is_alone = agreement, memory, alone
        self._pending, self._abandon = pending, abandon
        self.state = State.OPEN
        self.why = ""
        """Why the store has ended."""
        self.running = ""
        """The verb of the call that runs."""
        self.failed_calls = 0
        """How many calls have failed on all ranks; the store goes on after these. The same number on each rank, but not
        while calls are pending."""

    # --- Guards

    def check_open(self, verb: str) -> None:
        """Raise Closed if the store has ended. Local."""
        if self.state is State.ENDED:
            raise self._agreement.at_rank(verb, Closed(f"{verb}: {self.why}"))

    def check_free(self, verb: str) -> None:
        """Raise if the store has ended, or is in another call or an updater; pending calls do not matter. Local."""
        self.check_open(verb)
        # First this, as calls may complete meanwhile.
        if not self._pending.active or self._pending.runs_here():
            self._check_idle(verb)
        # In an updater, other ranks are in the same call, and would wait for this one. Alone nobody waits.
        if not self._is_alone:
            check_outside(verb)

    def _check_idle(self, verb: str) -> None:
        """Raise Unsupported if the store is in a call. Local."""
        if running := self.running:
            raise Unsupported(f"{verb}: the store is in {running}; an updater, or another thread, cannot call it")

    @hiding_frames
    def enter(self, verb: str) -> BaseException | None:
        """Raise unless a call may begin. If calls are pending, wait for them, mark the store busy, and return their
        first unseen error; else return None and mark nothing. Local.
        """
        if self.state is not State.ENDED:
            self.check_free(verb)
        if self._pending.waiting and not self._pending.runs_here():
            # Claimed under the queue's lock: between the last pending call and this one no other may begin.
            self._pending.claim_when_done(partial(self._claim, verb))
            try:
                unseen = self._pending.take_failure()
                if unseen is not None and self.state is State.ENDED:  # by it, which says more than "closed"
                    raise unseen
                self.check_open(verb)
            except BaseException:  # Ctrl-C, too: nobody else gives back what was claimed
                self.running = ""
                raise
            return unseen
        self.check_open(verb)
        return None

    def _claim(self, verb: str) -> None:
        """Mark the store as busy, so that the thread of pending calls begins none; raise if it is busy. Local."""
        self._check_idle(verb)
        self.running = verb

    # --- Calls without an agreement of their own

    def run_without_agreement(self, verb: str, run: Callable[[], Result]) -> Result:
        """Return ``run()``, the store marked busy, no call compared; some failures end the store. May await ranks."""
        # So that an updater, or another thread, finds the store busy.
        self.running = verb
        self._agreement.record.rewrite(note(verb))
        try:
            return run_quietly(run)
        except BaseException as error:
            if isinstance(error, TransportError) or not isinstance(error, Exception):
                self.end_unless_settled(verb, error)
            self._agreement.at_rank(verb, error)
            hide_frames(error)
            raise
        finally:
            self.running = ""

    def shadow(self, prepare: _Prepare, run_in_order: Callable[..., Any]) -> None:
        """Take part in the calls of ranks that still have work, bringing nothing, until none has any. Collective."""
        call = Call("join", JOINED)
        self.running = "join"  # an updater may run here, and cannot call the store
        try:
            while report := self._agreement.shadow(call):
                with ExitStack() as until_done:
                    # The working ranks confirm, too: they must not push while this rank lacks memory for its part.
                    run = self._agreement.run_together(call, prepare, report, until_done)
                    if run is not None:
                        run_in_order(run_quietly, run)
        except BaseException as error:
            self.end_unless_settled("join", error)
            hide_frames(error)
            raise
        finally:
            self.running = ""

    # --- The end

    @contextmanager
    def joining(self) -> Iterator[None]:
        """In a with block: set the state to JOINING, reset it at the end; Closed if the store has ended. Local."""
        self.check_open("join")
        before, self.state = self.state, State.JOINING
        try:
            yield
        finally:
            if self.state is State.JOINING:  # which the end of the store changes, too
                self.state = before

    def end(self, why: str) -> None:
        """Have later calls raise Closed, with ``why``. Local; it frees nothing and tells nobody."""
        self.state, self.why = State.ENDED, why

    def end_unless_settled(self, verb: str, error: BaseException) -> None:
        """Count a call's error if all ranks know of it, and keep the store open; otherwise, or after failed GPU work,
        end the store on this rank.

        It completes the other error's message by where missing ranks are, for which it may wait.
        """
        if is_marked(error, "settled"):
            self.failed_calls += 1
            if self._memory.order.failed:  # whoever has been told of it
                self._abandon_after(error)
            return
        self._agreement.complete_text(verb, error)
        # The others have the same deadline.
        self._abandon_after(error, tell=not isinstance(error, Stalled))

    def _abandon_after(self, error: BaseException, tell: bool = True) -> None:
        """Make the store unusable on this rank after an error; ``tell`` ranks that would wait on GPUs for it. Local."""
        self._abandon(f"the store ended in an earlier call ({text_of(error, repr)}); create a new store", tell)


def show_keys(key: Any = None) -> str:
    """Return a call's keys, valid or not, as a short text for a message. Local."""
    if key is None:
        return ""
    return brief(label(list(key)) if isinstance(key, (list, tuple, Mapping)) and key else repr(key), _MOST_SHOWN)
