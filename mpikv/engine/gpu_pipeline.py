"""The stages of a push and a pull on a GPU, where the host only queues work.

In a call with several messages NCCL has a stream of its own. While it carries a message, the GPU packs the next one,
updates by the sum of the one before, and unpacks the one before that. All ranks queue the stages in the same order, and
each waits only for the transfer that it needs.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ..arrays.arrays import add_in_pairs, local_sum, run_quietly
from ..memory.device import DeviceMemory
from .calls import Confirm
from .compression import Compression
from .pipeline import Arrays, TransferPipeline, are_plain
from .plan import Plan
from .values import Values


class GpuPipeline(TransferPipeline):
    """The :class:`~.pipeline.Pipeline` of values that lie on GPUs."""

    def __init__(self, values: Values, compression: Compression | None) -> None:
        """Do as the base class does; the values must lie on a GPU. Local."""
        super().__init__(values, compression)
        assert isinstance(self._memory, DeviceMemory)
        self._gpu, self._order, self._copy = self._memory.gpu, self._memory.order, self._memory.copy
        self.streams = self._order
        if self._in_pairs:
            self._add = partial(add_in_pairs, own=self._transport.rank)

    # --- Before the ranks agree

    def prepare(self, plan: Plan) -> None:
        """Prepare a plan as the base class does; if the updater takes whole values, bind it to them. MemoryError if
        this rank lacks memory. Local.
        """
        super().prepare(plan)
        # Bound now, as it uploads addresses: memory may be short, and the ranks have not agreed yet.
        self._order.run(lambda: plan.update_whole)

    def add_lists(self, plan: Plan, sources: Arrays) -> Arrays:
        """Return the sources, each key's list replaced by its sum; unchanged if a codec packs each array. Local."""
        # A codec of ranges packs each array by itself.
        by_array = self._compression is not None and self._compression.codec.elementwise
        if by_array or are_plain(sources) or all(len(group) == 1 for group in sources):
            return sources
        return self._order.run(run_quietly, self._local_sums, plan, sources)

    def _local_sums(self, plan: Plan, sources: Arrays) -> Arrays:
        """Return for each key its list's sum, or only array, in a tuple of one; () for an empty list. Local."""
        pairs = zip(plan.entries, sources, strict=True)
        return [(local_sum(group, entry.dtype, self._in_pairs),) if group else () for entry, group in pairs]

    def restoring(self, plan: Plan, confirm: Confirm | None) -> Confirm | None:
        """Copy residuals and codec state now, on the store's stream; return ``confirm`` wrapped to put them back if it
        raises. Uncompressed, return the given one. Local.
        """
        return self._order.run(super().restoring, plan, confirm)

    # --- Push and pull

    def _early_outs(self, plan: Plan, sources: Arrays | None, targets: Arrays) -> Arrays | None:
        """Return the targets if they may be filled while later messages are sent, else an empty tuple. Local."""
        return targets if plan.overlaps and self._lie_apart(plan, sources, targets) else ()

    def _lie_apart(self, plan: Plan, sources: Arrays | None, targets: Arrays) -> bool:
        """Return whether all arrays are plain and none overlaps another, a key's own target and source excepted. Local.

        Then targets may be filled before the sources of other keys are read.
        """
        sources = self._values.buffers(plan) if sources is None else sources
        if not (are_plain(sources) and are_plain(targets)):
            return False
        every = [*sources, *targets]
        low = np.array(self._gpu.addresses(every), np.int64)
        high = low + np.array([array.nbytes for array in every], np.int64)
        kept = high > low
        # A target that is its own key's source does not count twice.
        kept[len(sources) :] &= low[len(sources) :] != low[: len(sources)]
        # Sorted by their first bytes, disjoint arrays end before the next one begins.
        low, high = low[kept], high[kept]
        order = np.argsort(low)
        return bool((high[order][:-1] <= low[order][1:]).all())
