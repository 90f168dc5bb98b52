"""The description of a call that ranks compare: its verb, its keys, and every setting that changes its result."""

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

# Verbs that move no whole values, and so need no buckets.
_NO_BUCKETS = ("row_sparse_pull", "delete", "all_gather")
_OF_ROWS = (Contribution.ROWS, Contribution.ROWS_FOR_WHOLE)
# Cached for the few texts that calls with any keys share.
_digest = lru_cache(maxsize=256)(digest)


def text_call(verb: str, text: str, shown: str | None = None) -> Call:
    """Return a :class:`Call` of a verb and a text for ranks to compare later; messages show ``shown``. Local."""
    return Call(verb, digest(f"{verb} {text}"), text if shown is None else shown, describe=text.splitlines)


def add_text(call: Call, text: str) -> Call:
    """Return a copy of a call with one more text for ranks to compare. Local."""
    return replace(call, token=call.token ^ digest(text), describe=lambda: [*call.describe(), text])


class Comparison:
    """Describes the calls of one store. Local."""

    def __init__(self, exchange: Exchange, agreement: Agreement) -> None:
        self._exchange, self._agreement = exchange, agreement
        # Cached, as describing an updater takes longer than the rest of making a call.
        self._described: tuple[Updater, int, str] | None = None

    def plan_call(self, verb: str, plan: Plan, priority: Any = 0) -> Call:
        """Return the cached :class:`Call` of a verb without updates, or a copy with priorities. The first time it
        prepares the plan, and may allocate, unless the verb needs no buckets. Local.
        """
        call = plan.calls.get(verb)
        if call is None:
            # Now, as memory may be short on this rank, and the others must learn it before they begin.
            if verb not in _NO_BUCKETS:
                plan.prepare()
            texts = partial(describe, plan.keys, plan.shapes, plan.dtypes)
            plan.calls[verb] = call = Call(verb, plan.digest ^ _digest(verb), plan.label, plan.keys, texts)
        return call if priority == 0 else _add_priorities(call, plan, priority)

    def update_call(
        self, verb: str, plan: Plan, priority: Any = 0, contribution: Contribution = Contribution.WHOLE
    ) -> tuple[Call, Steps, Confirm | None]:
        """Return the Call of a push or pushpull, the next update's Steps, and a collective function to share updaters'
        errors, or None if no updater raises. May allocate. Local.
        """
        updater = self._exchange.updater
        known = plan.update_calls.get((verb, contribution))
        if known is None or known.revision != updater.revision:
            known = plan.update_calls[verb, contribution] = self._describe_update(verb, plan, contribution)
        call, steps, confirm = known.call, known.steps, known.confirm
        if steps is None:
            steps = self._exchange.steps(plan)
            # Two schedules of a user may have the same name and give different rates.
            if isinstance(updater, Optimizer) and updater.opaque:
                call = add_text(call, f"lr_scheduler gives {'; '.join(map(str, dict.fromkeys(steps.each)))}")
        if not steps.uniform and contribution not in _OF_ROWS:
            plan.prepare_updates()
        if confirm is not None and contribution not in _OF_ROWS:
            confirm = self._exchange.pipeline.restoring(plan, confirm)
        return call if priority == 0 else _add_priorities(call, plan, priority), steps, confirm

    def value_call(self, verb: str, form: Form, arrays: Sequence[Array | RowSparse], option: str) -> Call:
        """Return a new :class:`Call` that compares keys, shapes and dtypes of arrays, and a text ``option``. Local."""
        texts = [*describe(form.keys, [a.shape for a in arrays], [a.dtype for a in arrays]), option]
        return Call(verb, digest("\n".join([verb, *texts])), label(form.keys), describe=lambda: texts)

    def _describe_update(self, verb: str, plan: Plan, contribution: Contribution) -> UpdateCall:
        """Return a new :class:`UpdateCall` for the caller to cache; prepare the plan, unless for rows alone. Local."""
        updater = self._exchange.updater
        if contribution is not Contribution.ROWS:
            self._exchange.pipeline.prepare(plan)
        # Joined by xor from digests that are kept, so that the texts of all keys are not hashed again.
        token = plan.digest ^ _digest(verb + contribution.value) ^ _digest("\n".join(self._settings()))
        # Written out only where ranks disagree.
        texts = partial(describe, plan.keys, plan.shapes, plan.dtypes)

        def parts() -> list[str]:
            """Return the texts that ranks compare: settings, keys with shapes and dtypes, and the contribution."""
            return [*self._settings(), *texts(), contribution.value]

        call = Call(verb, token, plan.label, plan.keys, parts, contribution.name)
        confirm = (lambda failure: self._agreement.confirm(call, failure)) if updater.may_raise else None
        steps = None if updater.depends_on_count else self._exchange.steps(plan)
        return UpdateCall(call, steps, confirm, updater.revision)

    def _settings(self) -> list[str]:
        """Return a list of texts: the updater's settings, and the codec's if pushes are compressed. Local."""
        updater, known = self._exchange.updater, self._described
        if known is None or known[0] is not updater or known[1] != updater.revision:
            known = self._described = updater, updater.revision, f"updater {updater.settings()}"
        compression = self._exchange.compression
        return [known[2], *([] if compression is None else [f"compression {compression.codec.settings()}"])]


def _add_priorities(call: Call, plan: Plan, priority: Any) -> Call:
    """Return the call if all priorities are 0, else a copy that compares them; raise unless one int per key. Local."""
    wishes = priorities(priority, plan.keys)
    return add_text(call, f"priority {wishes}") if any(wishes) else call
