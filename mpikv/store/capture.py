"""A pushpull that is made again and again, which a GPU is given as one piece of work.

On a GPU the first call queues it as it will be recorded, so that all is compiled and connected; the second records it
in a CUDA graph, and launches that, as do those that follow. Numbers that change from call to call, as an optimizer's
rate, are read from memory, to which each call writes them first. All else is as in any call: ranks compare what they
call, which includes that all of them record it, or launch what they have recorded together, as NCCL wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..arrays.arrays import lies_elsewhere
from ..cluster.agreement import Agreement
from ..cluster.background import Work
from ..cluster.calls import Call, PreparedCall
from ..engine.calls import Steps
from ..engine.exchange import Exchange
from ..engine.keys import leaves, parse
from ..engine.pipeline import Arrays, groups_of
from ..engine.plan import Plan
from ..memory.device import DeviceMemory
from ..memory.row_sparse import RowSparse
from ..protocols import Graph, StepTable, Updater
from ..verbs.arguments import in_form
from ..verbs.comparison import add_text
from ..verbs.operands import given_to_fill
from ..verbs.renewed import Filled
from ..verbs.row_arguments import Brought
from .door import Door, State

if TYPE_CHECKING:
    from ..verbs import Verbs

__all__ = ["CapturedStep", "Fixed", "prepare_capture"]

_NOT_TOLD = None, "", None
# How a call is made, as ranks that disagree are told.
_PLAIN, _FIRST, _AGAIN = "as a plain call", "called for the first time", "to be recorded anew at its next call"
_RECORDED, _LAUNCHED = "recorded in this call", "launched as it was recorded"


class Fixed(NamedTuple):
    """The arguments of a pushpull that is made again and again, in lists and dicts of its own."""

    key: Any
    value: Any
    out: Any
    result: Any
    """What the caller of the pushpull expects."""


@dataclass(frozen=True, eq=False)
class _Known:
    """What is known on a GPU of a call, until it is to be forgotten. It keeps what the GPU uses."""

    plan: Plan
    sources: Arrays | None
    """None where the buffers are pushed."""
    targets: Arrays
    result: Any
    lack: str
    """Why it cannot be recorded."""
    agreed: bool = False
    """Whether all ranks know whether all can record it."""
    table: StepTable | None = None
    revision: int = 0
    """That of the updater, whose settings the table follows from."""
    uniform: bool = True
    """Whether all keys are updated by one step."""
    ready: bool = False
    """Whether it was queued once as it will be recorded."""
    graph: Graph | None = None

    def suits(self, steps: Steps, updater: Updater) -> bool:
        """Return whether what was queued makes the updates that are to be made now, given other numbers."""
        # Steps of keys may be equal for once, as where a schedule ends at zero.
        alike = steps.uniform is self.uniform or (not self.uniform and updater.by_key)
        if self.table is None or updater.revision == self.revision:
            return alike
        return alike and self.table.fits(steps.each[0])


class _Launch(NamedTuple):
    """A launch that was prepared: from call to call only the steps are others."""

    known: _Known | None
    call: Call | None
    """What it was prepared for, before how it is made was added to that."""
    prepared: PreparedCall | None


_NO_LAUNCH, _NO_STEPS = _Launch(None, None, None), Steps((), True)


class CapturedStep:
    """A pushpull of some keys, from the same arrays into the same arrays: made by :meth:`mpikv.KVStore.capture`, and
    called without arguments, or with ``wait=False``.

    Collective: every rank calls it, in the order of its other calls. It pushes what its arrays hold then, fills what it
    was given to fill, and returns what :meth:`mpikv.KVStore.pushpull` returned. It raises what that raises; ranks that
    make other calls, or call another of these, all raise ``RankMismatch``.
    """

    def __init__(
        self,
        given: Fixed,
        number: int,
        verbs: Verbs,
        exchange: Exchange,
        agreement: Agreement,
        door: Door,
        call: Callable[[Callable[..., PreparedCall], Any, bool], Any],
    ) -> None:
        """Local. Use :meth:`mpikv.KVStore.capture`. ``number`` is the same on all ranks; ``call`` makes a call of the
        store: it is given what prepares the call, the key, and whether to wait.
        """
        self._given, self._number, self._call = given, number, call
        self._door, self._verbs, self._exchange, self._agreement = door, verbs, exchange, agreement
        memory = self._exchange.transport.memory
        self._memory = memory if isinstance(memory, DeviceMemory) and not _has_rows(given) else None
        self._why = "" if self._memory else "rows are pushed" if _has_rows(given) else "the store is on the host"
        self._known: _Known | None = None
        # The call that was described last, how, and that description.
        self._told: tuple[Call | None, str, Call | None] = _NOT_TOLD
        self._launch = _NO_LAUNCH
        self._steps = _NO_STEPS
        self._exchange.values.listeners.add(self)

    def invalidate(self) -> None:
        """Let go of what was recorded: values are about to lie, or to be updated, in another way. Local."""
        self._known, self._told, self._launch = None, _NOT_TOLD, _NO_LAUNCH

    def __call__(self, *, wait: bool = True) -> Any:
        """Push and pull. Collective.

        Args:
            wait: False returns a :class:`mpikv.Work` at once, as in :meth:`mpikv.KVStore.push`. On a GPU the caller's
                stream then goes on beside the call, until :meth:`mpikv.Work.wait`: so a forward pass waits for the
                weights of a layer when it comes there, if each layer has a step of its own.
        """
        made, given = self._call(self._prepare, self._given.key, wait), self._given.result
        if isinstance(made, Work):
            made.inner = lambda result: result if given is None else given
            return made
        return made if given is None else given

    @property
    def captured(self) -> bool:
        """Whether a call is launched as one piece of work, as the last one was; but in a block of ``join`` none is.
        Local.
        """
        return self._known is not None and self._known.graph is not None

    @property
    def reason(self) -> str:
        """Why not, or nothing. Local."""
        if self.captured:
            return ""
        lack = self._door.why or self._why or (self._known.lack if self._known else "")
        return lack or "the second call in the same circumstances records it"

    def __repr__(self) -> str:
        state = "captured" if self.captured else f"not captured: {self.reason}"
        return f"<mpikv.CapturedStep #{self._number} {state}>"

    def _prepare(self, *_arguments: object) -> PreparedCall:
        """Prepare the next call. It changes nothing that a rank whose call is refused must know again."""
        memory = self._memory
        if memory is None or self._door.state is State.JOINING:
            return self._plainly(_PLAIN)
        known = self._known or self._bound(memory)
        if known.lack or not known.agreed:
            call, run = self._plainly(_PLAIN if known.agreed else _FIRST)
            if known.agreed:
                return call, run
            if not known.lack:
                self._steps = self._verbs.comparison.update_call("pushpull", known.plan)[1]
            return call, lambda: self._first(known, run)
        call, steps, _ = self._verbs.comparison.update_call("pushpull", known.plan)
        updater = self._exchange.updater
        same = steps.uniform is known.uniform and updater.revision == known.revision
        if not same and not known.suits(steps, updater):
            known = self._with_table(replace(known, ready=False, graph=None), steps)
        self._steps, launch = steps, self._launch
        if launch.prepared is not None and launch.known is known and launch.call is call:
            return launch.prepared
        if known.graph is not None:
            prepared = self._described(call, _LAUNCHED), self._launcher(memory, known)
            self._launch = _Launch(known, call, prepared)
            return prepared
        if not known.ready:
            return self._described(call, _AGAIN), lambda: self._queue_first(known)
        return self._described(call, _RECORDED), lambda: self._record(memory, known)

    def _plainly(self, how: str) -> PreparedCall:
        """Prepare it as any pushpull."""
        key, value, out, _ = self._given
        call, run = self._verbs.push_pull.pushpull(key, value, out, 0)
        return self._described(call, how), run

    def _described(self, call: Call, how: str) -> Call:
        """Add to what is compared which of the store's it is, and how it is made."""
        known, same, described = self._told
        if described is None or call is not known or how != same:
            described = add_text(call, f"captured step #{self._number}, {how}")
            self._told = call, how, described
        return described

    def _bound(self, memory: DeviceMemory) -> _Known:
        plan, sources, targets, result = _bind(self._verbs, self._given)
        assert not isinstance(sources, Brought)
        lack = self._exchange.capture_blocker() or ("" if plan.keys else "there are no keys")
        lack = lack or _lack_of(
            memory, self._given, plan, None if sources is None else groups_of(sources), groups_of(targets)
        )
        if lack:  # plain calls look at their arrays anew
            return _Known(plan, None, (), None, lack)
        return self._with_table(
            _Known(plan, sources, targets, result, lack), self._verbs.comparison.update_call("pushpull", plan)[1]
        )

    def _with_table(self, known: _Known, steps: Steps) -> _Known:
        table = known.table
        if table is None or not table.fits(steps.each[0]):
            table = self._exchange.table_of_steps(known.plan)
        return replace(known, table=table, revision=self._exchange.updater.revision, uniform=steps.uniform)

    # --- What is run once all ranks agree

    def _first(self, known: _Known, run: Callable[[], Any]) -> Any:
        """Learn whether all ranks can record it; make it."""
        known = self._known = replace(known, agreed=True, lack=self._lack_anywhere(known.lack))
        return run() if known.lack else self._queue_first(known)

    def _lack_anywhere(self, lack: str) -> str:
        """Return why it cannot be recorded on this rank, or on another. Collective."""
        rank, size = self._exchange.transport.rank, self._exchange.transport.size
        least = self._agreement.least(rank if lack else size)
        return lack if lack or least == size else f"rank {least} cannot, and its own reason says why"

    def _queue_first(self, known: _Known) -> Any:
        """Queue it as it will be recorded."""
        self._known = replace(known, ready=True)
        return self._run(known)

    def _record(self, memory: DeviceMemory, known: _Known) -> Any:
        """Record it, and launch that if every rank could; else queue it, now and from now on."""
        graph, lack = None, ""
        with self._exchange.pipeline.uncounted(known.plan):
            try:
                graph = memory.order.record(self._queue, known)
            except RuntimeError as error:  # of CUDA, in whatever words
                lack = str(error)
        lack = self._lack_anywhere(lack)
        known = self._known = replace(known, graph=None if lack else graph, lack=lack)
        return self._run(known) if lack else self._launcher(memory, known)()

    def _launcher(self, memory: DeviceMemory, known: _Known) -> Callable[[], Any]:
        """Return what launches it, and keeps all that it uses."""
        return partial(memory.order.queue, f"pushpull({known.plan.label})", partial(self._run, known))

    def _run(self, known: _Known, _: object = None) -> Any:
        """Queue it, or launch what was recorded, with the steps of now."""
        steps = self._steps
        if known.table is not None:
            known.table.write(steps.each[:1] if known.uniform else steps.each)
        if known.graph is None:
            self._queue(known)
        else:
            known.graph.launch()
            self._exchange.pipeline.count(known.plan, stale=False)
        return known.result

    def _queue(self, known: _Known) -> None:
        """Queue it with the steps of the table."""
        plan, steps = known.plan, Steps((None,) * len(known.plan.keys), True)
        if known.table is not None:
            rows = known.table.rows
            steps = Steps([rows[0]] * len(rows) if known.uniform else rows, known.uniform)
        self._exchange.pipeline.pushpull(plan, known.sources, steps, known.targets, None)


def prepare_capture(verbs: Verbs, key: Any, value: Any, out: Any) -> PreparedCall:
    """Prepare nothing but to know that a pushpull could be made; what is run returns its arguments, to be kept."""
    given = Fixed(_copy(key), _copy(value), _copy(out), given_to_fill(key, value, out))
    verbs.push_pull.pushpull(given.key, given.value, given.out, 0)  # finds all that is wrong with it
    plan, _, _, result = _bind(verbs, given)
    if type(result) in Filled:
        raise TypeError(
            "each call fills the same arrays, and one of them is read-only, or of integers that hold less than the "
            "stored ones; use pushpull, or numpy's arrays of the stored dtype"
        )
    verbs.give_up()  # nothing is to be filled
    return verbs.comparison.plan_call("capture", plan), lambda: given


def _copy(given: Any) -> Any:
    """Return arguments as they are now, whatever becomes of lists and dicts."""
    if isinstance(given, Mapping):
        return {key: _copy(each) for key, each in given.items()}
    return list(map(_copy, given)) if isinstance(given, (list, tuple)) else given


def _bind(verbs: Verbs, given: Fixed) -> tuple[Plan, Arrays | Brought | None, Arrays, Any]:
    """Return the plan of a pushpull, what it pushes, None for the buffers, what it fills, and what it returns."""
    key, value, out, result = given
    plan, sources = verbs.operands.sources(key, value)
    fills = given_to_fill(key, value, out)
    if fills is None:
        return plan, sources, (), in_form(key, plan, plan.views)
    if isinstance(sources, Brought):
        return plan, sources, (), result
    targets, renewed = verbs.operands.targets(plan, key, fills, implied=out is None)
    return plan, sources, targets, renewed if type(renewed) in Filled else result


def _has_rows(given: Fixed) -> bool:
    return any(isinstance(each, RowSparse) for arrays in given[:3] for each in leaves(arrays))


def _lack_of(memory: DeviceMemory, given: Fixed, plan: Plan, sources: Arrays | None, targets: Arrays) -> str:
    """Return why arrays are no memory of the GPU that stays the same, or nothing."""
    for entry, group in zip(plan.entries, targets, strict=True) if targets else ():
        if not all(map(memory.gpu.owns, group)):
            return f"an array that is filled with key {entry.key!r} is the host's"
    if sources is None:
        return ""
    for key, group, arrays in zip(plan.keys, parse(given.key, given.value).groups, sources, strict=True):
        if lack := _lack_of_source(memory, group, arrays):
            return f"{lack}, of key {key!r}"
    return ""


def _lack_of_source(memory: DeviceMemory, given: Sequence[Any], arrays: Sequence[Any]) -> str:
    if len(given) > 1:
        return "several arrays are added up in memory that is taken each time"
    if not lies_elsewhere(given[0]):
        return "an array that is pushed is the host's"
    there = memory.source(given[0])
    if there.size and memory.gpu.address(there) != memory.gpu.address(arrays[0]):
        return "an array that is pushed is copied each time, as it is not contiguous, or part of a value"
    return ""
