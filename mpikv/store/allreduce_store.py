"""Stores without values, under the names of MXNet's: sums over ranks, and a store of one process for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import numpy as np

from ..arrays.arrays import is_immutable, lies_elsewhere, source, target
from ..cluster.calls import PreparedCall
from ..cluster.tracebacks import hidden_from_pytest
from ..engine.keys import Form, parse
from ..engine.plan import label
from ..errors import KeyNotInitialized, RankMismatch, Unsupported, ValueMismatch, brief
from ..memory.host import HostMemory
from ..options import naming_arguments
from ..protocols import Array, Gpu, Key
from ..verbs.comparison import text_call
from ..verbs.operands import given_to_fill
from .kvstore import KVStore
from .plugins import KVStoreBase
from .wrapped import Wrapped

if TYPE_CHECKING:
    from .device_sums import DeviceSums

__all__ = ["AllReduce", "TestStore"]

__tracebackhide__ = hidden_from_pytest


class _Kind(NamedTuple):
    """One rank's operand under a name."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    on_gpu: bool
    """Whether it lies on a GPU, and may be summed there."""


OpenSums: TypeAlias = "Callable[[KVStore, Gpu], DeviceSums | None]"
"""Makes the :class:`~mpikv.store.device_sums.DeviceSums` of a store, given this rank's GPU; returns None on every rank
where one cannot be made. Collective."""


@naming_arguments
class AllReduce(Wrapped):
    """A store that keeps no values: ``create("horovod")``, ``"byteps"`` or ``"allreduce"``.

    :meth:`pushpull` sums over ranks, and :meth:`broadcast` copies the root's array to all; neither needs an ``init``,
    and a key is only a name by which ranks agree on what they sum. It may have another shape and dtype at each call, on
    every rank alike; keeping them saves work. The memory of a name is kept for its next call, until :meth:`delete`. A
    :class:`mpikv.Trainer` on it updates the weights on each rank.

    Names under which every rank brings arrays of its GPU are summed there by NCCL, in the arrays that are filled, and
    in place where they are those that are brought; calls are then in the order of streams, as those of ``nccl``. A list
    of arrays for one name has one shape and dtype there. Where NCCL cannot join the ranks, or a rank brings arrays of
    the host, all are copied to the host. Where a name's arrays lie may change if it does on every rank.

    It has ``pushpull``, ``broadcast``, ``delete``, ``barrier``, ``check_equal``, ``any_rank``, ``raise_on_all_ranks``,
    ``is_capable`` and ``close``, and the facts ``type``, ``rank``, ``size``, ``num_workers``, ``local_rank`` and
    ``is_root``; nothing else of :class:`mpikv.KVStore`, although :func:`mpikv.create` is typed to return one.

    Example (one rank; on n ranks that each bring ones, the sum is n):
        >>> import mpikv, numpy as np
        >>> with mpikv.create("horovod") as kv:
        ...     kv.pushpull("gradient", np.ones(2))
        array([1., 1.])
    """

    def __init__(self, store: KVStore, open_sums: OpenSums | None = None) -> None:
        """Use :func:`mpikv.create`. The store belongs to this one. Without ``open_sums`` there are no sums on GPUs."""
        super().__init__(store)
        self._known: dict[Key, _Kind] = {}
        self._open_sums = open_sums
        self._sums: DeviceSums | None = None
        # The names that are summed there, the same on every rank.
        self._on_gpus: set[Key] = set()

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
        if here := [name for name in names if name in self._store]:
            self._store.delete(here)
        else:
            self._store.check_equal(label(names), "delete")
        for name in names:
            del self._known[name]
        self._on_gpus.difference_update(names)

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
            return self._call(verb, key, value, out, priority)
        except RankMismatch as error:
            brought = self._kinds(parse(key, value)).items()
            kinds = ", ".join(
                f"{name!r} {kind.dtype.name}{list(kind.shape)}{' on a GPU' * kind.on_gpu}" for name, kind in brought
            )
            text, mark, rank = str(error).rpartition(" [rank ")
            error.args = (
                f"{text}; the store {self.type!r} calls init when shapes or dtypes differ from the last call, and "
                f"here they are {brief(kinds)}{mark}{rank}",
            )
            raise

    def _call(self, verb: str, key: Any, value: Any, out: Any, priority: Any) -> Any:
        try:
            form = parse(key, value)
            kinds = self._kinds(form)
        except Exception as error:
            self.raise_on_all_ranks(error, verb)
        on_gpus = self._on_gpus.issuperset(kinds)
        # Of a call all names are in one place.
        moved = set() if on_gpus else self._on_gpus.intersection(kinds)
        if changed := {name: kind for name, kind in kinds.items() if name in moved or self._known.get(name) != kind}:
            on_gpus = not moved and self._agree_on_place(form, all(kind.on_gpu for kind in kinds.values()))
            if on_gpus:
                self._on_gpus.update(kinds)
            else:
                zeros = [np.zeros(kind.shape, kind.dtype) for kind in changed.values()]
                self._store.init(list(changed), zeros, overwrite=True)
                self._on_gpus.difference_update(changed)
            self._known.update(kinds)
        if not (on_gpus and self._sums):
            return getattr(self._store, verb)(key, value, out, priority)
        filled = given_to_fill(key, value, out)
        return self._store._collective(verb, self._sums.prepare, key, verb, form, filled, priority)

    def _kinds(self, form: Form) -> dict[Key, _Kind]:
        """Return the operands of a call, one for each name. Local."""
        kinds, facts = {}, self._store._transport.memory.facts
        asked = self._sums is not None or self._open_sums is not None
        for name, group in zip(form.keys, form.groups, strict=True):
            if not group:
                raise ValueMismatch(f"no value for key {name!r}; a store without values has no buffers either")
            # On a GPU, and writable there.
            on_gpu = asked and all(lies_elsewhere(array) and not is_immutable(array) for array in group)
            shape, dtype = (self._sums.memory.facts if on_gpu and self._sums else facts)(group[0])
            kinds[name] = _Kind(shape, dtype, on_gpu)
        return kinds

    def _agree_on_place(self, form: Form, on_gpu: bool) -> bool:
        """Return whether every rank's arrays lie on its GPU, and can be summed there. Collective."""
        if self._open_sums is None:
            return False
        agreed: bool = self._store._collective("init", self._prepare_place, form, on_gpu)
        return agreed

    def _prepare_place(self, form: Form, on_gpu: bool) -> PreparedCall:
        memory = self._store._transport.memory
        assert isinstance(memory, HostMemory)
        gpu = memory.find(form.groups[0][0]) if on_gpu and self._sums is None else None

        def run() -> bool:
            if not self._store._agreement.least(int(on_gpu)):
                return False
            if self._sums is None and self._open_sums is not None and gpu is not None:
                self._sums = self._open_sums(self._store, gpu)
                if self._sums is None:
                    self._open_sums = None
            return self._sums is not None

        return text_call("init", f"where {form.keys} lie", label(form.keys)), run


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
