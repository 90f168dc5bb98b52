"""Stores without values, under the names of MXNet's: sums over ranks, and a store of one process for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeAlias
from weakref import ref

import numpy as np

from ..arrays.arrays import address_of, disjoint, is_immutable, lies_elsewhere, local_sum, run_quietly, source, storable
from ..cluster.calls import Call, PreparedCall
from ..cluster.tracebacks import hidden_from_pytest, hiding_frames
from ..collectives.collectives import Collectives, Pair
from ..collectives.operations import Op
from ..engine.keys import Form, parse
from ..engine.pipeline import Arrays
from ..engine.plan import label
from ..errors import Unsupported, ValueMismatch, a_kind
from ..memory.device import DeviceMemory
from ..memory.host import HOST, HostMemory
from ..protocols import Array, Gpu, Key, Memory
from ..verbs.arguments import checked_target, outs_of, priorities
from ..verbs.comparison import text_call
from ..verbs.operands import given_to_fill
from ..verbs.renewed import answer
from .kvstore import KVStore, drain_gpu_stores
from .plugins import KVStoreBase, RankedStore

__tracebackhide__ = hidden_from_pytest


# Descriptions of calls to keep: training repeats a few.
_MOST_CALLS = 1024


class _Work(NamedTuple):
    """The work of a call once ranks agree."""

    pairs: list[Pair]
    """For each key with elements the array to send and the one to fill: flat, and the same or without overlap."""
    before: list[Pair]
    """Targets and sources of copies to make first."""
    after: list[Pair]
    """Targets and sources of copies to make last."""


_Reference: TypeAlias = tuple[Callable[[], Any], tuple[int, ...], np.dtype[Any]]
"""A weak reference to an array, its shape, and its dtype."""
OpenGpus: TypeAlias = "Callable[[KVStore, Gpu], Collectives | None]"
"""Makes the collectives of GPUs for a store, given this rank's; returns None on every rank where ranks cannot have
them. Collective."""


class AllReduce(RankedStore):
    """A store that keeps no values: ``create("horovod")``, ``"byteps"`` or ``"allreduce"``.

    :meth:`pushpull` sums over ranks, and :meth:`broadcast` copies the root's array to all; neither needs an ``init``,
    and a key is only a name by which ranks agree on what they sum. It may have another shape and dtype at each call, on
    every rank alike. A list of arrays for one name has one shape and dtype. A :class:`mpikv.Trainer` on it updates the
    weights on each rank.

    A call of arrays of GPUs alone is made there by NCCL, in the arrays that are filled, and in place where they are
    those that are brought; calls are then in the order of streams, as those of ``nccl``. Every rank brings arrays of
    its GPU, or every rank some of the host. Where NCCL cannot join the ranks, all are copied to the host.

    It has ``pushpull``, ``broadcast``, ``barrier``, ``check_equal``, ``any_rank``, ``raise_on_all_ranks``,
    ``is_capable`` and ``close``, and the facts ``type``, ``rank``, ``size``, ``num_workers``, ``local_rank`` and
    ``is_root``; nothing else of :class:`mpikv.KVStore`, although :func:`mpikv.create` is typed to return one.

    Example (one rank; on n ranks that each bring ones, the sum is n):
        >>> import mpikv, numpy as np
        >>> with mpikv.create("horovod") as kv:
        ...     kv.pushpull("gradient", np.ones(2))
        array([1., 1.])
    """

    def __init__(self, store: KVStore, open_gpus: OpenGpus | None = None) -> None:
        """Take over a KVStore, to use its transport and to close it. Collective. Use :func:`mpikv.create`.

        Without ``open_gpus`` there are no sums on GPUs.
        """
        self._store, self._group, self._type, self._root = store, store._group, store._type, store._root
        self._host = Collectives(store._transport, store._config.deterministic)
        store.before_free.append(self._host.close)
        self._gpus: Collectives | None = None
        self._open_gpus = open_gpus
        # By verb and names the last call that took no copies, and references to the arrays to send and to fill.
        self._known: dict[tuple[str, tuple[Key, ...]], tuple[Call, list[_Reference]]] = {}

    def __getattr__(self, name: str) -> NoReturn:
        """Raise AttributeError; of a method of KVStore it names a store that has it. Local."""
        known = not name.startswith("_") and hasattr(KVStore, name)
        where = f"; the store that mpikv.create('dist_sync') makes has {name!r}" if known else ""
        raise AttributeError(f"{a_kind(self)} has no {name!r}{where}", name=name, obj=self)

    def __repr__(self) -> str:
        return f"<mpikv.AllReduce {self.type!r} rank {self.rank}/{self.size} transport={self._store.transport}>"

    def pushpull(self, key: Any, value: Any = None, out: Any = None, priority: Any = 0) -> Any:
        """Fill ``out``, else ``value``, with the sum over ranks; return it, or new arrays if unwritable. Collective.

        Forms of keys and arrays, and what is returned, as in :meth:`mpikv.KVStore.pushpull`.

        Raises:
            ValueMismatch: an array of a list has another shape than the first; a shape or a dtype of ``out`` does not
                fit; there is no value.
            RankMismatch, PeerFailed: as in :meth:`mpikv.KVStore.push`.
        """
        return self._make_call("pushpull", key, value, out, priority)

    def broadcast(self, key: Any, value: Any = None, out: Any = None, priority: Any = 0) -> Any:
        """Fill ``out``, else ``value``, with the root's values; return it, or new arrays if unwritable. Collective."""
        return self._make_call("broadcast", key, value, out, priority)

    def init(self, key: Any, value: Any = None, overwrite: bool = False) -> None:
        """Raise Unsupported on every rank: this store keeps no values. Collective."""
        self._cannot("init")

    def push(self, key: Any, value: Any = None, priority: Any = 0) -> None:
        """Raise Unsupported on every rank: this store keeps no values. Collective."""
        self._cannot("push")

    def pull(self, key: Any, out: Any = None, priority: Any = 0) -> None:
        """Raise Unsupported on every rank: this store keeps no values. Collective."""
        self._cannot("pull")

    def barrier(self) -> None:
        """Wait until every rank has come here. Collective."""
        self._store.barrier()

    _barrier = barrier

    def check_equal(self, text: str, verb: str = "check_equal") -> None:
        """Compare a text with those of the other ranks; raise RankMismatch if they differ. Collective."""
        self._store.check_equal(text, verb)

    def any_rank(self, flag: bool) -> bool:
        """Return whether any rank passed True. Collective."""
        return self._store.any_rank(flag)

    @hiding_frames
    def raise_on_all_ranks(self, error: Exception, verb: str = "raise_on_all_ranks") -> NoReturn:
        """Raise the error here, and have the other ranks' next call, whatever it is, raise PeerFailed. Collective."""
        self._store.raise_on_all_ranks(error, verb)

    def close(self) -> None:
        """End the store; free its buffers, its transport and its communicators. Collective, idempotent."""
        self._store.close()

    def __exit__(self, *failure: object) -> None:
        """Close the store, which is collective; after an error end it on this rank alone."""
        self._store.__exit__(*failure)

    def _cannot(self, verb: str) -> NoReturn:
        """Raise Unsupported: this store has no such call; a rank in another call raises PeerFailed. Collective."""
        error = Unsupported(f"the store {self.type!r} keeps no values and has no {verb}; 'dist_sync' has")
        self.raise_on_all_ranks(error, verb)

    def _make_call(self, verb: str, key: Any, value: Any, out: Any, priority: Any) -> Any:
        """Check a pushpull or broadcast, or reuse the last checks; make it; return its result. Collective.

        The first call with arrays of GPUs opens NCCL before, by a call of its own.
        """
        if type(priority) is int and not priority and (known := self._recall(verb, key, value, out)) is not None:
            return self._store._collective(verb, self._repeat, key, verb, *known, given_to_fill(key, value, out))
        try:
            form = parse(key, value)
            on_gpus = self._can_sum_on_gpus(form)
        except Exception as error:
            self.raise_on_all_ranks(error, verb)
        if on_gpus and self._gpus is None:
            self._store._collective(verb, self._prepare_gpus, key, verb, form)
        filled = given_to_fill(key, value, out)
        return self._store._collective(verb, self._prepare, key, verb, form, on_gpus, filled, out is None, priority)

    def _can_sum_on_gpus(self, form: Form) -> bool:
        """Return whether all arrays are mutable and on GPUs, and NCCL is open or untried; raise for no array. Local."""
        for name, group in zip(form.keys, form.groups, strict=True):
            if not group:
                raise ValueMismatch(f"no value for key {name!r}; a store without values has no buffers either")
        arrays = [array for group in form.groups for array in group]
        can_sum = self._gpus is not None or self._open_gpus is not None
        return can_sum and bool(arrays) and all(lies_elsewhere(one) and not is_immutable(one) for one in arrays)

    def _prepare_gpus(self, key: Any, verb: str, form: Form) -> PreparedCall:
        """Return (call, run); run(), collective, opens NCCL or, if a rank cannot, has the host sum for good. Local."""
        memory, opens = self._store._transport.memory, self._open_gpus
        assert isinstance(memory, HostMemory)
        assert opens is not None
        gpu = memory.find(form.groups[0][0])

        def run() -> None:
            """Open the collectives of GPUs, to be used from now on; if a rank cannot, never try again. Collective."""
            # Once: if NCCL cannot join the ranks, the host sums from now on.
            self._gpus, self._open_gpus = opens(self._store, gpu), None

        return text_call(verb, f"{label(form.keys)} on GPUs, for the first time", label(form.keys)), run

    # --- Calls

    def _prepare(
        self, key: Any, verb: str, form: Form, on_gpus: bool, filled: Any, implied: bool, priority: Any
    ) -> PreparedCall:
        """Return (call, run) of a pushpull or broadcast of ``form`` into ``filled``. Check all; on the host copy unfit
        arrays and pack a small sum now; keep a simple call for :meth:`_recall`. Local; run() is collective.

        Raises:
            ValueMismatch: the arrays of a list, or the arrays to fill, do not fit, or cannot be summed.
            Unsupported: an array lies elsewhere, or the present stream is being captured.
        """
        here = self._gpus if on_gpus and self._gpus is not None else self._host
        on_gpus = here is self._gpus
        if on_gpus:
            here.memory.order.begin()
        sources = [self._add_up(name, group, here.memory) for name, group in zip(form.keys, form.groups, strict=True)]

        def check_outs(arrays: Any) -> Arrays:
            """Return for each key a tuple of arrays to fill; raise if one does not fit the key's source. Local."""
            groups = form.groups if implied and arrays is filled else outs_of(key, arrays, form.keys).groups
            return [
                tuple(checked_target(each, name, source.shape, source.dtype, here.memory) for each in group)
                for name, source, group in zip(form.keys, sources, groups, strict=True)
            ]

        outs, result = self._store._verbs.operands.with_stand_ins(check_outs, filled, implied)
        work = self._plan_work(sources, outs, here.memory)
        wishes = priorities(priority, form.keys) if priority != 0 else ()
        option = f"on {'GPUs' if on_gpus else 'the host'}" + f" priority {wishes}" * any(wishes)
        call = self._store._verbs.comparison.value_call(verb, form, sources, option)
        alone = all(len(group) == 1 for group in form.groups)
        if alone and not (any(wishes) or on_gpus or work.before or work.after) and result is filled:
            if len(self._known) >= _MOST_CALLS:
                self._known.clear()
            plain = [*sources, *(targets[0] for targets in outs)]
            self._known[verb, form.keys] = call, [(ref(array), array.shape, array.dtype) for array in plain]
        if not on_gpus:
            # At once, as the message may be staged. A GPU's copies belong to the work of the call.
            _copy(work.before, here.memory)
            work.before.clear()
        self._stage(here, verb, work.pairs)
        return call, partial(self._run, here, verb, work, result)

    def _recall(self, verb: str, key: Any, value: Any, out: Any) -> tuple[Call, list[Pair]] | None:
        """Return a cached call and flat pairs to send and fill, if these keys' last call had these arrays; else None.

        To check and describe them anew takes longer than to sum small ones.
        """
        if type(key) is dict and value is None:
            key, value = tuple(key), tuple(key.values())
        elif type(value) is np.ndarray:
            key, value, out = (key,), (value,), out if out is None else (out,)
        outs = value if out is None else out
        if not all(type(each) in (list, tuple) for each in (key, value, outs)):
            return None
        names, arrays = tuple(key), (*value, *outs)
        if not {int, str}.issuperset(map(type, names)) or (known := self._known.get((verb, names))) is None:
            return None
        call, remembered = known
        if len(arrays) != len(remembered):
            return None
        # An array may get another shape or dtype in place.
        for (last, shape, dtype), array in zip(remembered, arrays, strict=True):
            if last() is not array or array.shape != shape or array.dtype != dtype:
                return None
        if not all(array.flags.writeable for array in outs):
            return None
        sends = [array.reshape(-1) for array in value]
        into = sends if outs is value else [array.reshape(-1) for array in outs]
        return call, [pair for pair in zip(sends, into, strict=True) if pair[0].size]

    def _repeat(self, key: Any, verb: str, call: Call, pairs: list[Pair], filled: Any) -> PreparedCall:
        """Prepare a call that _recall has found; pack its message now if a small sum. Local; run() is collective."""
        self._stage(self._host, verb, pairs)
        return call, partial(self._run, self._host, verb, _Work(pairs, [], []), filled)

    def _stage(self, here: Collectives, verb: str, pairs: Sequence[Pair]) -> None:
        """Pack a small sum's message, if that saves a barrier, and note it as the pipeline's ``prefetched``. Local."""
        sends = [send for send, _ in pairs]
        if verb == "pushpull" and here.stage(*sends):
            self._store._exchange.pipeline.prefetched = sends[0]

    def _add_up(self, key: Key, group: Sequence[Any], memory: Memory) -> Array:
        """Return a key's only array, or the new sum of its list, in this memory; raise if some do not fit. Local."""
        first, *others = map(memory.source, group)
        storable(first.dtype)
        if not others:
            return first
        for array in others:
            if (array.shape, array.dtype) != (first.shape, first.dtype):
                raise ValueMismatch(
                    f"the arrays for key {key!r} are {first.dtype.name}{list(first.shape)} and "
                    f"{array.dtype.name}{list(array.shape)}; those of one list are alike"
                )
        add = partial(local_sum, [first, *others], first.dtype, self._store._config.deterministic)
        return memory.order.run(run_quietly, lambda: add().astype(first.dtype, copy=False))

    def _plan_work(self, sources: Sequence[Array], outs: Arrays, memory: Memory) -> _Work:
        """Return a call's copies and sums, none made yet; allocate arrays for those not fit to send or fill. Local."""
        work, gpu = _Work([], [], []), memory.gpu if isinstance(memory, DeviceMemory) else None
        address = address_of if gpu is None else gpu.address
        apart = disjoint([[source] for source in sources], outs, address)
        for given, targets in zip(sources, outs, strict=True):
            send = given
            if not (apart and given.flags.c_contiguous):
                send = memory.empty(given.shape, given.dtype)
                work.before.append((send, given))
            into = next((out for out in targets if out is send or _fits(out, given.dtype, gpu)), None)
            if into is None:
                into = memory.empty(given.shape, given.dtype)
            work.after.extend((out, into) for out in targets if out is not into)
            if send.size:
                flat = into.reshape(-1)
                same = into is send or address(into) == address(send)
                work.pairs.append((flat, flat) if same else (send.reshape(-1), flat))
        return work

    def _run(self, here: Collectives, verb: str, work: _Work, result: Any) -> Any:
        """Make a call's copies, and its sums or broadcasts; on GPUs only queue them, once the pending calls of other
        stores have been made. Return the call's result. Collective.
        """
        staged, self._store._exchange.pipeline.prefetched = self._store._exchange.pipeline.prefetched is not None, None
        if here is self._gpus:
            drain_gpu_stores()
            here.memory.order.run(run_quietly, self._copy_and_sum, here, verb, work, staged)
        else:
            self._copy_and_sum(here, verb, work, staged)
        return answer(result)

    def _copy_and_sum(self, here: Collectives, verb: str, work: _Work, staged: bool) -> None:
        """Make the call's first copies, its sums or broadcasts, and its last copies. Collective."""
        _copy(work.before, here.memory)
        if verb == "pushpull":
            here.all_reduce_each(work.pairs, Op.SUM, staged)
        else:
            root: int = self._store.root
            if self.rank == root:
                _copy([(into, send) for send, into in work.pairs if into is not send], here.memory)
            for _, into in work.pairs:
                here.broadcast(into, root)
        _copy(work.after, here.memory)


def _copy(pairs: Sequence[Pair], memory: Memory) -> None:
    """Copy the second array of each pair to the first. Local; queued on a GPU."""
    if pairs:
        memory.copy([target for target, _ in pairs], [source for _, source in pairs])


def _fits(out: Array, dtype: np.dtype[Any], gpu: Gpu | None) -> bool:
    """Return whether the caller's array can receive results directly: contiguous, of this dtype and GPU. Local."""
    return (gpu is None or gpu.owns(out)) and out.dtype == dtype and bool(out.flags.c_contiguous)


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
        """Copy the first array of each key to the key's arrays in ``out``; do nothing without ``out``. Local."""
        if out is not None:
            form = parse(key, value)
            _fill(form.keys, parse(key, out, "out").groups, [source(array) for array, *_ in form.groups])

    def pushpull(self, key: Any, value: Any = None, out: Any = None, priority: Any = 0) -> None:
        """Fill each key's arrays in ``out``, else in ``value``, with the sum of its arrays in ``value``. Local."""
        form = parse(key, value)
        sums = [sum(others, start=first.copy()) for first, *others in (map(source, group) for group in form.groups)]
        _fill(form.keys, form.groups if out is None else parse(key, out, "out").groups, sums)


def _fill(keys: Sequence[Key], groups: Sequence[Sequence[Any]], arrays: Sequence[Array]) -> None:
    """Copy each array to all outs of its key; before, raise ValueMismatch or TypeError if an out is unfit. Local."""
    pairs = [
        (checked_target(out, key, array.shape, array.dtype, HOST), array)
        for key, outs, array in zip(keys, groups, arrays, strict=True)
        for out in outs
    ]
    _copy(pairs, HOST)
