"""What happens once all ranks have agreed on a call: the data move, the updater runs.

Every bucket of a plan goes one way: packed from the caller's arrays, summed over ranks, given to the updater while it
is in the cache, and copied to the caller's outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias
from weakref import WeakSet, ref

import numpy as np

from . import publication
from .arena import Arena, Block, Place
from .arrays import add, add_in_pairs, add_in_pairs_over, disjoint, local_sum, run_quietly, storable, zeros
from .compression import Add, Compression, Layers, check, check_payloads, compress, restoring
from .errors import noted
from .keys import Entry, KeyTable
from .memory import private
from .optimizers import Optimizer
from .placement import place
from .plan import Bucket, Part, Plan, Plans, build
from .publication import Cast, Publication
from .rowsparse import Presence
from .typing import (
    Array,
    Codec,
    GpuKernels,
    Kernels,
    Key,
    Placement,
    StepTable,
    Transport,
    Updater,
    Whole,
    WholeKernels,
)
from .updaters import Assign, check_state

__all__ = ["Arrays", "Confirm", "Exchange", "Forgetful", "Steps", "are_plain"]

# From here on a pushpull delivers each bucket while it is in the cache. Below, everything stays in the last level of
# cache, and finding out whether that is safe would take longer.
_STREAMED_BYTES = 8 << 20

_NONE: Mapping[Any, int] = MappingProxyType({})

Confirm: TypeAlias = "Callable[[BaseException | None], None]"
"""Tells the other ranks what an update raised here, if it did, and learns what it did there."""


Arrays: TypeAlias = "Sequence[Any]"
"""The arrays of a call, one item per key: either each is *plain*, one numpy array of the shape and dtype of the value,
or each is a tuple of any number of arrays; flat ones where they are pushed."""


class Forgetful(Protocol):
    """What keeps something that stands on where values lie, or on how they are updated."""

    def forget(self) -> None:
        """Let go of it, as that changes now, on all ranks alike. Local."""
        ...


class Steps(NamedTuple):
    """The updater's step for each key of a push."""

    each: Sequence[Any]
    uniform: bool
    """Whether they are all the same."""


class Exchange:
    """The values of a store and the operations on them, which are collective unless they say that they are local."""

    def __init__(
        self, transport: Transport, placement: str, root: int, kernels: Kernels, deterministic: bool = False
    ) -> None:
        self.transport, self._root, self._wanted = transport, root, placement
        self._in_pairs, self._add = deterministic, add_in_pairs if deterministic else add
        self._add_received: Add = self._add
        if deterministic and not transport.memory.is_host:
            self._add_received = partial(_add_over, transport.rank)
        self.summed = transport.size
        """Over how many ranks the sums go that are given to the updater; 0: it is given each rank's own."""
        self.table = KeyTable()
        self.updater: Updater = Assign()
        self._kernels = kernels
        self._whole_kernels = kernels if isinstance(kernels, WholeKernels) else None
        # Whether the last addition may be left to the update: the terms come here, and are added from left to right.
        self._may_add = transport.neighbours > 1 and (transport.size == 2 or not deterministic)
        self.compression: Compression | None = None
        # How values are sent to those who pull them, where packed.
        self._publication: Publication | None = None
        self._publications: dict[str, Publication] = {}
        self.placement: Placement = place(placement, transport, self.updater, root)
        self._settle()
        self._revision = self.updater.revision
        self._arena = Arena(transport, pooling=placement != "owners")
        # The sum of half precision is twice as wide as the message.
        self._memory = transport.memory
        self._scratch = private(transport)(2 * transport.limit)
        self._plans = Plans()
        # Arrays of callers that are known to lie apart from values, by their identities, until they are gone.
        self._known_apart: dict[int, ref[Array]] = {}
        self.forgetful: WeakSet[Forgetful] = WeakSet()
        """Who keeps plans, or what was made of them."""
        self.staged: Array | None = None
        """The first message of a push, prepared before the ranks agree on it."""

    @property
    def _adding(self) -> bool:
        return self._may_add and self.compression is None

    @property
    def in_pairs(self) -> bool:
        """Whether sums are made as in :func:`mpikv.arrays.add_in_pairs`. Local."""
        return self._in_pairs

    @property
    def current(self) -> bool:
        """Whether a push leaves every rank with the newest values. Local."""
        return self._current

    @property
    def _fencing(self) -> bool:
        """Whether each bucket's sum makes an exchange, which no rank passes before all have updated the last one."""
        return self.compression is None or self.compression.by_bucket

    def known(self, key: Any) -> Plan | None:
        """Return the plan of a key, or of a list of keys, that was planned before; None where it is to be looked at
        more closely. Local.
        """
        kind = type(key)
        if kind is str or kind is int:
            return self._plans.single.get(key)
        # True and 1.0 equal 1, but are no keys.
        if (kind is list or kind is tuple) and len(kinds := set(map(type, key))) == 1 and kinds <= _KEYS:
            return self._plans.single.get(key[0]) if len(key) == 1 else self._plans.find(tuple(key))
        return None

    def plan(self, keys: tuple[Key, ...]) -> Plan:
        """Return the plan for known keys. Local."""
        plan = self._plans.single.get(keys[0]) if len(keys) == 1 else self._plans.find(keys)
        if plan is None:
            self.table.check_kind(keys)
            entries = [self.table[key] for key in keys]
            plan = build(
                entries, self.placement, self.transport, self.updater, self._kernels, self._scratch, self._adding
            )
            self._plans.add(plan, len(self.table))
        return plan

    def prepare(self, plan: Plan) -> None:
        """Work out now what a push of whole arrays needs: before ranks agree on it, as it may fail on one. Local."""
        plan.prepare()
        wanted = self._whole and not self.updater.fallible and "owned" not in plan.memo
        if wanted and self._whole_kernels is not None:
            self._memory.order.run(self._bound, self._whole_kernels, plan)

    def forget_recorded(self) -> None:
        """Have those that keep what was made of plans let go of it. Local."""
        for each in list(self.forgetful):
            each.forget()

    def _forget_plans(self) -> None:
        self.forget_recorded()
        self._plans.clear()

    def steps(self, plan: Plan) -> Steps:
        """Return the updater's step for each key of the next push. Local. A user's schedule may raise in it."""
        updater, keys = self.updater, plan.keys
        if updater.revision != self._revision:
            self.check_slots()
        counts = self.table.counts[plan.rows]
        if len(keys) == 1:
            return Steps((updater.step(keys[0], int(counts) + 1),), True)
        if not updater.by_key and len(keys) and (counts == counts[0]).all():
            return Steps((updater.step(keys[0], int(counts[0]) + 1),) * len(keys), True)
        steps = [updater.step(key, count + 1) for key, count in zip(keys, counts.tolist(), strict=True)]
        return Steps(steps, not steps or steps.count(steps[0]) == len(steps))

    def check_slots(self) -> None:
        """Raise if a setting that was changed since :meth:`adopt` asks for other state than there is."""
        for entry in self.table.entries():
            check_state(self.updater, entry.dtype, entry.place.block.state)
        # Other options may need other code.
        self._ready(self.updater, {entry.dtype for entry in self.table.entries()})
        self._revision = self.updater.revision

    def _settle(self) -> None:
        """Work out what follows from the updater and its placement."""
        # Whether values are updated key by key instead of bucket by bucket.
        self._whole = self.updater.fallible or not self.updater.elementwise
        # Whether a push leaves every rank with the newest values.
        self._current = self.transport.shared or self.placement.everywhere or self.transport.size == 1

    # --- Calls that are made again and again

    def lack(self) -> str:
        """Return why no pushpull can be recorded on a GPU, to be run again; "" if one can. Local."""
        if self.updater.fallible:
            return "an updater function is Python, which runs on the host"
        if self._whole:
            return f"{type(self.updater).__name__} updates whole values"
        if isinstance(self._kernels, GpuKernels) and not (self.updater.assigns or self._kernels.has_rule(self.updater)):
            return f"{type(self.updater).__name__} is Python, which runs on the host"
        if self.compression is not None:
            return "pushes are compressed"
        if self._in_pairs and self.transport.size > 1:
            return "sums in a fixed order take memory each time"
        return ""

    def table_of_steps(self, plan: Plan) -> StepTable | None:
        """Return memory for the steps of a plan's keys, or None if updates have none. There is no :meth:`lack`. Local.

        Raises:
            MemoryError: there is too little.
        """
        if self.updater.assigns:
            return None
        assert isinstance(self._kernels, GpuKernels)
        return self._kernels.table(self.updater, self._memory, len(plan.keys), set(plan.dtypes))

    def pushed_again(self, plan: Plan) -> None:
        """Take note of a pushpull that was recorded, and run again. Local."""
        self._count(plan)
        self.table.stale[plan.rows] = False

    @contextmanager
    def uncounted(self, plan: Plan) -> Iterator[None]:
        """Take no note of what is pushed and pulled meanwhile. Local."""
        counts, stale = self.table.counts[plan.rows].copy(), self.table.stale[plan.rows].copy()
        try:
            yield
        finally:
            self.table.counts[plan.rows], self.table.stale[plan.rows] = counts, stale

    # --- Push and pull

    def stage(self, plan: Plan, sources: Arrays) -> None:
        """Prepare the first message of the push that comes next. Local."""
        if not self._memory.is_host:
            return  # the store's stream does that, in the order of the calls
        # What is compressed changes residuals, for which it is too early; what stays where it lies is not prepared.
        if plan.buckets and self.compression is None and not plan.buckets[0].direct:
            # Copies of plain arrays cannot overflow.
            pack = self._pack if are_plain(sources) else partial(run_quietly, self._pack)
            self.staged = pack(plan.buckets[0], sources)

    def added_up(self, plan: Plan, sources: Arrays) -> Arrays:
        """Return what is to be pushed, of a GPU with lists added up, for which it may have too little memory. Local.

        A codec of ranges packs each array by itself.
        """
        by_array = self.compression is not None and self.compression.codec.elementwise
        if self._memory.is_host or by_array or all(len(group) == 1 for group in sources):
            return sources
        added: Arrays = self._memory.order.run(run_quietly, self._sums_of_lists, plan, sources)
        return added

    def _sums_of_lists(self, plan: Plan, sources: Arrays) -> Arrays:
        return [
            (local_sum(group, entry.dtype, self._in_pairs),) if len(group) > 1 else group
            for entry, group in zip(plan.entries, sources, strict=True)
        ]

    def restoring(self, plan: Plan, confirm: Confirm | None) -> Confirm | None:
        """Return ``confirm``, which brings residuals back to what they are now where it raises. Local."""
        if self.compression is None or confirm is None:
            return confirm
        if self._memory.is_host:
            return restoring(plan, confirm)
        kept: Confirm = self._memory.order.run(restoring, plan, confirm)
        return kept

    def push(self, plan: Plan, sources: Arrays, steps: Steps, confirm: Confirm | None) -> None:
        """Sum the sources over ranks and update.

        ``confirm`` is called with what a fallible updater raised on this rank, or None; it raises if one raised
        anywhere.
        """
        self._push(plan, sources, steps, confirm)
        if self.transport.lends and plan.direct and self.compression is None:
            self.transport.fence()

    def _push(self, plan: Plan, sources: Arrays, steps: Steps, confirm: Confirm | None) -> None:
        """Push; other ranks may read the sources until the next fence."""
        self._reduce(plan, sources, steps, None)
        if self._whole:
            self._update_whole(plan, steps, confirm)
        self._count(plan)

    def push_buffers(self, plan: Plan, steps: Steps, confirm: Confirm | None) -> None:
        """Sum the ranks' buffers and update. They may be filled again when it returns."""
        if self.compression is not None:
            # Only this rank reads its buffers, and it has when this returns.
            self.push(plan, self._brought(plan), steps, confirm)
            return
        for bucket in plan.buckets:
            assert bucket.buffered is not None
            send, terms = bucket.buffered
            if not self.transport.shared:
                terms = tuple(self.placement.reduce(bucket, send, bucket.total))
            self._take(bucket, terms, steps)
        if self._whole:
            self._update_whole(plan, steps, confirm)
        self._count(plan)
        self.transport.fence()

    def pushpull_buffers(self, plan: Plan, steps: Steps, targets: Arrays, confirm: Confirm | None) -> None:
        """Push the buffers, then pull; without targets only so that this rank has the newest values."""
        if self.compression is not None:
            self.pushpull(plan, self._brought(plan), steps, targets or [()] * len(plan.keys), confirm)
            return
        self.push_buffers(plan, steps, confirm)
        self.pull(plan, targets)

    def pull(self, plan: Plan, targets: Arrays) -> None:
        """Copy the values to the targets, if there are any."""
        self._refresh(plan)
        if not targets:
            return
        if are_plain(targets):
            for array, value in zip(targets, plan.values, strict=True):
                array[...] = value
            return
        self._copy(
            (array, entry.value)
            for entry, group in zip(plan.entries, targets, strict=True)
            for array in group
            if array is not entry.view
        )

    def republish(self, plan: Plan) -> None:
        """Give every rank the values of the keys, to the last bit, which their owners have changed in place."""
        for present in plan.present:
            present.fill()
        publication.end(plan.buckets)
        for bucket in () if self._current else plan.buckets:
            self.placement.publish(bucket)
        self.table.stale[plan.rows] = False
        self.transport.fence()

    def _refresh(self, plan: Plan) -> None:
        """Give this rank the newest values."""
        if not self._current and np.any(self.table.stale[plan.rows]):
            self._publish(plan)

    def pushpull(self, plan: Plan, sources: Arrays, steps: Steps, targets: Arrays, confirm: Confirm | None) -> None:
        """Push, then pull; bucket by bucket where that pays and no target is another key's source."""
        if self._whole or plan.nbytes < _STREAMED_BYTES or not self._fencing:
            self._push(plan, sources, steps, confirm)
            self.transport.fence()
            self.pull(plan, targets)
            return
        # Whether copies may be early is this rank's affair; the order of the exchanges is not.
        groups = _groups(sources), _groups(targets)
        early = self._memory.is_host and disjoint(*groups)
        flat = _flat_copies(plan, groups[1]) if early else ()
        self._reduce(plan, sources, steps, flat)
        self._count(plan)
        self.table.stale[plan.rows] = False
        if not early:
            self.pull(plan, targets)

    def _reduce(self, plan: Plan, sources: Arrays, steps: Steps, outs: Sequence[Sequence[Array]] | None) -> None:
        """Sum bucket by bucket; update each while it is in the cache; deliver it, if wanted, one bucket behind.

        The delay lets the exchange of the next bucket be the fence that the delivery of this one needs.
        """
        previous: Bucket | None = None
        compressed = None if self.compression is None else self.compression.start(plan, _layers(sources))
        for bucket in plan.buckets:
            terms = self._terms(bucket, sources) if compressed is None else (compressed(bucket),)
            self._take(bucket, terms, steps)
            if outs is not None and previous is not None:
                self._deliver(previous, outs)
            previous = bucket
        if outs is not None and previous is not None:
            self.transport.fence()
            self._deliver(previous, outs)

    def _terms(self, bucket: Bucket, sources: Arrays) -> Sequence[Array]:
        """Run the collective of a bucket; return the terms of this rank's elements."""
        send, self.staged = self.staged, None
        return self.placement.reduce(bucket, self._pack(bucket, sources) if send is None else send, bucket.total)

    def _pack(self, bucket: Bucket, sources: Arrays) -> Array:
        """Prepare this rank's contribution to a bucket: in the outbox, or where it lies when the transport would copy
        it anyway.
        """
        send = bucket.sends[self.transport.turn]
        whole = self._in_place(bucket, sources) if bucket.direct else None
        if whole is not None:
            return whole
        if not bucket.dense:
            send.fill(0)
        if bucket.items is not None and are_plain(sources):
            for slot, array in zip(bucket.slots[self.transport.turn], sources[bucket.items], strict=True):
                slot[...] = array
            return send
        self._copy(self._local_sums(bucket, sources, send))
        return send

    def _local_sums(self, bucket: Bucket, sources: Arrays, send: Array) -> Iterator[tuple[Array, Array]]:
        """Yield where each piece of a message goes, and the sum of this rank's arrays."""
        for piece in bucket.pieces:
            arrays = [array[piece.begin : piece.end] for array in _flat(sources[piece.item])]
            if arrays:
                yield send[piece.at : piece.until], local_sum(arrays, bucket.dtype, self._in_pairs)
            else:  # a rank that has left join() brings none
                send[piece.at : piece.until].fill(0)

    def _copy(self, pairs: Iterable[tuple[Array, Array]]) -> None:
        """Copy to the first of each pair from the second; on a GPU by as few launches as can be."""
        if self._memory.is_host:
            for target, source in pairs:
                np.copyto(target, source, casting="unsafe")
            return
        every = list(pairs)
        self._memory.copy([target for target, _ in every], [source for _, source in every])

    def _in_place(self, bucket: Bucket, sources: Arrays) -> Array | None:
        """Return this rank's contribution to a bucket where it lies, if it is all of one array of the caller's."""
        piece = bucket.pieces[0]
        given = sources[piece.item]
        (array, *others) = (given,) if type(given) is np.ndarray else given or (None,)
        if array is None or others or array.dtype != bucket.dtype:
            return None
        if self._memory.is_host:
            # A sum is made in the memory of a value that is replaced by it: what lies there would be gone too early.
            apart = array.base is None or not np.may_share_memory(array, bucket.value)
            fits = apart and array.flags.c_contiguous and array.flags.aligned
        else:
            fits = array.flags.c_contiguous
        whole: Array | None = array.reshape(-1)[piece.begin : piece.end] if fits else None
        return whole

    def _take(self, bucket: Bucket, terms: Sequence[Array], steps: Steps) -> None:
        """Add up the terms of this rank's elements and update them, piece by piece in the cache."""
        parts: Sequence[Part] = bucket.runs if steps.uniform else bucket.parts
        summed = not parts or terms[0] is bucket.total
        for part in parts:
            if part.add_and_update is not None:
                part.add_and_update(*_two_terms(terms, part), steps.each[part.item])
                continue
            if not summed:
                self._add_received(terms, part.low, part.high, part.total)
            if part.update is not None:
                part.update(steps.each[part.item] if part.items is None else [steps.each[item] for item in part.items])

    def _deliver(self, bucket: Bucket, outs: Sequence[Sequence[Array]]) -> None:
        """Copy an updated bucket to the callers' flat arrays."""
        if not self.transport.shared:
            self._publish_bucket(bucket)
        for piece in bucket.pieces if outs else ():
            for array in outs[piece.item]:
                np.copyto(array[piece.begin : piece.end], bucket.value[piece.at : piece.until], casting="unsafe")

    def _update_whole(self, plan: Plan, steps: Steps, confirm: Confirm | None) -> None:
        """Run an updater of whole values on those that this rank owns, in the order of the call.

        A fallible updater changes copies, which are stored when every rank knows that all went well.
        """
        if confirm is None:
            self._update_owned(plan, steps, [])
            return
        changed: list[tuple[Array, Array]] = []
        failure: BaseException | None = None
        try:
            self._update_owned(plan, steps, changed)
        except BaseException as error:  # sys.exit in an updater, or Ctrl-C: the other ranks wait
            failure = error
        confirm(failure)
        for stored, value in changed:
            np.copyto(stored, value)

    def _update_owned(self, plan: Plan, steps: Steps, changed: list[tuple[Array, Array]]) -> None:
        if self._whole_kernels is not None and not self.updater.fallible:
            update = self._bound(self._whole_kernels, plan)
            update([step for step, total in zip(steps.each, plan.totals, strict=True) if total is not None])
            return
        for entry, total, step in zip(plan.entries, plan.totals, steps.each, strict=True):
            if total is not None:
                value, state = entry.updated, entry.state
                if self.updater.fallible:
                    value, state = value.copy(), {name: array.copy() for name, array in state.items()}
                    changed += [(entry.updated, value), *((entry.state[name], array) for name, array in state.items())]
                try:
                    self.updater.update(step, total, value, state)
                except BaseException as error:
                    noted(error, f"updating key {entry.key!r}")
                    raise

    def _bound(self, kernels: WholeKernels, plan: Plan) -> Callable[[Sequence[Any]], None]:
        """Return what updates all whole values that this rank owns, by as few launches as can be."""
        update: Callable[[Sequence[Any]], None] | None = plan.memo.get("owned")
        if update is not None:
            return update
        pairs = zip(plan.entries, plan.totals, strict=True)
        wholes = [Whole(total, entry.updated, entry.state) for entry, total in pairs if total is not None]
        plan.memo["owned"] = bound = kernels.bind_whole(self.updater, wholes)
        return bound

    def update(self, step: Any, total: Array, value: Array, state: Mapping[str, Array]) -> None:
        """Have the updater change arrays, which lie in the store's memory, for a step. Local."""
        if self._memory.is_host or self.updater.fallible:
            self.updater.update(step, total, value, state)
        else:
            self._kernels.bind(self.updater, total, value, state)(step)

    def _count(self, plan: Plan) -> None:
        for present in plan.present:
            present.fill()
        self.table.counts[plan.rows] += 1
        if not self._current:
            self.table.stale[plan.rows] = True

    def _publish(self, plan: Plan) -> None:
        """Give every rank the newest values of the keys."""
        for bucket in plan.buckets:
            self._publish_bucket(bucket)
        self.table.stale[plan.rows] = False

    def _publish_bucket(self, bucket: Bucket) -> None:
        if bucket.exact is not None and self._publication is not None:
            if self._publication.publish(bucket, self.updater.assigns):
                return
            publication.end((bucket,))
        self.placement.publish(bucket)

    def close(self) -> None:
        """Let go of the values, whose memory the transport frees."""
        self._forget_plans()
        self.table, self._arena, self._scratch = KeyTable(), Arena(self.transport), zeros(0)
        self._publication, self._publications = None, {}

    # --- The table

    def apart(self, array: Array) -> Array:
        """Return the array, or a copy if it lies in the memory of values, which may change before it is read. Local."""
        return array.copy() if self.is_view(array) else array

    def is_view(self, array: Array) -> bool:
        """Return whether an array lies in the memory of values. Local."""
        return self._arena.holds(array)

    def lie_apart(self, arrays: Sequence[Array]) -> bool:
        """Return whether none of the host's arrays lies in the memory of values. Local.

        No flag tells: torch, for one, makes a view writable. Asking where an array lies takes longer than adding it, so
        that each is asked once; what has memory of its own has no base.
        """
        known = self._known_apart
        for array in arrays:
            if array.base is not None and id(array) not in known:
                if self.is_view(array):
                    return False
                known[id(array)] = ref(array, partial(_forget, known, id(array)))
        return True

    def fillable(self, out: Array, entry: Entry) -> Array:
        """Return an array that is to be filled with a value: its view for one over the memory of that value, where
        there is nothing to fill. Local.
        """
        if self._memory.is_host and _is_same(out, entry.value):
            return entry.view
        self.check_own(out)
        return out

    def check_own(self, out: Array) -> None:
        """Raise TypeError if what is to be filled lies in the memory of values, one of which would be lost. Local."""
        if self._memory.is_host and self.is_view(out):
            raise TypeError(
                "what is to be filled lies in the memory of the store's values, one of which would be lost; pass "
                "an out= that has memory of its own"
            )

    def set_apart(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """Return the arrays that :meth:`write` is to be given. The root has a GPU's views of values copied now, for
        which there may be too little memory. Local.
        """
        if self._memory.is_host or self.transport.rank != self._root or not any(map(self._arena.holds, arrays)):
            return arrays
        kept: Sequence[Array] = self._memory.order.run(lambda given: list(map(self.apart, given)), arrays)
        return kept

    def check_storable(self, arrays: Sequence[Array]) -> None:
        """Raise if values like these cannot be stored, or not be updated by the present updater. Local."""
        self._ready(self.updater, {storable(array.dtype) for array in arrays})

    def enter(self, keys: Sequence[Key], arrays: Sequence[Array], sparse: Container[Key] = ()) -> None:
        """Give keys their memory; the arrays say how much. Known keys start anew. Those in ``sparse`` are row-sparse.

        Raises:
            MemoryError: on every rank, if one has too little; nothing was changed.
        """
        known = [key for key in keys if key in self.table]
        with self._arena.undone():
            requests = [(array.dtype, array.size) for array in arrays]
            places = self._arena.place(requests, [self.table[key].place for key in known])
            for array, where in zip(arrays, places, strict=True):
                where.block.ensure_state(self.updater.slots(array.dtype))
                if self.packs_values and where.block.exact is None:
                    where.block.exact = where.block.new_exact()
        self._forget(known)
        for key, array, where in zip(keys, arrays, places, strict=True):
            self.table.add(key, array.shape, array.dtype, where, Presence() if key in sparse else None)
        self._arena.shrink()

    def add_buffers(self, plan: Plan) -> None:
        """Give the keys buffers, and their blocks the memory for them.

        Raises:
            MemoryError: on every rank, if one has too little.
        """
        rows = self.transport.neighbours
        for block in dict.fromkeys(entry.place.block for entry in plan.entries):
            if block.buffers is None:
                memory = self.transport.allocate(rows * block.values.nbytes)
                block.buffers = memory.view(block.values.dtype).reshape(rows, -1)
                self._forget_plans()  # those of this block know of no buffers
        for entry in plan.entries:
            if not self.table.buffered[entry.index]:
                entry.buffer(self.transport.place).fill(0)  # it may be what an earlier key has left
        self.table.buffered[plan.rows] = True

    def unbuffered(self, plan: Plan) -> Key | None:
        """Return a key that has no buffers, or None. Local."""
        if self.table.buffered[plan.rows].all():
            return None
        return next(entry.key for entry in plan.entries if not self.table.buffered[entry.index])

    def buffers(self, plan: Plan) -> list[Array]:
        """Return this rank's buffer for each key. Local."""
        return [entry.buffer(self.transport.place) for entry in plan.entries]

    def _brought(self, plan: Plan) -> Arrays:
        """Return this rank's buffers as what a caller would bring."""
        buffers = self.buffers(plan)
        return buffers if self._memory.is_host else [(buffer.reshape(-1),) for buffer in buffers]

    @contextmanager
    def empty_buffers(self, plan: Plan) -> Iterator[None]:
        """Let this rank's buffers hold zeros meanwhile: for a push to which it brings nothing. Local."""
        buffers = self.buffers(plan)
        contents = [buffer.copy() for buffer in buffers]
        for buffer in buffers:
            buffer.fill(0)
        try:
            yield
        finally:
            for buffer, content in zip(buffers, contents, strict=True):
                np.copyto(buffer, content)

    def write(self, keys: Sequence[Key], arrays: Sequence[Array]) -> None:
        """Store the root's arrays, so that every rank can read them; of a GPU such as :meth:`set_apart` returns."""
        apart = [self.apart(array) for array in arrays] if self._memory.is_host else arrays
        for key, array in zip(keys, apart, strict=True):
            entry = self.table[key]
            if self.transport.rank == self._root:
                self._memory.copy((entry.value,), (array,))
            if not self.transport.shared:
                self.transport.broadcast(entry.value.reshape(-1), self._root)
            self.table.stale[entry.index] = False
            if entry.present is not None:
                entry.present.fill()
        self.transport.fence()
        self.start_from_values(keys)

    def delete(self, keys: Sequence[Key]) -> None:
        """Forget keys and free their places."""
        self._arena.release(self._forget(keys))
        self._arena.shrink()

    def _forget(self, keys: Sequence[Key]) -> list[Place]:
        """Forget keys; return their places."""
        if not keys:
            return []
        self._clear(tuple(key for key in keys if self._arena.is_shared(self.table[key].place.block)))
        places = [self.table.remove(key) for key in keys]
        self._forget_plans()
        return places

    def _clear(self, keys: tuple[Key, ...]) -> None:
        """Fill what is kept beside values with zeros, where it may be given to new keys."""
        for bucket in self.plan(keys).buckets:
            for part in bucket.parts:
                for array in part.state.values():
                    array.fill(0)
        for key in keys:
            for residual in self.table[key].residuals():
                residual.fill(0)

    def check_codec(self, codec: Codec) -> None:
        """Raise if what a codec packs cannot be sent. Local."""
        check_payloads(codec, self.transport)

    def check_compressible(self, plan: Plan, sources: Arrays | None) -> None:
        """Raise if arrays that are to be pushed, or the buffers, cannot be compressed, as they are to be. Local."""
        assert self.compression is not None
        check(self.compression.codec, plan, _groups(self._brought(plan) if sources is None else sources), self._memory)

    def compress(self, codec: Codec | None, values: Cast | None = None) -> None:
        """Compress what is pushed from now on, or no more; what was left out of earlier pushes is dropped.

        ``values`` packs what is pulled, where that travels.
        """
        # Before anything changes, as there may be too little memory.
        publishing = None if values is None else self._published_by(values)
        compression = None if codec is None else compress(codec, self.transport, self._add, self._in_pairs)
        room = self._room_for_exact(publishing, self.placement)
        self._end_packing()
        self._publication, self.compression = publishing, compression
        self.drop_residuals()
        # Sums are no longer, or again, left to the rules.
        self._ready(self.updater, {entry.dtype for entry in self.table.entries()})
        self._begin_packing(room)

    def _published_by(self, codec: Cast) -> Publication | None:
        """Return what packs values, where they ever travel. Memory of a transport is given back by its end alone, so
        that it is made once.
        """
        if self.transport.shared or self.transport.size == 1:
            return None
        name = codec.settings()
        if name not in self._publications:
            self._publications[name] = Publication(codec, self.transport)
        return self._publications[name]

    @property
    def packs_values(self) -> bool:
        """Whether values are packed that ranks pull."""
        return self._publication is not None and not self._current

    def _room_for_exact(self, publishing: Publication | None, placement: Placement) -> dict[Block, Array]:
        """Return memory for exact values, if they are to be kept. On GPUs collective."""
        if publishing is None or placement.everywhere:
            return {}
        blocks = dict.fromkeys(entry.place.block for entry in self.table.entries())
        return {block: exact for block in blocks if (exact := block.new_exact()) is not None}

    def _begin_packing(self, room: dict[Block, Array]) -> None:
        """Have the owners keep exact values there from now on. Every rank has the newest ones. Local."""
        for block, exact in room.items():
            block.exact = exact
        if room:
            self._forget_plans()
            publication.begin(self.plan(tuple(self.table)).buckets)

    def _end_packing(self) -> None:
        """Give every rank the exact values, and forget that they were something else."""
        self.give_exact()
        if self._holds_rounded:
            for block in self._arena.blocks:
                block.exact = None
            self._forget_plans()

    def give_exact(self) -> None:
        """Give every rank the exact values, where those that it holds were packed."""
        if self._holds_rounded and len(self.table):
            self.republish(self.plan(tuple(self.table)))

    @property
    def _holds_rounded(self) -> bool:
        return any(block.exact is not None for block in self._arena.blocks)

    def drop_residuals(self, keeping: Mapping[Block, int] = _NONE) -> None:
        """Forget what was left out of earlier pushes. Local. Of some blocks the memory of so many positions is kept."""
        self._forget_plans()
        for block in self._arena.blocks:
            del block.residuals[keeping.get(block, 0) :]
            for residual in block.residuals:
                residual.fill(0)
            block.drop_sums()
        for entry in self.table.entries():
            entry.codec_state.clear()

    def recount(self) -> None:
        """Tell all ranks how often owners, who did so by themselves, have updated their values."""
        counts = self.table.counts
        told = np.zeros((self.transport.size, counts.size), np.int64)
        told[self.transport.rank] = counts
        self.transport.all_gather(told.reshape(-1), (counts.size,) * self.transport.size)
        entries = list(self.table.entries())
        rows = np.fromiter((entry.index for entry in entries), np.intp)
        owners = np.fromiter((entry.place.block.owner for entry in entries), np.intp)
        latest = told[owners, rows]
        if not self._current:
            self.table.stale[rows] |= (told[:, rows] != latest).any(axis=0)
        counts[rows] = latest

    def placed(self, updater: Updater, dtypes: Set[np.dtype[Any]] = frozenset()) -> Placement:
        """Return the placement for an updater that can take over the present values, and such of more dtypes; or raise.
        Local.
        """
        placement = place(self._wanted, self.transport, updater, self._root)
        self._ready(updater, {entry.dtype for entry in self.table.entries()} | dtypes)
        return placement

    def _ready(self, updater: Updater, dtypes: set[np.dtype[Any]]) -> None:
        """Raise if the updater cannot update values of these dtypes; compile what it needs for them. Local."""
        self.tell_ranks(updater)
        for dtype in dtypes:
            updater.slots(dtype)
            self._kernels.prepare(updater, dtype, self._adding)

    def tell_ranks(self, updater: Updater) -> None:
        """Tell an optimizer over how many ranks its sums go; raise if it cannot take the mean of them. Local."""
        if isinstance(updater, Optimizer):
            updater.sums_over(self.summed)

    def adopt(self, updater: Updater) -> None:
        """Take another updater, with new state."""
        placement = self.placed(updater)
        # Before anything changes, as a GPU may have too little memory.
        dtypes = {entry.place.block: entry.dtype for entry in self.table.entries()}
        states = {block: block.new_state(updater.slots(dtype)) for block, dtype in dtypes.items()}
        room = self._room_for_exact(self._publication, placement)
        # Its placement may have other owners, who need the newest values.
        self._end_packing()
        stale = tuple(entry.key for entry in self.table.entries() if self.table.stale[entry.index])
        if stale:
            # For an updater without state: the present one may have been changed to ask for other state than there is.
            entries = [self.table[key] for key in stale]
            self._publish(build(entries, self.placement, self.transport, Assign(), self._kernels, self._scratch))
        self.updater, self.placement = updater, placement
        self._settle()
        self._revision = updater.revision
        self._forget_plans()
        for block in self._arena.blocks:
            block.state = states.get(block, {})
        for entry in self.table.entries():
            if entry.present is not None:
                entry.present.fill()  # other ranks may own the rows from now on
        self.table.start_counts()
        self._begin_packing(room)
        if len(self.table):
            self.start_from_values(tuple(self.table))

    def start_from_values(self, keys: Sequence[Key]) -> None:
        """Copy values that were given, and that all ranks have, to where an owner knows them better: to exact values,
        where what is pulled is packed, and to an optimizer's float32 masters. Local.
        """
        if self.packs_values:
            publication.begin(self.plan(tuple(keys)).buckets)
        if not any("master" in self.table[key].place.block.state for key in keys):
            return
        for bucket in self.plan(tuple(keys)).buckets:
            for part in bucket.parts:
                if "master" in part.state:
                    self._memory.copy((part.state["master"],), (part.value,))


_KEYS = {int, str}


def _forget(known: dict[int, Any], name: int, gone: object) -> None:
    known.pop(name, None)


def _is_same(array: Array, value: Array) -> bool:
    """Return whether an array is a value's memory, element by element."""
    if array.shape != value.shape or array.dtype != value.dtype or not array.flags.c_contiguous:
        return False
    first, of_value = (each.__array_interface__["data"][0] for each in (array, value))
    return bool(first == of_value)


def _add_over(own: int, terms: Sequence[Array], low: int, high: int, out: Array) -> None:
    add_in_pairs_over(terms, own, low, high, out)


def _two_terms(terms: Sequence[Array], part: Part) -> tuple[Array, Array]:
    """Return what is left of the sum of a part: all terms but the last are added up."""
    low, high = part.low, part.high
    if len(terms) == 2:
        return terms[0][low:high], terms[1][low:high]
    add(terms[:-1], low, high, part.total)
    return part.total, terms[-1][low:high]


def _flat(given: Any) -> Sequence[Array]:
    """Return the flat arrays of one key."""
    return (given.reshape(-1),) if type(given) is np.ndarray else given


def _layers(sources: Arrays) -> Layers:
    """Return the flat arrays of each position in the keys' lists, which are of one length."""
    if are_plain(sources):
        return [[array.reshape(-1) for array in sources]]
    return list(zip(*sources, strict=True))


def _flat_copies(plan: Plan, groups: Sequence[Sequence[Array]]) -> Sequence[Sequence[Array]]:
    """Return the arrays to copy values to; a view of the value is none."""
    pairs = zip(plan.entries, groups, strict=True)
    return [tuple(array.reshape(-1) for array in group if array is not entry.view) for entry, group in pairs]


def are_plain(arrays: Arrays) -> bool:
    """Return whether there is one numpy array per key, as :data:`Arrays` says."""
    return len(arrays) > 0 and type(arrays[0]) is np.ndarray


def _groups(arrays: Arrays) -> Sequence[Sequence[Array]]:
    return [(array,) for array in arrays] if are_plain(arrays) else arrays
