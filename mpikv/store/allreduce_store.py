"""Stores without values, under the names of MXNet's: sums over ranks, and a store of one process for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np

from ..arrays.arrays import source, target
from ..cluster.tracebacks import hidden_from_pytest
from ..engine.keys import parse
from ..errors import KeyNotInitialized, RankMismatch, Unsupported, ValueMismatch, brief
from ..protocols import Array, Key
from .kvstore import KVStore
from .plugins import KVStoreBase
from .wrapped import Wrapped

__all__ = ["AllReduce", "TestStore"]

__tracebackhide__ = hidden_from_pytest


_Kind: TypeAlias = "tuple[tuple[int, ...], np.dtype[Any]]"
"""A shape and a dtype."""


class AllReduce(Wrapped):
    """A store that keeps no values: ``create("horovod")``, ``"byteps"`` or ``"allreduce"``.

    :meth:`pushpull` sums over ranks, and :meth:`broadcast` copies the root's array to all; neither needs an ``init``,
    and a key is only a name by which ranks agree on what they sum. It may have another shape and dtype at each call, on
    every rank alike; keeping them saves work. The memory of a name is kept for its next call, until :meth:`delete`. A
    :class:`mpikv.Trainer` on it updates the weights on each rank.

    It has ``pushpull``, ``broadcast``, ``delete``, ``barrier``, ``check_equal``, ``any_rank``, ``raise_on_all_ranks``,
    ``is_capable`` and ``close``, and the facts ``type``, ``rank``, ``size``, ``num_workers``, ``local_rank`` and
    ``is_root``; nothing else of :class:`mpikv.KVStore`, although :func:`mpikv.create` is typed to return one.

    Example (one rank; on n ranks that each bring ones, the sum is n):
        >>> import mpikv, numpy as np
        >>> with mpikv.create("horovod") as kv:
        ...     kv.pushpull("gradient", np.ones(2))
        array([1., 1.])
    """

    def __init__(self, store: KVStore) -> None:
        """Use :func:`mpikv.create`. The store belongs to this one."""
        super().__init__(store)
        self._known: dict[Key, _Kind] = {}

    def __repr__(self) -> str:
        return f"<mpikv.AllReduce {self.type!r} rank {self.rank}/{self.size} transport={self._store.transport}>"

    def pushpull(self, key: Any, value: Any = None, out: Any = None, priority: Any = 0) -> Any:
        """Fill ``out``, or ``value`` where there is none, with the sum over ranks.

        Collective. Forms of keys and arrays, and what is returned, as in :meth:`mpikv.KVStore.pushpull`.

        Raises:
            ValueMismatch: an array of a list has another shape than the first; a shape or a dtype of ``out`` does not
                fit; there is no value.
            RankMismatch, PeerFailed: as in :meth:`mpikv.KVStore.push`.
        """
        return self._called("pushpull", key, value, out, priority)

    def broadcast(self, key: Any, value: Any = None, out: Any = None, priority: Any = 0) -> Any:
        """Fill ``out``, or ``value`` where there is none, with the root's ``value``. Collective, and repeatable."""
        return self._called("broadcast", key, value, out, priority)

    def init(self, key: Any, value: Any = None, overwrite: bool = False) -> None:
        """Not in this store. Collective; raises Unsupported."""
        self._cannot("init")

    def push(self, key: Any, value: Any = None, priority: Any = 0) -> None:
        """Not in this store. Collective; raises Unsupported."""
        self._cannot("push")

    def pull(self, key: Any, out: Any = None, priority: Any = 0) -> None:
        """Not in this store. Collective; raises Unsupported."""
        self._cannot("pull")

    def delete(self, key: Any) -> None:
        """Give back the memory of names that are not summed any more. Collective.

        Raises:
            KeyNotInitialized: a name was not used since the store was made, or deleted.
        """
        try:
            names = parse(key, None).keys
            if unknown := [name for name in names if name not in self._known]:
                raise KeyNotInitialized(f"{unknown[0]!r} was never summed or broadcast in this store, or was deleted")
        except Exception as error:
            self.raise_on_all_ranks(error, "delete")
        self._store.delete(key)
        for name in names:
            del self._known[name]

    def close(self) -> None:
        """End the store. Collective, idempotent."""
        self._store.close()

    def __exit__(self, *failure: object) -> None:
        self._store.__exit__(*failure)

    def _cannot(self, verb: str) -> NoReturn:
        self.raise_on_all_ranks(
            Unsupported(f"the store {self.type!r} keeps no values and has no {verb}; 'dist_sync' has"), verb
        )

    def _called(self, verb: str, key: Any, value: Any, out: Any, priority: Any) -> Any:
        try:
            self._enter(verb, key, value)
            return getattr(self._store, verb)(key, value, out, priority)
        except RankMismatch as error:
            brought = self._apart(key, value, {}).items()
            kinds = ", ".join(f"{name!r} {dtype.name}{list(shape)}" for name, (shape, dtype) in brought)
            text, mark, rank = str(error).rpartition(" [rank ")
            error.args = (
                f"{text}; the store {self.type!r} calls init when shapes or dtypes differ from the last call, and "
                f"here they are {brief(kinds)}{mark}{rank}",
            )
            raise

    def _enter(self, verb: str, key: Any, value: Any) -> None:
        """Make room for the sums of keys that are new, or whose arrays have changed."""
        try:
            changed = self._apart(key, value, self._known)
        except Exception as error:
            self.raise_on_all_ranks(error, verb)
        if changed:
            self._store.init(list(changed), [np.zeros(*kind) for kind in changed.values()], overwrite=True)
            self._known.update(changed)

    def _apart(self, key: Any, value: Any, known: Mapping[Key, _Kind]) -> dict[Key, _Kind]:
        """Return what a call brings for each name of which something else is known."""
        apart = {}
        form, facts = parse(key, value), self._store._transport.memory.facts
        for name, group in zip(form.keys, form.groups, strict=True):
            if not group:
                raise ValueMismatch(f"no value for key {name!r}; a store without values has no buffers either")
            kind = facts(group[0])
            if known.get(name) != kind:
                apart[name] = kind
        return apart


@KVStoreBase.register
class TestStore(KVStoreBase):
    """A store of one process, to look at by authors of stores, and to test programs with: ``create("teststore")``.

    Example:
        >>> import mpikv, numpy as np
        >>> total = np.zeros(2)
        >>> mpikv.create("teststore").pushpull("g", [np.ones(2), np.ones(2)], out=total)
        >>> total
        array([2., 2.])
    """

    def broadcast(self, key: Any, value: Any = None, out: Any = None, priority: Any = 0) -> None:
        """Copy the array of each key to those of ``out``; without it there is nothing to do."""
        if out is None:
            return
        for (array, *_), outs in zip(parse(key, value).groups, parse(key, out, "out").groups, strict=True):
            _fill(outs, source(array))

    def pushpull(self, key: Any, value: Any = None, out: Any = None, priority: Any = 0) -> None:
        """Fill the arrays of ``out``, or of ``value`` where there is none, with the sum of those of ``value``."""
        groups = parse(key, value).groups
        for group, outs in zip(groups, groups if out is None else parse(key, out, "out").groups, strict=True):
            first, *others = map(source, group)
            _fill(outs, sum(others, start=first.copy()))


def _fill(outs: Sequence[Any], array: Array) -> None:
    for out in outs:
        np.copyto(target(out), array, casting="same_kind")
