"""The store ``p3``: what is pushed goes in slices, between which a more urgent push may come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from .arguments import like, outs_of, priorities, singles, writable
from .arrays import source
from .errors import KeyAlreadyInitialized, KeyNotInitialized, Unsupported, ValueMismatch
from .keys import Form, parse
from .plan import label
from .store import KVStore
from .typing import Array, Key
from .work import urgency
from .wrapped import Wrapped

__all__ = ["Sliced"]

Result = TypeVar("Result")


class _Slice(NamedTuple):
    """A range of the elements of a value, and the key of the store beneath under which they are kept."""

    name: str
    low: int
    high: int


class _Cut(NamedTuple):
    """What is known of one key."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    slices: tuple[_Slice, ...]


class _Moved(NamedTuple):
    """The keys of a call, and the arrays that it pushes and fills, of each key or of each slice."""

    keys: list[Any]
    values: list[list[Array]]
    outs: list[list[Array]]

    def arguments(self, verb: str) -> tuple[Any, ...]:
        """Return what a verb of the store takes before the priority."""
        return {"push": (self.keys, self.values), "pull": (self.keys, self.outs), "pushpull": tuple(self)}[verb]


class Sliced(Wrapped):
    """The synchronous store whose calls with ``wait=False`` go in slices: ``create("p3")``.

    A value of more than ``MXNET_KVSTORE_SLICE_THRESHOLD`` elements, 40000 by default, is kept in slices of as many. A
    call with ``wait=False`` is made one slice at a time, small values of a list together. Between two slices a call of
    a higher ``priority`` that all ranks have issued goes first, unless it names a key of the one that waits. So the
    gradients of the first layers, which are computed last and needed first, do not wait for those of a large last one.
    Calls that wait are made whole, as nothing can pass them.

    Sums are those of ``dist_sync``. As in MXNet the store only sums, without updater, optimizer and compression: a
    :class:`mpikv.Trainer` on it updates the weights on each rank. It has ``init``, ``push``, ``pull``, ``pushpull``,
    ``broadcast``, ``set``, ``delete``, ``keys``, ``barrier``, ``agree``, ``vote``, ``refuse``, ``is_capable`` and
    ``close``, and the facts ``type``, ``rank``, ``size``, ``num_workers``, ``local_rank`` and ``is_root``; nothing else
    of :class:`mpikv.KVStore`, although :func:`mpikv.create` is typed to return one.

    References: Jayarajan et al., Priority-based parameter propagation for distributed DNN training, MLSys 2019.

    Example (one rank; on n ranks that each bring ones, the sums are n):
        >>> import mpikv, numpy as np
        >>> with mpikv.create("p3") as kv:
        ...     kv.init(["first", "last"], [np.zeros(2), np.zeros(100_000)])
        ...     last = kv.push("last", np.ones(100_000), priority=-1, wait=False)
        ...     first = kv.pushpull("first", np.ones(2), priority=0, wait=False)  # passes what is left of the other
        ...     first.wait()
        array([1., 1.])
    """

    def __init__(self, store: KVStore, elements: int) -> None:
        """Use :func:`mpikv.create`. The store belongs to this one; ``elements`` are the most of a slice."""
        super().__init__(store)
        self._elements = elements
        self._known: dict[Key, _Cut] = {}

    def __repr__(self) -> str:
        return (
            f"<mpikv.Sliced {self.type!r} rank {self.rank}/{self.size} slices of {self._elements} elements, "
            f"{len(self._known)} keys>"
        )

    def keys(self) -> tuple[Key, ...]:
        """Return the keys in the order of their ``init``. Local."""
        return tuple(self._known)

    def __contains__(self, key: object) -> bool:
        return key in self._known

    def __len__(self) -> int:
        return len(self._known)

    # --- Verbs

    def init(self, key: Any, value: Any = None, overwrite: bool = False) -> None:
        """As :meth:`mpikv.KVStore.init`. Collective."""
        form, arrays = self._asked("init", self._valued, key, value)
        self._asked("init", self._check_new, form.keys, overwrite)
        if known := [name for name in form.keys if name in self._known]:
            self.delete(known)
        self._enter(form.keys, arrays)

    def push(self, key: Any, value: Any = None, priority: Any = 0, *, wait: bool = True) -> Any:
        """As :meth:`mpikv.KVStore.push`, without buffers. Collective."""
        return self._call("push", key, value, None, priority, wait)

    def pull(
        self, key: Any, out: Any = None, priority: Any = 0, ignore_sparse: bool = True, *, wait: bool = True
    ) -> Any:
        """As :meth:`mpikv.KVStore.pull`. Collective. With ``wait=False`` an ``out`` has to be contiguous."""
        return self._call("pull", key, None, out, priority, wait)

    def pushpull(self, key: Any, value: Any = None, out: Any = None, priority: Any = 0, *, wait: bool = True) -> Any:
        """As :meth:`mpikv.KVStore.pushpull`, without buffers. Collective. With ``wait=False`` what it fills has to be
        contiguous.
        """
        return self._call("pushpull", key, value, out, priority, wait)

    def broadcast(self, key: Any, value: Any = None, out: Any = None, priority: Any = 0) -> Any:
        """As :meth:`mpikv.KVStore.broadcast`. Collective."""
        form, arrays = self._asked("broadcast", self._valued, key, value)
        self._asked("broadcast", self._check_same, form.keys, arrays)
        given = dict(zip(form.keys, arrays, strict=True))
        if new := [name for name in given if name not in self._known]:
            self._enter(new, [given[name] for name in new])
        if known := [name for name in given if name not in new]:
            self._store.set(*self._flat(known, [given[name] for name in known]))
        stored = [(self._known[name].shape, self._known[name].dtype) for name in given]
        result = like(key, form, stored) if out is None else out
        outs = self._asked("broadcast", lambda: self._writable(outs_of(key, result, form.keys)))
        self._move("pull", _Moved(list(given), [[] for _ in given], outs))
        return result

    def set(self, key: Any, value: Any = None) -> None:
        """As :meth:`mpikv.KVStore.set`. Collective."""
        form, arrays = self._asked("set", self._valued, key, value)
        self._asked("set", self._check_known, form.keys)
        self._asked("set", self._check_same, form.keys, arrays)
        self._store.set(*self._flat(form.keys, arrays))

    def delete(self, key: Any) -> None:
        """As :meth:`mpikv.KVStore.delete`. Collective."""
        keys = self._asked("delete", lambda: self._check_known(parse(key, None).keys))
        self._store.delete([one.name for name in keys for one in self._known[name].slices])
        for name in keys:
            del self._known[name]

    def set_updater(self, updater: Callable[[Any, Array, Array], Any] | None) -> None:
        """Not in this store. Collective; raises Unsupported."""
        self._cannot("set_updater")

    _set_updater = set_updater

    def close(self) -> None:
        """End the store. Collective, idempotent."""
        self._store.close()

    def __exit__(self, *failure: object) -> None:
        self._store.__exit__(*failure)

    def _cannot(self, verb: str) -> NoReturn:
        self.refuse(Unsupported(f"the store {self.type!r} only sums and has no {verb}; 'dist_sync' has"), verb)

    # --- Moving values

    def _call(self, verb: str, key: Any, value: Any, out: Any, priority: Any, wait: bool) -> Any:
        if wait:
            form = self._asked(verb, parse, key, value)
            moved, _, result = self._asked(verb, self._prepared, verb, form, key, value, out, priority)
            self._move(verb, moved)
            return result
        result = None
        keys: tuple[Key, ...] = ()
        try:
            form = parse(key, value)
            keys = form.keys  # known even of a call that is bad on this rank only, so that its place is the others'
            moved, wishes, result = self._prepared(verb, form, key, value, out, priority)
            parts = self._parts(verb, moved, wishes)
        except Exception as error:
            parts = [partial(self._store.refuse, error, verb)]  # which wait() raises, as all that is wrong with it
        work = self._store._issue_parts(verb, key, urgency(priority), parts, frozenset(keys))
        work.answer = result
        return work

    def _move(self, verb: str, moved: _Moved) -> None:
        """Make a call whole; fill outs with gaps by way of others without."""
        dense = [[np.empty(one.shape, one.dtype) if _has_gaps(one) else one for one in outs] for outs in moved.outs]
        whole = _Moved(*map(list, zip(*self._slices(moved._replace(outs=dense)), strict=True)))
        getattr(self._store, verb)(*whole.arguments(verb))
        for outs, filled in zip(moved.outs, dense, strict=True):
            for out, array in zip(outs, filled, strict=True):
                if array is not out:
                    np.copyto(out, array)

    def _parts(self, verb: str, moved: _Moved, wishes: Sequence[int]) -> list[Callable[[], Any]]:
        """Return calls of at most the elements of a slice, those of the most urgent keys first."""
        if any(_has_gaps(out) for outs in moved.outs for out in outs):
            raise ValueMismatch("what is filled by a call with wait=False has gaps between its elements; pass a copy")
        order = sorted(range(len(wishes)), key=lambda place: -wishes[place])
        moved = _Moved(*([column[place] for place in order] for column in moved))
        prepare = getattr(self._store._calls, verb)
        return [
            partial(self._store._collective, verb, prepare, *part.arguments(verb), 0) for part in self._packed(moved)
        ]

    def _packed(self, moved: _Moved) -> Iterator[_Moved]:
        part, elements = _Moved([], [], []), 0
        for (name, values, outs), size in zip(self._slices(moved), self._sizes(moved.keys), strict=True):
            if part.keys and elements + size > self._elements:
                yield part
                part, elements = _Moved([], [], []), 0
            part.keys.append(name)
            part.values.append(values)
            part.outs.append(outs)
            elements += size
        yield part

    def _sizes(self, keys: Sequence[Key]) -> Iterator[int]:
        return (one.high - one.low for key in keys for one in self._known[key].slices)

    def _slices(self, moved: _Moved) -> Iterator[tuple[str, list[Array], list[Array]]]:
        """Yield the slices of a call, and what of its arrays belongs to each."""
        for key, values, outs in zip(*moved, strict=True):
            flat, filled = ([array.reshape(-1) for array in arrays] for arrays in (values, outs))
            for name, low, high in self._known[key].slices:
                yield name, [array[low:high] for array in flat], [array[low:high] for array in filled]

    def _flat(self, keys: Sequence[Key], arrays: Sequence[Array]) -> tuple[list[str], list[Array]]:
        moved = _Moved(list(keys), [[array] for array in arrays], [[] for _ in keys])
        slices = list(self._slices(moved))
        return [name for name, _, _ in slices], [array for _, (array,), _ in slices]

    # --- What the caller passed

    def _asked(self, verb: str, check: Callable[..., Result], *arguments: Any) -> Result:
        """Make a local check. What it raises is raised here, and the other ranks are told."""
        try:
            return check(*arguments)
        except Exception as error:
            self.refuse(error, verb)

    def _prepared(
        self, verb: str, form: Form, key: Any, value: Any, out: Any, priority: Any
    ) -> tuple[_Moved, list[int], Any]:
        """Return the arrays of a call, the priorities of its keys, and what the call returns."""
        keys, wishes = self._check_known(form.keys), priorities(priority, form.keys)
        moved = _Moved(list(keys), [[] for _ in keys], [[] for _ in keys])
        if verb != "pull":
            values = [self._readable(name, group) for name, group in zip(keys, form.groups, strict=True)]
            moved = moved._replace(values=values)
        if verb == "push":
            return moved, wishes, None
        given = key if isinstance(key, Mapping) else value
        if out is None and given is not None:
            return moved._replace(outs=self._writable(form)), wishes, given
        result = self._new(key) if out is None else out
        return moved._replace(outs=self._writable(outs_of(key, result, keys))), wishes, result

    def _readable(self, key: Key, group: Sequence[Any]) -> list[Array]:
        """Return the arrays that are pushed to a key."""
        if not group:
            raise ValueMismatch(f"no value for key {key!r}")
        arrays, shape = [source(each) for each in group], self._known[key].shape
        for array in arrays:
            if array.shape != shape:
                raise ValueMismatch(f"value of key {key!r} has shape {array.shape} and the stored value {shape}")
        return arrays

    def _writable(self, form: Form) -> list[list[Array]]:
        """Return the arrays that are filled, of each key."""
        return [
            [writable(out, key, self._known[key].shape, self._known[key].dtype) for out in group]
            for key, group in zip(form.keys, form.groups, strict=True)
        ]

    def _new(self, key: Any) -> Any:
        """Return new arrays in the form of a key or a list of them."""
        each = key if isinstance(key, (list, tuple)) else [key]
        new = [
            np.empty(self._known[name].shape, self._known[name].dtype) for one in each for name in parse(one, None).keys
        ]
        return new if isinstance(key, (list, tuple)) else new[0]

    def _valued(self, key: Any, value: Any) -> tuple[Form, list[Array]]:
        """Return the one array of each key, which may be new."""
        form = parse(key, value)
        kind = type(next(iter((*self._known, *form.keys))))
        if other := [name for name in form.keys if type(name) is not kind]:
            raise TypeError(f"key {other[0]!r} is no {kind.__name__}, which the store's keys are")
        return form, singles(form, None)

    def _check_known(self, keys: tuple[Key, ...]) -> tuple[Key, ...]:
        if strange := [key for key in keys if key not in self._known]:
            known = f"known keys: {label(list(self._known))}" if self._known else "no key was"
            raise KeyNotInitialized(
                f"key {strange[0]!r} was never initialized ({known}); call init({strange[0]!r}, value) on every rank "
                "first"
            )
        return keys

    def _check_new(self, keys: Sequence[Key], overwrite: bool) -> None:
        if not overwrite and (known := [key for key in keys if key in self._known]):
            raise KeyAlreadyInitialized(
                f"key {known[0]!r} was initialized before, with shape {self._known[known[0]].shape}; "
                "use set() to change its value, or init(..., overwrite=True) to start anew"
            )

    def _check_same(self, keys: Sequence[Key], arrays: Sequence[Array]) -> None:
        """Raise unless the values of known keys have their shapes."""
        for key, array in zip(keys, arrays, strict=True):
            if key in self._known:
                self._readable(key, [array])

    # --- Keys

    def _enter(self, keys: Sequence[Key], arrays: Sequence[Array]) -> None:
        """Give values to new keys, of which the slices are new keys of the store beneath."""
        self._known.update((key, self._cut(key, array)) for key, array in zip(keys, arrays, strict=True))
        try:
            self._store.init(*self._flat(keys, arrays))
        except BaseException:
            for key in keys:
                del self._known[key]
            raise

    def _cut(self, key: Key, array: Array) -> _Cut:
        # Its name holds the shape too, so that ranks with other shapes of as many elements are noticed.
        name, size = f"{key}{list(array.shape)}", array.size
        edges = [*range(0, max(size, 1), self._elements), size]
        slices = (_Slice(f"{name}[{low}:{high}]", low, high) for low, high in pairwise(edges))
        return _Cut(array.shape, array.dtype, tuple(slices))


def _has_gaps(array: Array) -> bool:
    return not array.flags.c_contiguous
