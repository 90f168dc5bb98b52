"""The part of a rank that has left ``join`` in the calls of the others: it makes them, and brings nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..cluster.calls import CallReport, PreparedCall
from ..engine.calls import Contribution
from ..engine.exchange import Exchange
from ..engine.plan import Plan
from ..errors import RankMismatch

if TYPE_CHECKING:
    from .push_pull import PushPull
    from .rows import RowVerbs


class Join:
    """Prepares the calls of other ranks."""

    def __init__(self, exchange: Exchange, push_pull: PushPull, rows: RowVerbs, rank: int) -> None:
        self._exchange, self._push_pull, self._rows, self._rank = exchange, push_pull, rows, rank

    def prepare(self, report: CallReport, until_done: ExitStack) -> Callable[[], Any] | None:
        """Return a function for an empty part in others' call, None for a barrier; may zero buffers, or raise. Local.

        ``until_done`` keeps this rank's buffers zeroed while the others may read them.
        """
        if report.verb == "barrier":
            return None
        call, run = self._prepare(report, self._exchange.values.plan(tuple(report.keys)), until_done)
        self._check_same(report, call.describe())
        return run

    def _prepare(self, report: CallReport, plan: Plan, until_done: ExitStack) -> PreparedCall:
        """Return (call, run) of an empty part; zero buffers ``until_done`` if pushed. Local; run() is collective."""
        # An empty list of arrays for each key adds nothing, and fills nothing.
        nothing: Sequence[Any] = [()] * len(plan.keys)
        if report.verb == "pull":
            return self._push_pull.pull_arrays(plan, nothing)
        if report.verb == "row_sparse_pull":
            return self._rows.pull_rows(plan, nothing, None, 0)
        contribution = Contribution[report.contribution]
        if contribution in (Contribution.ROWS, Contribution.ROWS_FOR_WHOLE):
            none = self._rows.no_rows(plan)
            whole = nothing if contribution is Contribution.ROWS_FOR_WHOLE else None
            if report.verb == "push":
                return self._rows.push(plan, none)
            return self._rows.pushpull_rows(plan, none, whole, nothing, None, 0)
        if contribution is not Contribution.BUFFERS:
            return self._push_pull.update(report.verb, plan, nothing, targets=nothing)
        # Without a codec, as those that pack buffers push them as arrays: a codec may decode zeros to other numbers.
        until_done.enter_context(self._exchange.values.zeroed_buffers(plan))
        return self._push_pull.update(report.verb, plan, None, targets=nothing)

    def _check_same(self, report: CallReport, mine: Sequence[str]) -> None:
        """Raise RankMismatch if a text of this rank's description of the call is not in the report. Local."""
        if (differs := next((text for text in mine if text not in report.parts), None)) is not None:
            raise RankMismatch(
                f"ranks disagree: others call {report.text} with {list(report.parts)[:4]}; rank {self._rank}, which "
                f"has left join(), has {differs}; nothing was changed"
            )
