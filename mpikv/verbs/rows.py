"""``row_sparse_pull``, and ``push``, ``pull`` and ``pushpull`` of rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..cluster.calls import PreparedCall
from ..cluster.printing import log
from ..engine.calls import Contribution
from ..engine.exchange import Exchange
from ..engine.keys import parse
from ..engine.pipeline import Arrays
from ..engine.plan import Plan
from ..errors import mark, noted
from ..memory.row_sparse import RowSparse
from ..sparse.rows import Rows
from .arguments import outs_of
from .comparison import Comparison
from .operands import Operands
from .row_arguments import Asked, check_fit, deliver, empty_rows, fill, pair_outs, requests_of, spare_bytes, want_rows

Requests: TypeAlias = "Sequence[Sequence[Asked]]"
"""For each key, which rows of it a call asks for."""


class RowVerbs:
    """Prepares these calls of one store."""

    def __init__(self, exchange: Exchange, operands: Operands, comparison: Comparison, rows: Rows) -> None:
        self._exchange, self._operands, self._comparison, self._rows = exchange, operands, comparison, rows
        self._memory = exchange.transport.memory

    # --- Check

    def pull(self, key: Any, out: Any, ignore_sparse: Any, priority: Any) -> PreparedCall:
        """Return (call, run) to pull into arrays and into each RowSparse. ``ignore_sparse`` leaves each RowSparse as it
        is, and logs so. Local; run() is collective.
        """
        form = parse(key, None, "out") if out is key else outs_of(key, out, self._operands.plan(key).keys)
        plan = self._exchange.values.plan(form.keys)
        sparse, dense = _separate(form.groups)
        self._rows.load(plan.dtypes)
        for entry, rows in zip(plan.entries, sparse, strict=True):
            for each in rows:
                check_fit(entry, "out", each)
            if rows and ignore_sparse:
                text = "pull: a RowSparse out of key %r is left as it is; ignore_sparse=False fills it"
                log(text, entry.key, level=logging.INFO)
        if ignore_sparse:
            sparse = [()] * len(sparse)
        elif any(sparse):
            self._memory.order.check_new()
        targets = self._operands.check_targets(plan, dense)
        call = self._comparison.plan_call("pull", plan, priority)

        def run() -> Any:
            """Pull whole values; fill arrays, and replace the rows of each RowSparse; return ``out``. Collective."""
            self._exchange.pipeline.pull(plan, targets)
            try:
                for entry, group in zip(plan.entries, sparse, strict=True):
                    for rows in group:
                        fill(entry, rows)
            except MemoryError as error:
                mark(error, "settled")  # the ranks have made their call, and each fills its own
                raise
            return out

        return call, run

    def pushpull(self, plan: Plan, given: Sequence[RowSparse], key: Any, result: Any, priority: Any) -> PreparedCall:
        """Return (call, run) to push rows; then each RowSparse of ``result`` gets the new values of its own rows, and
        each array the whole value. Take memory now. Local; run() is collective.
        """
        rows, dense = _separate(outs_of(key, result, plan.keys).groups)
        if any(rows):
            self._memory.order.check_new()
        asked = [
            pair_outs(entry, [each.indices for each in group], group)
            for entry, group in zip(plan.entries, rows, strict=True)
        ]
        whole = None
        if any(dense):
            whole = self._operands.check_targets(plan, dense)
        return self.pushpull_rows(plan, given, whole, asked, result, priority)

    def row_sparse_pull(self, key: Any, out: Any, priority: Any, row_ids: Any) -> PreparedCall:
        """Return (call, run) to pull the rows ``row_ids`` into ``out`` or new RowSparse; take memory for them now.
        Local; run() is collective.
        """
        plan = self._operands.plan(key)
        self._rows.load(plan.dtypes)
        asked, result = requests_of(plan.entries, key, out, row_ids)
        for each in (each for group in asked for each in group if type(each.out) is not RowSparse):
            self._exchange.values.check_apart(each.out)
        return self.pull_rows(plan, asked, result, priority)

    # --- Call and run

    def push(self, plan: Plan, given: Sequence[RowSparse], priority: Any = 0) -> PreparedCall:
        """Return (call, run) for a push of checked rows; ranks compare priorities. Local; run() is collective."""
        call, steps, confirm = self._comparison.update_call("push", plan, priority, Contribution.ROWS)
        return call, lambda: self._rows.push(plan, given, steps, confirm)

    def pull_rows(self, plan: Plan, asked: Requests, result: Any, priority: Any) -> PreparedCall:
        """Return (call, run) to pull rows for checked requests; take memory now. Local; run() is collective."""
        call = self._comparison.plan_call("row_sparse_pull", plan, priority)
        return call, self._prepare_pull(plan, asked, result)

    def pushpull_rows(
        self, plan: Plan, given: Sequence[RowSparse], whole: Arrays | None, asked: Requests, result: Any, priority: Any
    ) -> PreparedCall:
        """Return (call, run) to push checked rows, then pull ``whole`` values and rows. Local; run() is collective."""
        contribution = Contribution.ROWS if whole is None else Contribution.ROWS_FOR_WHOLE
        call, steps, confirm = self._comparison.update_call("pushpull", plan, priority, contribution)
        # Before ranks agree: it takes the memory for the rows.
        pull = self._prepare_pull(plan, asked)

        def run() -> Any:
            """Push the rows; then fill ``whole`` and the requests' outs; return ``result``. Collective."""
            self._rows.push(plan, given, steps, confirm)
            self._exchange.transport.fence()
            if whole is not None:
                self._exchange.pipeline.pull(plan, whole)
            try:
                pull()
            except MemoryError as error:
                noted(error, "the rows were pushed, but not pulled")
                raise
            return result

        return call, run

    def no_rows(self, plan: Plan) -> Sequence[RowSparse]:
        """Return for each key a RowSparse without rows, to be pushed by a rank that has none. Local."""
        self._rows.load(plan.dtypes)
        return list(map(empty_rows, plan.entries))

    def _prepare_pull(self, plan: Plan, asked: Requests, result: Any = None) -> Callable[[], Any]:
        """Take memory for pulled rows, as a GPU may have too little; return a collective function that pulls. Local."""
        every = [want_rows(entry, group) for entry, group in zip(plan.entries, asked, strict=True)]
        nbytes = 0 if self._memory.is_host else spare_bytes(plan.entries, every)
        spare = self._memory.empty((nbytes,), np.dtype(np.uint8))

        def pull() -> Any:
            """Pull the rows, and give them to the requests' outs; return ``result``. Collective if a value is stale."""
            with self._memory.workspace.over(spare):
                self._rows.pull(plan, [(wanted.ids, wanted.rows) for wanted in every])
                for entry, wanted in zip(plan.entries, every, strict=True):
                    deliver(entry, wanted)
            return result

        return pull


def _separate(groups: Sequence[Sequence[Any]]) -> tuple[list[Sequence[RowSparse]], list[Sequence[Any]]]:
    """Return two lists with an item for each key: the RowSparse of its group, and its other arrays. Local."""
    return (
        [[each for each in group if type(each) is RowSparse] for group in groups],
        [[each for each in group if type(each) is not RowSparse] for group in groups],
    )
