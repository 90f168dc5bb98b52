"""The comparison of ranks' calls before data move.

Every collective call of the store starts by comparing one number, a digest of the call. Data move only if all ranks
passed the same number. Otherwise the ranks exchange texts, and every one of them raises. A rank with bad arguments
raises its own error, and the others ``PeerFailed``. Ranks that made different calls all raise the same
``RankMismatch``. Either way every rank has made the same number of steps, so the store can be used again. Each rank
also writes its call to the status board of ``cluster/status_board.py``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NoReturn

import numpy as np

from ..errors import (
    MPIKVError,
    PeerFailed,
    Raised,
    RankMismatch,
    Stalled,
    TransportError,
    is_marked,
    mark,
    mark_stalled,
    noted,
    notes,
    text_of,
)
from ..protocols import Group, Transport
from .calls import ANY, JOINED, Call, CallReport, text_of_note
from .runtime import owned
from .status_board import StatusBoard
from .tracebacks import callers_place_of, place_here, place_of

# Tokens that are no digest: the owner's work went well; the arguments are bad or the work failed. Digests are below
# JOINED; _WELL and _FAILED meet only each other, in confirm.
_WELL = 1
_FAILED = (1 << 62) - 1
_JOINABLE = ("push", "pull", "pushpull", "row_sparse_pull", "barrier")
# The verb of a close without a line of the program, at its end.
_END = "the end of the program"


class Agreement:
    """Compares the ranks' calls. Its public methods are collective, but for those that complete an error's message."""

    def __init__(self, transport: Transport, group: Group, board: StatusBoard) -> None:
        """Keep the arguments, and the record of this rank's calls on the board; send nothing. Local."""
        self._transport, self._group, self._board = transport, group, board
        self._lateness, self.record = board.lateness, board.record
        """Shows the call on the board; whoever makes calls notes there the end of each one, good or bad."""

    def begin(self, call: Call, send_ready: bool = False) -> None:
        """Count a call, show it on the board, and wait for all ranks; raise on all unless each makes an equal call or
        has joined. Collective; a fence.

        The caller ends the call by ``record.leave()``.

        ``send_ready``: the send buffer holds the call's first message.

        Raises:
            RankMismatch: ranks made different calls.
            PeerFailed: another rank raised before it could take part.
            Stalled: a rank did not come; the message does not tell yet where it is.
        """
        record = self.record
        record.begin(call.note)
        equal = self._transport.agree(call.token, send_ready)
        record.met = record.clock()
        if not equal:
            _, some_have_left = self.compare_reports(call)
            if some_have_left:
                self.confirm(call, None)  # ranks in join() confirm too: they may lack memory for their part
        elif record.calls >= self._lateness.fold_at:
            self._lateness.fold(record.calls, self._transport.all_gather)

    def least(self, number: int) -> int:
        """Return the smallest of the numbers that the ranks pass; compares no call. Collective."""
        numbers = np.zeros(self._group.size, np.int64)
        numbers[self._group.rank] = number
        self._transport.all_gather(numbers, (1,) * numbers.size)
        return int(numbers.min())

    def refuse(self, call: Call, error: BaseException) -> NoReturn:
        """Count a call, and take part in the other ranks' :meth:`begin` only to refuse it: raise the error here, with
        verb and rank in its text, and PeerFailed there; Stalled if a rank does not come. Collective.
        """
        self.record.begin(call.note)
        self._tell_failure(call, error)
        self.record.met = self.record.clock()
        if isinstance(error, MemoryError):
            self.name_call_in(error, call)
        raise self.at_rank(call.verb, error)

    def confirm(self, call: Call, error: BaseException | None) -> None:
        """Meet all ranks. If some pass an error, these raise their own, and the others PeerFailed. Collective."""
        if error is None:
            if not self._transport.agree(_WELL):
                self.compare_reports(call)  # raises: some rank has reported an error
            return
        self._tell_failure(call, error)
        # Its text is this package's, and may be completed.
        if isinstance(error, MPIKVError):
            raise self.at_rank(call.verb, error)
        # An error of the caller's own code is raised as it is.
        raise mark(noted(error, f"in {call} on rank {self._group.rank} of {self._group.size}"), "settled")

    def run_together(self, call: Call, work: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``work(*arguments)``; if it raises on any rank, raise on every rank. Collective."""
        failure, result = None, None
        try:
            result = work(*arguments)
        except BaseException as error:  # also Ctrl-C: the other ranks wait in confirm
            failure = error
        self.confirm(call, failure)
        return result

    def shadow(self, call: Call) -> CallReport | None:
        """In join(): count and meet the others' next call; return its report, or None if all ranks joined; raise as
        :meth:`begin`. Collective.

        :meth:`confirm` must follow a report.
        """
        self.record.begin(call.note)
        equal = self._transport.agree(JOINED)
        self.record.met = self.record.clock()
        return None if equal else self.compare_reports(call)[0]

    def _tell_failure(self, call: Call, error: BaseException) -> None:
        """Tell other ranks this rank's error, and set its mark ``repeated``: whether another rank has the same and
        prints it in full. Raises nothing itself. Collective.
        """
        # _FAILED is no digest: even alone, this rank makes the others look for the reason.
        rank = self._group.rank
        if self._transport.agree(_FAILED):  # all ranks failed, most likely by the same mistake: no texts are needed
            mark(error, "repeated", rank != 0)
        else:
            errors = [other.error for other in self._exchange_reports(call, error)]
            mark(error, "repeated", errors.index(errors[rank]) != rank)

    def _exchange_reports(self, call: Call, error: BaseException | None, place: str | None = None) -> list[CallReport]:
        """Send every rank a report of this rank's call, line and error; return all ranks', in order. Collective."""
        text, verb, place = str(call), call.verb, place_here() if place is None else place
        if verb == "close" and not place:
            place = "".join(owned("exits"))  # where the program called sys.exit
            last = self.record.calls - 1
            text, verb = f"call #{last} {text_of_note(self.record.note_of(last))}" if last > 0 else "create", _END
        # As text: an exception of a caller's class may not be made on another rank.
        failure = format_error(error, place) if error else ""
        mine = CallReport(text, verb, place, call.keys, call.token, call.contribution, tuple(call.describe()), failure)
        return [CallReport(*json.loads(text)) for text in self._group.gather(json.dumps(mine))]

    def compare_reports(self, call: Call, number: int = 0, place: str | None = None) -> tuple[CallReport, bool]:
        """Exchange all ranks' reports of a call. Raise on an error or unequal calls, else return (the report of the
        first rank that has not joined, whether any has joined). Collective.

        ``number`` and ``place`` are those of a call that is not the last one.
        """
        reports = self._exchange_reports(call, None, place)
        # Errors before mismatches: bad arguments change the digest too, and the error says more.
        for rank, other in enumerate(reports):
            if other.error:
                raise self.at_rank(call.verb, _make_peer_error(call, rank, other.error))
        working = {rank: other for rank, other in enumerate(reports) if other.token != JOINED}
        if len(working) < len(reports):
            self._check_joinable(call, working)
        known = {rank: other for rank, other in working.items() if other.token != ANY}
        if len({other.token for other in known.values()}) > 1:
            # A nonblocking call of MPI begins with this letter.
            begun = any(other.verb[0] == "I" for other in known.values())
            text = (
                f"ranks disagree at call #{number or self.record.calls}: {_describe_difference(known)}; "
                f"{'MPI has begun the nonblocking ones' if begun else 'nothing was changed'}; "
                "every rank must make the same calls in the same order, outside of conditions on the rank"
                f"{_describe_places(known)}"
            )
            raise self.at_rank(call.verb, self._make_mismatch(text, known))
        return next(iter(working.values())), len(working) < len(reports)

    def _check_joinable(self, call: Call, working: Mapping[int, CallReport]) -> None:
        """Raise RankMismatch if one of these calls cannot be made while other ranks are in join. Local."""
        for rank, other in working.items():
            if other.verb not in _JOINABLE:
                text = (
                    f"{_describe_act([rank], other)} while others have left join(), and take part only in "
                    f"{', '.join(_JOINABLE)}; every rank must enter join(), and make other calls outside of it"
                )
                raise self.at_rank(call.verb, self._make_mismatch(f"{text}; nothing was changed", working))

    def _make_mismatch(self, text: str, working: Mapping[int, CallReport]) -> RankMismatch:
        """Return a RankMismatch with this text, marked as repeated unless this rank is to print it in full. Local.

        One rank prints it in full: the first of the smallest group with one call, most likely the wrong one. A rank at
        the end of its program has no traceback and is passed over.
        """
        alike = Counter(other.token for other in working.values())
        calling = [rank for rank, other in working.items() if other.verb not in ("close", _END)]
        first = min(calling, key=lambda rank: alike[working[rank].token], default=0)
        return mark(RankMismatch(text), "repeated", first != self._group.rank)

    def at_rank(self, verb: str, error: Raised) -> Raised:
        """Mark an error as known to all ranks and return it; if not marked yet, add verb and rank to its text. Local.

        The text of mpikv's errors, of TypeError, ValueError and IndexError changes in place; an OSError gets a note.
        """
        if is_marked(error, "settled"):
            return error
        if isinstance(error, (MPIKVError, TypeError, ValueError, IndexError)):
            error.args = (self._add_rank(verb, verb, error),)
        elif isinstance(error, OSError):  # its arguments are a number, a text and a path
            noted(error, f"in {verb} on rank {self._group.rank} of {self._group.size}")
        return mark(error, "settled")

    def complete_text(self, verb: str, error: BaseException) -> None:
        """Add to a Stalled's text where late ranks are, and show this rank as given up on the board; add verb and rank
        to the text of any TransportError. Local; may wait for answers of late ranks.

        It leaves other errors as they are.
        """
        if isinstance(error, Stalled):
            error.missing, about = self._board.report(error.missing)
            mark_stalled(error, self._group.rank)
            self._board.give_up()
            error.args = (f"{error}, in {about}; if a rank is only slow, raise timeout= or MPIKV_TIMEOUT",)
        if isinstance(error, TransportError):
            self.at_rank(verb, error)

    def name_call_in(self, error: Exception, call: Call) -> None:
        """Put a call before an error's text, in place, and this rank after it if there are several. Local."""
        error.args = (self._add_rank(str(call), call.verb, error),)

    def _add_rank(self, begin: str, verb: str, error: BaseException) -> str:
        """Return an error's text with ``begin`` before it, unless it starts with the verb, and this rank behind it, if
        there are several. The error stays as it is. Local.
        """
        text = text_of(error)
        text = text if text.startswith((f"{verb}:", f"{verb}(")) else f"{begin}: {text}"
        where = f" [rank {self._group.rank}/{self._group.size}]" if self._group.size > 1 else ""
        return text if text.endswith(where) else text + where


def compare_requests(
    group: Group, verb: str, wanted: Mapping[str, str], problem: Exception | None, own: Any = None
) -> list[Any]:
    """Return a list of ranks' ``own``; raise on all if their ``wanted`` differ or one has a problem. Collective."""
    # JSON, never pickle: a rank must not run what another one sends.
    text = json.dumps([wanted, problem and f"{type(problem).__name__}: {problem}", own])
    requests = [json.loads(text) for text in group.gather(text)]
    where = f" [rank {group.rank}/{group.size}]" if group.size > 1 else ""
    if problem is not None:
        problem.args = (f"{verb}: {problem}{where}",)
        failures = [failure for _, failure, _ in requests]
        raise mark(problem, "repeated", failures.index(failures[group.rank]) != group.rank)
    first, _, _ = requests[0]
    for rank, (other, failure, _) in enumerate(requests):
        if failure:
            raise PeerFailed(f"{verb}: rank {rank} raised {failure}{where}", rank)
        if other != first:
            differing = [
                f"{key} {first[key]} on rank 0, {other[key]} on rank {rank}"
                for key in first
                if first[key] != other[key]
            ]
            mismatch = RankMismatch(f"{verb}: ranks disagree: {'; '.join(differing)}{where}")
            raise mark(mismatch, "repeated", group.rank != 0)
    return [own for _, _, own in requests]


def _make_peer_error(call: Call, rank: int, failure: str) -> Exception:
    """Return the error to raise here because another rank raised ``failure``: PeerFailed, or RankMismatch if it raised
    that. Local.
    """
    kind, _, text = failure.partition(": ")
    if kind == RankMismatch.__name__:  # one rank found it, but it concerns all
        return mark(RankMismatch(text), "repeated")
    # It changed nothing: the agreement comes before data move, and a failed update is not stored.
    return PeerFailed(f"{call}: rank {rank} raised {failure}; nothing was changed", rank)


def format_error(error: BaseException, call_place: str = "") -> str:
    """Return "CLASS: TEXT" of an error, for other ranks. Unless it is an MPIKVError, its notes and a place follow: the
    caller's line in its traceback, else ``call_place``, else its innermost line. Local.
    """
    if isinstance(error, MPIKVError) or error.__traceback__ is None:
        return f"{type(error).__name__}: {text_of(error)}"
    where = ", ".join([*notes(error), (callers_place_of(error) or call_place or place_of(error)).strip()])
    return f"{type(error).__name__}: {text_of(error)} ({where})"


def _describe_difference(reports: Mapping[int, CallReport]) -> str:
    """Return a text of the first rank's call and the first unequal one, with all its ranks; if they read alike, of
    their first unequal item, too. At least one must differ. Local.
    """
    (rank, first), *others = reports.items()
    other = next(other for _, other in others if other.token != first.token)
    where = ""
    if other.text == first.text:
        sides = enumerate(zip_longest(first.parts, other.parts))
        where = next((f" (item {at}: {_compare(left, right)})" for at, (left, right) in sides if left != right), "")
    # Of more than two calls the first two are shown: a text for each would hide the difference.
    like = [rank for rank, one in reports.items() if one.token == other.token]
    return f"{_describe_act([rank], first)}; {_describe_act(like, other)}{where}"


def _describe_places(reports: Mapping[int, CallReport]) -> str:
    """Return "; rank 0 is at FILE:LINE in NAME, ...": for each different call, the program's line on its first rank. ""
    if no line is known. Local.
    """
    # Reversed, so that the first rank of each call is the one that stays in the dict.
    firsts = {other.token: (rank, other) for rank, other in reversed(list(reports.items()))}
    calls = sorted(one for one in firsts.values() if one[1].place)
    places = [f"rank {rank} {'left' if other.verb == _END else 'is'}{other.place}" for rank, other in calls]
    return f"; {', '.join(places)}" if places else ""


_OPTIONS = re.compile(r"(?P<name>[^(]*)\((?P<options>.*)\)", re.DOTALL)


def _compare(left: str | None, right: str | None) -> str:
    """Return words for the difference of two items of unequal calls; None: that call has no such item. Local.

    Of two lists of the same options, as of an updater, show only the options that differ.
    """
    if left is None or right is None:
        return f"{left or right}, only in the {'first' if right is None else 'second'} of these calls"
    (name, options), (other_name, other_options) = map(_options_of, (left, right))
    if name != other_name or len(options) != len(other_options):
        return f"{left} against {right}"
    return f"{name}: {'; '.join(f'{a} against {b}' for a, b in zip(options, other_options, strict=True) if a != b)}"


def _options_of(text: str) -> tuple[str, list[str]]:
    """Return (name, options) of a name before a list in brackets; without a list (text, []). Local."""
    found = _OPTIONS.fullmatch(text)
    return (found["name"], found["options"].split(", ")) if found else (text, [])


def _describe_act(ranks: Sequence[int], report: CallReport) -> str:
    """Return words as "rank 0 calls push(w)" for these ranks, which make one call. Local."""
    who, one = ", ".join(map(str, ranks)), len(ranks) == 1
    if report.verb == _END:
        end = "has reached the end of its program" if one else "have reached the ends of their programs"
        return f"rank{'s' * (not one)} {who} {end}, after {report.text}"
    return f"rank {who} calls {report.text}" if one else f"ranks {who} call {report.text}"
