"""Checks and conversions of rows that a caller pushes or asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arrays.arrays import accumulator, castable, is_array, run_quietly
from ..engine.keys import Entry, Form, parse
from ..errors import Unsupported, ValueMismatch, a_kind
from ..memory.device import ALIGNMENT
from ..memory.row_sparse import RowSparse, cast_rows, row_ids, sum_rows
from ..protocols import Array, Key, Memory
from .arguments import cast_fault, checked_target

if TYPE_CHECKING:
    from ..engine.exchange import Exchange

_NUMPYS = {np.ndarray}


class Brought(NamedTuple):
    """The rows that a rank pushes: for each key the sum of its list, in the value's dtype."""

    rows: Sequence[RowSparse]


class Asked(NamedTuple):
    """A request for some rows of a value."""

    ids: Array
    out: Any
    """A :class:`RowSparse`, to replace its rows, or an array, to fill with these rows and zeros."""


def brings_rows(groups: Sequence[Sequence[Any]]) -> bool:
    """Return whether one of a call's arrays, in groups by key, is a :class:`RowSparse`. Local."""
    return any(type(given) is RowSparse for group in groups for given in group)


def asks_rows(out: Any) -> bool:
    """Return whether an ``out`` of a pull, in any form, has a :class:`RowSparse`. Local."""
    if isinstance(out, Mapping):
        out = list(out.values())
    if not isinstance(out, (list, tuple)):
        return type(out) is RowSparse
    return set(map(type, out)) != _NUMPYS and any(map(asks_rows, out))


def sum_given(entries: Sequence[Entry], groups: Sequence[Sequence[Any]], exchange: Exchange) -> Brought:
    """Return for each key the sum of its RowSparse in the value's dtype, maybe the given one; raise if unfit. Local."""
    return Brought([_sum_group(entry, group, exchange) for entry, group in zip(entries, groups, strict=True)])


def rows_to_store(form: Form, exchange: Exchange) -> list[RowSparse]:
    """For init: return each key's RowSparse, in the store's memory, apart from values; raise unless one each. Local."""
    for key, group in zip(form.keys, form.groups, strict=True):
        _check_rows(key, group)
        if len(group) != 1:
            raise ValueMismatch(f"{len(group)} values for key {key!r}; a stored value is one array")
    return [_in_memory(group[0], exchange) for group in form.groups]


def requests_of(entries: Sequence[Entry], key: Any, out: Any, wanted: Any) -> tuple[list[list[Asked]], Any]:
    """Return a row_sparse_pull's checked requests, a list per value, and its result: ``out``, or new RowSparse in the
    form of ``wanted``. Local.
    """
    if wanted is None:
        raise TypeError("row_ids says which rows are wanted; pass an array of their numbers, or a list of arrays")
    if isinstance(wanted, Integral):
        wanted = [wanted]
    if not isinstance(key, (list, tuple)):
        (entry,) = entries
        asked = pair_outs(entry, [wanted] if _is_one(wanted) else list(wanted), out)
        if out is None:
            out = [each.out for each in asked]
            if _is_one(wanted):
                (out,) = out
        return [asked], out
    if _is_one(wanted) and len(key) == 1:
        wanted = [wanted]
    if _is_one(wanted) or len(wanted) != len(key):
        raise ValueMismatch(f"{len(key)} keys need a list of as many row_ids, each an array or a list of arrays")
    if out is not None and (not isinstance(out, (list, tuple)) or len(out) != len(key)):
        raise ValueMismatch(f"{len(key)} keys need a list of as many outs")
    known, found = {entry.key: (entry, list[Asked]()) for entry in entries}, []
    for at, name in enumerate(key):
        (single,) = parse(name, None).keys
        entry, asked = known[single]
        (more,), result = requests_of([entry], single, None if out is None else out[at], wanted[at])
        asked += more
        found.append(result)
    return [asked for _, asked in known.values()], found if out is None else out


class Made(NamedTuple):
    """Memory to answer one request, taken before ranks agree, as a GPU may have too little; None where not needed."""

    some: Array | None
    """For its rows, where other requests pull more of them."""
    cast: Array | None
    """For its rows in the dtype of an out on a GPU."""


class Wanted(NamedTuple):
    """The rows of a value to pull, memory for them, and the requests that they answer."""

    ids: Array
    rows: Array
    """A row for each number."""
    asked: Sequence[Asked]
    made: Sequence[Made]


def want_rows(entry: Entry, asked: Sequence[Asked]) -> Wanted:
    """Return a :class:`Wanted` of these requests: the union of their row numbers, and new memory, not filled yet, for
    the rows and for copies of them. Local.
    """
    memory, ids = entry.place.block.memory, _union([each.ids for each in asked])
    rows = memory.empty((ids.size, prod(entry.shape[1:])), entry.dtype)
    return Wanted(ids, rows, asked, [_take_memory(entry, ids, each, memory) for each in asked])


def _take_memory(entry: Entry, ids: Array, each: Asked, memory: Memory) -> Made:
    """Return new memory for copies of one request's rows, and for these cast; None for each not needed. Local."""
    shape, out = (each.ids.size, *entry.shape[1:]), each.out
    casts = isinstance(out, RowSparse) and not out.on_host and out.dtype != entry.dtype
    some = None if each.ids is ids else memory.empty(shape, entry.dtype)
    return Made(some, memory.empty(shape, out.dtype) if casts else None)


def spare_bytes(entries: Sequence[Entry], every: Sequence[Wanted]) -> int:
    """Return the bytes of workspace on a GPU for pulling these rows and for :func:`deliver`. Local."""
    nbytes = 0
    for entry, wanted in zip(entries, every, strict=True):
        if not wanted.asked:
            continue
        dense = sum(not isinstance(each.out, RowSparse) for each in wanted.asked) * (entry.value.nbytes + ALIGNMENT)
        numbers = [wanted.ids, *(each.ids for each in wanted.asked), *(each.ids for each in wanted.asked)]
        nbytes += dense + sum(ids.nbytes + ALIGNMENT for ids in numbers)
    return nbytes


def deliver(entry: Entry, wanted: Wanted) -> None:
    """Give pulled rows to each request's out: a RowSparse, maybe uncopied, or an array, with zeros elsewhere. Local."""
    memory, rows = entry.place.block.memory, wanted.rows.reshape(wanted.ids.size, *entry.shape[1:])
    for each, made in zip(wanted.asked, wanted.made, strict=True):
        # A single request owns the pulled rows; several need copies.
        some = rows
        if each.ids is not wanted.ids:
            some = memory.workspace.take_rows(rows, np.searchsorted(wanted.ids, each.ids), made.some)
        if isinstance(each.out, RowSparse):
            # A copy: several outs of one request share the numbers.
            each.out.replace(each.ids.copy(), _cast_like(each.out, some, memory, made.cast))
        elif memory.is_host:
            each.out[...] = 0
            each.out[each.ids] = some
        else:
            whole = memory.workspace.empty(entry.shape, entry.dtype)
            whole.fill(0)
            memory.workspace.put_rows(whole, each.ids, some)
            memory.copy((each.out,), (whole,))


def fill(entry: Entry, out: RowSparse) -> None:
    """Replace an out's rows by a value's nonzero rows. Waits for a GPU. Local."""
    memory = entry.place.block.memory
    rows = memory.to_host(entry.value).reshape(entry.shape[0], prod(entry.shape[1:]))
    ids = np.flatnonzero(rows.any(axis=1))
    some = memory.workspace.take_rows(entry.value, ids, memory.empty((ids.size, *entry.shape[1:]), entry.dtype))
    out.replace(ids, _cast_like(out, some, memory))


def _union(wanted: Sequence[Array]) -> Array:
    """Return the sorted union of sorted arrays of numbers; the array itself if there is one. Local."""
    if len(wanted) == 1:
        return wanted[0]
    return np.unique(np.concatenate(wanted)) if wanted else np.empty(0, np.int64)


def _is_one(wanted: Any) -> bool:
    """Return whether these are row numbers for one array, not a list of several such. Local."""
    return is_array(wanted) or (
        isinstance(wanted, (list, tuple)) and all(isinstance(number, Integral) for number in wanted)
    )


def pair_outs(entry: Entry, wanted: Sequence[Any], out: Any) -> list[Asked]:
    """Return a checked request per out, or per ``wanted`` with a new out; a single ``wanted`` is for all. Local."""
    if not entry.shape:
        raise ValueMismatch(f"the value of key {entry.key!r} is a single number and has no rows; pull it")
    # Sorted and once each, so that two requests can be joined, and a row travels once.
    numbers = [np.unique(row_ids(each, entry.shape[0])) for each in wanted]
    if out is None:
        return [Asked(ids, empty_rows(entry)) for ids in numbers]
    outs = list(out) if isinstance(out, (list, tuple)) else [out]
    if len(numbers) == 1:
        numbers *= len(outs)
    if len(outs) != len(numbers):
        raise ValueMismatch(
            f"{len(outs)} outs and {len(numbers)} row_ids for key {entry.key!r}; give one row_ids for all, or one each"
        )
    return [Asked(ids, _checked_out(entry, each)) for ids, each in zip(numbers, outs, strict=True)]


def empty_rows(entry: Entry) -> RowSparse:
    """Return a new RowSparse without rows, of a value's shape, dtype and memory. Local."""
    none = entry.place.block.memory.empty((0, *entry.shape[1:]), entry.dtype)
    return RowSparse(np.empty(0, np.int64), none, entry.shape)


def _in_memory(rows: RowSparse, exchange: Exchange) -> RowSparse:
    """Return rows with values in the store's memory, apart from stored ones: the given rows, or with a copy. Local."""
    values = exchange.values.apart(exchange.transport.memory.source(rows.values))
    return rows if values is rows.values else RowSparse(rows.indices, values, rows.shape)


def _cast_like(out: RowSparse, rows: Array, memory: Memory, made: Array | None = None) -> Array:
    """Return rows in an out's dtype and memory: themselves if they fit, else a copy, on a GPU in ``made`` if given. A
    copy to the host waits for the GPU. Local.
    """
    if out.on_host:
        return memory.to_host(rows).astype(out.dtype, copy=False)
    if rows.dtype == out.dtype:
        return rows
    new = memory.empty(rows.shape, out.dtype) if made is None else made
    memory.copy((new,), (rows,))
    return new


def _checked_out(entry: Entry, out: Any) -> Any:
    """Return a RowSparse ``out`` itself, or the :func:`checked_target` of an array; raise if unfit. Local."""
    if not isinstance(out, RowSparse):
        return checked_target(out, entry.key, entry.shape, entry.dtype, entry.place.block.memory)
    check_fit(entry, "out", out)
    return out


def _sum_group(entry: Entry, group: Sequence[Any], exchange: Exchange) -> RowSparse:
    """Return the sum of a key's RowSparse of this rank, cast; a host's only one itself if it fits; or raise. Local."""
    _check_rows(entry.key, group)
    for each in group:
        check_fit(entry, "value", each)
    memory = entry.place.block.memory
    only, *others = [_in_memory(each, exchange) for each in group]
    # Summed before they travel: each row of this rank is then sent once.
    if others:
        terms = [(each.indices, each.values) for each in (only, *others)]
        tables, wide = memory.workspace, accumulator(entry.dtype)
        ids, rows = run_quietly(sum_rows, terms, wide, exchange.in_pairs, tables)
    else:
        ids, rows = only.indices, only.values
        # On a GPU the caller's rows may also be the out, and get other rows before the GPU has read these: copy them.
        if memory.is_host and rows.dtype == entry.dtype:
            return only
    summed = empty_rows(entry)
    summed.replace(ids, run_quietly(cast_rows, memory.workspace, rows, entry.dtype))
    return summed


def _check_rows(key: Key, group: Sequence[Any]) -> None:
    """Raise ValueMismatch if one of a key's group is no RowSparse. Local."""
    for each in group:
        if type(each) is not RowSparse:
            raise ValueMismatch(
                f"value of key {key!r} is {a_kind(each)}, and others of this call are RowSparse; make a call "
                "for each kind"
            )


def check_fit(entry: Entry, what: str, rows: RowSparse) -> None:
    """Raise ValueMismatch for other shapes and uncastable dtypes, Unsupported for a GPU's out of a host's store. Local.

    ``what``: "value" to push or "out" to fill.
    """
    if rows.shape != entry.shape:
        raise ValueMismatch(
            f"{what} of key {entry.key!r} has shape {rows.shape} and the stored value {entry.shape}; a RowSparse has "
            "the shape of the whole value"
        )
    memory = entry.place.block.memory
    if what == "out" and not rows.on_host:
        if memory.is_host:
            raise Unsupported(
                f"out of key {entry.key!r} has its rows on a GPU and the store its values on the host; pull to a "
                "RowSparse on the host"
            )
        memory.source(rows.values)  # which raises if they lie on another device
    given, stored = rows.dtype, entry.dtype
    if not (castable(stored, given) if what == "out" else castable(given, stored)):
        raise ValueMismatch(f"{cast_fault(f'{what} of key {entry.key!r}', given, stored)}; use astype")
