"""What happens once all ranks have agreed on a call: the data move, the updater runs.

Every bucket of a plan goes one way: packed from the caller's arrays, summed over ranks, given to the updater while it
is in the cache, and copied to the caller's outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .arena import Arena
from .arrays import disjoint, local_sum, storable, zeros
from .errors import ConfigError, noted
from .keys import KeyTable
from .placement import place
from .plan import Bucket, Plan, build
from .typing import Array, Key, Placement, Transport, Updater
from .updaters import Assign

__all__ = ["Exchange"]

_MOST_PLANS = 1024
# From here on a pushpull delivers each bucket while it is in the cache. Below, everything stays in the last level of
# cache, and finding out whether that is safe would take longer.
_STREAMED_BYTES = 8 << 20

Groups = Sequence[Sequence[Array]]


class Exchange:
    """The values of a store and the operations on them. All but :meth:`plan`, :meth:`steps` and the checks are
    collective.
    """

    def __init__(self, transport: Transport, placement: str, root: int) -> None:
        self.transport, self._root, self._wanted = transport, root, placement
        self.table = KeyTable()
        self.updater: Updater = Assign()
        self.placement: Placement = place(placement, transport, self.updater, root)
        self._revision = self.updater.revision
        self._arena = Arena(transport)
        # The sum of half precision is twice as wide as the message.
        self._scratch = zeros(2 * transport.limit)
        self._plans: dict[tuple[Key, ...], Plan] = {}

    def plan(self, keys: tuple[Key, ...]) -> Plan:
        """Return the plan for known keys. Local."""
        plan = self._plans.get(keys)
        if plan is None:
            self.table.check_kind(keys)
            entries = [self.table[key] for key in keys]
            plan = build(entries, self.placement, self._total, whole=self._whole)
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[keys] = plan
        return plan

    def steps(self, plan: Plan) -> list[Any]:
        """Return the updater's step for each key of the next push. Local. A user's schedule may raise in it."""
        if self.updater.revision != self._revision:
            self._check_slots()
        counts = (self.table.counts[plan.rows] + 1).tolist()
        step = self.updater.step
        return [step(key, count) for key, count in zip(plan.keys, counts, strict=True)]

    def _check_slots(self) -> None:
        """Raise if a setting that was changed since :meth:`adopt` asks for other state than there is."""
        for entry in self.table.entries():
            wanted, state = self.updater.slots(entry.dtype), entry.place.block.state
            if wanted.keys() != state.keys():
                raise ConfigError(
                    f"the optimizer was changed to keep {sorted(wanted)} per element and the store has "
                    f"{sorted(state)}; call set_optimizer again, which starts its state anew"
                )
        self._revision = self.updater.revision

    @property
    def _whole(self) -> bool:
        """Whether values are updated key by key instead of bucket by bucket."""
        return self.updater.fallible or not self.updater.elementwise

    # --- Push and pull

    def push(
        self, plan: Plan, sources: Groups, steps: Sequence[Any], confirm: Callable[[BaseException | None], None]
    ) -> None:
        """Sum the sources over ranks and update.

        ``confirm`` is called with what a fallible updater raised on this rank, or None; it raises if one raised
        anywhere.
        """
        self._reduce(plan, sources, steps, None)
        if self._whole:
            self._update_whole(plan, steps, confirm)
        self._count(plan)

    def pull(self, plan: Plan, targets: Groups) -> None:
        """Copy the values to the targets."""
        if self.table.stale[plan.rows].any():
            self._publish(plan)
        for entry, group in zip(plan.entries, targets, strict=True):
            for array in group:
                np.copyto(array, entry.value, casting="unsafe")

    def pushpull(
        self,
        plan: Plan,
        sources: Groups,
        steps: Sequence[Any],
        targets: Groups,
        confirm: Callable[[BaseException | None], None],
    ) -> None:
        """Push, then pull; bucket by bucket where that pays and no target is another key's source."""
        if self._whole or plan.nbytes < _STREAMED_BYTES:
            self.push(plan, sources, steps, confirm)
            self.transport.fence()
            self.pull(plan, targets)
            return
        # Whether copies may be early is this rank's affair; the order of the exchanges is not.
        early = disjoint(sources, targets)
        flat = [tuple(array.reshape(-1) for array in group) for group in targets] if early else [()] * len(targets)
        self._reduce(plan, sources, steps, flat)
        self._count(plan)
        self.table.stale[plan.rows] = False
        if not early:
            self.pull(plan, targets)

    def _reduce(self, plan: Plan, sources: Groups, steps: Sequence[Any], outs: Groups | None) -> None:
        """Sum bucket by bucket; update each while it is in the cache; deliver it, if wanted, one bucket behind.

        The delay lets the exchange of the next bucket be the fence that the delivery of this one needs.
        """
        uniform = not steps or steps.count(steps[0]) == len(steps)
        previous: Bucket | None = None
        for bucket in plan.buckets:
            self.placement.reduce(bucket, self._pack(bucket, sources), bucket.total)
            if not self._whole:
                for part in bucket.runs if uniform else bucket.parts:
                    self.updater.update(steps[part.item], part.total, part.value, part.state)
            if outs is not None and previous is not None:
                self._deliver(previous, outs)
            previous = bucket
        if outs is not None and previous is not None:
            self.transport.fence()
            self._deliver(previous, outs)

    def _pack(self, bucket: Bucket, sources: Groups) -> Array:
        """Return this rank's contribution to a bucket, in the outbox, or where it lies when the transport would copy it
        anyway.
        """
        if len(bucket.pieces) == 1 and not self.transport.shared:
            piece = bucket.pieces[0]
            group = sources[piece.item]
            if len(group) == 1 and group[0].dtype == bucket.dtype and group[0].flags.c_contiguous:
                return group[0][piece.begin : piece.end]
        packed = self.transport.outbox(bucket.nbytes).view(bucket.dtype)
        if not bucket.dense:
            packed.fill(0)
        for piece in bucket.pieces:
            arrays = [array[piece.begin : piece.end] for array in sources[piece.item]]
            # A rank that has left join() brings no arrays.
            total = local_sum(arrays, bucket.dtype) if arrays else 0
            np.copyto(packed[piece.at : piece.until], total, casting="unsafe")
        return packed

    def _deliver(self, bucket: Bucket, outs: Groups) -> None:
        """Copy an updated bucket to the callers' flat arrays."""
        if not self.transport.shared:
            self.placement.publish(bucket)
        for piece in bucket.pieces:
            for array in outs[piece.item]:
                np.copyto(array[piece.begin : piece.end], bucket.value[piece.at : piece.until], casting="unsafe")

    def _update_whole(self, plan: Plan, steps: Sequence[Any], confirm: Callable[[BaseException | None], None]) -> None:
        """Run an updater of whole values on those that this rank owns, in the order of the call.

        A fallible updater changes copies, which are stored when every rank knows that all went well.
        """
        if not self.updater.fallible:
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

    def _update_owned(self, plan: Plan, steps: Sequence[Any], changed: list[tuple[Array, Array]]) -> None:
        for entry, total, step in zip(plan.entries, plan.totals, steps, strict=True):
            if total is not None:
                value, state = entry.value, entry.state
                if self.updater.fallible:
                    value, state = value.copy(), {name: array.copy() for name, array in state.items()}
                    changed += [(entry.value, value), *((entry.state[name], array) for name, array in state.items())]
                try:
                    self.updater.update(step, total, value, state)
                except BaseException as error:
                    noted(error, f"updating key {entry.key!r}")
                    raise

    def _count(self, plan: Plan) -> None:
        rows = plan.rows
        self.table.versions[rows] += 1
        self.table.counts[rows] += 1
        self.table.stale[rows] = not (self.transport.shared or self.placement.everywhere)

    def _publish(self, plan: Plan) -> None:
        """Give every rank the newest values of the keys."""
        for bucket in plan.buckets:
            self.placement.publish(bucket)
        self.table.stale[plan.rows] = False

    def close(self) -> None:
        """Let go of the values, whose memory the transport frees."""
        self._plans.clear()
        self.table, self._arena, self._scratch = KeyTable(), Arena(self.transport), zeros(0)

    # --- The table

    def check_storable(self, arrays: Sequence[Array]) -> None:
        """Raise if values like these cannot be stored, or not be updated by the present updater. Local."""
        for dtype in {array.dtype for array in arrays}:
            self.updater.slots(storable(dtype))

    def enter(self, keys: Sequence[Key], arrays: Sequence[Array]) -> None:
        """Give keys their memory; the arrays say how much. Known keys start anew.

        Raises:
            MemoryError: on every rank, if one has too little; nothing was changed.
        """
        places = self._arena.place([(array.dtype, array.size) for array in arrays])
        self.delete([key for key in keys if key in self.table])
        for key, array, where in zip(keys, arrays, places, strict=True):
            where.block.ensure_state(self.updater.slots(array.dtype))
            self.table.add(key, array.shape, array.dtype, where)

    def write(self, keys: Sequence[Key], arrays: Sequence[Array]) -> None:
        """Store the root's arrays. Other ranks may read them after a fence."""
        for key, array in zip(keys, arrays, strict=True):
            entry = self.table[key]
            if self.transport.rank == self._root:
                np.copyto(entry.value, array, casting="unsafe")
            if not self.transport.shared:
                self.transport.broadcast(entry.value.reshape(-1), self._root)
            self.table.stale[entry.index] = False
        self._start_masters(tuple(keys))

    def delete(self, keys: Sequence[Key]) -> None:
        """Forget keys and free their places."""
        if not keys:
            return
        for bucket in self.plan(tuple(keys)).buckets:
            for part in bucket.parts:
                for array in part.state.values():
                    array.fill(0)  # the place may be given to a new key, whose state starts as zeros
        for key in keys:
            self._arena.release(self.table.remove(key))
        self._plans.clear()

    def placed(self, updater: Updater) -> Placement:
        """Return the placement for an updater that can take over the present values, or raise. Local."""
        placement = place(self._wanted, self.transport, updater, self._root)
        for dtype in {entry.dtype for entry in self.table.entries()}:
            updater.slots(dtype)
        return placement

    def adopt(self, updater: Updater) -> None:
        """Take another updater, with new state."""
        # Its placement may have other owners, who need the newest values.
        stale = tuple(entry.key for entry in self.table.entries() if self.table.stale[entry.index])
        if stale:
            self._publish(self.plan(stale))
        self.updater, self.placement = updater, self.placed(updater)
        self._revision = updater.revision
        self._plans.clear()
        for block in self._arena.blocks:
            block.state = {}
        for entry in self.table.entries():
            entry.place.block.ensure_state(updater.slots(entry.dtype))
        self.table.counts[:] = 0
        if len(self.table):
            self._start_masters(tuple(self.table))

    def _start_masters(self, keys: tuple[Key, ...]) -> None:
        """Copy values into the float32 masters that an optimizer keeps of half-precision values."""
        if not any("master" in self.table[key].place.block.state for key in keys):
            return
        self.transport.fence()
        for bucket in self.plan(keys).buckets:
            for part in bucket.parts:
                if "master" in part.state:
                    np.copyto(part.state["master"], part.value, casting="unsafe")

    def _total(self, dtype: np.dtype[Any], count: int) -> Array:
        return self._scratch[: count * dtype.itemsize].view(dtype)
