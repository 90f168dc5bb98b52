"""``init``, ``set``, ``delete`` and ``broadcast``: the root's values, under new keys or known ones."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..cluster.calls import PreparedCall
from ..engine.calls import Contribution
from ..engine.exchange import Exchange
from ..engine.keys import parse
from ..sparse.rows import Rows
from .arguments import checked_singles, priorities
from .comparison import Comparison
from .operands import Operands, given_to_fill
from .renewed import answer
from .row_arguments import brings_rows, rows_to_store


class ValueVerbs:
    """Prepares these calls of one store."""

    def __init__(self, exchange: Exchange, operands: Operands, comparison: Comparison, rows: Rows) -> None:
        self._exchange, self._operands, self._comparison, self._rows = exchange, operands, comparison, rows
        self._memory = exchange.transport.memory

    def init(self, key: Any, value: Any, overwrite: bool) -> PreparedCall:
        """Return (call, run) to add keys with the root's arrays or rows; raise if one is unfit, or known without
        ``overwrite``. Local; run() is collective.
        """
        exchange, table = self._exchange, self._exchange.values.table
        keys, groups = form = parse(key, value)
        table.check_kind(keys)
        if not overwrite:
            table.check_new(keys)
        # Compared as well: a key that only some ranks know would start anew on these alone.
        known = [name for name in keys if name in table]
        if brings_rows(groups):
            rows = rows_to_store(form, exchange)
            exchange.check_storable([each.values for each in rows])
            self._rows.load([each.dtype for each in rows])
            call = self._comparison.value_call("init", form, rows, f"{Contribution.ROWS.value}, overwrite {known}")
            return call, lambda: self._rows.add_keys(keys, rows)
        arrays = checked_singles(form, None, self._memory)
        exchange.check_storable(arrays)
        call = self._comparison.value_call("init", form, arrays, f"{Contribution.WHOLE.value}, overwrite {known}")
        apart = exchange.values.set_apart(arrays)

        def run() -> None:
            """Allocate the keys, known ones anew, and store the root's arrays. Collective."""
            exchange.values.add_keys(keys, apart)
            exchange.values.write(keys, apart)

        return call, run

    def set(self, key: Any, value: Any) -> PreparedCall:
        """Return (call, run) to store the root's arrays in known keys; raise if unfit. Local; run() is collective."""
        form = parse(key, value)
        call = self._comparison.plan_call("set", self._exchange.values.plan(form.keys))
        values = self._exchange.values
        arrays = values.set_apart(checked_singles(form, values.table, self._memory))
        return call, lambda: values.write(form.keys, arrays)

    def delete(self, key: Any) -> PreparedCall:
        """Return (call, run) to remove known keys; raise for unknown ones. Local; run() is collective."""
        keys = parse(key, None).keys
        call = self._comparison.plan_call("delete", self._exchange.values.plan(keys))
        return call, lambda: self._exchange.values.delete(keys)

    def broadcast(self, key: Any, value: Any, out: Any, priority: Any) -> PreparedCall:
        """Return (call, run) to add new keys and overwrite known ones with the root's arrays, then fill ``out`` or
        ``value``; raise if unfit. Local; run() is collective.
        """
        exchange, table = self._exchange, self._exchange.values.table
        keys, _ = form = parse(key, value)
        table.check_kind(keys)
        arrays = checked_singles(form, table, self._memory)
        exchange.check_storable(arrays)
        stored = [(a.shape, table[k].dtype if k in table else a.dtype) for k, a in zip(keys, arrays, strict=True)]
        if out is None and not self._memory.is_host and any(map(exchange.values.is_view, arrays)):
            raise TypeError("a value is a view of a stored one and must not be filled; pass out=, or a copy")
        check = partial(self._operands.check_new_targets, key, keys, stored)
        targets, result = self._operands.with_stand_ins(check, given_to_fill(key, value, out), out is None)
        call = self._comparison.value_call("broadcast", form, arrays, f"priority {priorities(priority, keys)}")
        apart = exchange.values.set_apart(arrays)

        def run() -> Any:
            """Allocate new keys, store the root's arrays under all, fill the targets; return the result. Collective."""
            new = [(key, array) for key, array in zip(keys, apart, strict=True) if key not in table]
            exchange.values.add_keys([key for key, _ in new], [array for _, array in new])
            exchange.values.write(keys, apart)
            exchange.pipeline.pull(exchange.values.plan(keys), targets)
            return answer(result)

        return call, run
