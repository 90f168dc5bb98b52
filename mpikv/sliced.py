"""A store that moves large values in slices, so that what is urgent need not wait for what is large: MXNet's ``p3``."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from .arguments import outs_of, priorities, singles, writable
from .arrays import disjoint, source
from .errors import KeyAlreadyInitialized, KeyNotInitialized, Unsupported, ValueMismatch
from .keys import parse
from .store import KVStore
from .typing import Array, Key
from .work import More, Work, urgency
from .wrapped import Wrapped

__all__ = ["Sliced"]

_Result = TypeVar("_Result")
_Groups = Sequence[Sequence[Array]]


class _Cut(NamedTuple):
    """How a value is cut into the values of the store below."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    names: tuple[str, ...]
    bounds: tuple[slice, ...]


class _Part(NamedTuple):
    """Slices that are moved together: the positions of their keys in the call, and which of its slices each is."""

    priority: int
    slices: list[tuple[int, int]]


class Sliced(Wrapped):
    """A store that moves values in slices, the most urgent first: ``create("p3")``.

    Values of more elements than MXNET_KVSTORE_SLICE_THRESHOLD (40,000) are cut into slices of so many. A call moves
    slice by slice, and between two of them makes way for calls of a higher priority that all ranks have issued: those
    with ``wait=False``, where it pays. Which slice comes next is the same on every rank. It sums only: there is no
    updater, as in MXNet, and a :class:`mpikv.Trainer` on it updates the weights on each rank.

    Verbs and their rules are those of :class:`mpikv.KVStore`, as far as it has them.

    References: Jayarajan et al., Priority-based parameter propagation for distributed DNN training, MLSys 2019.

    Example (one rank; on n ranks the sums are n times as large):
        >>> import mpikv, numpy as np
        >>> with mpikv.create("p3") as kv:
        ...     kv.init(["large", "small"], [np.zeros(100_000), np.zeros(2)])
        ...     large = kv.pushpull("large", np.ones(100_000), wait=False)
        ...     small = kv.pushpull("small", np.ones(2), priority=1, wait=False)
        ...     small.wait(), int(large.wait().sum())
        (array([1., 1.]), 100000)
    """

    def __init__(self, store: KVStore, threshold: int) -> None:
        """Use :func:`mpikv.create`. The store belongs to this one."""
        super().__init__(store)
        self._threshold = threshold
        self._cuts: dict[Key, _Cut] = {}

    # --- Facts

    def keys(self) -> tuple[Key, ...]:
        """Return the keys in the order of their ``init``. Local."""
        return tuple(self._cuts)

    def __contains__(self, key: object) -> bool:
        return key in self._cuts

    def __len__(self) -> int:
        return len(self._cuts)

    def __repr__(self) -> str:
        return (
            f"<mpikv.Sliced {self.type!r} rank {self.rank}/{self.size} {len(self)} keys of {self._threshold} elements>"
        )

    # --- Verbs

    def init(self, key: Any, value: Any = None) -> None:
        """As :meth:`mpikv.KVStore.init`. Collective."""
        cuts, arrays = self._told("init", self._entered, key, value, True)
        self._store.init(*_below(cuts.values(), arrays))
        self._cuts.update(cuts)

    def set(self, key: Any, value: Any = None) -> None:
        """As :meth:`mpikv.KVStore.set`. Collective."""
        cuts, arrays = self._told("set", self._entered, key, value, False)
        self._store.set(*_below(cuts.values(), arrays))

    def broadcast(self, key: Any, value: Any = None, out: Any = None, priority: Any = 0) -> Any:
        """As :meth:`mpikv.KVStore.broadcast`. Collective."""
        cuts, arrays = self._told("broadcast", self._entered, key, value)
        outs, result = self._told("broadcast", _outs, key, cuts, out)
        copies = [np.empty(cut.shape, cut.dtype) for cut in cuts.values()]
        _, pieces = _below(cuts.values(), copies)
        self._store.broadcast(*_below(cuts.values(), arrays), out=pieces)
        self._cuts.update(cuts)
        for group, copy in zip(outs, copies, strict=True):
            for array in group:
                np.copyto(array, copy, casting="unsafe")
        return result

    def delete(self, key: Any) -> None:
        """As :meth:`mpikv.KVStore.delete`. Collective."""
        cuts = self._told("delete", self._known, key)
        self._store.delete([name for cut in cuts.values() for name in cut.names])
        for each in cuts:
            del self._cuts[each]

    def push(self, key: Any, value: Any = None, priority: Any = 0, *, wait: bool = True) -> Any:
        """As :meth:`mpikv.KVStore.push`. Collective."""
        return self._issue("push", key, value, None, priority, wait)

    def pull(self, key: Any, out: Any = None, priority: Any = 0, *, wait: bool = True) -> Any:
        """As :meth:`mpikv.KVStore.pull`. Collective."""
        return self._issue("pull", key, None, out, priority, wait)

    def pushpull(self, key: Any, value: Any = None, out: Any = None, priority: Any = 0, *, wait: bool = True) -> Any:
        """As :meth:`mpikv.KVStore.pushpull`. Collective."""
        return self._issue("pushpull", key, value, out, priority, wait)

    def close(self) -> None:
        """End the store. Collective, idempotent."""
        self._store.close()

    def __exit__(self, *failure: object) -> None:
        self._store.__exit__(*failure)

    def _cannot(self, verb: str) -> NoReturn:
        self.refuse(Unsupported(f"the store {self.type!r} sums only and has no {verb}; 'dist_sync' has"), verb)

    # --- Calls in parts

    def _issue(self, verb: str, key: Any, value: Any, out: Any, priority: Any, wait: bool) -> Any:
        parts = self._parts(verb, key, value, out, priority)
        text = partial("{}({}) in slices".format, verb, "a dict" if isinstance(key, Mapping) else repr(key)[:80])
        work: Work = self._store.queue(verb, urgency(priority), text, partial(_advance, parts))
        return work.wait() if wait else work

    def _parts(self, verb: str, key: Any, value: Any, out: Any, priority: Any) -> Generator[More, None, Any]:
        """Make a call part by part: first agree on it, then move its slices. In the thread of pending calls."""
        cuts, wishes, values, outs, result = self._told(verb, self._prepared, verb, key, value, out, priority)
        self._store.agree(f"{verb} {list(cuts)} priorities {wishes}")
        flat: _Groups = [[array.reshape(-1) for array in group] for group in outs]
        if not disjoint(values, outs):  # of outs that are not contiguous the flat ones are copies as well
            flat = [[np.empty(array.size, array.dtype) for array in group] for group in outs]
        for part in _ordered(list(cuts.values()), wishes, self._threshold):
            yield More(part.priority)
            self._move(verb, list(cuts.values()), part, values, flat)
        for array, copy in zip(chain(*outs), chain(*flat), strict=True):
            if not np.may_share_memory(array, copy):
                array[...] = copy.reshape(array.shape)
        return result

    def _move(self, verb: str, cuts: Sequence[_Cut], part: _Part, values: _Groups, outs: _Groups) -> None:
        names = [cuts[at].names[number] for at, number in part.slices]
        bounds = [(at, cuts[at].bounds[number]) for at, number in part.slices]
        pieces = [[array[bound] for array in values[at]] for at, bound in bounds] if values else None
        targets = [[array[bound] for array in outs[at]] for at, bound in bounds] if outs else None
        if verb == "push":
            self._store.push(names, pieces)
        elif verb == "pull":
            self._store.pull(names, out=targets)
        else:
            self._store.pushpull(names, pieces, out=targets)

    # --- What can be wrong on this rank

    def _told(self, verb: str, check: Callable[..., _Result], *arguments: Any) -> _Result:
        """Make a local check. What it raises is raised here, and the other ranks are told."""
        try:
            return check(*arguments)
        except Exception as error:
            self.refuse(error, verb)

    def _prepared(
        self, verb: str, key: Any, value: Any, out: Any, priority: Any
    ) -> tuple[dict[Key, _Cut], list[int], _Groups, _Groups, Any]:
        """Return the keys of a call, their priorities, flat arrays to push, arrays to fill, and the result."""
        if verb == "pull":
            cuts = self._known(key)
            outs, result = _outs(key, cuts, key if isinstance(key, Mapping) else out)
            return cuts, priorities(priority, tuple(cuts)), [], outs, result
        form = parse(key, value)
        cuts = self._known(list(form.keys))
        pairs = zip(form.groups, cuts.items(), strict=True)
        values = [
            [_fitting(array, name, cut).reshape(-1) for array in _some(group, name)] for group, (name, cut) in pairs
        ]
        if verb == "push":
            return cuts, priorities(priority, form.keys), values, [], None
        given = out if out is not None else key if isinstance(key, Mapping) else value
        return cuts, priorities(priority, form.keys), values, *_outs(key, cuts, given)

    def _known(self, key: Any) -> dict[Key, _Cut]:
        """Return the cuts of keys that were initialised."""
        keys = parse(key, None).keys
        if unknown := [name for name in keys if name not in self._cuts]:
            near = ", ".join(map(repr, list(self._cuts)[:3])) or "none"
            raise KeyNotInitialized(f"key {unknown[0]!r} was never initialized (known: {near}); call init first")
        return {name: self._cuts[name] for name in keys}

    def _entered(self, key: Any, value: Any, new: bool | None = None) -> tuple[dict[Key, _Cut], list[Array]]:
        """Return the cuts and the values of keys; with ``new`` none may be known, and with False all have to be."""
        form = parse(key, value)
        if new and (known := [name for name in form.keys if name in self._cuts]):
            raise KeyAlreadyInitialized(f"key {known[0]!r} was initialized before; set() changes its value")
        if new is False:
            self._known(list(form.keys))
        cuts, arrays = {}, []
        for name, array in zip(form.keys, singles(form, None), strict=True):
            cuts[name] = self._cuts.get(name) or _cut(name, array, self._threshold)
            arrays.append(_fitting(array, name, cuts[name]))
        return cuts, arrays


def _cut(key: Key, array: Array, threshold: int) -> _Cut:
    bounds = [slice(low, min(low + threshold, array.size)) for low in range(0, max(array.size, 1), threshold)]
    names = (f"{key!r}[{bound.start}:{bound.stop}]" for bound in bounds)
    return _Cut(array.shape, array.dtype, tuple(names), tuple(bounds))


def _below(cuts: Iterable[_Cut], arrays: Sequence[Array]) -> tuple[list[str], list[Array]]:
    """Return the names of all slices of some keys, and the parts of their values."""
    pairs = list(zip(cuts, arrays, strict=True))
    names = [name for cut, _ in pairs for name in cut.names]
    return names, [part for cut, array in pairs for bound in cut.bounds for part in [array.reshape(-1)[bound]]]


def _ordered(cuts: Sequence[_Cut], wishes: Sequence[int], threshold: int) -> Iterator[_Part]:
    """Yield the parts of a call, the most urgent first; small values go together."""
    part, size = _Part(0, []), 0
    for at in sorted(range(len(cuts)), key=lambda at: -wishes[at]):
        for number, bound in enumerate(cuts[at].bounds):
            size += bound.stop - bound.start
            if part.slices and (size > threshold or part.priority != wishes[at]):
                yield part
                part, size = _Part(0, []), bound.stop - bound.start
            part = _Part(wishes[at], [*part.slices, (at, number)])
    if part.slices:
        yield part


def _outs(key: Any, cuts: Mapping[Key, _Cut], out: Any) -> tuple[_Groups, Any]:
    """Return the arrays to fill for each key, and what the call returns."""
    if out is None:
        new = {name: np.empty(cut.shape, cut.dtype) for name, cut in cuts.items()}
        filled = [(array,) for array in new.values()]
        if isinstance(key, Mapping):
            return filled, new
        if isinstance(key, (list, tuple)):
            return filled, [new[name] for each in key for name in parse(each, None).keys]
        return filled, filled[0][0]
    groups = outs_of(key, out, tuple(cuts)).groups
    pairs = zip(groups, cuts.items(), strict=True)
    return [tuple(writable(each, name, cut.shape, cut.dtype) for each in group) for group, (name, cut) in pairs], out


def _fitting(value: Any, name: Key, cut: _Cut) -> Array:
    array = source(value)
    if array.shape != cut.shape:
        raise ValueMismatch(f"value of key {name!r} has shape {array.shape} and the stored value {cut.shape}")
    return array


def _some(group: Sequence[Any], name: Key) -> Sequence[Any]:
    if not group:
        raise ValueMismatch(f"no value for key {name!r}; this store has no buffers")
    return group


def _advance(parts: Generator[More, None, Any]) -> Any:
    """Make the next part of a call; return ``More``, or at the end what the call returns."""
    try:
        return next(parts)
    except StopIteration as end:
        return end.value
