"""What ranks compare before a call: its verb, its keys, and all that decides how values change by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from ..cluster.agreement import Agreement
from ..cluster.calls import Call
from ..engine.calls import Confirm, Contribution, Steps, UpdateCall
from ..engine.exchange import Exchange
from ..engine.keys import Form
from ..engine.plan import Plan, describe, digest, label
from ..memory.row_sparse import RowSparse
from ..optimizers import Optimizer
from ..protocols import Array, Updater
from .arguments import priorities

__all__ = ["Comparison", "add_text", "text_call"]


# Those that move no whole values.
_NO_BUCKETS = ("row_sparse_pull", "delete")
_OF_ROWS = (Contribution.ROWS, Contribution.ROWS_FOR_WHOLE)
# Of the few texts that come with any keys.
_digest = lru_cache(maxsize=256)(digest)


def text_call(verb: str, text: str, shown: str | None = None) -> Call:
    """Return a call of which ranks compare a text. ``shown`` stands for it in messages, with the first line that
    differs.
    """
    return Call(verb, digest(f"{verb} {text}"), text if shown is None else shown, describe=text.splitlines)


def add_text(call: Call, text: str) -> Call:
    """Return a call of which ranks compare one more text."""
    return replace(call, token=call.token ^ digest(text), describe=lambda: [*call.describe(), text])


class Comparison:
    """Describes the calls of one store. Local."""

    def __init__(self, exchange: Exchange, agreement: Agreement) -> None:
        self._exchange, self._agreement = exchange, agreement
        self.compression: str | None = None
        """The settings of what packs pushes, as it was given."""
        # To describe an updater takes longer than all else that makes a call.
        self._described: tuple[Updater, int, str] | None = None

    def plan_call(self, verb: str, plan: Plan, priority: Any = 0) -> Call:
        """Return the call of a verb that updates nothing."""
        call = plan.calls.get(verb)
        if call is None:
            if verb not in _NO_BUCKETS:
                plan.prepare()
            texts = partial(describe, plan.keys, plan.shapes, plan.dtypes)
            plan.calls[verb] = call = Call(verb, plan.digest ^ _digest(verb), plan.label, plan.keys, texts)
        return call if priority == 0 else _add_priorities(call, plan, priority)

    def update_call(
        self, verb: str, plan: Plan, priority: Any = 0, contribution: Contribution = Contribution.WHOLE
    ) -> tuple[Call, Steps, Confirm | None]:
        """Return the call of a verb that updates, the updater's steps, and how ranks learn how the update went, where
        it may fail on one of them.
        """
        updater = self._exchange.updater
        known = plan.update_calls.get((verb, contribution))
        if known is None or known.revision != updater.revision:
            known = plan.update_calls[verb, contribution] = self._describe_update(verb, plan, contribution)
        call, steps, confirm = known.call, known.steps, known.confirm
        if steps is None:
            steps = self._exchange.steps(plan)
            # Two schedules of a user's may differ and have the same name.
            if isinstance(updater, Optimizer) and updater.opaque:
                call = add_text(call, f"lr_scheduler gives {'; '.join(map(str, dict.fromkeys(steps.each)))}")
        if not steps.uniform and contribution not in _OF_ROWS:
            plan.prepare_updates()
        if confirm is not None and contribution not in _OF_ROWS:
            confirm = self._exchange.pipeline.restoring(plan, confirm)
        return call if priority == 0 else _add_priorities(call, plan, priority), steps, confirm

    def value_call(self, verb: str, form: Form, arrays: Sequence[Array | RowSparse], option: str) -> Call:
        """Return the call of a verb that gives values to keys, which may be new."""
        texts = [*describe(form.keys, [a.shape for a in arrays], [a.dtype for a in arrays]), option]
        return Call(verb, digest("\n".join([verb, *texts])), label(form.keys), describe=lambda: texts)

    def _describe_update(self, verb: str, plan: Plan, contribution: Contribution) -> UpdateCall:
        updater = self._exchange.updater
        if contribution is not Contribution.ROWS:
            self._exchange.pipeline.prepare(plan)
        token = plan.digest ^ _digest(verb + contribution.value) ^ _digest("\n".join(self._settings()))
        texts = partial(describe, plan.keys, plan.shapes, plan.dtypes)

        def parts() -> list[str]:
            return [*self._settings(), *texts(), contribution.value]

        call = Call(verb, token, plan.label, plan.keys, parts, contribution.name)
        confirm = (lambda failure: self._agreement.confirm(call, failure)) if updater.may_raise else None
        steps = None if updater.depends_on_count else self._exchange.steps(plan)
        return UpdateCall(call, steps, confirm, updater.revision)

    def _settings(self) -> list[str]:
        """Describe what decides how a value changes by what is pushed."""
        updater, known = self._exchange.updater, self._described
        if known is None or known[0] is not updater or known[1] != updater.revision:
            known = self._described = updater, updater.revision, f"updater {updater.settings()}"
        return [known[2]] if self.compression is None else [known[2], f"compression {self.compression}"]


def _add_priorities(call: Call, plan: Plan, priority: Any) -> Call:
    """Add priorities, which must be the same on all ranks, to what is compared."""
    wishes = priorities(priority, plan.keys)
    return add_text(call, f"priority {wishes}") if any(wishes) else call
