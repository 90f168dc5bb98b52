"""The values of a store: its keys, the memory of each value, and the plans of calls on them."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np

from ..arrays.arrays import address_of
from ..memory.device import DeviceMemory
from ..protocols import Array, Gpu, Key, Transport
from .alltoallv import gather
from .arena import Arena, Block, Place
from .keys import Entry, KeyTable
from .plan import Plan, Planner, Plans, by_block
from .spans import Spans


class PlanListener(Protocol):
    """An object that keeps plans, or things made of them, such as a captured step."""

    def invalidate(self) -> None:
        """Drop plans and things made of them: values move, or are updated in another way, on all ranks alike. Local."""
        ...


class Values:
    """Gives keys their memory, and lists of keys their plans. Methods are collective unless marked *Local*."""

    def __init__(self, transport: Transport, planner: Planner, root: int, pooling: bool) -> None:
        """Allocate nothing. Without ``pooling`` each value of a host will have its own block, and one owner. Local."""
        self.transport, self._memory, self._root = transport, transport.memory, root
        self.at_root = transport.rank == root
        """Whether this rank is the root: its arrays are stored by ``init``, ``set`` and ``broadcast``."""
        self.planner = planner
        """Makes plans. Call :meth:`invalidate` after a change: older plans belong to the planner before."""
        self.table = KeyTable()
        self.listeners: WeakSet[PlanListener] = WeakSet()
        self.plans = Plans()
        self._arena = Arena(transport, pooling)

    # --- Plans

    def plan(self, keys: tuple[Key, ...]) -> Plan:
        """Return the plan for known keys, kept or new; TypeError or KeyNotInitialized for others. Local."""
        plan = self.plans.single.get(keys[0]) if len(keys) == 1 else self.plans.lists.get(keys)
        if plan is None:
            self.table.check_kind(keys)
            plan = Plan(self.planner, self.table.find(keys))
            self.plans.add(plan, len(self.table))
        return plan

    def invalidate_listeners(self) -> None:
        """Make each listener, such as a captured step, drop its plans. Local."""
        for each in list(self.listeners):
            each.invalidate()

    def invalidate(self) -> None:
        """Drop all plans, the listeners', too: values move, or are updated in another way, from now on. Local."""
        self.invalidate_listeners()
        self.plans.clear()

    # --- Keys

    @property
    def blocks(self) -> Sequence[Block]:
        """The blocks that hold values. Local."""
        return self._arena.blocks

    @property
    def dtypes(self) -> set[np.dtype[Any]]:
        """The dtypes of values. Local."""
        return {block.values.dtype for block in self.blocks}

    def add_keys(self, keys: Sequence[Key], arrays: Sequence[Array], sparse: Container[Key] = ()) -> None:
        """Give keys memory for values of the shapes and dtypes of the arrays, of undefined content: :meth:`write` it
        next. Known keys start anew. Collective.

        Only shapes and dtypes of the arrays count; the keys in ``sparse`` are row-sparse.

        Raises:
            MemoryError: on every rank, if one has too little; nothing was changed.
        """
        known = [key for key in keys if key in self.table]
        with self._arena.restored_on_memory_error():
            requests = [(array.dtype, array.size) for array in arrays]
            # Rows are addressed in the state, too: it must be there for all elements of such a block.
            by_rows = {number for number, key in enumerate(keys) if key in sparse}
            places = self._arena.place(requests, [self.table[key].place for key in known], by_rows)
            for number in by_rows:
                places[number].block.by_rows = True
            for block in dict.fromkeys(where.block for where in places):
                block.kept = self.planner.kept(block)
                block.ensure_state(self.planner.updater.slots(block.values.dtype))
        # Only now: until here a rank without memory could still undo all.
        self._remove(known)
        for key, array, where in zip(keys, arrays, places, strict=True):
            self.table.add(key, array.shape, array.dtype, where, key in sparse)
        self._arena.shrink()

    def write(self, keys: Sequence[Key], arrays: Sequence[Array]) -> None:
        """Store the root's arrays, on a GPU those of :meth:`set_apart`, as all ranks' values and in the optimizer's
        copies; none is stale then. Collective.
        """
        entries = self.table.find(keys)
        if self.at_root:
            apart = list(map(self.apart, arrays)) if self._memory.is_host else arrays
            self._memory.copy([entry.value for entry in entries], apart)
        # Of shared memory the root's write is every rank's, once the fence shows it.
        if not self.transport.shared:
            for block, runs in _side_by_side(entries).items():
                for low, high in runs:
                    self.transport.broadcast(block.values[low:high], self._root)
        self.table.stale[[entry.index for entry in entries]] = False
        for entry in entries:
            entry.nonzero = None
        self.transport.fence()
        self.copy_to_masters(keys)

    def copy_to_masters(self, keys: Sequence[Key]) -> None:
        """Copy these keys' values to the optimizer's float32 copies of them, where it keeps such. Local."""
        if not any("master" in block.state for block in self.blocks):
            return
        buckets = self.plan(tuple(keys)).buckets
        for update in (each for bucket in buckets for each in bucket.joint_updates if "master" in each.state):
            self._memory.copy((update.state["master"],), (update.value,))

    def delete(self, keys: Sequence[Key]) -> None:
        """Remove keys and drop all plans; give large segments without values back to the system. Collective."""
        self._arena.release(self._remove(keys))
        self._arena.shrink()

    def _remove(self, keys: Sequence[Key]) -> list[Place]:
        """Remove keys, drop all plans; zero state and residuals of these keys in blocks that values share. Return their
        places, still allocated. Local.
        """
        if not keys:
            return []
        self._zero_state([entry for entry in self.table.find(keys) if self._arena.is_shared(entry.place.block)])
        places = [self.table.remove(key) for key in keys]
        self.invalidate()
        return places

    def _zero_state(self, entries: Sequence[Entry]) -> None:
        """Zero the optimizer state and residuals of entries, as new keys may get their places. Local."""
        # Only the owner has state; every rank has residuals of its own.
        for block, runs in _side_by_side(entries).items():
            for low, high in runs & self.planner.owned(block):
                for state in block.state_of(low, high).values():
                    state.fill(0)
            for residual in block.residuals:
                for low, high in runs:
                    residual[low:high].fill(0)

    def drop_residuals(self, keeps_memory: bool = False) -> None:
        """Drop all plans, sums and codec state; drop residuals, too, or zero them if ``keeps_memory``. Local."""
        self.invalidate()
        for block in self.blocks:
            if not keeps_memory:
                block.residuals.clear()
            for residual in block.residuals:
                residual.fill(0)
            block.sums = None
        for entry in self.table.entries():
            entry.codec_state.clear()

    def gather_counts(self) -> None:
        """Set all ranks' update counts to the owners'; mark values of unequal counts as stale. Collective.

        None is marked where a push leaves every rank with the newest values.
        """
        counts = self.table.counts
        of_ranks = gather(self.transport, counts)
        entries = list(self.table.entries())
        rows = np.fromiter((entry.index for entry in entries), np.intp)
        owners = np.fromiter((entry.place.block.grid.owner(entry.place.start) for entry in entries), np.intp)
        latest = of_ranks[owners, rows]
        if not self.planner.current:
            self.table.stale[rows] |= (of_ranks[:, rows] != latest).any(axis=0)
        counts[rows] = latest

    def close(self) -> None:
        """Drop all keys, values and plans; the transport frees the memory later. Local."""
        self.invalidate()
        self.table, self._arena = KeyTable(), Arena(self.transport)

    # --- Buffers

    def add_buffers(self, plan: Plan) -> None:
        """Give keys zeroed buffers where they have none. If a block gets memory for them, drop all plans: this one is
        outdated, too. Collective.

        Raises:
            MemoryError: on every rank, if one has too little.
        """
        rows = self.transport.sharing_size
        for block in dict.fromkeys(entry.place.block for entry in plan.entries):
            if block.buffers is None:
                memory = self.transport.allocate(rows * block.values.nbytes)
                block.buffers = memory.view(block.values.dtype).reshape(rows, -1)
                self.invalidate()  # plans of this block know of no buffers
        for entry in plan.entries:
            if not self.table.buffered[entry.index]:
                entry.buffer(self.transport.sharing_rank).fill(0)  # an earlier key may have left its contents there
        self.table.buffered[plan.rows] = True

    def find_unbuffered(self, plan: Plan) -> Key | None:
        """Return the first key of a plan that has no push buffers, or None if all have them. Local."""
        if self.table.buffered[plan.rows].all():
            return None
        return next(entry.key for entry in plan.entries if not self.table.buffered[entry.index])

    def buffers(self, plan: Plan) -> list[Array]:
        """Return a view of this rank's push buffer for each key; all must have one. Local."""
        return [entry.buffer(self.transport.sharing_rank) for entry in plan.entries]

    def are_buffers(self, plan: Plan, arrays: Sequence[Array]) -> bool:
        """Return whether each array is the memory of this rank's push buffer of its key; all must have one. Local."""
        return all(map(_is_same, arrays, self.buffers(plan)))

    @contextmanager
    def zeroed_buffers(self, plan: Plan) -> Iterator[None]:
        """In a with block: zero this rank's buffers of the keys, and restore their contents at its end. Local."""
        # The program's own numbers are in them: it has left join, and may still look there.
        buffers = self.buffers(plan)
        contents = [buffer.copy() for buffer in buffers]
        for buffer in buffers:
            buffer.fill(0)
        try:
            yield
        finally:
            for buffer, content in zip(buffers, contents, strict=True):
                np.copyto(buffer, content)

    # --- Callers' arrays in the memory of values

    def lie_apart(self, gpu: Gpu, arrays: Sequence[Array]) -> bool:
        """Return whether none of a GPU's arrays begins in the memory of values, free parts, too. Local."""
        return not self._arena.holds_any(np.array(gpu.addresses(arrays), np.uint64), gpu.address)

    def is_view(self, array: Array) -> bool:
        """Return whether an array overlaps the memory of values, free parts, too, or a GPU's begins there. Local."""
        if isinstance(self._memory, DeviceMemory):
            # CuPy says that arrays lie apart if one came from another library, wherever that got its memory.
            return array.size > 0 and not self.lie_apart(self._memory.gpu, [array])
        # An array that owns its memory has no base: most arrays need no search.
        return not (type(array) is np.ndarray and array.base is None) and self._arena.holds(array)

    def apart(self, array: Array) -> Array:
        """Return the array, or a copy if it lies in the memory of values, which a call may change. Local."""
        if not self.is_view(array):
            return array
        copied = self._memory.empty(array.shape, array.dtype)
        self._memory.copy((copied,), (array,))
        return copied

    def set_apart(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """Return the arrays, for a later :meth:`write`; on a GPU's root, with a copy in place of each that begins in
        the memory of values. Copies are only queued. Local.

        The host's root copies in :meth:`write`; a GPU's now, before the call, as its memory may be short.
        """
        if self._memory.is_host or not self.at_root or not any(map(self.is_view, arrays)):
            return arrays
        return self._memory.order.run(lambda given: list(map(self.apart, given)), arrays)

    def fillable(self, out: Array, entry: Entry) -> Array:
        """Return the array to fill: ``out``, or the entry's read-only view if ``out`` is the value itself; raise
        TypeError if it lies in other values. On a GPU always ``out``. Local.
        """
        if self._memory.is_host and _is_same(out, entry.value):
            return entry.view
        self.check_apart(out)
        return out

    def check_apart(self, out: Array) -> None:
        """Raise TypeError if a host array to fill lies in the memory of values: it would overwrite one. Local."""
        if self._memory.is_host and self.is_view(out):
            raise TypeError(
                "the array to fill lies in the memory of the store's values, and filling it would overwrite one; "
                "pass an out= with memory of its own"
            )


def _side_by_side(entries: Sequence[Entry]) -> dict[Block, Spans]:
    """Return for each block the ranges of its entries, joined; blocks in the order of the entries. Local."""
    places = {block: [entries[item].place for item in items] for block, items in by_block(entries).items()}
    return {block: Spans.join((each.start, each.start + each.size) for each in run) for block, run in places.items()}


def _is_same(array: Array, other: Array) -> bool:
    """Return whether two arrays are the same elements of memory. Local."""
    if array.shape != other.shape or array.dtype != other.dtype or not array.flags.c_contiguous:
        return False
    return address_of(array) == address_of(other)
