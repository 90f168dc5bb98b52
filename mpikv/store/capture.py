"""Graph capture: a repeated pushpull that a GPU runs as one launch.

On a GPU the first call queues the work as it will be recorded, so that kernels are compiled and ranks connected. The
second call records a CUDA graph and launches it; later calls launch it again. Numbers that change from call to call, as
an optimizer's rate, are read from memory; each call writes them there first. Ranks compare these calls as any others,
and whether they queue, record or launch: NCCL requires that all of them do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..arrays.arrays import lies_elsewhere
from ..cluster.background import Work
from ..cluster.calls import PreparedCall
from ..engine.calls import Steps
from ..engine.keys import parse
from ..engine.pipeline import Arrays, groups_of
from ..engine.plan import Plan
from ..errors import Unsupported
from ..memory.device import DeviceMemory
from ..protocols import Graph, StepTable, Updater
from ..verbs.arguments import in_form
from ..verbs.comparison import add_text
from ..verbs.operands import given_to_fill
from ..verbs.renewed import Renewed
from ..verbs.row_arguments import Brought
from .door import Door, State

if TYPE_CHECKING:
    from ..verbs import Verbs

# How a call runs, in the words that ranks compare and errors show.
_PLAIN, _FIRST = "as a plain call", "to be recorded at its next call, if all ranks can"
_RECORDED, _LAUNCHED = "recorded in this call", "launched as it was recorded"


class Fixed(NamedTuple):
    """The arguments of a repeated pushpull, in copies of the caller's lists and dicts."""

    key: Any
    value: Any
    out: Any
    result: Any
    """The structure that each call returns."""


@dataclass(frozen=True, eq=False)
class _Known:
    """The state of a step on a GPU, until values move or settings change. It keeps the arrays that the GPU uses."""

    plan: Plan
    sources: Arrays | None
    """None for the buffers."""
    targets: Arrays
    result: Any
    lack: str
    """Why it cannot be recorded, on this rank or, once the ranks have told each other, on any; "" if it can."""
    table: StepTable | None = None
    revision: int = 0
    """The updater's revision when the table was made."""
    uniform: bool = True
    """Whether all keys are updated by one step."""
    graph: Graph | None = None

    def suits(self, steps: Steps, updater: Updater) -> bool:
        """Return whether the GPU table, and a graph that reads it, can serve these steps' rates. Local."""
        # Different steps may be equal for one call, as where a schedule ends at zero: keep the table by key then.
        alike = steps.uniform is self.uniform or (not self.uniform and updater.by_key)
        if self.table is None or updater.revision == self.revision:
            return alike
        return alike and self.table.fits(steps.each[0])


class CapturedStep:
    """A pushpull of some keys, from the same arrays into the same arrays.

    :meth:`mpikv.KVStore.capture` makes it; call it without arguments, or with ``wait=False``. Collective: every rank
    calls it, in the order of its other calls. It pushes the present contents of its arrays, fills the arrays to fill,
    and returns and raises the same as :meth:`mpikv.KVStore.pushpull`. Where ranks make other calls, or call another
    step, all raise ``RankMismatch``.
    """

    def __init__(self, given: Fixed, number: int, verbs: Verbs, door: Door, issue_unless: Callable[..., Any]) -> None:
        """Keep the arguments, and listen for values that move; nothing is recorded yet. Local.

        Use :meth:`mpikv.KVStore.capture`. ``number`` is the same on all ranks.
        ``issue_unless(wait, verb, prepare, *arguments)`` makes a call of the store, or leaves it to the store's thread.
        """
        self._given, self._number, self._issue_unless = given, number, issue_unless
        self._door, self._verbs, self._exchange, self._agreement = door, verbs, verbs.exchange, verbs.agreement
        memory = self._exchange.transport.memory
        self._memory = memory if isinstance(memory, DeviceMemory) else None
        self._why = "" if self._memory else "the store is on the host"
        self._known: _Known | None = None
        # Returns a call's description with this step's number and how it runs. A loop asks for one again and again.
        self._describe = lru_cache(1)(lambda call, how: add_text(call, f"captured step #{number}, {how}"))
        self._steps = Steps((), True)
        self._exchange.values.listeners.add(self)

    def invalidate(self) -> None:
        """Drop plan, arrays and graph, as values move or are updated in another way; a call finds them anew. Local."""
        self._known = None

    def __call__(self, *, wait: bool = True) -> Any:
        """Push and pull the step's arrays; return the filled structure, or a Work with ``wait=False``. Collective.

        Args:
            wait: False returns a :class:`mpikv.Work` at once, as in :meth:`mpikv.KVStore.push`. On a GPU the caller's
                stream then goes on beside the call, until :meth:`mpikv.Work.wait`: so a forward pass waits for the
                weights of a layer when it comes there, if each layer has a step of its own.
        """
        made, given = self._issue_unless(wait, "pushpull", self._prepare, self._given.key, 0), self._given.result
        if isinstance(made, Work):
            made.inner = lambda result: result if given is None else given
            return made
        return made if given is None else given

    @property
    def captured(self) -> bool:
        """Whether a graph is recorded. The next call launches it, unless settings changed or in ``join``. Local."""
        return self._known is not None and self._known.graph is not None

    @property
    def reason(self) -> str:
        """Why no graph is recorded; "" if one is. Local."""
        if self.captured:
            return ""
        lack = self._door.why or self._why or (self._known.lack if self._known else "")
        return lack or "the second call in the same circumstances records it"

    def __repr__(self) -> str:
        state = "captured" if self.captured else f"not captured: {self.reason}"
        return f"<mpikv.CapturedStep #{self._number} {state}>"

    def _prepare(self, *_arguments: object) -> PreparedCall:
        """Return (call, run): a plain pushpull, a warm-up, a recording or a graph's launch. Local; run() is collective.

        What is known of the step changes only in the call's run, which is collective.
        """
        memory = self._memory
        # A rank that has left join cannot launch this graph: it has no arrays.
        if memory is None or self._door.state is State.JOINING:
            return self._prepare_plain(_PLAIN)
        known = self._known
        if known is not None and known.lack:
            return self._prepare_plain(_PLAIN)
        if known is not None:
            call, self._steps, _ = self._verbs.comparison.update_call("pushpull", known.plan)
            if known.suits(self._steps, self._exchange.updater):
                if known.graph is None:
                    return self._describe(call, _RECORDED), lambda: self._record(memory, known)
                # The queue keeps the arrays of the graph alive until the GPU is done.
                launch = partial(memory.order.queue, f"pushpull({known.plan.label})", partial(self._run, known))
                return self._describe(call, _LAUNCHED), launch
        # Bound anew for a new table, and after anything that moves values: the graph has their addresses.
        first = self._bind_anew(memory)
        call, run = self._prepare_plain(_FIRST)
        return call, lambda: self._run_first(first, run)

    def _prepare_plain(self, how: str) -> PreparedCall:
        """Return (call, run) for a plain pushpull; ranks compare ``how``, too. Local; run() is collective."""
        key, value, out, _ = self._given
        call, run = self._verbs.push_pull.pushpull(key, value, out, 0)
        return self._describe(call, how), run

    def _bind_anew(self, memory: DeviceMemory) -> _Known:
        """Return a new state, not kept yet: plan, checked arrays and a new GPU table, or why it cannot record. Note the
        next update's steps; may raise. Local.
        """
        plan, sources, targets, result = _bind(self._verbs, self._given)
        if isinstance(sources, Brought):
            return _Known(plan, None, (), None, "rows are pushed")
        lack = self._exchange.capture_blocker() or ("" if plan.keys else "there are no keys")
        pushed = None if sources is None else groups_of(sources)
        lack = lack or _find_lack(memory, self._given, plan, pushed, groups_of(targets))
        if lack:  # plain calls look at their arrays anew
            return _Known(plan, None, (), None, lack)
        self._steps = self._verbs.comparison.update_call("pushpull", plan)[1]
        table, revision = self._exchange.make_step_table(plan), self._exchange.updater.revision
        return _Known(plan, sources, targets, result, lack, table, revision, self._steps.uniform)

    # --- What is run once all ranks agree

    def _run_first(self, known: _Known, run: Callable[[], Any]) -> Any:
        """Keep ``known`` for the next call. Queue this one as it will be recorded if all ranks can, else call ``run``;
        return the result. Collective.
        """
        known = self._known = replace(known, lack=self._agree_on_lack(known.lack))
        return run() if known.lack else self._run(known)

    def _agree_on_lack(self, lack: str) -> str:
        """Return ``lack``; if it is "", a text that names a rank with a lack, without its reason, or "". Collective."""
        rank, size = self._exchange.transport.rank, self._exchange.transport.size
        least = self._agreement.least(rank if lack else size)
        return lack if lack or least == size else f"rank {least} cannot, and its own reason says why"

    def _record(self, memory: DeviceMemory, known: _Known) -> Any:
        """Record the call in a graph and launch it, if all ranks can; else queue it, and make later calls plain. Return
        the result. Collective.
        """
        graph, lack = None, ""
        # Nothing runs while it is recorded, so nothing may be counted; the launch counts.
        with self._exchange.pipeline.uncounted(known.plan):
            try:
                graph = memory.order.record(self._queue, known)
            except RuntimeError as error:  # of CUDA, in whatever words
                lack = str(error)
        # NCCL waits for all ranks in a graph: if one cannot launch it, none may.
        lack = self._agree_on_lack(lack)
        known = self._known = replace(known, graph=None if lack else graph, lack=lack)
        run = partial(self._run, known)
        return run() if lack else memory.order.queue(f"pushpull({known.plan.label})", run)

    def _run(self, known: _Known, _: object = None) -> Any:
        """Write the rates of the prepared steps; launch the graph or, without one, queue the work; count the push.
        Return the result, filled later. Collective.
        """
        steps = self._steps
        if known.table is not None:
            known.table.write(steps.each[:1] if known.uniform else steps.each)
        if known.graph is None:
            self._queue(known)
        else:
            known.graph.launch()
            self._exchange.pipeline.count_push(known.plan, stale=False)
        return known.result

    def _queue(self, known: _Known) -> None:
        """Queue a pushpull on the GPU; its updates read their rates from the GPU table. Collective."""
        plan, steps = known.plan, Steps((None,) * len(known.plan.keys), True)
        if known.table is not None:
            rows = known.table.rows
            steps = Steps([rows[0]] * len(rows) if known.uniform else rows, known.uniform)
        self._exchange.pipeline.pushpull(plan, known.sources, steps, known.targets, None, None)


def prepare_capture(verbs: Verbs, key: Any, value: Any, out: Any) -> PreparedCall:
    """Return (call, run): check a pushpull's arguments now; run() pushes nothing, and returns them, lists and dicts
    copied, as a :class:`Fixed`. Local.
    """
    if verbs.push_pull.check_finite:
        raise Unsupported("captured steps look at no values: create the store without check_finite, or use pushpull")
    # The arrays stay the caller's; of the lists around them later changes would pass unnoticed.
    names = key if isinstance(key, tuple) else _copy(key)  # without values their views come in the form of the keys
    given = Fixed(names, _copy(value), _copy(out), given_to_fill(key, value, out))
    verbs.push_pull.pushpull(given.key, given.value, given.out, 0)  # raises for every mistake in them
    plan, _, _, result = _bind(verbs, given)
    if type(result) is Renewed:
        raise TypeError(
            "each call fills the same arrays, and one of them is read-only; use pushpull, or numpy's arrays"
        )
    verbs.give_up()  # it was prepared for its checks alone
    return verbs.comparison.plan_call("capture", plan), lambda: given


def _copy(given: Any) -> Any:
    """Return arguments with mappings copied as dicts, lists and tuples as lists, but the same arrays. Local."""
    if isinstance(given, Mapping):
        return {key: _copy(each) for key, each in given.items()}
    return list(map(_copy, given)) if isinstance(given, (list, tuple)) else given


def _bind(verbs: Verbs, given: Fixed) -> tuple[Plan, Arrays | Brought | None, Arrays, Any]:
    """Return a pushpull's plan, its checked sources (rows as Brought, None for buffers), its targets (none for rows),
    and its result, maybe a :class:`Renewed`. Local.
    """
    key, value, out, result = given
    plan, sources = verbs.operands.find_sources(key, value)
    fills = given_to_fill(key, value, out)
    if fills is None:
        return plan, sources, (), in_form(key, plan, plan.views)
    if isinstance(sources, Brought):
        return plan, sources, (), result
    targets, renewed = verbs.operands.find_targets(plan, key, fills, implied=out is None)
    return plan, sources, targets, renewed if type(renewed) is Renewed else result


def _find_lack(memory: DeviceMemory, given: Fixed, plan: Plan, sources: Arrays | None, targets: Arrays) -> str:
    """Return why a graph cannot use the same GPU memory for these arrays at each call; "" if it can. Local."""
    for entry, group in zip(plan.entries, targets, strict=True) if targets else ():
        if not all(map(memory.gpu.owns, group)):
            return f"an array that is filled with key {entry.key!r} is the host's"
    if sources is None:
        return ""
    # Compared with what was bound: a copy that was made for a push is new each time, and its address with it.
    for key, group, arrays in zip(plan.keys, parse(given.key, given.value).groups, sources, strict=True):
        if lack := _find_lack_of_source(memory, group, arrays):
            return f"{lack}, of key {key!r}"
    return ""


def _find_lack_of_source(memory: DeviceMemory, given: Sequence[Any], arrays: Sequence[Any]) -> str:
    """Return why a graph cannot read a key's arrays at each call; "" if it can. Local."""
    if len(given) > 1:
        return "several arrays are added up in memory that is taken each time"
    if not lies_elsewhere(given[0]):
        return "an array that is pushed is the host's"
    there = memory.source(given[0])
    if there.size and memory.gpu.address(there) != memory.gpu.address(arrays[0]):
        return "an array that is pushed is copied each time, as it is not contiguous, or part of a value"
    return ""
