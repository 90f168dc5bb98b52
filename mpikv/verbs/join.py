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

__all__ = ["Join"]


class Join:
    """Prepares the calls of other ranks."""

    def __init__(self, exchange: Exchange, push_pull: PushPull, rows: RowVerbs, rank: int) -> None:
        self._exchange, self._push_pull, self._rows, self._rank = exchange, push_pull, rows, rank

    def prepare(self, said: CallReport, until_done: ExitStack) -> Callable[[], Any] | None:
        """Return this rank's part in a call of the others, None for a barrier. Local.

        ``until_done`` keeps this rank's buffers zeroed while the others may read them.
        """
        if said.verb == "barrier":
            return None
        call, run = self._prepare(said, self._exchange.values.plan(tuple(said.keys)), until_done)
        self._check_same(said, call.describe())
        return run

    def _prepare(self, said: CallReport, plan: Plan, until_done: ExitStack) -> PreparedCall:
        nothing: Sequence[Any] = [()] * len(plan.keys)
        if said.verb == "pull":
            return self._push_pull.pull_arrays(plan, nothing)
        if said.verb == "row_sparse_pull":
            return self._rows.pull_rows(plan, nothing)
        contribution = Contribution[said.contribution]
        pulls = said.verb == "pushpull"
        if contribution in (Contribution.ROWS, Contribution.ROWS_FOR_WHOLE):
            none = self._rows.none_of(plan)
            whole = nothing if contribution is Contribution.ROWS_FOR_WHOLE else None
            return self._rows.pushpull_rows(plan, none, whole, nothing) if pulls else self._rows.push(plan, none)
        sources: Sequence[Any] | None = nothing
        # Zeros in the buffers add nothing. With compression they would: a codec may decode zeros to other numbers.
        if contribution is Contribution.BUFFERS and self._exchange.compression is None:
            until_done.enter_context(self._exchange.values.empty_buffers(plan))
            sources = None
        if pulls:
            return self._push_pull.pushpull_arrays(plan, sources, nothing, contribution=contribution)
        return self._push_pull.push_arrays(plan, sources, contribution=contribution)

    def _check_same(self, said: CallReport, mine: Sequence[str]) -> None:
        """Raise if this rank would describe a call of the others in another way than they do."""
        if (differs := next((text for text in mine if text not in said.parts), None)) is not None:
            text = f"others call {said.text} with {list(said.parts)[:4]}; rank {self._rank}, which has left join(), has"
            raise RankMismatch(f"ranks disagree: {text} {differs}; nothing was changed")
