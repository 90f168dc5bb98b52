"""Pushes and pulls of some rows of a value: what the ranks bring goes to the rows' owners, who sum and update it.

An element has the same owner as in a push of whole arrays, since its optimizer state lives there. Owners' ranges are
not made of whole rows: a row in which one ends goes to all of its owners, each of which updates its elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .arrays import accumulator
from .errors import Unsupported, noted
from .exchange import Confirm, Exchange, Steps
from .keys import Entry
from .passing import Part, Passing
from .plan import Plan
from .rowsparse import RowSparse, merged_rows
from .typing import Array, Key, Placement
from .updaters import CallableUpdater

__all__ = ["Rows", "check_updater"]

Selected: TypeAlias = "tuple[Array, Array]"
"""The rising numbers of some rows of a value, and these rows, flat: an array of shape (rows, elements of a row)."""

Empty: TypeAlias = "Callable[[Any, Any], Array]"
"""Returns new memory of a shape and a dtype, as numpy's."""

_OWNERS = "owners of rows"
# Bytes of memory that is kept from push to push: new memory costs more than what is done in it.
_MOST_KEPT = 16 << 20


def check_updater(exchange: Exchange) -> None:
    """Raise Unsupported if rows cannot be pushed to a store as it is. Local."""
    updater = exchange.updater
    if exchange.compression is not None:
        raise Unsupported(
            f"rows cannot be compressed by {exchange.compression.codec.settings()}; push to_dense(), or end the "
            "compression by set_gradient_compression(None)"
        )
    if not isinstance(updater, CallableUpdater) and (updater.fallible or not updater.elementwise):
        raise Unsupported(
            f"{type(updater).__name__} updates whole values and cannot update some rows; push to_dense(), or use an "
            "element-wise optimizer"
        )


class _Kind(NamedTuple):
    """How the rows of a value look as bytes."""

    width: int
    dtype: np.dtype[Any]


class Rows:
    """Moves rows of the values of a store. All but :attr:`sent` is collective."""

    def __init__(self, exchange: Exchange, root: int, dense_from: float) -> None:
        """Local. From the share ``dense_from`` of a value's rows on, a sum that replaces the value is made of whole
        arrays.
        """
        self._exchange, self._root, self._dense_from = exchange, root, dense_from
        self._transport = exchange.transport
        self._passing, self._kept = Passing(exchange.transport), _Kept()
        # Of which keys a rank brought many rows to the last push, as far as the ranks know alike.
        self._many: set[Key] = set()
        self._sent_whole = 0

    @property
    def sent(self) -> int:
        """How many bytes this rank has sent to others for rows, with each whole array that was sent instead."""
        return self._passing.sent + self._sent_whole

    def prepare(self, plan: Plan) -> None:
        """Cut the keys that :meth:`push` may send whole, before it runs. Local."""
        if self._may_be_crowded(plan):
            for key in plan.keys:
                self._exchange.plan((key,)).prepare()

    def enter(self, keys: Sequence[Key], given: Sequence[RowSparse]) -> None:
        """Give keys their memory, and the root's rows."""
        table = self._exchange.table
        dirty = [self._exchange.leaves_old(rows.dtype, prod(rows.shape)) for rows in given]
        likes = [np.broadcast_to(np.zeros((), rows.dtype), rows.shape) for rows in given]
        self._exchange.enter(keys, likes, sparse=keys)
        entries = [table[key] for key in keys]
        for entry, old, (ids, rows) in zip(entries, dirty, self._from_root(entries, given), strict=True):
            if self._transport.place == 0:
                if old:
                    entry.value.fill(0)
                _table(entry, entry.value)[ids] = rows
            assert entry.present is not None
            entry.present.rows = self._of_this_rank(entry, ids).copy()
        self._transport.fence()
        self._exchange.start_from_values(keys)

    def push(self, plan: Plan, given: Sequence[RowSparse], steps: Steps, confirm: Confirm | None) -> None:
        """Sum the rows over ranks, and update those that are in the sum."""
        crowded = self._crowded(plan, given)
        for item in np.flatnonzero(crowded).tolist():
            one = self._exchange.plan(plan.keys[item : item + 1])
            # Other ranks may read the array where it lies, but not after this push, which ends in a fence then.
            self._exchange.push(one, [given[item].to_dense()], Steps(steps.each[item : item + 1], True), None)
            self._sent_whole += plan.entries[item].value.nbytes if self._transport.size > 1 else 0
        sparse = np.flatnonzero(~crowded).tolist()
        if not sparse:
            return
        entries = [plan.entries[item] for item in sparse]
        sums = self._sums(entries, [(given[item].indices, _flat(given[item])) for item in sparse])
        each = [steps.each[item] for item in sparse]
        if confirm is None:
            for entry, step, (ids, total) in zip(entries, each, sums, strict=True):
                self._update(entry, ids, total, step)
        else:
            self._call(entries, each, sums, confirm)
        indices = [entry.index for entry in entries]
        self._exchange.table.counts[indices] += 1
        if not self._exchange.current:
            self._exchange.table.stale[indices] = True

    def pull(self, plan: Plan, wanted: Sequence[Array]) -> list[Selected]:
        """Return the rows of these numbers, which rise, of each value."""
        stale = self._exchange.table.stale
        # Every rank knows alike which these are.
        asked = [item for item, entry in enumerate(plan.entries) if stale[entry.index]]
        pulled = [(ids, _table(entry, entry.value)[ids]) for entry, ids in zip(plan.entries, wanted, strict=True)]
        if asked:
            entries = [plan.entries[item] for item in asked]
            self._ask(entries, [pulled[item] for item in asked])
        return pulled

    def _crowded(self, plan: Plan, given: Sequence[RowSparse]) -> Array:
        """Return for each key whether so many rows of it are brought that passing whole arrays is faster.

        How many they are is asked where they were many the last time; otherwise they are passed on, and noted.
        """
        crowded = np.zeros(len(given), np.bool_)
        # What an optimizer does to a row depends on whether it is there.
        if self._may_be_crowded(plan):
            most = self._passing.counts([len(rows) for rows in given]).max(axis=0)
            for item, (entry, count) in enumerate(zip(plan.entries, most.tolist(), strict=True)):
                crowded[item] = self._note(entry, count)
        return crowded

    def _may_be_crowded(self, plan: Plan) -> bool:
        return self._exchange.updater.assigns and any(key in self._many for key in plan.keys)

    def _note(self, entry: Entry, count: int) -> bool:
        """Note whether the rank that brings the most rows of a value brings many; return it."""
        many = count >= self._dense_from * max(entry.shape[0], 1)
        (self._many.add if many else self._many.discard)(entry.key)
        return many

    # --- Sums

    def _sums(self, entries: Sequence[Entry], given: Sequence[Selected]) -> list[Selected]:
        """Return the sum of what all ranks bring, of the rows of which this rank owns something."""
        self._kept.start()
        kinds, rank, label = [_kind(entry) for entry in entries], self._transport.rank, ("push", *_keys(entries))
        lengths = [ids.size for ids, _ in given]
        if self._transport.size == 1:
            terms = [given]
        elif self._exchange.placement.everywhere:
            received, table = self._passing.to_all(_pack(given), label, lengths)
            terms = [_unpack(part, kinds) for part in received]
            terms[rank] = given
        else:
            owners = [self._owners(entry) for entry in entries]
            split = [
                owner.split(rows, self._transport.size, self._kept) for owner, rows in zip(owners, given, strict=True)
            ]
            parts = list(zip(*split, strict=True))
            packed = [() if to == rank else _pack(part) for to, part in enumerate(parts)]
            received, table = self._passing.to_each(packed, label, lengths)
            terms = [_unpack(part, kinds) for part in received]
            terms[rank] = parts[rank]
        if self._transport.size > 1 and self._exchange.updater.assigns:
            for entry, count in zip(entries, table.max(axis=0).tolist(), strict=True):
                self._note(entry, count)
        return [
            merged_rows(each, accumulator(entry.dtype), self._exchange.in_pairs, self._kept)
            for entry, each in zip(entries, zip(*terms, strict=True), strict=True)
        ]

    def _from_root(self, entries: Sequence[Entry], given: Sequence[RowSparse]) -> Sequence[Selected]:
        """Return the root's rows."""
        mine = [(rows.indices, _flat(rows)) for rows in given]
        if self._transport.size == 1:
            return mine
        packed = _pack(mine) if self._transport.rank == self._root else ()
        received, _ = self._passing.to_all(packed, ("init", *_keys(entries)))
        if self._transport.rank == self._root:
            return mine
        return _unpack(received[self._root], [_kind(entry) for entry in entries])

    def _of_this_rank(self, entry: Entry, ids: Array) -> Array:
        """Return the rows of which this rank updates something."""
        if self._exchange.placement.everywhere:
            return ids
        return self._owners(entry).split((ids, _nothing(ids)), self._transport.size)[self._transport.rank][0]

    def _owners(self, entry: Entry) -> _Owners:
        memo = self._exchange.plan((entry.key,)).memo
        if _OWNERS not in memo:
            memo[_OWNERS] = _Owners(entry, self._exchange.placement)
        owners: _Owners = memo[_OWNERS]
        return owners

    # --- Updates

    def _update(self, entry: Entry, ids: Array, total: Array, step: Any) -> None:
        """Update what this rank owns of some rows."""
        updater = self._exchange.updater
        if updater.assigns:
            self._clear(entry)
            if entry.present is not None:
                entry.present.rows = ids
        value = _table(entry, entry.value)
        states = {name: _table(entry, array) for name, array in entry.state.items()}
        whole, parts = self._own(entry, ids)
        if updater.assigns:
            value[ids[whole]] = total[whole]
            for at, low, high in parts:
                value[ids[at], low:high] = total[at, low:high]
            return
        rows = ids[whole]
        picked = _taken(value, rows, self._kept)
        picked_states = {name: _taken(state, rows, self._kept) for name, state in states.items()}
        flat = {name: state.reshape(-1) for name, state in picked_states.items()}
        updater.update(step, total[whole].reshape(-1), picked.reshape(-1), flat)
        value[rows] = picked
        for name, state in picked_states.items():
            states[name][rows] = state
        for at, low, high in parts:
            part = {name: state[ids[at], low:high] for name, state in states.items()}
            updater.update(step, total[at, low:high], value[ids[at], low:high], part)

    def _own(self, entry: Entry, ids: Array) -> tuple[Array | slice, Sequence[tuple[int, int, int]]]:
        """Return what this rank updates of rows of which it updates something, as :meth:`_Owners.own`."""
        if self._exchange.placement.everywhere:
            return slice(None), ()
        return self._owners(entry).own(self._transport.rank, ids)

    def _clear(self, entry: Entry) -> None:
        """Write zeros to what this rank owns of a value, where something else may be."""
        value = _table(entry, entry.value)
        if entry.present is None or entry.present.rows is None:
            flat, everywhere = value.reshape(-1), self._exchange.placement.everywhere
            for low, high in ((0, flat.size),) if everywhere else self._owners(entry).ranges(self._transport.rank):
                flat[low:high] = 0
            return
        ids = entry.present.rows
        whole, parts = self._own(entry, ids)
        value[ids[whole]] = 0
        for at, low, high in parts:
            value[ids[at], low:high] = 0

    def _call(self, entries: Sequence[Entry], steps: Sequence[Any], sums: Sequence[Selected], confirm: Confirm) -> None:
        """Have the root's function update the values, of which it is given copies, since it may fail."""
        updater, changed, failure = self._exchange.updater, list[tuple[Entry, Array]](), None
        assert isinstance(updater, CallableUpdater)
        try:
            for entry, step, (ids, total) in zip(entries, steps, sums, strict=True):
                if self._transport.rank == self._root:
                    rows = total.astype(entry.dtype, copy=False).reshape(ids.size, *entry.shape[1:])
                    value = entry.value.copy()
                    changed.append((entry, value))
                    _updated(updater, step, RowSparse(ids, rows, entry.shape), value)
        except BaseException as error:  # sys.exit in an updater, or Ctrl-C: the other ranks wait
            failure = error
        confirm(failure)
        for entry, value in changed:
            np.copyto(entry.value, value)

    # --- Pulls

    def _ask(self, entries: Sequence[Entry], pulled: Sequence[Selected]) -> None:
        """Replace rows of values that only their owners have by the owners'."""
        kinds, keys = [_kind(entry) for entry in entries], _keys(entries)
        owners = [self._owners(entry) for entry in entries]
        numbers = [
            owner.split((ids, _nothing(ids)), self._transport.size)
            for owner, (ids, _) in zip(owners, pulled, strict=True)
        ]
        questions = list(zip(*numbers, strict=True))
        asked, _ = self._passing.to_each([_pack(part) for part in questions], ("ask", *keys))
        only_ids = [_Kind(0, np.dtype(np.float64)) for _ in kinds]
        # What was asked may be overwritten by the first message of the answers. They are rows alone, copied here: who
        # asked knows in which order.
        answers = [
            [
                _table(entry, entry.value)[ids].reshape(-1)
                for entry, (ids, _) in zip(entries, _unpack(part, only_ids), strict=True)
            ]
            for part in asked
        ]
        received, _ = self._passing.to_each(answers, ("answer", *keys))
        for rank, part in enumerate(received):
            if rank == self._transport.rank:
                continue
            take = _taker(part)
            for owner, kind, (ids, rows), (found, _) in zip(owners, kinds, pulled, questions[rank], strict=True):
                values = _rows_of(take, found.size, kind)
                at = np.searchsorted(ids, found)
                whole, pieces = owner.own(rank, found)
                rows[at[whole]] = values[whole]
                for row, low, high in pieces:
                    rows[at[row], low:high] = values[row, low:high]


class _Kept:
    """Memory that is handed out again from the start of each push on."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._used = 0

    def start(self) -> None:
        """Take back what was handed out; make room for as much."""
        if self._memory.size < self._used <= _MOST_KEPT:
            self._memory = np.empty(self._used, np.uint8)
        self._used = 0

    def __call__(self, shape: Any, dtype: Any) -> Array:
        """Return memory of undefined content."""
        dtype, begin = np.dtype(dtype), self._used
        nbytes = prod(shape) * dtype.itemsize
        self._used += -(-nbytes // 64) * 64
        if self._used > self._memory.size:
            return np.empty(shape, dtype)
        memory: Array = self._memory[begin : begin + nbytes].view(dtype).reshape(shape)
        return memory


def _taken(table: Array, ids: Array, empty: Empty) -> Array:
    """Return some rows of a table, in memory of their own."""
    taken = empty((ids.size, table.shape[1]), table.dtype)
    # They are known to be in range; to find that out, take would copy first.
    np.take(table, ids, axis=0, out=taken, mode="clip")
    return taken


class _Owners:
    """Who owns which elements of one value, which is not replicated."""

    def __init__(self, entry: Entry, placement: Placement) -> None:
        edges, owners = [0], list[int]()
        for count, owner in _shares(entry, placement):
            if owners and owners[-1] == owner:
                edges[-1] += count
            elif count:
                owners.append(owner)
                edges.append(edges[-1] + count)
        self._width = max(prod(entry.shape[1:]), 1)
        self._edges, self._owners = np.array(edges), np.array(owners or [0])
        # Whether a row may have several owners, and whether it may have more than two.
        self._cut = bool((self._edges % self._width).any())
        self._short = len(edges) > 3 and int(np.diff(self._edges[1:-1]).min()) < self._width
        self._alone = len(self._owners) == 1

    def _ends(self, ids: Array) -> tuple[Array, Array]:
        """Return in which ranges the first and the last element of each row are."""
        first = np.searchsorted(self._edges, ids * self._width, "right") - 1
        if not self._cut:
            return first, first
        last = np.searchsorted(self._edges, (ids + 1) * self._width - 1, "right") - 1
        return first, last

    def split(self, rows: Selected, size: int, empty: Empty = np.empty) -> list[Selected]:
        """Return for each rank the rows of which it owns something."""
        ids, values = rows
        if self._alone:
            return [rows if rank == self._owners[0] else (ids[:0], values[:0]) for rank in range(size)]
        first, last = self._ends(ids)
        owner, last_owner, parts = self._owners[first], self._owners[last], []
        for rank in range(size):
            needed = owner == rank
            if self._cut:
                needed |= last_owner == rank
            if self._short:
                needed |= last > first + 1
            at = np.flatnonzero(needed)
            parts.append((ids[at], _taken(values, at, empty)))
        return parts

    def own(self, rank: int, ids: Array) -> tuple[Array | slice, Sequence[tuple[int, int, int]]]:
        """Return which of some rows, as :meth:`split` gives them to a rank, are all that rank's, and its parts of the
        others: a position among them, and elements.
        """
        if not self._cut:
            return slice(None), ()
        first, last = self._ends(ids)
        parts = [part for at in np.flatnonzero(first != last).tolist() for part in self._parts(rank, at, ids)]
        whole = (first == last) & (self._owners[first] == rank)
        return slice(None) if whole.all() else np.flatnonzero(whole), parts

    def _parts(self, rank: int, at: int, ids: Array) -> Iterator[tuple[int, int, int]]:
        begin = int(ids[at]) * self._width
        first, last = (int(end[0]) for end in self._ends(ids[at : at + 1]))
        for number in range(first, last + 1):
            if self._owners[number] == rank:
                low, high = (int(edge) - begin for edge in self._edges[number : number + 2])
                yield at, max(low, 0), min(high, self._width)

    def ranges(self, rank: int) -> Iterator[tuple[int, int]]:
        """Yield a rank's ranges of elements."""
        for (low, high), owner in zip(pairwise(self._edges.tolist()), self._owners.tolist(), strict=False):
            if owner == rank:
                yield low, high


def _shares(entry: Entry, placement: Placement) -> Iterator[tuple[int, int]]:
    """Yield how many elements belong to whom, one range after the other."""
    block, at, end = entry.place.block, entry.place.start, entry.place.start + entry.place.size
    while at < end:
        grid = block.grid(at)
        stop = min(end, grid[1])
        for rank, count in enumerate(placement.share(at, stop, grid, block.owner).counts):
            yield count, rank
        at = stop


def _updated(updater: CallableUpdater, step: Key, rows: RowSparse, value: Array) -> None:
    try:
        updater.call(step, rows, value)
    except BaseException as error:
        noted(error, f"updating key {step!r}")
        raise


# --- Rows as bytes


def _kind(entry: Entry) -> _Kind:
    return _Kind(prod(entry.shape[1:]), entry.dtype)


def _keys(entries: Sequence[Entry]) -> tuple[Key, ...]:
    return tuple(entry.key for entry in entries)


def _table(entry: Entry, array: Array) -> Array:
    """Return a view of an array of a value's shape with one row of elements for each of its rows."""
    return array.reshape(entry.shape[0], prod(entry.shape[1:]))


def _flat(rows: RowSparse) -> Array:
    return rows.values.reshape(len(rows), prod(rows.shape[1:]))


def _nothing(ids: Array) -> Array:
    return np.empty((ids.size, 0))


def _pack(selected: Sequence[Selected]) -> Part:
    """Return as flat arrays: how many rows there are of each value, and the numbers and the rows of each."""
    lengths = np.array([ids.size for ids, _ in selected], np.int64)
    if not lengths.any():
        return ()
    return [lengths, *(np.ascontiguousarray(array).reshape(-1) for pair in selected for array in pair)]


def _unpack(packed: Array, kinds: Sequence[_Kind]) -> list[Selected]:
    """Return what :func:`_pack` was given; no bytes are no rows of any."""
    if not packed.size:
        return [(np.empty(0, np.int64), np.empty((0, kind.width), kind.dtype)) for kind in kinds]
    take = _taker(packed)
    lengths = take(8 * len(kinds)).view(np.int64).tolist()
    return [
        (take(8 * count).view(np.int64), _rows_of(take, count, kind))
        for count, kind in zip(lengths, kinds, strict=True)
    ]


def _rows_of(take: Callable[[int], Array], count: int, kind: _Kind) -> Array:
    return take(count * kind.width * kind.dtype.itemsize).view(kind.dtype).reshape(count, kind.width)


def _taker(packed: Array) -> Callable[[int], Array]:
    """Return a function that takes so many more bytes."""
    at = 0

    def take(count: int) -> Array:
        nonlocal at
        at += count
        return packed[at - count : at]

    return take
