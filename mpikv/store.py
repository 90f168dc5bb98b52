"""The store: the verbs, each of which plans, agrees with the other ranks, and then moves data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from . import optimizers
from .agreement import Agreement, Call
from .arena import Arena
from .arrays import castable, disjoint, local_sum, source, storable, target, zeros
from .config import Config
from .errors import Closed, ConfigError, TransportError, ValueMismatch, known_names
from .keys import Entry, Form, KeyTable, parse
from .placement import Replicated, place
from .plan import Bucket, Plan, build, describe, digest, label
from .typing import Array, Key, Transport, Updater
from .updaters import Assign, CallableUpdater
from .world import Group

__all__ = ["KVStore"]

Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])

_CAPABILITIES = {"optimizer": True, "sparse": False, "compression": False, "async": False, "gpu": False}
_LARGEST_CACHE = 1024


class KVStore:
    """A table of named arrays that all ranks share: a push adds up one array per rank, a pull reads the value.

    Made by :func:`mpikv.create`. Every method marked *collective* must be called by every rank of :attr:`comm`, in the same order
    and with the same keys. A rank that does otherwise gets, like every other rank, an error that names the rank and the call,
    before any data move; the store can then be used again. Host arrays are complete when a call returns.

    Example (one rank; on n ranks every push adds up n arrays):

        >>> import mpikv, numpy as np
        >>> with mpikv.create() as kv:
        ...     kv.init("w", np.full((2, 3), 2.0))
        ...     kv.push("w", np.full((2, 3), 8.0))
        ...     kv.pull("w")
        array([[8., 8., 8.],
               [8., 8., 8.]])
    """

    def __init__(self, group: Group, transport: Transport, config: Config, *, type: str = "local", root: int = 0) -> None:
        """Collective. Use :func:`mpikv.create`, which makes the parts."""
        self._group, self._transport, self._config = group, transport, config
        self._type, self._root = type, root
        self._ended: str | None = None
        self._updater: Updater = Assign()
        self._placement = place(config.placement, transport, self._updater, root)
        self._agreement = Agreement(transport, group, config.check)
        self._table = KeyTable()
        self._arena = Arena(transport)
        # A sum of half precision is twice as wide as the message.
        self._scratch = zeros(2 * transport.limit)
        self._plans: dict[tuple[Key, ...], Plan] = {}
        self._calls: dict[tuple[str, tuple[Key, ...]], Call] = {}
        self._settings: tuple[Updater, int, int] = (self._updater, -1, 0)

    # Facts -------------------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's number among the ranks of the store, from 0."""
        return self._group.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._group.size

    @property
    def num_workers(self) -> int:
        """The number of ranks, under MXNet's name."""
        return self._group.size

    @property
    def local_rank(self) -> int:
        """This process's number among the ranks of its host, from 0."""
        return self._group.local_rank

    @property
    def type(self) -> str:
        """The name that was given to :func:`mpikv.create`, in lower case."""
        return self._type

    @property
    def root(self) -> int:
        """The rank whose values count at ``init``, ``set`` and ``broadcast``, and which runs Python updaters."""
        return self._root

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root."""
        return self._group.rank == self._root

    @property
    def comm(self) -> Any:
        """The store's own communicator (an ``mpi4py.MPI.Intracomm``), or None for a store of one rank."""
        return self._group.comm

    @property
    def transport(self) -> str:
        """How bytes move: ``local``, ``shm`` or ``mpi``."""
        return self._transport.name

    @property
    def placement(self) -> str:
        """Where values live with the present updater: ``root``, ``sharded`` or ``replicated``."""
        return self._placement.name

    @property
    def optimizer(self) -> Any:
        """The optimizer given to :meth:`set_optimizer`, or None."""
        return self._updater if isinstance(self._updater, optimizers.Optimizer) else None

    def is_capable(self, capability: str) -> bool:
        """Return whether the store can do what the word says: optimizer, sparse, compression, async or gpu. Local.

        Raises:
            ConfigError: the word is unknown.
        """
        if capability.lower() not in _CAPABILITIES:
            raise ConfigError(known_names("capability", capability, _CAPABILITIES))
        return _CAPABILITIES[capability.lower()]

    def keys(self) -> tuple[Key, ...]:
        """Return the keys in the order of their ``init``. Local."""
        return tuple(self._table)

    def __iter__(self) -> Iterator[Key]:
        return iter(self.keys())

    def __contains__(self, key: object) -> bool:
        return key in self._table

    def __len__(self) -> int:
        return len(self._table)

    def __repr__(self) -> str:
        state = "closed" if self._ended else f"{len(self)} keys"
        return (
            f"<mpikv.KVStore {self._type!r} rank {self.rank}/{self.size} transport={self.transport} "
            f"placement={self.placement} root={self._root} updater={self._updater.settings()} {state}>"
        )

    # Verbs -------------------------------------------------------------------------------------------------------------------

    def init(self, key: Any, value: Any = None, overwrite: bool = False) -> None:
        """Enter keys into the table.

        Collective. The root's values are stored; the other ranks' give shape and dtype, which must be the same.

        Args:
            key: an int or a str, a list of them, or a dict of arrays.
            value: an array, or a list of one array per key. It is copied.
            overwrite: whether known keys start anew, with the new shape and dtype and without optimizer state.

        Raises:
            KeyAlreadyInitialized: a key is known and ``overwrite`` is False.
            ValueMismatch: the number of arrays differs from the number of keys, or the dtype cannot be stored.
            RankMismatch: ranks gave other keys, shapes or dtypes.

        Example:
            >>> import mpikv, numpy as np
            >>> kv = mpikv.create()
            >>> kv.init(["a", "b"], [np.zeros(3), np.ones((2, 2))])
            >>> len(kv), "a" in kv
            (2, True)
        """
        self._collective("init", key, lambda: self._prepare_init(key, value, overwrite), self._initialise)

    def push(self, key: Any, value: Any = None, priority: Any = 0) -> None:
        """Add up one value per rank and give the sum to the updater.

        Collective. Without an updater the stored value becomes the sum (ASSIGN; it is not added to the old value and never
        averaged). With one, ``updater(key, sum, stored)`` runs once per key and push, at the owner.

        Args:
            key: an int or a str, a list of them, or a dict of arrays. Repeated keys in a list mean a list of arrays.
            value: an array of the stored shape, or a list of such arrays, which are summed on this rank first, from left to
                right; for a list of keys, a list with one of either per key. A dtype of the same kind is cast. Half precision is
                summed in float32. The arrays are never changed or kept and may be reused when push returns.
            priority: an int, or one per key; the same on every rank. Calls run at once and in order, so it changes nothing yet.

        Raises:
            KeyNotInitialized: ``init`` was not called for a key.
            ValueMismatch: a shape, a dtype or the number of arrays does not fit.
            RankMismatch: ranks made different calls.
            PeerFailed: another rank's arguments were bad, or the updater raised there.

        Example:
            >>> import mpikv, numpy as np
            >>> kv = mpikv.create()
            >>> kv.init(3, np.zeros(2))
            >>> kv.push(3, [np.ones(2), np.ones(2)])
            >>> kv.pull(3)
            array([2., 2.])
        """
        self._collective("push", key, lambda: self._prepare_push(key, value, priority), self._push)

    def pull(self, key: Any, out: Any = None, priority: Any = 0, ignore_sparse: bool = True) -> Any:
        """Read the stored value of a key, or of each key of a list.

        Collective; ``out`` may differ per rank.

        Args:
            key: an int or a str, a list of them, or a dict of arrays to fill.
            out: an array of the stored shape, or a list of such arrays, each of which is filled; for a list of keys, a list
                with one of either per key. A dtype of the same kind is cast. None: new arrays are returned.
            priority: as in :meth:`push`.
            ignore_sparse: accepted for MXNet's sake; all values are dense.

        Returns:
            ``out``, or the new arrays in the form of ``key``.

        Raises:
            KeyNotInitialized: ``init`` was not called for a key.
            ValueMismatch: a shape or a dtype does not fit.
            TypeError: ``out`` cannot be written, as JAX's arrays.

        Example:
            >>> import mpikv, numpy as np
            >>> kv = mpikv.create()
            >>> kv.init(["a", "b"], [np.zeros(2), np.ones(1)])
            >>> kv.pull(["a", "b"])
            [array([0., 0.]), array([1.])]
        """
        return self._collective("pull", key, lambda: self._prepare_pull(key, out, priority), self._pull)

    def pushpull(self, key: Any, value: Any = None, out: Any = None, priority: Any = 0) -> Any:
        """Push and pull in one exchange, which is faster than the two calls.

        Collective.

        Args:
            key: as in :meth:`push`.
            value: as in :meth:`push`.
            out: as in :meth:`pull`, a dict where ``key`` is one; None writes into the arrays of ``value``. An array may be both
                pushed and pulled into.
            priority: as in :meth:`push`.

        Returns:
            ``out``, or ``value`` if None.

        Raises:
            KeyNotInitialized: ``init`` was not called for a key.
            ValueMismatch: a shape, a dtype or the number of arrays does not fit.

        Example:
            >>> import mpikv, numpy as np
            >>> kv = mpikv.create()
            >>> kv.init("g", np.zeros(2))
            >>> kv.pushpull({"g": np.full(2, 3.0)})
            {'g': array([3., 3.])}
        """
        return self._collective("pushpull", key, lambda: self._prepare_pushpull(key, value, out, priority), self._pushpull)

    def broadcast(self, key: Any, value: Any = None, out: Any = None, priority: Any = 0) -> Any:
        """Store the root's values under keys, new or known, and read them: ``init`` or ``set``, then ``pull``.

        Collective. ``value`` is read on the root only; on other ranks it gives shape and dtype.

        Args:
            key: as in :meth:`init`.
            value: as in :meth:`init`.
            out: as in :meth:`pull`; may be ``value``.
            priority: as in :meth:`push`.

        Returns:
            ``out``, or new arrays.

        Example:
            >>> import mpikv, numpy as np
            >>> mpikv.create().broadcast("w", np.ones(2))
            array([1., 1.])
        """
        return self._collective("broadcast", key, lambda: self._prepare_broadcast(key, value, out, priority), self._broadcast)

    def set(self, key: Any, value: Any = None) -> None:
        """Overwrite stored values by the root's, without the updater. Optimizer state stays.

        Collective. ``value`` is read on the root only; the other ranks' are checked.

        Raises:
            KeyNotInitialized: ``init`` was not called for a key.
            ValueMismatch: a shape or a dtype does not fit.

        Example:
            >>> import mpikv, numpy as np
            >>> kv = mpikv.create()
            >>> kv.init("w", np.zeros(2))
            >>> kv.set("w", np.ones(2))
            >>> kv.pull("w")
            array([1., 1.])
        """
        self._collective("set", key, lambda: self._prepare_set(key, value), self._set)

    def delete(self, key: Any) -> None:
        """Remove keys, their values and their optimizer state. Collective.

        Raises:
            KeyNotInitialized: a key is unknown.

        Example:
            >>> import mpikv, numpy as np
            >>> kv = mpikv.create()
            >>> kv.init("w", np.zeros(2))
            >>> kv.delete("w")
            >>> "w" in kv
            False
        """
        self._collective("delete", key, lambda: self._prepare_delete(key), self._delete)

    def barrier(self) -> None:
        """Wait until every rank has come here. Collective.

        Raises:
            Stalled: a rank did not come within the store's timeout.
        """
        self._collective("barrier", None, lambda: (Call("barrier", digest("barrier")), ()), lambda: None)

    _barrier = barrier

    def set_updater(self, updater: Callable[[Any, Array, Array], Any] | None) -> None:
        """Set the function that a push calls, once per key, at the root: ``updater(key, input, stored)``.

        Collective. It changes ``stored`` in place or returns the new value; ``input`` is the sum over ranks, ``key`` exactly what
        the caller of ``init`` wrote. An exception in it is raised on every rank, and no value of that push is changed.
        None returns to ASSIGN. Nothing changes until the next push.

        Raises:
            Unsupported: the placement was asked to be ``sharded`` or ``replicated``.

        Example (one rank; on n ranks that each push ones, the value grows by 2 n):
            >>> import mpikv, numpy as np
            >>> kv = mpikv.create()
            >>> kv.init(3, np.zeros(2))
            >>> @kv.updater
            ... def update(key, input, stored):
            ...     stored += 2 * input
            >>> kv.push(3, np.ones(2))
            >>> kv.pull(3)
            array([2., 2.])
        """
        self._change_updater("set_updater", lambda: Assign() if updater is None else CallableUpdater(_callable(updater)))

    _set_updater = set_updater

    def updater(self, function: Function) -> Function:
        """Set the updater, as a decorator. See :meth:`set_updater`. Collective."""
        self.set_updater(function)
        return function

    def set_optimizer(self, optimizer: Any, **arguments: Any) -> None:
        """Set the optimizer that a push runs at the owners of the values; state starts anew.

        Collective; the same on every rank. Settings changed later, as ``optimizer.learning_rate``, count from the next push on and
        must be changed alike on every rank, which the push checks.

        Args:
            optimizer: an object of :mod:`mpikv.optimizers`, or the name of one.
            arguments: for a name, its arguments.

        Raises:
            ConfigError: the name or an argument is unknown.
            Unsupported: a stored dtype cannot be optimized.
            RankMismatch: ranks gave other optimizers or settings.

        Example:
            >>> import mpikv, numpy as np
            >>> kv = mpikv.create()
            >>> kv.init("w", np.ones(2))
            >>> kv.set_optimizer("sgd", learning_rate=0.5)
            >>> kv.push("w", np.ones(2))
            >>> kv.pull("w")
            array([0.5, 0.5])
        """
        self._change_updater("set_optimizer", lambda: _optimizer(optimizer, arguments))

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the optimizer's learning rate, from the next push on. Local; call it on every rank, as the next push checks.

        Raises:
            ConfigError: no optimizer is set.
        """
        if self.optimizer is None:
            raise ConfigError("set_learning_rate: no optimizer is set; call set_optimizer(...) first")
        self.optimizer.learning_rate = learning_rate

    def close(self) -> None:
        """End the store and free its memory. Collective, idempotent; also done at the end of a ``with`` block and of the program.

        Raises:
            RankMismatch: the other ranks did something else.
        """
        if self._ended is not None:
            return
        try:
            self._collective("close", None, lambda: (Call("close", digest("close")), ()), self._free)
        finally:
            self.abandon("the store was closed")

    def abandon(self, why: str) -> None:
        """Make the store unusable on this rank without asking the others. Local; used where a collective call could wait for ever."""
        if self._ended is None:
            self._ended = why

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.close()
        else:
            # The other ranks may be anywhere; closing together could wait for ever and hide the error.
            self.abandon(f"the store ended with {kind.__name__}: {error}")

    # The door of every collective call -----------------------------------------------------------------------------------------

    def _collective(
        self, verb: str, key: Any, prepare: Callable[[], tuple[Call, tuple[Any, ...]]], run: Callable[..., Result]
    ) -> Result:
        """Prepare, which finds all that is wrong with this rank's arguments; agree with the others; run."""
        if self._ended is not None:
            raise Closed(f"{verb}: {self._ended}; create a new store")
        try:
            try:
                call, arguments = prepare()
            except Exception as error:
                self._agreement.refuse(Call(verb, 0, _shown(key)), error)
            self._agreement.begin(call)
            return run(*arguments)
        except TransportError as error:
            self.abandon(f"the store ended in an earlier call ({error})")
            raise

    def _planned(self, verb: str, keys: tuple[Key, ...], priority: Any, updates: bool) -> tuple[Plan, Call]:
        """Return the plan for the keys and what to compare with the other ranks before it is run."""
        plan = self._plan(keys)
        settings = self._updater_digest() if updates else 0
        call = self._calls.get((verb, keys))
        if call is None:
            token = plan.digest ^ digest(verb) ^ settings
            call = self._calls[verb, keys] = Call(verb, token, plan.label, lambda: self._described(plan, updates))
        if priority == 0:
            return plan, call
        wish = f"priority {_priorities(priority, keys)}"
        return plan, Call(verb, call.token ^ digest(wish), plan.label, lambda: [*self._described(plan, updates), wish])

    def _described(self, plan: Plan, updates: bool) -> list[str]:
        texts = describe(plan.keys, [e.shape for e in plan.entries], [e.dtype for e in plan.entries])
        return [f"updater {self._updater.settings()}", *texts] if updates else texts

    def _updater_digest(self) -> int:
        updater, revision, value = self._settings
        if updater is not self._updater or revision != self._updater.revision:
            value = digest(self._updater.settings())
            self._settings = (self._updater, self._updater.revision, value)
            self._calls.clear()
        return value

    def _plan(self, keys: tuple[Key, ...]) -> Plan:
        plan = self._plans.get(keys)
        if plan is None:
            self._table.check_kind(keys)
            entries = [self._table[key] for key in keys]
            plan = build(entries, self._placement, self._total, whole=not self._updater.elementwise)
            if len(self._plans) >= _LARGEST_CACHE:
                self._forget_plans()
            self._plans[keys] = plan
        return plan

    def _forget_plans(self) -> None:
        self._plans.clear()
        self._calls.clear()

    def _total(self, dtype: np.dtype[Any], count: int) -> Array:
        return self._scratch[: count * dtype.itemsize].view(dtype)

    # Push ----------------------------------------------------------------------------------------------------------------------

    def _prepare_push(self, key: Any, value: Any, priority: Any) -> tuple[Call, tuple[Any, ...]]:
        form = parse(key, value)
        plan, call = self._planned("push", form.keys, priority, updates=True)
        return call, (plan, call, self._sources(plan, form), self._steps(plan))

    def _sources(self, plan: Plan, form: Form) -> list[tuple[Array, ...]]:
        """Return each key's arrays as flat numpy arrays, checked against the stored value."""
        return [
            tuple(_fitting(source(array), entry, array).reshape(-1) for array in _some(group, entry.key))
            for entry, group in zip(plan.entries, form.groups, strict=True)
        ]

    def _steps(self, plan: Plan) -> list[Any]:
        # The count that this push makes; a user's schedule may raise, which has to happen before data move.
        counts = (self._table.counts[plan.rows] + 1).tolist()
        step = self._updater.step
        return [step(key, count) for key, count in zip(plan.keys, counts, strict=True)]

    def _push(self, plan: Plan, call: Call, sources: Sequence[Sequence[Array]], steps: Sequence[Any]) -> None:
        self._reduce(plan, sources, steps, None)
        self._finish(plan, call, steps)

    def _reduce(
        self, plan: Plan, sources: Sequence[Sequence[Array]], steps: Sequence[Any], outs: Sequence[Sequence[Array]] | None
    ) -> None:
        """Sum bucket by bucket; update each while it is in the cache; deliver it, if wanted, one bucket behind.

        The delay lets the exchange of the next bucket be the fence that the delivery of this one needs.
        """
        updates = self._updater.elementwise
        uniform = not steps or steps.count(steps[0]) == len(steps)
        previous: Bucket | None = None
        for bucket in plan.buckets:
            self._placement.reduce(bucket, self._pack(bucket, sources), bucket.total)
            if updates:
                for part in bucket.runs if uniform else bucket.parts:
                    self._updater.update(steps[part.item], part.total, part.value, part.state)
            if outs is not None and previous is not None:
                self._deliver(previous, outs)
            previous = bucket
        if outs is not None and previous is not None:
            self._transport.fence()
            self._deliver(previous, outs)

    def _pack(self, bucket: Bucket, sources: Sequence[Sequence[Array]]) -> Array:
        """Return this rank's contribution to a bucket, in the outbox, or where it lies when the transport would copy it anyway."""
        if len(bucket.pieces) == 1 and not self._transport.shared:
            piece = bucket.pieces[0]
            (first, *others) = sources[piece.item]
            if not others and first.dtype == bucket.dtype:
                return first[piece.begin : piece.end]
        packed = self._transport.outbox(bucket.nbytes).view(bucket.dtype)
        if not bucket.dense:
            packed.fill(0)
        for piece in bucket.pieces:
            arrays = [array[piece.begin : piece.end] for array in sources[piece.item]]
            np.copyto(packed[piece.at : piece.until], local_sum(arrays, bucket.dtype), casting="unsafe")
        return packed

    def _finish(self, plan: Plan, call: Call, steps: Sequence[Any]) -> None:
        """Run updaters of whole values and count the push."""
        if not self._updater.elementwise:
            self._update_whole(plan, call, steps)
        rows = plan.rows
        self._table.versions[rows] += 1
        self._table.counts[rows] += 1
        self._table.stale[rows] = not (self._transport.shared or isinstance(self._placement, Replicated))

    def _update_whole(self, plan: Plan, call: Call, steps: Sequence[Any]) -> None:
        changed: list[tuple[Entry, Array]] = []
        failure: Exception | None = None
        try:
            for entry, total, step in zip(plan.entries, plan.totals, steps, strict=True):
                if total is not None:
                    value = entry.value.copy() if self._updater.fallible else entry.value
                    self._updater.update(step, total, value, entry.state)
                    changed.append((entry, value))
        except Exception as error:
            failure = error
        if self._updater.fallible:
            self._agreement.confirm(call, failure)
            for entry, value in changed:
                np.copyto(entry.value, value)
        elif failure is not None:
            raise failure

    # Pull ----------------------------------------------------------------------------------------------------------------------

    def _prepare_pull(self, key: Any, out: Any, priority: Any) -> tuple[Call, tuple[Any, ...]]:
        if out is None and not isinstance(key, Mapping):
            out = self._new(key)
        form = parse(key, out, "out")
        plan, call = self._planned("pull", form.keys, priority, updates=False)
        return call, (plan, self._targets(plan, form), key if out is None else out)

    def _new(self, key: Any) -> Any:
        """Return new arrays in the form of the keys."""
        names = parse(key, None).keys
        entries = {name: self._table[name] for name in names}
        if not isinstance(key, (list, tuple)):
            return _empty(entries[names[0]])
        return [_empty(entries[parse(each, None).keys[0]]) for each in key]

    def _targets(self, plan: Plan, form: Form) -> list[tuple[Array, ...]]:
        """Return each key's arrays to fill as numpy arrays, checked against the stored value."""
        return [
            tuple(_fitting(target(array), entry, array, "out") for array in group)
            for entry, group in zip(plan.entries, form.groups, strict=True)
        ]

    def _pull(self, plan: Plan, targets: Sequence[Sequence[Array]], result: Any) -> Any:
        self._publish(plan)
        for entry, group in zip(plan.entries, targets, strict=True):
            for array in group:
                np.copyto(array, entry.value, casting="unsafe")
        return result

    def _publish(self, plan: Plan) -> None:
        """Give every rank the newest values of the keys, where some have older ones."""
        if not self._table.stale[plan.rows].any():
            return
        for bucket in plan.buckets:
            self._placement.publish(bucket)
        self._table.stale[plan.rows] = False

    def _deliver(self, bucket: Bucket, outs: Sequence[Sequence[Array]]) -> None:
        """Copy an updated bucket to the callers' flat arrays."""
        if not self._transport.shared:
            self._placement.publish(bucket)
        for piece in bucket.pieces:
            for array in outs[piece.item]:
                np.copyto(array[piece.begin : piece.end], bucket.value[piece.at : piece.until], casting="unsafe")

    # Pushpull ------------------------------------------------------------------------------------------------------------------

    def _prepare_pushpull(self, key: Any, value: Any, out: Any, priority: Any) -> tuple[Call, tuple[Any, ...]]:
        form = parse(key, value)
        plan, call = self._planned("pushpull", form.keys, priority, updates=True)
        sources, steps = self._sources(plan, form), self._steps(plan)
        result = out if out is not None else key if isinstance(key, Mapping) else value
        targets = self._targets(plan, form if out is None else _outs(key, out, form.keys))
        return call, (plan, call, sources, steps, targets, result)

    def _pushpull(
        self,
        plan: Plan,
        call: Call,
        sources: Sequence[Sequence[Array]],
        steps: Sequence[Any],
        targets: Sequence[Sequence[Array]],
        result: Any,
    ) -> Any:
        flat = [tuple(array.reshape(-1) for array in group) for group in targets if _contiguous(group)]
        if self._updater.elementwise and len(flat) == len(targets) and disjoint(sources, flat):
            self._reduce(plan, sources, steps, flat)
            self._finish(plan, call, steps)
            self._table.stale[plan.rows] = False
            return result
        self._push(plan, call, sources, steps)
        self._transport.fence()
        return self._pull(plan, targets, result)

    # Init, set, delete, broadcast ------------------------------------------------------------------------------------------------

    def _prepare_init(self, key: Any, value: Any, overwrite: bool) -> tuple[Call, tuple[Any, ...]]:
        form = parse(key, value)
        arrays = _single(form)
        self._table.check_kind(form.keys)
        if not overwrite:
            self._table.check_new(form.keys)
        self._check_slots(arrays)
        known = tuple(name for name in form.keys if name in self._table)
        return self._valued("init", form, arrays, [f"overwrite {known}"]), (form.keys, arrays, known)

    def _valued(self, verb: str, form: Form, arrays: Sequence[Array], options: Sequence[str] = ()) -> Call:
        texts = [*describe(form.keys, [a.shape for a in arrays], [a.dtype for a in arrays]), *options]
        return Call(verb, digest("\n".join([verb, *texts])), label(form.keys), lambda: texts)

    def _check_slots(self, arrays: Sequence[Array]) -> None:
        for dtype in {storable(array.dtype) for array in arrays}:
            self._updater.slots(dtype)

    def _initialise(self, keys: Sequence[Key], arrays: Sequence[Array], known: Sequence[Key]) -> None:
        self._delete(known)
        self._enter(keys, arrays)
        self._write(keys, arrays)

    def _enter(self, keys: Sequence[Key], arrays: Sequence[Array]) -> None:
        """Give new keys their memory."""
        before = len(self._arena.blocks)
        places = self._arena.place([(array.dtype, array.size) for array in arrays])
        for block in self._arena.blocks[before:]:
            block.reset_state(self._updater.slots(block.values.dtype))
        for key, array, where in zip(keys, arrays, places, strict=True):
            self._table.add(key, array.shape, array.dtype, where)

    def _write(self, keys: Sequence[Key], arrays: Sequence[Array]) -> None:
        """Store the root's values."""
        for key, array in zip(keys, arrays, strict=True):
            entry = self._table[key]
            if self.is_root:
                np.copyto(entry.value, array, casting="unsafe")
            if not self._transport.shared:
                self._transport.broadcast(entry.value.reshape(-1), self._root)
            self._table.stale[entry.index] = False
        self._start_masters(tuple(keys))

    def _start_masters(self, keys: tuple[Key, ...]) -> None:
        """Copy values into the float32 masters that an optimizer keeps of half-precision values."""
        if not any("master" in self._table[key].place.block.state for key in keys):
            return
        self._transport.fence()
        for bucket in self._plan(keys).buckets:
            for part in bucket.parts:
                if "master" in part.state:
                    np.copyto(part.state["master"], part.value, casting="unsafe")

    def _prepare_set(self, key: Any, value: Any) -> tuple[Call, tuple[Any, ...]]:
        form = parse(key, value)
        arrays = [
            _fitting(array, self._table[name], array) for name, array in zip(form.keys, _single(form), strict=True)
        ]
        _, call = self._planned("set", form.keys, 0, updates=False)
        return call, (form.keys, arrays)

    def _set(self, keys: Sequence[Key], arrays: Sequence[Array]) -> None:
        self._write(keys, arrays)

    def _prepare_delete(self, key: Any) -> tuple[Call, tuple[Any, ...]]:
        keys = parse(key, None).keys
        _, call = self._planned("delete", keys, 0, updates=False)
        return call, (keys,)

    def _delete(self, keys: Sequence[Key]) -> None:
        if not keys:
            return
        for bucket in self._plan(tuple(keys)).buckets:
            for part in bucket.parts:
                for array in part.state.values():
                    array.fill(0)  # the place may be given to a new key, whose state starts as zeros
        for key in keys:
            index = self._table[key].index
            self._table.versions[index] = self._table.counts[index] = self._table.stale[index] = 0
            self._arena.release(self._table.remove(key))
        self._forget_plans()

    def _prepare_broadcast(self, key: Any, value: Any, out: Any, priority: Any) -> tuple[Call, tuple[Any, ...]]:
        form = parse(key, value)
        arrays = _single(form)
        self._table.check_kind(form.keys)
        self._check_slots(arrays)
        for name, array in zip(form.keys, arrays, strict=True):
            if name in self._table:
                _fitting(array, self._table[name], array)
        if out is None:
            out = _like(key, form, arrays)
        outs = _outs(key, out, form.keys)
        for array, group in zip(arrays, outs.groups, strict=True):
            for each in group:
                _check_fit(target(each), array.shape, array.dtype, each, "out")
        wishes = [f"priority {_priorities(priority, form.keys)}"] if priority != 0 else []
        return self._valued("broadcast", form, arrays, wishes), (form.keys, arrays, outs, out)

    def _broadcast(self, keys: tuple[Key, ...], arrays: Sequence[Array], outs: Form, result: Any) -> Any:
        new = [(key, array) for key, array in zip(keys, arrays, strict=True) if key not in self._table]
        self._enter([key for key, _ in new], [array for _, array in new])
        self._write(keys, arrays)
        self._transport.fence()
        plan = self._plan(keys)
        return self._pull(plan, self._targets(plan, outs), result)

    # Updaters --------------------------------------------------------------------------------------------------------------------

    def _change_updater(self, verb: str, make: Callable[[], Updater]) -> None:
        def prepare() -> tuple[Call, tuple[Any, ...]]:
            updater = make()
            placement = place(self._config.placement, self._transport, updater, self._root)
            for dtype in {entry.dtype for entry in self._table.entries()}:
                updater.slots(dtype)
            settings = updater.settings()
            return Call(verb, digest(f"{verb} {settings}"), settings, lambda: [settings]), (updater, placement)

        self._collective(verb, None, prepare, self._adopt)

    def _adopt(self, updater: Updater, placement: Any) -> None:
        # Another placement may have other owners, who need the newest values.
        stale = tuple(entry.key for entry in self._table.entries() if self._table.stale[entry.index])
        if stale:
            self._publish(self._plan(stale))
        self._updater, self._placement = updater, placement
        self._forget_plans()
        for block in self._arena.blocks:
            block.reset_state(updater.slots(block.values.dtype))
        self._table.counts[:] = 0
        if len(self._table):
            self._start_masters(self.keys())

    def _free(self) -> None:
        self._forget_plans()
        self._table, self._arena = KeyTable(), Arena(self._transport)
        self._agreement.close()
        self._transport.close()
        self._group.close()


def _optimizer(optimizer: Any, arguments: Mapping[str, Any]) -> Updater:
    if isinstance(optimizer, str):
        made: Updater = optimizers.create(optimizer, **arguments)
        return made
    if arguments:
        raise ConfigError(f"arguments {sorted(arguments)} go with an optimizer's name, not with an object")
    if not isinstance(optimizer, optimizers.Optimizer):
        raise TypeError(f"expected an optimizer or its name, got {type(optimizer).__name__}; for a function use set_updater")
    return optimizer


def _callable(updater: Any) -> Callable[[Any, Array, Array], Any]:
    if not callable(updater):
        raise TypeError(f"an updater is a function f(key, input, stored), not a {type(updater).__name__}")
    return updater  # type: ignore[no-any-return]


def _fitting(array: Array, entry: Entry, given: Any, what: str = "value") -> Array:
    """Return the array if it fits the stored value."""
    if array.shape != entry.shape or array.dtype != entry.dtype:
        _check_fit(array, entry.shape, entry.dtype, given, f"{what} of key {entry.key!r}")
    return array


def _check_fit(array: Array, shape: tuple[int, ...], dtype: np.dtype[Any], given: Any, what: str) -> None:
    if array.shape != shape:
        raise ValueMismatch(f"{what} has shape {array.shape}, stored is shape {shape}; reshape it or init the key anew")
    casts = castable(array.dtype, dtype) if what.startswith("value") else castable(dtype, array.dtype)
    if not casts:
        raise ValueMismatch(
            f"{what} has dtype {array.dtype.name}, stored is {dtype.name}; only dtypes of one kind are cast, use astype"
        )


def _some(group: tuple[Any, ...], key: Key) -> tuple[Any, ...]:
    if not group:
        raise ValueMismatch(f"no value for key {key!r}")
    return group


def _single(form: Form) -> list[Array]:
    """Return the one array of each key."""
    for key, group in zip(form.keys, form.groups, strict=True):
        if len(_some(group, key)) > 1:
            raise ValueMismatch(f"{len(group)} values for key {key!r}; a stored value is one array")
    return [source(group[0]) for group in form.groups]


def _outs(key: Any, out: Any, keys: tuple[Key, ...]) -> Form:
    """Return the arrays to fill in the order of ``keys``."""
    form = parse(out, None, "out") if isinstance(key, Mapping) and isinstance(out, Mapping) else parse(key, out, "out")
    if form.keys == keys:
        return form
    groups = dict(zip(form.keys, form.groups, strict=True))
    if groups.keys() != set(keys):
        raise ValueMismatch(f"out has keys {label(form.keys)} and the call {label(keys)}")
    return Form(keys, tuple(groups[name] for name in keys))


def _like(key: Any, form: Form, arrays: Sequence[Array]) -> Any:
    """Return new arrays in the form of the call."""
    new = {name: np.empty(array.shape, array.dtype) for name, array in zip(form.keys, arrays, strict=True)}
    if isinstance(key, Mapping):
        return new
    return list(new.values()) if isinstance(key, (list, tuple)) else new[form.keys[0]]


def _empty(entry: Entry) -> Array:
    return np.empty(entry.shape, entry.dtype)


def _contiguous(group: Sequence[Array]) -> bool:
    return all(array.flags.c_contiguous for array in group)


def _priorities(priority: Any, keys: Sequence[Key]) -> list[int]:
    wishes = list(priority) if isinstance(priority, (list, tuple)) else [priority] * len(keys)
    if len(wishes) != len(keys) or not all(isinstance(wish, (int, np.integer)) for wish in wishes):
        raise ValueMismatch(f"priority is an int or a list of one int per key, not {priority!r}")
    return [int(wish) for wish in wishes]


def _shown(key: Any) -> str:
    text = repr(list(key)) if isinstance(key, Mapping) else repr(key)
    return text if len(text) <= 80 else text[:77] + "..."
