"""One collective call at a time: ranks agree on it, then data move. The checked face of collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeVar

from ..arrays.arrays import quiet
from ..cluster.agreement import Agreement
from ..cluster.calls import Call
from ..cluster.tracebacks import hidden_from_pytest, hide_frames
from ..errors import Closed, Stalled, TransportError, ValueMismatch, is_marked, text_of
from ..protocols import Array, Group
from .collectives import Collectives

__tracebackhide__ = hidden_from_pytest
Result = TypeVar("Result")


class Standing:
    """Whether the ranks of a group can make calls together.

    After an error that every rank has, as RankMismatch, they can. After another one, as Stalled, each later call raises
    it anew.
    """

    def __init__(self, agreement: Agreement, group: Group) -> None:
        """Let calls in: there is no failure yet. Local."""
        self._agreement, self._group = agreement, group
        self._failure: Exception | None = None

    def check_usable(self) -> None:
        """Raise the failure that has ended all calls, if there is one. Local."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def end(self, error: Exception) -> None:
        """Note a failure outside of the calls, for later calls to raise, and tell other ranks. Local; does not wait."""
        self._failure = error
        self._group.announce_end(text_of(error))

    def end_unless_settled(self, verb: str, error: BaseException) -> None:
        """Unless all ranks know of an error: complete its text, let no later call in, and tell the others of it (not of
        a deadline). Raise nothing.

        It cuts this package's frames out of every error. Local; may wait for the answers of late ranks.
        """
        if not is_marked(error, "settled"):
            self._agreement.complete_text(verb, error)
            ended = f"{verb} failed on this rank alone ({text_of(error, repr)}), and the ranks cannot go on together"
            self._failure = error if isinstance(error, TransportError) else Closed(ended)
            if not isinstance(error, Stalled):  # the others have the same deadline
                self._group.announce_end(ended)
        hide_frames(error)


class Communicator(Standing):
    """Makes the calls of a group of ranks, for one thread at a time. All methods are collective."""

    def __init__(self, collectives: Collectives, agreement: Agreement, group: Group) -> None:
        """Keep the parts. Calls will run with a copy of the present context variables, without numpy's warnings."""
        super().__init__(agreement, group)
        self.collectives, self._quietly = collectives, quiet()

    def call(self, call: Call, run: Callable[[bool], Result], *message: Array) -> Result:
        """Agree on a call over ranks, and return ``run(staged)``; a failure here alone ends later calls. Never nest it.
        Collective.

        Args:
            call: ranks compare its token. The bytes of the message, and all that ``run`` does, follow from it.
            run: moves data by :attr:`collectives`, and passes on whether the message is ``staged``.
            message: the parts of the message that the first collective of ``run`` takes, if that can be staged.

        Raises:
            RankMismatch: ranks made different calls.
            PeerFailed: another rank refused.
            Stalled: a rank did not come.
        """
        self.check_usable()
        try:
            staged = bool(message) and self.collectives.stage(*message)
            self._agreement.begin(call, staged)
            # A caller who has numpy raise at an overflow would have it end halfway, on some ranks.
            result: Result = self._quietly(run, staged)
        except BaseException as error:
            if isinstance(error, ValueMismatch):
                self._agreement.name_call_in(error, call)
            self.end_unless_settled(call.verb, error)
            raise
        finally:
            self._agreement.record.leave()
        return result

    def refuse(self, call: Call, error: Exception) -> NoReturn:
        """Come to the other ranks' call only to refuse it: raise the error here, and PeerFailed there. Collective."""
        self.check_usable()
        try:
            self._agreement.refuse(call, error)
        except BaseException as failure:
            self.end_unless_settled(call.verb, failure)
            raise
