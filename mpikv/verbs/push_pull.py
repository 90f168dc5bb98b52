"""``push``, ``pull`` and ``pushpull`` of whole arrays, and ``buffer`` for pushes without copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..cluster.calls import PreparedCall
from ..engine.calls import Contribution
from ..engine.exchange import Exchange
from ..engine.pipeline import Arrays, are_plain
from ..engine.plan import Plan
from ..errors import NotFinite
from ..protocols import Array
from .arguments import in_form
from .comparison import Comparison
from .operands import Operands, given_to_fill
from .renewed import Renewed, answer
from .row_arguments import Brought, asks_rows

if TYPE_CHECKING:
    from .rows import RowVerbs

# Looked up once: the class of an enum finds its members slowly.
_WHOLE, _BUFFERS = Contribution.WHOLE, Contribution.BUFFERS


class PushPull:
    """Prepares these calls of one store."""

    check_finite = 0
    """See :class:`~mpikv.config.Config`."""
    _pushes = 0

    def __init__(self, exchange: Exchange, operands: Operands, comparison: Comparison, rows: RowVerbs) -> None:
        self._exchange, self._operands, self._comparison, self._rows = exchange, operands, comparison, rows

    # --- Check

    def push(self, key: Any, value: Any, priority: Any) -> PreparedCall:
        """Return (call, run) for a push; pack its first message if the plan prefetches. Local; run() is collective."""
        plan, arrays = self._operands.find_sources(key, value)
        if self.check_finite:
            self._check_finite_values(plan, arrays)
        if type(arrays) is Brought:
            return self._rows.push(plan, arrays.rows, priority)
        if not plan.raw:
            arrays = self._exchange.pushable(plan, arrays)
        # Described first, then packed: a user's schedule may raise, and no message is to be dropped then.
        prepared = self.update("push", plan, arrays, priority)
        if arrays is not None:
            self._exchange.pipeline.pack_first(plan, arrays)
        return prepared

    def pull(self, key: Any, out: Any, ignore_sparse: Any, priority: Any) -> PreparedCall:
        """Return (call, run) to pull into ``out``, a dict as ``key``, or new arrays. Local; run() is collective."""
        known = self._operands.find_cached_pulled(key, out)
        if known is None:
            given = out if out is not None or not isinstance(key, Mapping) else key
            if asks_rows(given):
                return self._rows.pull(key, given, ignore_sparse, priority)
            known = self._operands.find_pulled(key, out)
        return self.pull_arrays(*known, priority)

    def pushpull(self, key: Any, value: Any, out: Any, priority: Any) -> PreparedCall:
        """Return (call, run) to push, then pull into ``out`` or the pushed arrays; buffers without ``out`` give views.
        Pack the first message now if the plan prefetches. Local; run() is collective.
        """
        plan, arrays = self._operands.find_sources(key, value, out is None)
        if self.check_finite:
            self._check_finite_values(plan, arrays)
        if type(arrays) is Brought:
            return self._rows.pushpull(plan, arrays.rows, key, given_to_fill(key, value, out), priority)
        pushed = arrays if plan.raw else self._exchange.pushable(plan, arrays)
        if out is not None:
            targets, result = self._operands.find_targets(plan, key, out)
        elif arrays is None:
            # Of buffers without out= nothing is copied: the caller reads the new values in place.
            targets, result = (), in_form(key, plan, plan.views)
        elif are_plain(arrays):
            targets, result = arrays, key if value is None else value
        else:
            targets, result = self._operands.find_targets(plan, key, given_to_fill(key, value, out), True)
        prepared = self.update("pushpull", plan, pushed, priority, targets, result)
        if pushed is not None:
            self._exchange.pipeline.pack_first(plan, pushed)
        return prepared

    def buffer(self, key: Any) -> PreparedCall:
        """Return (call, run); run(), collective, makes missing buffers, of zeros, and returns this rank's. Local."""
        plan = self._operands.plan(key)

        def run() -> Any:
            """Allocate missing buffers; return this rank's in the form of ``key``. Collective."""
            self._exchange.values.add_buffers(plan)
            return in_form(key, plan, self._exchange.values.buffers(plan))

        return self._comparison.plan_call("buffer", plan), run

    def all_gather(self, key: Any, owned: Sequence[Sequence[Array]]) -> PreparedCall:
        """Return (call, run) to fill each ``owned[r]`` on all ranks with rank r's, through the memory of a key's value.
        Local; run() is collective.
        """
        plan = self._operands.plan(key)
        run = partial(self._exchange.pipeline.all_gather, plan.values[0], owned)
        return self._comparison.plan_call("all_gather", plan), run

    def _check_finite_values(self, plan: Plan, arrays: Arrays | Brought | None) -> None:
        """Count a push; in every ``check_finite``-th, wait for a GPU, raise NotFinite for NaN and infinity. Local."""
        self._pushes += 1
        if self._pushes % self.check_finite:
            return
        if isinstance(arrays, Brought):
            arrays = [rows.values for rows in arrays.rows]
        groups = self._exchange.values.buffers(plan) if arrays is None else arrays
        for key, shape, group in zip(plan.keys, plan.shapes, groups, strict=True):
            for array in group if isinstance(group, tuple) else (group,):
                finite = np.isfinite(array).ravel()
                if not finite.all():
                    # Only now to the host: a GPU answers the question itself. Lists are flat here, and rows fewer.
                    first = int(finite.argmin())
                    element = [int(each) for each in np.unravel_index(first, (finite.size, *shape[1:]))]
                    text = f"the value of key {key!r} has {array.ravel()[first]} at element {element}"
                    raise NotFinite(f"{text}; look at what this rank computes from its batch")

    # --- Call and run

    def update(
        self, verb: str, plan: Plan, sources: Arrays | None, priority: Any = 0, targets: Arrays = (), result: Any = None
    ) -> PreparedCall:
        """Return (call, run) for a push or pushpull of checked ``sources``, or of buffers if None; pack no message yet.
        Local; run() is collective.
        """
        contribution = _WHOLE if sources is not None else _BUFFERS
        known, pipeline = plan.update_calls.get((verb, contribution)), self._exchange.pipeline
        if (
            known
            and known.steps
            and not known.confirm
            and known.revision == self._exchange.updater.revision
            and priority == 0
        ):
            # The hot path: training repeats a call, and nothing about it has changed. It saves a call into Comparison.
            call, steps, confirm = known.call, known.steps, known.confirm
        else:
            call, steps, confirm = self._comparison.update_call(verb, plan, priority, contribution)
        if verb == "push":
            return call, partial(pipeline.push, plan, sources, steps, confirm)
        run = partial(pipeline.pushpull, plan, sources, steps, targets, confirm, result)
        return call, run if type(result) is not Renewed else lambda: answer(run())

    def pull_arrays(self, plan: Plan, targets: Arrays, result: Any = None, priority: Any = 0) -> PreparedCall:
        """Return (call, run) for a pull into checked arrays; run() returns ``result``, finished if it is a
        :class:`Renewed`. Local; run() is collective.
        """
        run = partial(self._exchange.pipeline.pull, plan, targets, result)
        # As plan_call does; to ask here saves a hundredth of a small pull.
        if (call := plan.calls.get("pull")) is None or priority != 0:
            call = self._comparison.plan_call("pull", plan, priority)
        return call, run if type(result) is not Renewed else lambda: answer(run())
