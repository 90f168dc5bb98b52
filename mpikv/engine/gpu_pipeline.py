"""What a push and a pull do on a GPU, where work is queued and not done.

Of a call with several messages NCCL has a stream of its own: while it carries a message, the GPU prepares the next one,
updates by the sum of the one before, and copies what has come to the caller's outputs. So messages are summed one ahead
of the updates, and copied out one behind them. Each step is queued where its turn comes on all ranks, and waits for no
more than the transfer that it needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np

from ..arrays.arrays import add_in_pairs_over, local_sum, run_quietly
from ..memory.device import DeviceMemory
from ..protocols import Array, Event, GpuKernels, Whole
from .compression import Compression, restoring
from .pipeline import Arrays, Confirm, Pipeline, Steps, are_plain, cut
from .plan import Bucket, Plan
from .values import Values

__all__ = ["GpuPipeline"]


class GpuPipeline(Pipeline):
    """The :class:`~.pipeline.Pipeline` of values that lie on GPUs."""

    def __init__(self, values: Values, compression: Compression | None) -> None:
        super().__init__(values, compression)
        assert isinstance(self._memory, DeviceMemory)
        self._gpu, self._order = self._memory.gpu, self._memory.order
        if self._in_pairs:
            self._add = partial(add_in_pairs_over, self._transport.rank)
        # Where streams take no turns: a host waits in it, or sums are put together of whole values.
        self._in_one_go = self._compression is not None or self._whole
        self._whole_kernels: GpuKernels | None = None
        if self._whole and not self._updater.may_raise and isinstance(self._kernels, GpuKernels):
            self._whole_kernels = self._kernels

    # --- Before the ranks agree

    def prepare(self, plan: Plan) -> None:
        super().prepare(plan)
        if self._whole_kernels is not None and "owned" not in plan.memo:
            self._order.run(self._bound, self._whole_kernels, plan)

    def add_lists(self, plan: Plan, sources: Arrays) -> Arrays:
        # A codec of ranges packs each array by itself.
        by_array = self._compression is not None and self._compression.codec.elementwise
        if by_array or are_plain(sources) or all(len(group) == 1 for group in sources):
            return sources
        added: Arrays = self._order.run(run_quietly, self._local_sums, plan, sources)
        return added

    def _local_sums(self, plan: Plan, sources: Arrays) -> Arrays:
        pairs = zip(plan.entries, sources, strict=True)
        return [(local_sum(group, entry.dtype, self._in_pairs),) if group else () for entry, group in pairs]

    def restoring(self, plan: Plan, confirm: Confirm | None) -> Confirm | None:
        if confirm is None or self._compression is None:
            return confirm
        kept: Confirm = self._order.run(restoring, plan, confirm)
        return kept

    def buffers_as_sources(self, plan: Plan) -> Arrays:
        return [(buffer.reshape(-1),) for buffer in self._values.buffers(plan)]

    # --- Push and pull

    def push(self, plan: Plan, sources: Arrays | None, steps: Steps, confirm: Confirm | None) -> None:
        if self._in_one_go:
            super().push(plan, sources, steps, confirm)
        else:
            self._push_by_streams(plan, sources, steps, None)

    def pushpull(
        self, plan: Plan, sources: Arrays | None, steps: Steps, targets: Arrays, confirm: Confirm | None
    ) -> None:
        if self._in_one_go:
            super().pushpull(plan, sources, steps, targets, confirm)
        else:
            self._push_by_streams(plan, sources, steps, targets)

    def pull(self, plan: Plan, targets: Arrays) -> None:
        stale = self._values.table.stale
        if plan.overlaps and np.any(stale[plan.rows]):
            delivery = _Delivery(self, targets, early=are_plain(targets))
            with self._order.apart():
                for bucket in plan.buckets:
                    delivery.add(bucket)
                delivery.end()
            stale[plan.rows] = False
            if delivery.early:
                return
        super().pull(plan, targets)

    def _push_by_streams(self, plan: Plan, sources: Arrays | None, steps: Steps, targets: Arrays | None) -> None:
        """Sum message by message, and update; with targets, which may be none, give each rank the new values, and copy
        them there. Without, the caller's stream goes on when the sources were read.
        """
        delivery = None
        if targets is not None:
            delivery = _Delivery(self, targets, plan.overlaps and self._may_fill_early(plan, sources, targets))
        # The terms of a sum last until the next sum, where the library does not add.
        most = int(plan.overlaps or len(plan.buckets) == 1)
        ahead: deque[tuple[Bucket, Sequence[Array], Event | None]] = deque()

        def update() -> None:
            bucket, addends, sent = ahead.popleft()
            self._order.arrive(sent)
            self._update(bucket, addends, steps)
            if delivery is not None:
                delivery.add(bucket)

        with self._order.apart() if plan.overlaps else nullcontext():
            for bucket in plan.buckets:
                ahead.append((bucket, self._reduce(bucket, sources), self._order.sent()))
                if len(ahead) > most:
                    update()
            # A sum in pairs is made in the update: of addends, of which this rank's may be the caller's array.
            if delivery is None and not self._in_pairs:
                self._order.note_read()
            while ahead:
                update()
            if delivery is not None:
                delivery.end()
        self.count(plan, stale=delivery is None)
        if delivery is not None and targets and not delivery.early:
            super().pull(plan, targets)

    def _may_fill_early(self, plan: Plan, sources: Arrays | None, targets: Arrays) -> bool:
        """Return whether targets may be filled while the sources of other keys are yet to be read: of plain arrays none
        lies in another one, but for those of one key. Local.
        """
        sources = self._values.buffers(plan) if sources is None else sources
        if not (are_plain(sources) and are_plain(targets)):
            return False
        every = [*sources, *targets]
        low = np.array(self._gpu.addresses(every), np.int64)
        high = low + np.array([array.nbytes for array in every], np.int64)
        kept = high > low
        kept[len(sources) :] &= low[len(sources) :] != low[: len(sources)]
        low, high = low[kept], high[kept]
        order = np.argsort(low)
        return bool((high[order][:-1] <= low[order][1:]).all())

    def give(self, bucket: Bucket) -> Event | None:
        """Give every rank an updated message; return the point behind that, if the stream has to wait for it."""
        if self.current:
            return None
        bucket.publish()
        return self._order.sent()

    def fill(self, bucket: Bucket, sent: Event | None, targets: Arrays) -> None:
        """Copy a message to plain arrays, when it has come."""
        self._order.arrive(sent)
        self._copy(targets[bucket.items] if bucket.items else cut(bucket, targets), bucket.parts)

    # --- Update

    def _update_whole(self, plan: Plan, steps: Steps, confirm: Confirm | None) -> None:
        if self._whole_kernels is None:
            super()._update_whole(plan, steps, confirm)
            return
        pairs = zip(plan.totals, steps.each, strict=True)
        self._bound(self._whole_kernels, plan)([step for total, step in pairs if total is not None])

    def _bound(self, kernels: GpuKernels, plan: Plan) -> Callable[[Sequence[Any]], None]:
        """Return what updates all whole values that this rank owns, by as few launches as can be."""
        update: Callable[[Sequence[Any]], None] | None = plan.memo.get("owned")
        if update is not None:
            return update
        pairs = zip(plan.entries, plan.totals, strict=True)
        wholes = [Whole(total, entry.value, entry.state) for entry, total in pairs if total is not None]
        plan.memo["owned"] = bound = kernels.bind_whole(self._updater, wholes)
        return bound

    def update(self, step: Any, total: Array, value: Array, state: Mapping[str, Array]) -> None:
        if self._updater.may_raise:
            super().update(step, total, value, state)
        else:
            self._kernels.bind(self._updater, total, value, state)(step)

    def _copy(self, targets: Sequence[Array], sources: Sequence[Array]) -> None:
        self._memory.copy(targets, sources)


class _Delivery:
    """Gives all ranks the new values of a call, message by message. Copies each to the arrays that the caller wants to
    be filled when the next one is on its way, if these may be filled so ``early``.
    """

    def __init__(self, pipeline: GpuPipeline, targets: Arrays, early: bool) -> None:
        self.early = early
        self._pipeline, self._targets = pipeline, targets
        self._coming: deque[tuple[Bucket, Event | None]] = deque()

    def add(self, bucket: Bucket) -> None:
        """Give a message. Collective."""
        self._coming.append((bucket, self._pipeline.give(bucket)))
        if len(self._coming) > 1:
            self._fill()

    def end(self) -> None:
        """Copy what is left. Local."""
        while self._coming:
            self._fill()

    def _fill(self) -> None:
        bucket, sent = self._coming.popleft()
        if self.early:
            self._pipeline.fill(bucket, sent, self._targets)
