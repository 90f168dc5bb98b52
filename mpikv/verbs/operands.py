"""From the arguments of a call to its plan and arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any
from weakref import ref

import numpy as np

from ..engine.exchange import Exchange
from ..engine.keys import Form, flatten, parse
from ..engine.pipeline import Arrays
from ..engine.plan import Plan
from ..errors import Unsupported, ValueMismatch, is_marked
from ..memory.device import DeviceMemory
from ..protocols import Array, Key
from ..sparse.rows import Rows, check_updater
from .arguments import checked_out, checked_sources, checked_target, new_arrays, outs_of, stand_in
from .renewed import Renewed
from .row_arguments import Brought, brings_rows, sum_given

_is_contiguous = attrgetter("flags.c_contiguous")
_LISTS, _KEY_TYPES = (list, tuple), {int, str}


class Operands:
    """Finds the plan and the arrays of a call, and every mistake in them on this rank. Local."""

    def __init__(self, exchange: Exchange, rows: Rows) -> None:
        self._exchange, self._rows, self._memory = exchange, rows, exchange.transport.memory
        self._plans = exchange.values.plans
        self._kind: Any = np.ndarray
        self._on_host = True
        # Callers' arrays known to lie apart from values, by identity, until they are gone. With it a pushpull of 160
        # views of other arrays takes 0.8 ms, without it 1.8 ms.
        self._known_apart: dict[int, ref[Array]] = {}

    def plan(self, key: Any) -> Plan:
        """Return the plan for keys without arrays, cached or new; raise for a dict and for unknown keys. Local."""
        if isinstance(key, Mapping):
            raise TypeError("this call takes keys without arrays, not a dict; pass a list of its keys")
        return self._find_plan(key) or self._exchange.values.plan(parse(key, None).keys)

    def _find_plan(self, key: Any) -> Plan | None:
        """Return the cached plan of a key or a list of keys; None for other forms, and for unknown keys. Local."""
        kind, plans = type(key), self._plans
        if kind is str or kind is int:
            return plans.single.get(key)
        if kind not in _LISTS or not key:
            return None
        try:
            plan = plans.single.get(key[0]) if len(key) == 1 else plans.lists.get(tuple(key))
        except TypeError:  # an item without a hash is no key: the caller's parser raises the right error
            return None
        if plan is None or type(plan.keys[0]) is str:
            return plan
        return plan if _are_keys(key, plan.keys) else None

    # --- What is pushed

    def find_sources(self, key: Any, value: Any, filled: bool = False) -> tuple[Plan, Arrays | Brought | None]:
        """Return a push's plan and its checked arrays, its rows as :class:`Brought`, or None to push the buffers. Raise
        if some do not fit or have no buffer; may prepare the plan. Local.

        ``filled``: the call also writes to the arrays.
        """
        names, given = key, value
        if type(key) is dict and value is None:
            names, given = tuple(key), list(key.values())
        plan = self._find_plan(names)
        if plan is not None and (arrays := self._plain_arrays(plan, names, given, filled)) is not None:
            return plan, arrays
        if names is not key or (plan is None and isinstance(key, Mapping)):
            return self.find_sources(*flatten(key, value), filled)
        if value is not None:
            form = parse(key, value)
            if plan is None:
                plan = self._exchange.values.plan(form.keys)
                if (arrays := self._plain_arrays(plan, key, value, filled)) is not None:
                    return plan, arrays
            return self._check_sources(form)
        plan = plan or self.plan(key)
        if (missing := self._exchange.values.find_unbuffered(plan)) is not None:
            raise ValueMismatch(f"no value for key {missing!r} and no buffer; pass one, or fill kv.buffer({missing!r})")
        return plan, None

    def find_arrays(self, key: Any, value: Any) -> tuple[Plan, Arrays]:
        """Return the plan and the checked, flat arrays of a push in any form; raise Unsupported for rows. Local."""
        plan, arrays = self._check_sources(parse(key, value))
        if isinstance(arrays, Brought):
            raise Unsupported("this store takes no RowSparse; push to_dense(), or use 'dist_sync'")
        return plan, arrays

    def _check_sources(self, form: Form) -> tuple[Plan, Arrays | Brought]:
        """Return the plan and a push's checked arrays, or summed rows; copies views of values if needed. Local."""
        plan = self._exchange.values.plan(form.keys)
        if brings_rows(form.groups):
            check_updater(self._exchange)
            self._rows.load(plan.dtypes)
            return plan, sum_given(plan.entries, form.groups, self._exchange)
        arrays = checked_sources(plan.entries, form.groups)
        if len(plan.buckets) > 1:
            arrays = [tuple(map(self._exchange.values.apart, group)) for group in arrays]
        return plan, arrays

    def _plain_arrays(self, plan: Plan, key: Any, given: Any, filled: bool) -> Sequence[Any] | None:
        """Return the caller's sequence, or (array,), if each array fits as it is; else None; may allocate. Local.

        Those that are ``filled`` are also writable, and lie apart from the memory of values. Training calls the store
        in this form thousands of times; the slower path of the caller handles all other forms. A new plan is prepared.
        """
        kind = self._kind
        is_one = type(given) is kind
        if not (is_one or (type(given) in _LISTS and given and type(given[0]) is kind)):
            return None  # perhaps rows, which need no buckets
        if not plan.ready:
            plan.prepare()
        # A GPU's arrays are all writable, and its operands ask for all places at once.
        writable = filled and self._on_host
        # A push of several buckets changes some values before it reads all sources: sources over the memory of values
        # need a copy then.
        apart = writable or (self._on_host and plan.parted)
        if is_one:
            dtype = plan.dtypes[0]
            if (
                type(key) not in _KEY_TYPES
                or given.shape != plan.shapes[0]
                or (given.dtype is not dtype and given.dtype != dtype)
                or (writable and not given.flags.writeable)
                or (apart and given.base is not None and not self._lies_apart(given))
                or (plan.cut and not given.flags.c_contiguous)
            ):
                return None
            return (given,)
        if type(key) not in _LISTS or not len(key) == len(given) == len(plan.keys):
            return None  # perhaps some keys are named twice
        arrays: Sequence[Any] = given
        cut, bound = plan.cut, plan.bound_values
        if bound is not None and bound.fits(given, writable, apart):
            return arrays
        # One loop: arrays are in no cache yet, and a pass for each property would take longer.
        for array, shape, dtype in zip(given, plan.shapes, plan.dtypes, strict=True):
            if (
                type(array) is not kind
                or array.shape != shape
                or (array.dtype is not dtype and array.dtype != dtype)
                or (writable and not array.flags.writeable)
                or (apart and array.base is not None and not self._lies_apart(array))
                or (cut and not array.flags.c_contiguous)
            ):
                return None
        return arrays

    def _lies_apart(self, array: Array) -> bool:
        """Return whether an array lies outside of the memory of stored values; if so, remember that. Local."""
        # Its flags do not tell: torch, for one, makes a view writable. Comparing addresses takes longer than adding a
        # small array, so each array is looked up once, or its base for all views of it.
        known, base = self._known_apart, array.base
        if id(array) in known or id(base) in known:
            return True
        if type(base) is np.ndarray and not self._exchange.values.is_view(base):
            array = base
        elif self._exchange.values.is_view(array):
            return False
        # Weakly, and forgotten with the array: a later one may get its number.
        number = id(array)
        known[number] = ref(array, lambda _: known.pop(number, None))
        return True

    # --- What is filled

    def find_pulled(self, key: Any, out: Any) -> tuple[Plan, Arrays, Any]:
        """Return a pull's plan, checked arrays to fill, and result: ``out``, dict, new arrays or a Renewed. Local."""
        plan = self._find_plan(key)
        if plan is None and isinstance(key, Mapping):
            plan, out = self.plan(flatten(key, out, "out")[0]), key
        plan = plan or self.plan(key)
        if out is None:
            self._memory.order.check_new()
            out = new_arrays(key, plan, self._memory)
        return plan, *self.find_targets(plan, key, out)

    def find_cached_pulled(self, key: Any, out: Any) -> tuple[Plan, Arrays, Any] | None:
        """Return as :meth:`find_pulled`, if the plan is cached and each array fits as it is; else None. Local."""
        names, outs, filled = key, out, out
        if type(key) is dict and out is None:
            names, outs, filled = tuple(key), list(key.values()), key
        plan = self._find_plan(names)
        if plan is None or (arrays := self._plain_arrays(plan, names, outs, True)) is None:
            return None
        return plan, arrays, filled

    def find_targets(self, plan: Plan, key: Any, given: Any, implied: bool = False) -> tuple[Arrays, Any]:
        """Return the checked arrays to fill for ``given``, and its result: ``given``, or a :class:`Renewed` if some
        cannot be written. ``implied``: it was given to be pushed, not as ``out``. Local.
        """
        names, outs = key, given
        if isinstance(given, dict) and (type(key) is dict or isinstance(key, Mapping)):
            names, outs = tuple(given), list(given.values())
            if names != plan.keys or not _are_keys(names, plan.keys):
                names, outs = flatten(given, what="out")
                names = plan.keys if tuple(names) == plan.keys else ()
        if (arrays := self._plain_arrays(plan, names, outs, True)) is not None:
            return arrays, given
        return self.with_stand_ins(
            lambda out: self.check_targets(plan, outs_of(key, out, plan.keys).groups), given, implied
        )

    def with_stand_ins(self, check: Callable[[Any], Arrays], given: Any, implied: bool = False) -> tuple[Arrays, Any]:
        """Return ``check(given)``, the arrays to fill, and ``given``. If some cannot be written, make a
        :class:`Renewed` of ``given``, and return ``check`` of its arrays, and the Renewed. Local.

        A Renewed has new arrays in the places of those; the caller's stay as they were.
        """
        try:
            return check(given), given
        except TypeError as error:
            if not is_marked(error, "unwritable"):
                raise
        self._memory.order.cancel()  # some were to be filled already
        renewed = Renewed(given, lambda array: stand_in(array, implied, self._memory))
        return check(renewed.arrays), renewed

    def check_targets(self, plan: Plan, groups: Sequence[Sequence[Any]]) -> Arrays:
        """Return for each key a tuple of arrays: each out's own, or a new one noted to be copied there after the call.
        Raise if an out is unfit, or lies in another value. Local.
        """
        fillable, pairs = self._exchange.values.fillable, zip(plan.entries, groups, strict=True)
        return [tuple(fillable(checked_out(entry, out), entry) for out in group) for entry, group in pairs]

    def check_new_targets(
        self, key: Any, keys: tuple[Key, ...], stored: Sequence[tuple[Any, np.dtype[Any]]], out: Any
    ) -> Arrays:
        """Return for each key, known or not, a tuple of arrays to fill, checked against ``stored``; raise if one is
        unfit, or lies in a value. Local.
        """
        outs = [
            tuple(checked_target(array, name, shape, dtype, self._memory) for array in group)
            for name, (shape, dtype), group in zip(keys, stored, outs_of(key, out, keys).groups, strict=True)
        ]
        for array in (array for group in outs for array in group):
            self._exchange.values.check_apart(array)
        return outs


class GpuOperands(Operands):
    """The :class:`Operands` of a store on a GPU."""

    def __init__(self, exchange: Exchange, rows: Rows, memory: DeviceMemory) -> None:
        super().__init__(exchange, rows)
        self._gpu, self._kind, self._on_host = memory.gpu, memory.gpu.kind, False

    def _plain_arrays(self, plan: Plan, key: Any, given: Any, filled: bool) -> Sequence[Any] | None:
        """Return a tuple of the arrays if each fits its key as it is, contiguous and on this GPU; else None. Local."""
        arrays = super()._plain_arrays(plan, key, given, filled)
        if arrays is None or not all(map(_is_contiguous, arrays)) or self._gpu.addresses(arrays) is None:
            return None
        if (filled or plan.parted) and not self._exchange.values.lie_apart(self._gpu, arrays):
            return None
        # A copy of the list: it keeps the arrays alive until the GPU has done with them, if the caller's list changes.
        return tuple(arrays)


def given_to_fill(key: Any, value: Any, out: Any) -> Any:
    """Return ``out``, or without it the arrays that the call pushes: a dict given as ``key``, or ``value``. Local."""
    return out if out is not None else key if isinstance(key, Mapping) else value


def _are_keys(names: Sequence[Any], equal: tuple[Key, ...]) -> bool:
    """Return whether names that equal keys are keys themselves: True and 1.0 equal the key 1 and are none. Local."""
    return not equal or type(equal[0]) is str or set(map(type, names)) == {int}
