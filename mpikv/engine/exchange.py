"""The engine of a store: its values, the pipeline that moves them, and the settings of both.

The updater, its placement and the compression are the same on all ranks. Each change of one makes a new pipeline and
drops all plans: so a push need not look at settings.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays.arrays import storable, zeros
from ..errors import Unsupported, brief
from ..memory.host import private_allocator
from ..optimizers import Optimizer
from ..optimizers.recording import is_recordable
from ..optimizers.updaters import Assign, check_state
from ..protocols import Array, Codec, GpuKernels, Kernels, Placement, StepTable, Transfers, Transport, Updater
from .arena import Block
from .calls import Steps
from .compression import Compression, check_arrays, make_compression
from .gpu_pipeline import GpuPipeline
from .pipeline import Arrays, Pipeline, TransferPipeline, groups_of
from .placement import place
from .plan import Plan, Planner
from .spans import Spans
from .team import Team
from .values import Values


class Exchange:
    """Keeps a store's values and settings. Methods are collective unless marked *Local*."""

    def __init__(
        self, transport: Transport, placement: str, root: int, kernels: Kernels, deterministic: bool, threads: int
    ) -> None:
        """Allocate scratch memory, twice a message; begin with ASSIGN, and no values or threads. On GPUs collective."""
        self.transport, self._root, self._wanted, self._kernels = transport, root, placement, kernels
        self.in_pairs = deterministic
        """Whether sums are made as in :func:`mpikv.arrays.arrays.add_in_pairs`."""
        self.summed = transport.size
        """The number of ranks in the sums that the updater gets; 0: it gets each rank's own arrays."""
        self.compression: Compression | None = None
        updater = Assign()
        self._revision = updater.revision
        placed = place(placement, transport, updater, root)
        # Half precision is summed in float32: twice as wide as the message.
        scratch = private_allocator(transport)(2 * transport.limit)
        team = Team(threads) if threads > 1 and transport.memory.is_host else None
        planner = Planner(transport, placed, updater, kernels, scratch, deterministic, team=team)
        self.values = Values(transport, planner, root, pooling=placement != "owners")
        self._use_planner(planner)

    def _use_planner(self, planner: Planner) -> None:
        """Use a planner from now on: make a pipeline with the present compression; drop all plans. Local."""
        self.updater: Updater = planner.updater
        self.placement: Placement = planner.placement
        self.values.planner = planner
        self.values.invalidate()
        kind = TransferPipeline if isinstance(self.transport, Transfers) else Pipeline
        self.pipeline = (kind if self.transport.memory.is_host else GpuPipeline)(self.values, self.compression)

    def close(self) -> None:
        """Drop values, plans and codec, and tell threads to end; the transport frees the memory later. Local."""
        self.values.close()
        # A codec has memory of its own. The pipeline and the plans refer to that of the transport, as scratch does.
        self.compression = None
        if (team := self.values.planner.team) is not None:
            team.close()
        self._use_planner(replace(self.values.planner, scratch=zeros(0), team=None))

    # --- Updaters

    def steps(self, plan: Plan) -> Steps:
        """Return the steps of the keys' next updates, e.g. learning rates; count none. If the updater's settings
        changed, check them first, and maybe raise. Local.
        """
        updater, keys = self.updater, plan.keys
        if updater.revision != self._revision:
            self.check_slots()
        # Numbers of numpy are slow one by one, so single keys and equal counts have ways of their own.
        counts = self.values.table.counts[plan.rows]
        if len(keys) == 1:
            return Steps((updater.step(keys[0], int(counts) + 1),), True)
        if not updater.by_key and len(keys) and np.logical_and.reduce(counts == counts[0]):
            return Steps((updater.step(keys[0], int(counts[0]) + 1),) * len(keys), True)
        steps = [updater.step(key, count + 1) for key, count in zip(keys, counts.tolist(), strict=True)]
        return Steps(steps, not steps or steps.count(steps[0]) == len(steps))

    def check_slots(self) -> None:
        """Raise if the updater's changed settings need other state; compile kernels, and note its revision. Local."""
        for block in self.values.blocks:
            check_state(self.updater, block.values.dtype, block.state)
        # Other options may need other code.
        self._prepare_kernels(self.updater, self.values.dtypes)
        self._revision = self.updater.revision

    def check_storable(self, arrays: Sequence[Array]) -> None:
        """Raise if values like these arrays cannot be stored or updated; compile kernels for their dtypes. Local."""
        self._prepare_kernels(self.updater, set(map(storable, {array.dtype for array in arrays})))

    def place_updater(self, updater: Updater, dtypes: Set[np.dtype[Any]] = frozenset()) -> Placement:
        """Return the placement that an updater would get; use neither yet. Set the updater's rank count, and compile
        its kernels for ``dtypes`` and those of values; raise if one is impossible. Local.
        """
        placement = place(self._wanted, self.transport, updater, self._root, self.compression is not None)
        self._prepare_kernels(updater, self.values.dtypes | dtypes)
        return placement

    def _prepare_kernels(self, updater: Updater, dtypes: Set[np.dtype[Any]]) -> None:
        """Compile an updater's kernels for these dtypes, set its number of ranks; raise if one is impossible. Local."""
        self.set_rank_count(updater)
        for dtype in dtypes:
            try:
                updater.slots(dtype)
                self._kernels.prepare(updater, dtype, self.values.planner.adding)
            except Unsupported as error:
                keys = [key for key in self.values.table if self.values.table[key].dtype == dtype]
                error.args = (f"keys {brief(keys)}: {error}" if keys else str(error),)
                raise

    def set_rank_count(self, updater: Updater) -> None:
        """Tell an optimizer how many ranks its sums have, 0 if there are no sums; it raises if it cannot average these.
        Do nothing for other updaters. Local.
        """
        if isinstance(updater, Optimizer):
            updater.sums_over(self.summed)

    def adopt(self, updater: Updater, state_follows: bool = False) -> None:
        """Set the updater, and maybe another placement: publish stale values, zero update counts and state, drop plans.
        With ``state_follows`` fitting state stays, as the caller writes it next. Collective.

        ``state_follows``: the caller is about to write all state, so memory of the present state may be reused
        as it is.
        """
        placement, table = self.place_updater(updater), self.values.table
        # Before anything changes, as a GPU may have too little memory.
        planner = replace(self.values.planner, updater=updater, placement=placement)
        changes = list[tuple[Block, Spans, dict[str, Array]]]()
        for block in self.values.blocks:
            # The elements of this rank may be others under the new placement, and need state there.
            kept, slots = planner.kept(block), updater.slots(block.values.dtype)
            reuses = state_follows and block.has_state(slots, kept)
            changes.append((block, kept, block.state if reuses else block.new_state(slots, kept)))
        # The new placement may have other owners, and they need the newest values.
        # On all ranks the same ones, so all publish them together.
        stale = [entry for entry in table.entries() if table.stale[entry.index]]
        if stale:
            # ASSIGN has no state to check: the present updater may have been changed to need other state than there is.
            self.pipeline.publish(Plan(replace(self.values.planner, updater=Assign()), stale))
        # From here nothing can fail: all memory has been taken.
        self._revision = updater.revision
        self._use_planner(planner)
        for block, kept, state in changes:
            if kept != block.kept:
                block.sums = None  # its memory for sums is of the elements kept before
            block.kept, block.state = kept, state
        for entry in table.entries():
            entry.nonzero = None  # other ranks may own the rows from now on
        # The state starts at zero, and with it the count that a step depends on; versions go on.
        table.start_counts()
        self.values.copy_to_masters(tuple(table))

    # --- Calls that a GPU makes again and again

    def capture_blocker(self) -> str:
        """Return why this updater and these settings rule out graph capture of a pushpull; "" if they do not. Local."""
        updater, planner = self.updater, self.values.planner
        if updater.may_raise:
            return "an updater function is Python, which runs on the host"
        if planner.whole:
            return f"{type(updater).__name__} updates whole values"
        if isinstance(self._kernels, GpuKernels) and not (updater.assigns or is_recordable(updater)):
            return f"{type(updater).__name__} is Python, which runs on the host"
        if planner.compressed:
            return "pushes are compressed"
        return "deterministic sums allocate memory in each call" if self.in_pairs and self.transport.size > 1 else ""

    def make_step_table(self, plan: Plan) -> StepTable | None:
        """Return a table in new GPU memory for the steps of a plan's updates; None if the updater, ASSIGN, has no
        steps. Local.

        The caller has checked that there is no :meth:`capture_blocker`.

        Raises:
            MemoryError: the GPU has too little.
        """
        if self.updater.assigns:
            return None
        assert isinstance(self._kernels, GpuKernels)
        return self._kernels.step_table(self.updater, self.transport.memory, len(plan.keys), set(plan.dtypes))

    # --- Compression

    def pushable(self, plan: Plan, sources: Arrays | None) -> Arrays | None:
        """Return the arrays to push: the sources, on a GPU with lists summed; None for the buffers. With compression
        check the arrays, return buffers as arrays, too, and allocate residuals. Local.

        Raises:
            NotFinite: an element cannot be compressed.
        """
        if self.compression is not None:
            sources = self.values.buffers(plan) if sources is None else sources
            check_arrays(self.compression.codec, plan, groups_of(sources), self.transport.memory)
        return None if sources is None else self.pipeline.add_lists(plan, sources)

    def compress(self, codec: Codec | None) -> None:
        """Compress pushes from now on, or stop (None); drop plans, residuals and codec state. Without an updater, the
        placement may change. Collective.
        """
        # Before anything changes, as there may be too little memory.
        self.compression = None if codec is None else make_compression(codec, self.transport, self.in_pairs)
        self.values.drop_residuals()
        self._use_planner(replace(self.values.planner, compressed=codec is not None))
        # Kernels add inside the update rule only without compression: other kernels may be needed now. And sums without
        # an updater may have another placement.
        if self.place_updater(self.updater).name != self.placement.name:
            self.adopt(self.updater)
