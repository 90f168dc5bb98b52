"""The part of a rank that has left ``join`` in the calls of the others: it makes them, and brings nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..cluster.calls import CallReport, PreparedCall
from ..engine.calls import Contribution
from ..errors import RankMismatch

if TYPE_CHECKING:
    from . import Verbs


def prepare_empty_part(verbs: Verbs, report: CallReport, until_done: ExitStack) -> Callable[[], Any] | None:
    """Return a collective function that takes part in the others' call, adding and filling nothing; None for a barrier.
    Raise if this rank cannot, or its settings differ; may zero buffers. Local.

    ``until_done`` keeps this rank's buffers zeroed while the others may read them.
    """
    if report.verb == "barrier":
        return None
    call, run = _prepare(verbs, report, until_done)
    differs = next((text for text in call.describe() if text not in report.parts), None)
    if differs is not None:
        raise RankMismatch(
            f"ranks disagree: others call {report.text} with {list(report.parts)[:4]}; rank "
            f"{verbs.exchange.transport.rank}, which has left join(), has {differs}; nothing was changed"
        )
    return run


def _prepare(verbs: Verbs, report: CallReport, until_done: ExitStack) -> PreparedCall:
    """Return (call, run) of an empty part. If buffers are pushed, zero this rank's until ``until_done`` closes. Local;
    run() is collective.
    """
    plan = verbs.exchange.values.plan(tuple(report.keys))
    # An empty list of arrays for each key adds nothing, and fills nothing.
    nothing: Sequence[Any] = [()] * len(plan.keys)
    if report.verb == "pull":
        return verbs.push_pull.pull_arrays(plan, nothing)
    if report.verb == "row_sparse_pull":
        return verbs.rows.pull_rows(plan, nothing, None, 0)
    contribution = Contribution[report.contribution]
    if contribution in (Contribution.ROWS, Contribution.ROWS_FOR_WHOLE):
        none = verbs.rows.no_rows(plan)
        whole = nothing if contribution is Contribution.ROWS_FOR_WHOLE else None
        if report.verb == "push":
            return verbs.rows.push(plan, none)
        return verbs.rows.pushpull_rows(plan, none, whole, nothing, None, 0)
    if contribution is not Contribution.BUFFERS:
        return verbs.push_pull.update(report.verb, plan, nothing, targets=nothing)
    # Without a codec, as those that pack buffers push them as arrays: a codec may decode zeros to other numbers.
    until_done.enter_context(verbs.exchange.values.zeroed_buffers(plan))
    return verbs.push_pull.update(report.verb, plan, None, targets=nothing)
