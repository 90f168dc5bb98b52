"""Row-sparse pushes and pulls: each rank sends rows to their owners; the owners sum and update them.

An element has the same owner as in a dense push, since its optimizer state lives there. Shard boundaries may fall
inside a row. Such a row goes to all of its owners, and each updates its own elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from math import gcd, prod
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from ..arrays.arrays import accumulator
from ..engine.calls import Confirm, Steps
from ..engine.keys import Entry
from ..engine.plan import Plan
from ..errors import Unsupported
from ..memory.device import ALIGNMENT
from ..memory.row_sparse import RowSparse, cast_rows, sum_rows
from ..optimizers.updaters import CallableUpdater
from ..protocols import Array, Key, Placement
from .messages import Kind, Packed, Selected, Split

if TYPE_CHECKING:
    from ..engine.exchange import Exchange


def check_updater(exchange: Exchange) -> None:
    """Raise Unsupported if this store cannot push rows: by compression, or an optimizer of whole values. Local."""
    updater = exchange.updater
    if exchange.compression is not None:
        raise Unsupported(
            f"rows cannot be compressed by {exchange.compression.codec.settings()}; push to_dense(), or end the "
            "compression by set_gradient_compression(None)"
        )
    if not isinstance(updater, CallableUpdater) and (updater.may_raise or not updater.elementwise):
        raise Unsupported(
            f"{type(updater).__name__} updates whole values and cannot update some rows; push to_dense(), or use an "
            "element-wise optimizer"
        )


class Rows:
    """Row-sparse initial values, pushes and pulls of a store. Collective, but for :attr:`sent` and :meth:`load`."""

    def __init__(self, exchange: Exchange, root: int) -> None:
        """Keep the parts of a store; allocate nothing. Local."""
        self._exchange, self._root = exchange, root
        self._transport, self._memory = exchange.transport, exchange.transport.memory
        self._tables = self._memory.workspace
        self._messages = Packed(exchange.transport) if self._memory.is_host else Split(exchange.transport)
        self._owners_of = WeakKeyDictionary[Plan, _Owners]()

    @property
    def sent(self) -> int:
        """Bytes of row numbers and rows that this rank has sent to others so far. Local."""
        return self._messages.sent

    def load(self, dtypes: Sequence[np.dtype[Any]]) -> None:
        """Compile or load the GPU's kernels for rows of these dtypes; nothing on the host. Local."""
        for dtype in dict.fromkeys(dtypes):
            self._tables.prepare_rows(dtype)

    def add_keys(self, keys: Sequence[Key], given: Sequence[RowSparse]) -> None:
        """Add row-sparse keys: allocate their values, and store the root's rows. Collective.

        Raises:
            MemoryError: on every rank, if one has too little; nothing was changed.
        """
        table = self._exchange.values.table
        likes = [np.broadcast_to(np.zeros((), rows.dtype), rows.shape) for rows in given]
        with ExitStack() as held:
            sent = self._send_from_root(keys, given, held)
            self._exchange.values.add_keys(keys, likes, sparse=keys)
            entries = [table[key] for key in keys]
            for entry, (ids, rows) in zip(entries, sent, strict=True):
                # One rank of those that share a value's memory writes it; the fence below shows it to the others.
                if self._transport.sharing_rank == 0:
                    if entry.place.block.old:
                        entry.value.fill(0)
                    self._tables.put_rows(_table(entry, entry.value), ids, rows)
                # Without an updater a push clears the possibly nonzero rows: record them from the start.
                mine = self._owners(entry).split(ids, self._transport.size)[self._transport.rank]
                entry.nonzero = ids[mine].copy()
        self._transport.fence()
        self._exchange.values.copy_to_masters(keys)

    def push(self, plan: Plan, given: Sequence[RowSparse], steps: Steps, confirm: Confirm | None) -> None:
        """Sum the rows over ranks, update these rows at their owners, and count the push. Collective.

        Raises:
            MemoryError: on every rank, if the GPU of one has too little; nothing was changed.
        """
        with ExitStack() as held:
            # Sums first: too little memory must raise before any value changes.
            sums = self._sum_rows(plan, [(rows.indices, _flat(rows)) for rows in given], held)
            every = zip(plan.entries, steps.each, sums, strict=True)
            if confirm is not None:
                # A user's updater: it sees whole values, on the root.
                assert isinstance(self._exchange.updater, CallableUpdater)
                mine = every if self._transport.rank == self._root else ()
                whole = ((entry, self._cast(entry, *rows), step) for entry, step, rows in mine)
                self._exchange.pipeline.update_copies(whole, confirm)
            else:
                for entry, step, (ids, total) in every:
                    self._update(entry, ids, total, step)
        self._exchange.values.table.counts[plan.rows] += 1
        if not self._exchange.pipeline.current:
            # Only owners have the new rows now: a pull fetches them before it reads.
            self._exchange.values.table.stale[plan.rows] = True

    def _reserve(self, nbytes: int, held: ExitStack) -> None:
        """On GPUs reserve memory until ``held`` is left, or MemoryError on all ranks; collective. On hosts nothing."""
        if not self._memory.is_host:
            # Each rank allocates its own number of bytes: no other rank reads this memory.
            held.enter_context(self._tables.over(self._transport.allocate(nbytes)))

    def pull(self, plan: Plan, pulled: Sequence[Selected]) -> None:
        """Read the rows of rising numbers in ``pulled`` into the array beside them. Collective if a value is stale."""
        stale = self._exchange.values.table.stale
        # The flags are the same on every rank, so all ranks agree whether to communicate.
        asked = [item for item, entry in enumerate(plan.entries) if stale[entry.index]]
        for entry, (ids, rows) in zip(plan.entries, pulled, strict=True):
            self._tables.take_rows(_table(entry, entry.value), ids, rows)
        if asked:
            with ExitStack() as held:
                self._fetch_stale([plan.entries[item] for item in asked], [pulled[item] for item in asked], held)

    # --- Sums

    def _sum_rows(self, plan: Plan, given: Sequence[Selected], held: ExitStack) -> list[Selected]:
        """By value return (numbers, sums) of the rows with elements of this rank; reserve GPU memory. Collective."""
        if self._transport.size > 1:
            addends = self._send_to_owners(plan, given, held)
        else:
            addends = [given]
            if not self._memory.is_host:
                self._reserve(self._bound(plan.entries, [[ids for ids, _ in given]]), held)
        return [
            sum_rows(each, accumulator(entry.dtype), self._exchange.in_pairs, self._tables)
            for entry, each in zip(plan.entries, zip(*addends, strict=True), strict=True)
        ]

    def _send_to_owners(self, plan: Plan, given: Sequence[Selected], held: ExitStack) -> Sequence[Sequence[Selected]]:
        """Send rows to owners; return by sender, this rank included, then by value, those with elements of this rank.
        Reserve GPU memory for the rest of the push. Collective.
        """
        entries, numbers, values = plan.entries, [ids for ids, _ in given], [rows for _, rows in given]
        kinds, rank, label = [_kind(entry) for entry in entries], self._transport.rank, ("push", plan.keys)

        def reserve(received: Sequence[Sequence[Array]]) -> None:
            """Reserve GPU memory for the rest of the push, now that the received numbers are known. Collective."""
            self._reserve(self._bound(entries, [*parts, *received]), held)

        if self._exchange.placement.everywhere:
            parts = [numbers]
            addends = self._messages.send(parts, lambda: [values], kinds, label, reserve)
            # Its own rows without a detour: the exchange leaves that part undefined.
            addends[rank] = list(given)
        else:
            size, pairs = self._transport.size, zip(entries, numbers, strict=True)
            places = [self._owners(entry).split(ids, size) for entry, ids in pairs]
            parts = [[ids[at] for ids, at in zip(numbers, each, strict=True)] for each in zip(*places, strict=True)]
            rows = list[Sequence[Array]]()

            def split() -> Sequence[Sequence[Array]]:
                """Return for each rank the rows that it owns, a list by value; keep them in ``rows``. Local."""
                some = [self._split(*each) for each in zip(entries, values, places, strict=True)]
                rows.extend(zip(*some, strict=True))
                return rows

            addends = self._messages.send(parts, split, kinds, label, reserve)
            addends[rank] = list(zip(parts[rank], rows[rank], strict=True))
        return addends

    def _bound(self, entries: Sequence[Entry], every: Sequence[Sequence[Array]]) -> int:
        """Return an upper bound of the GPU memory that a push takes, in bytes. Local.

        ``every``: numbers of the rows that this rank has or receives.
        """
        wide = [Kind(prod(entry.shape[1:]), accumulator(entry.dtype)) for entry in entries]
        levels = 1 + self._transport.size.bit_length() if self._exchange.in_pairs else 1
        slots = max((len(self._exchange.updater.slots(entry.dtype)) for entry in entries), default=0)
        cleared = sum(entry.nonzero.nbytes for entry in entries if entry.nonzero is not None)
        pieces = 0 if all(entry.keeps_all for entry in entries) else 2
        # Copies of a row, none wider than a row of sums: sent or received; the sum at each level; its cast; the value
        # as it is read and written; each state. A piece may be as short as one element, hence two numbers per element.
        # Bounds, no exact count: memory that is left over is given back, and too little would end the store.
        rows = _bound_rows(every, wide, copies=4 + levels + slots + pieces, arrays=1 + 3 * levels)
        return rows + cleared + len(entries) * (16 + 2 * slots) * ALIGNMENT

    def _send_from_root(self, keys: Sequence[Key], given: Sequence[RowSparse], held: ExitStack) -> Sequence[Selected]:
        """Send the root's rows to every rank, and return them; reserve GPU memory. Collective."""
        mine = [(rows.indices, _flat(rows)) for rows in given]
        kinds = [Kind(prod(rows.shape[1:]), rows.dtype) for rows in given]

        def reserve(received: Sequence[Sequence[Array]]) -> None:
            """Reserve GPU memory for the rows to send or receive. Collective."""
            self._reserve(_bound_rows([[ids for ids, _ in mine], *received], kinds, copies=1, arrays=3), held)

        sent = mine if self._transport.rank == self._root else []
        numbers, rows = [ids for ids, _ in sent], [values for _, values in sent]
        received = self._messages.send([numbers], lambda: [rows], kinds, ("init", tuple(keys)), reserve)
        if sent or not self._memory.is_host:
            return sent or received[self._root]
        # Copy: entering the keys may send messages through the same receive buffer.
        return [(ids.copy(), values.copy()) for ids, values in received[self._root]]

    def _split(self, entry: Entry, values: Array, places: Sequence[Any]) -> list[Array]:
        """Return for each rank the rows at its positions: views of ``values``, or of one copy. Local."""
        if self._owners(entry).alone:
            return [values[at] for at in places]
        # One copy for all ranks: rows of each are then one range.
        order, ends = np.concatenate(places), np.cumsum([0, *map(len, places)]).tolist()
        values = self._tables.take_rows(values, order)
        return [values[low:high] for low, high in pairwise(ends)]

    def _owners(self, entry: Entry) -> _Owners:
        """Return the owners of a value's elements, cached with its plan. Local."""
        plan = self._exchange.values.plan((entry.key,))
        owners = self._owners_of.get(plan)
        if owners is None:
            owners = self._owners_of[plan] = _Owners(entry, self._exchange.placement, self._transport.rank)
        return owners

    # --- Updates

    def _update(self, entry: Entry, ids: Array, total: Array, step: Any) -> None:
        """Update own elements of rows by their sum; with no updater set them, zero others, note ``nonzero``. Local."""
        updater = self._exchange.updater
        if updater.assigns:
            # Without an updater a push replaces the value, so rows outside of the sum become zero.
            self._clear(entry)
            if entry.row_sparse:
                entry.nonzero = ids
        # Rows that lie over a boundary have two owners or more, and each updates its own elements.
        value = _table(entry, entry.value)
        whole, parts = self._owners(entry).own(self._transport.rank, ids)
        sums = total if isinstance(whole, slice) else self._tables.take_rows(total, whole)
        if updater.assigns:
            self._tables.put_rows(value, ids[whole], sums)
            if parts:
                into = [value[ids[at], low:high] for at, low, high in parts]
                self._tables.copy(into, [total[at, low:high] for at, low, high in parts])
            return
        # The host updates by numpy: other kernels would be compiled here, in the middle of a call.
        bind = updater.bind if self._memory.is_host else partial(self._exchange.values.planner.kernels.bind, updater)
        states, pieces = self._find_states(entry, ids[whole])
        rows, *others = self._tables.numbers((ids[whole],) if pieces is None else (ids[whole], pieces))
        of_states = others[0] if others else rows
        # Copies, side by side: an optimizer updates one contiguous array per call, however many rows.
        picked = self._tables.take_rows(value, rows)
        picked_states = {name: self._tables.take_rows(state, of_states) for name, state in states.items()}
        flat = {name: state.reshape(-1) for name, state in picked_states.items()}
        bind(sums.reshape(-1), picked.reshape(-1), flat)(step)
        self._tables.put_rows(value, rows, picked)
        for name, state in picked_states.items():
            self._tables.put_rows(states[name], of_states, state)
        for at, low, high in parts:
            begin = int(ids[at]) * value.shape[1]
            part = entry.state_of(begin + low, begin + high)
            bind(total[at, low:high], value[ids[at], low:high], part)(step)

    def _find_states(self, entry: Entry, ids: Array) -> tuple[Mapping[str, Array], Array | None]:
        """Return the states as tables of rows, and None; or as tables of pieces of rows, and these rows' pieces. Local.

        A state of the whole value has the value's row numbers; the places are None. Otherwise the state holds this
        rank's ranges only, end to end; its tables consist of pieces of rows, and the places are numbers of pieces.
        """
        if entry.keeps_all:
            return {name: _table(entry, array) for name, array in entry.state.items()}, None
        owners, state = self._owners(entry), entry.place.block.state
        unit = owners.unit
        tables = {name: array[: array.size // unit * unit].reshape(-1, unit) for name, array in state.items()}
        return tables, owners.pieces(ids)

    def _clear(self, entry: Entry) -> None:
        """Write zeros to this rank's possibly nonzero elements of a value. Local."""
        value, place = _table(entry, entry.value), entry.place
        if entry.nonzero is None:
            mine = self._exchange.values.planner.owned(place.block)
            for low, high in mine.within(place.start, place.start + place.size):
                place.block.values[low:high] = 0
            return
        ids = entry.nonzero
        whole, parts = self._owners(entry).own(self._transport.rank, ids)
        self._tables.put_rows(value, ids[whole], None)
        for at, low, high in parts:
            value[ids[at], low:high] = 0

    def _cast(self, entry: Entry, ids: Array, total: Array) -> RowSparse:
        """Return a sum of rows as a RowSparse of the value's dtype and shape. Local."""
        rows = cast_rows(self._tables, total, entry.dtype)
        return RowSparse(ids, rows.reshape(ids.size, *entry.shape[1:]), entry.shape)

    # --- Pulls

    def _fetch_stale(self, entries: Sequence[Entry], pulled: Sequence[Selected], held: ExitStack) -> None:
        """Fetch rows of stale values from other owners into ``pulled``, which has own elements already. Collective."""
        owners, size = [self._owners(entry) for entry in entries], self._transport.size
        numbers = [[ids[at] for at in owner.split(ids, size)] for owner, (ids, _) in zip(owners, pulled, strict=True)]
        wanted, kinds = list(zip(*numbers, strict=True)), [_kind(entry) for entry in entries]

        def reserve(asked: Sequence[Sequence[Array]]) -> None:
            """Reserve GPU memory for rows that others ask for, and for those that this rank wants. Collective."""
            # Two copies: rows sent or received, and of the received ones those of one owner.
            self._reserve(_bound_rows((*asked, *wanted), kinds, copies=2, arrays=5), held)

        def take(asked: Sequence[Array]) -> list[Array]:
            """Return copies of the rows that another rank asks for, by value. Local."""
            some = zip(entries, asked, strict=True)
            return [self._tables.take_rows(_table(entry, entry.value), ids) for entry, ids in some]

        received = self._messages.fetch(wanted, kinds, tuple(entry.key for entry in entries), take, reserve)
        for rank, part in enumerate(received):
            if rank == self._transport.rank:
                continue
            for owner, (ids, rows), some, values in zip(owners, pulled, wanted[rank], part, strict=True):
                at = np.searchsorted(ids, some)
                whole, pieces = owner.own(rank, some)
                mine = values if isinstance(whole, slice) else self._tables.take_rows(values, whole)
                self._tables.put_rows(rows, at[whole], mine)
                into = [rows[at[row], low:high] for row, low, high in pieces]
                self._tables.copy(into, [values[row, low:high] for row, low, high in pieces])


class _Owners:
    """The owners of a value's elements; of a replicated value, this rank owns all."""

    def __init__(self, entry: Entry, placement: Placement, rank: int) -> None:
        """Find the owners' ranges of the value, and where this rank's lie in its optimizer state. Local."""
        edges, owners, (block, start, size) = [0], list[int](), entry.place
        shares = block.grid.shares(placement, start, start + size)
        for count, owner in ((size, rank),) if placement.everywhere else shares:
            if owners and owners[-1] == owner:
                edges[-1] += count
            elif count:
                owners.append(owner)
                edges.append(edges[-1] + count)
        self._width = max(prod(entry.shape[1:]), 1)
        self._edges, self._owners = np.array(edges), np.array(owners or [0])
        # Offset of this rank's ranges in its state arrays, minus their offset in the value; state holds own ranges
        # only.
        self._shifts = np.array(
            [
                block.kept.locate(start + low, start + high).start - low if owner == rank else 0
                for (low, high), owner in zip(pairwise(edges), owners, strict=True)
            ],
            np.int64,
        )
        # So that pieces of the state are rows of a table: an optimizer then updates many rows by one call.
        self.unit = gcd(self._width, *self._shifts.tolist())
        """Elements per piece: each row and each range of this rank's state consists of whole pieces."""
        # Whether a boundary falls inside a row.
        self._cut = bool((self._edges % self._width).any())
        self.alone = len(self._owners) == 1
        """Whether one rank owns all elements."""

    def _ends(self, ids: Array) -> tuple[Array, Array]:
        """Return for each row the numbers of the owners' ranges that have its first and its last element. Local."""
        first = np.searchsorted(self._edges, ids * self._width, "right") - 1
        if not self._cut:
            return first, first
        last = np.searchsorted(self._edges, (ids + 1) * self._width - 1, "right") - 1
        return first, last

    def split(self, ids: Array, size: int) -> list[Any]:
        """Return for each rank the positions of rows with elements of its own, and of any row in three ranges or more:
        an array, or a slice. Local.

        They are a slice if one rank owns the whole value.
        """
        if self.alone:
            return [slice(None) if rank == self._owners[0] else slice(0, 0) for rank in range(size)]
        first, last = self._ends(ids)
        owner, last_owner = self._owners[first], self._owners[last]
        parts = []
        for rank in range(size):
            needed = owner == rank
            if self._cut:
                needed |= last_owner == rank
                # A range shorter than a row may lie inside of one: then its owner is neither the first nor the last.
                needed |= last > first + 1
            parts.append(np.flatnonzero(needed))
        return parts

    def pieces(self, ids: Array) -> Array:
        """Return the numbers of the pieces of state of rows that this rank owns as a whole. Local."""
        first, _ = self._ends(ids)
        begin = (ids * self._width + self._shifts[first]) // self.unit
        return (begin[:, None] + np.arange(self._width // self.unit)).reshape(-1)

    def own(self, rank: int, ids: Array) -> tuple[Array | slice, Sequence[tuple[int, int, int]]]:
        """Of a rank's rows from :meth:`split`, return the positions of those that it owns whole, and its parts of
        others as (position, first, end). Local.
        """
        if not self._cut:
            return slice(None), ()
        first, last = self._ends(ids)
        parts = [part for at in np.flatnonzero(first != last).tolist() for part in self._parts(rank, at, ids)]
        whole = (first == last) & (self._owners[first] == rank)
        return slice(None) if whole.all() else np.flatnonzero(whole), parts

    def _parts(self, rank: int, at: int, ids: Array) -> Iterator[tuple[int, int, int]]:
        """Yield a rank's parts of one row, as (position, first element, end). Local."""
        begin = int(ids[at]) * self._width
        first, last = (int(end[0]) for end in self._ends(ids[at : at + 1]))
        for number in range(first, last + 1):
            if self._owners[number] == rank:
                low, high = (int(edge) - begin for edge in self._edges[number : number + 2])
                yield at, max(low, 0), min(high, self._width)


def _bound_rows(every: Sequence[Sequence[Array]], kinds: Sequence[Kind], copies: int, arrays: int) -> int:
    """Return an upper bound of GPU memory for ``copies`` of each row in ``arrays`` of each value, in bytes. Local."""
    pairs = (pair for numbers in every for pair in zip(numbers, kinds, strict=False))
    return sum(copies * ids.size * (kind.nbytes + 8) + arrays * ALIGNMENT for ids, kind in pairs)


def _kind(entry: Entry) -> Kind:
    """Return the width and dtype of a value's rows. Local."""
    return Kind(prod(entry.shape[1:]), entry.dtype)


def _table(entry: Entry, array: Array) -> Array:
    """Return a two-dimensional view of a value, or of its state: one flat row for each of its rows. Local."""
    return array.reshape(entry.shape[0], prod(entry.shape[1:]))


def _flat(rows: RowSparse) -> Array:
    """Return a two-dimensional view of the rows: one flat row for each. Local."""
    return rows.values.reshape(len(rows), prod(rows.shape[1:]))
