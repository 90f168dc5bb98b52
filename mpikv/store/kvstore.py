"""The store and its verbs. Each verb plans, agrees with the other ranks, and then moves data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from .. import optimizers
from ..arrays.arrays import quiet, run_quietly
from ..cluster.agreement import Agreement
from ..cluster.background import Pending, Work, urgency
from ..cluster.calls import Call, PreparedCall
from ..cluster.environment import keep_directory
from ..cluster.process_group import ProcessGroup
from ..cluster.runtime import here, owned
from ..cluster.status_board import StatusBoard
from ..cluster.tracebacks import hidden_from_pytest, hide_frames, hiding_frames
from ..compute.kernels import find_kernels
from ..config import VARIABLES_ONLY, Config
from ..engine.exchange import Exchange
from ..engine.lazy import lazy
from ..engine.plan import digest
from ..errors import Closed, ConfigError, Stalled, Unsupported, ValueMismatch, a_kind, is_marked, known_names, text_of
from ..optimizers.updaters import UPDATING
from ..options import check_number, check_whole
from ..protocols import Array, GpuKernels, Key, Transport
from ..sparse.rows import Rows
from ..verbs import Verbs
from ..verbs.arguments import in_form
from ..verbs.control import ControlVerbs, check_head
from ..verbs.join import prepare_empty_part
from .door import Door, State, show_keys
from .plugins import RankedStore

if TYPE_CHECKING:
    from ..checkpoint.checkpoints import Checkpoints
    from ..checkpoint.saving import SaveWork
    from ..keep.commits import Commits, Restored
    from ..keep.state import ObjectState
    from .capture import CapturedStep

__tracebackhide__ = hidden_from_pytest
Function = TypeVar("Function", bound=Callable[..., Any])

# Seconds that ranks may differ in reaching the end of the program after a failure.
_LAST_STEPS = 1.0
_CAPABILITIES = {"optimizer": True, "sparse": True, "compression": True, "async": False, "gpu": False}
_CLOSE = Call("close", digest("close"))
# Looked up once: the class of an enum finds its members slowly.
_ENDED = State.ENDED


class KVStore(RankedStore):
    """A table of named arrays that all ranks share: a push adds up one array per rank, a pull reads the value.

    Made by :func:`mpikv.create`. Every method marked *collective* must be called by every rank of :attr:`comm`, in the
    same order and with the same keys. A rank that does otherwise gets, like every other rank, an error that names the
    rank and the call, before any data move; the store can then be used again. Host arrays are complete when a call
    returns.

    What a call fills, it returns: ``out``, or without it what :meth:`pushpull` and :meth:`broadcast` were given. Arrays
    of JAX are never written to, and arrays that were given without ``out`` may be read-only. The call does not fill
    these. It returns a structure like the one that it was given: the same dicts, nested as they came, lists, tuples and
    named tuples. A new array of the same library, shape and dtype stands there for each of them, beside the arrays that
    were filled. A read-only ``out`` of numpy's is a TypeError. A list or a tuple beside a key, or inside of a dict,
    always holds several arrays of this rank for one key: one for each device.

    Example (one rank; on n ranks every push adds up n arrays):

        >>> import mpikv, numpy as np
        >>> with mpikv.create() as kv:
        ...     kv.init("w", np.full((2, 3), 2.0))
        ...     kv.push("w", np.full((2, 3), 8.0))
        ...     kv.pull("w")
        array([[8., 8., 8.],
               [8., 8., 8.]])
    """

    _placement: str | None = None
    """The placement of stores of a kind, whatever was asked for."""
    _commits: Commits | None = None
    _restored: Restored | None = None
    _has_looped = False

    def __new__(cls, *parts: Any, **options: Any) -> KVStore:
        """Raise TypeError for a call without the parts that :func:`mpikv.create` makes. Local."""
        if len(parts) < 4:
            raise TypeError("a KVStore is made by mpikv.create(), or mpikv.create('dist_sync'), on every rank")
        return super().__new__(cls)

    def __init__(
        self,
        group: ProcessGroup,
        board: StatusBoard,
        transport: Transport,
        config: Config,
        *,
        found: Callable[..., KVStore],
        name: str = "local",
        root: int = 0,
        kernels: GpuKernels | None = None,
    ) -> None:
        """Make a store of these parts, and list it among the open ones. Collective.

        Use :func:`mpikv.create`, which makes the parts, and is ``found``.

        ``kernels``: those for a GPU's memory.
        """
        self._group, self._board, self._transport, self._config = group, board, transport, config
        self._type, self._root, self._found = name, root, found
        self._memory, self._quiet = transport.memory, quiet()
        self._agreement = Agreement(transport.control, group, board)
        placement = self._placement or config.placement
        rules = kernels or find_kernels(config.kernels)
        self._exchange = Exchange(transport, placement, root, rules, config.deterministic, config.threads)
        self._rows = Rows(self._exchange, root)
        self._verbs = Verbs(self._exchange, self._rows, self._agreement)
        self._verbs.push_pull.check_finite = config.check_finite
        self._control = ControlVerbs(self._agreement, group, root)
        self._order = transport.memory.order
        # Whether calls are made in the order of streams.
        self._has_stream = self._order.needed
        self._pending = Pending(self._least, self._on_worker, lambda: bool(self._door.running))
        self._door = Door(self._agreement, self._memory, group.size == 1, self._pending, self.abandon)
        self._captured = 0
        self._kept: dict[str, ObjectState] = {}
        self.before_free: list[Callable[[], None]] = []
        """Functions that release what uses the transport, on every rank alike, once ranks agree on the close."""
        self.before_close: list[Callable[[], None]] = []
        """Functions to call before the store is closed, once, on every rank alike."""
        # Last: a store whose constructor failed must not be closed at the end of the program.
        self._stores = open_stores()
        self._stores.append(self)

    def __reduce__(self) -> NoReturn:
        """Raise TypeError: a store can be neither pickled nor copied. Local."""
        raise TypeError(
            "a store cannot be pickled or copied, as it belongs to this process and its ranks; leave it out, save its "
            "values by kv.save(path), or make another store by mpikv.create()"
        )

    # --- Facts

    @property
    def root(self) -> int:
        """The rank whose values count at ``init``, ``set`` and ``broadcast``, and which runs Python updaters."""
        return self._root

    @property
    def comm(self) -> Any:
        """The store's own communicator (an ``mpi4py.MPI.Intracomm``), or None for a store of one rank."""
        return self._group.comm

    @property
    def transport(self) -> str:
        """How bytes move between ranks: ``local``, ``shm``, ``hierarchical``, ``mpi`` or ``nccl``."""
        return self._transport.name

    @property
    def placement(self) -> str:
        """Where values live with the present updater: ``root``, ``sharded``, ``replicated`` or ``owners``. Local.

        With ``owners`` each value is whole on one rank.
        """
        return self._exchange.placement.name

    @property
    def optimizer(self) -> Any:
        """The optimizer given to :meth:`set_optimizer`, or None. Waits for calls with ``wait=False``, which use it."""
        # A pending call may be about to use the settings that the caller changes next.
        self._pending.drain()
        return updater if isinstance(updater := self._exchange.updater, optimizers.Optimizer) else None

    @property
    def compression(self) -> Any:
        """The codec that compresses pushes, or None."""
        return self._verbs.settings.codec

    @lazy
    def _checkpoints(self) -> Checkpoints:
        """The part that saves and loads the store, made and imported at first use. Local."""
        from ..checkpoint.checkpoints import Checkpoints  # as many programs save nothing

        return Checkpoints(self._exchange, self._agreement, self._root, self._collective)

    @property
    def _assigns(self) -> bool:
        """Whether a push replaces the value by the sum, as without an updater; waits for pending calls. Local."""
        self._pending.drain()
        return self._exchange.updater.assigns

    @property
    def _joining(self) -> bool:
        """Whether the store is in a block of ``join``. Local."""
        return self._door.state is State.JOINING

    def _update_count(self, key: Key) -> int:
        """Return how many updates the present updater has made to a value; waits for pending calls. Local."""
        self._pending.drain()
        return int(self._exchange.values.table.counts[self._exchange.values.table[key].index])

    def _only_sums(self, keys: Sequence[Key], owner: object) -> None:
        """Note keys that hold a step's sums: no checkpoint has them. ``owner`` names the part with weights. Local."""
        self._exchange.values.table.summed.update(dict.fromkeys(keys, owner))

    def _all_gather(self, key: Key, owned: Sequence[Sequence[Array]]) -> None:
        """Fill each ``owned[r]`` on all ranks with rank r's, through the memory of the key. Collective.

        All are flat bytes, of the same sizes on every rank, and the key's value has as many.
        """
        self._collective("all_gather", self._verbs.push_pull.all_gather, key, owned)

    def is_capable(self, capability: str) -> bool:
        """Return whether the store has optimizer, sparse, compression, async or gpu; ConfigError for another word.

        Raises:
            ConfigError: the word is unknown.
        """
        if str(capability).lower() not in _CAPABILITIES:
            raise ConfigError(known_names("capability", capability, _CAPABILITIES))
        return {**_CAPABILITIES, "gpu": not self._memory.is_host}[capability.lower()]

    def statistics(self) -> dict[str, Any]:
        """Return a dict: bytes of rows sent, seconds of each rank, the late rank, and commits. Local.

        ``rows``: how many bytes this rank has sent to others in pushes and pulls of rows. ``ranks``, of several ranks,
        has a dict for each: how many seconds it was ``computing`` and waited for ``input`` between calls, and was
        ``waiting`` for other ranks and ``moving`` data in calls; how often it came ``last``, and how many seconds it
        ``held_up`` the others. ``late`` has the ``rank`` that held up the others most, the ``share`` of the time, the
        ``cause`` and a ``text``, or is None. Ranks on several hosts tell each other in each 128th call. ``commits``,
        once :meth:`steps` makes some: how many, and the seconds that they took.

        Example:
            >>> import mpikv
            >>> mpikv.create().statistics()
            {'rows': {'bytes_sent': 0}}
        """
        counters: dict[str, Any] = {"rows": {"bytes_sent": self._rows.sent}}
        if self.size > 1:
            counters |= self._board.lateness.statistics(self._agreement.record.calls)
        return counters if self._commits is None else {**counters, "commits": self._commits.statistics()}

    def keys(self) -> tuple[Key, ...]:
        """Return the keys in the order of their ``init``. Local."""
        self._door.check_open("keys")
        return tuple(self._exchange.values.table)

    def num_dead_node(self, timeout: float = 60) -> int:
        """Return how many ranks of this host have ended by now. Local: waits for nothing, sees no other host.

        Args:
            timeout: accepted for MXNet's sake, whose heartbeats it bounds.
        """
        return len(self._board.gone())

    def version(self, key: Key) -> int:
        """Return how many pushes the value of a key has seen. Local; waits for calls with ``wait=False``.

        Raises:
            KeyNotInitialized: the key is unknown.
        """
        self._door.check_open("version")
        self._pending.drain()
        return self._exchange.values.table.version(key)

    def __iter__(self) -> Iterator[Key]:
        """Return an iterator over the keys; raise Closed if the store has ended. Local."""
        return iter(self.keys())

    def __contains__(self, key: object) -> bool:
        """Return whether a key is in the table; raise Closed if the store has ended. Local."""
        self._door.check_open("keys")
        return key in self._exchange.values.table

    def __len__(self) -> int:
        """Return the number of keys; raise Closed if the store has ended. Local."""
        self._door.check_open("keys")
        return len(self._exchange.values.table)

    def __repr__(self) -> str:
        state = "closed" if self._door.state is _ENDED else f"{len(self)} keys"
        return (
            f"<mpikv.KVStore {self._type!r} rank {self.rank}/{self.size} transport={self.transport} "
            f"placement={self.placement} root={self._root} updater={self._exchange.updater.settings()} {state}>"
        )

    # --- Verbs

    def init(self, key: Any, value: Any = None, overwrite: bool = False) -> None:
        """Enter keys into the table, with the root's arrays as their values. Collective.

        The other ranks' arrays give shape and dtype, and these must be the same.

        Args:
            key: an int or a str, a list of them, or a dict of arrays.
            value: an array, or a list of one array per key. It is copied, and never written: :meth:`broadcast` fills
                every rank's arrays with the root's. A :class:`RowSparse`, or a list of them, makes the keys row-sparse.
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
        self._collective("init", self._verbs.values.init, key, value, overwrite)

    def push(self, key: Any, value: Any = None, priority: Any = 0, *, wait: bool = True) -> Any:
        """Sum the ranks' arrays of a key; the value becomes the sum, or what an updater makes of it. Collective.

        Without an updater the stored value becomes the sum (ASSIGN; it is not added to the old value and never
        averaged). With one, ``updater(key, sum, stored)`` runs once per key and push, at the owner.

        Args:
            key: an int or a str, a list of them, or a dict of arrays. Repeated keys in a list mean a list of arrays.
            value: an array of the stored shape, or a list of such arrays, which are summed on this rank first, from
                left to right; for a list of keys, a list with one of either per key. A dtype of the same kind is cast,
                integers only if the stored one is wider; sums may wrap in it, as numpy's do.
                Half precision is summed in float32 and rounded once, a list once more before it is sent. The arrays are
                never changed or kept and may be reused when push returns; memory that several ranks push from when it
                has returned on all of them. None, on every rank, takes the
                :meth:`buffer` of each key. A :class:`RowSparse`, or a list of them, on every rank, brings rows: only
                they travel, and an optimizer changes only the rows in the sum; without an updater all others become
                zero.
            priority: an int, or one per key; the same on every rank. Of calls with ``wait=False`` that all ranks have
                issued and that have not begun, the one with the highest comes first.
            wait: False returns a :class:`Work` at once, and a thread of the store makes the call while the caller goes
                on. Until it has completed, and on GPUs until :meth:`Work.wait` or another call of all ranks has
                returned, the arrays and lists of the call must not be changed, what it fills not be
                read, and settings of the optimizer not be set. Such calls are made one after the other, in the order in
                which they were issued but for priorities, on every rank alike; any other call waits for all of them
                first. Whatever is wrong with the call is raised by :meth:`Work.wait`. A Python updater runs in that
                thread.

        Returns:
            None, or a :class:`Work`; its :meth:`Work.wait` returns None.

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
        # True itself first: it costs nothing, and training passes nothing else.
        call = self._collective if wait is True or self._waits("push", wait) else self._issue
        return call("push", self._verbs.push_pull.push, key, value, priority)

    def pull(
        self, key: Any, out: Any = None, priority: Any = 0, ignore_sparse: bool = True, *, wait: bool = True
    ) -> Any:
        """Fill ``out``, or return new arrays, with the stored value of a key or of each key of a list. Collective.

        ``out`` may differ per rank.

        Args:
            key: an int or a str, a list of them, or a dict of arrays to fill.
            out: an array of the stored shape, or a list of such arrays, each of which is filled; for a list of keys,
                a list with one of either per key. A dtype of the same kind is cast, integers only if it is wider
                than the stored one. A key's own :meth:`view` is brought up to date.
                The arrays must not overlap: that is not looked for, as it would take longer than a small pull. None:
                new arrays of numpy's are returned.
            priority: as in :meth:`push`.
            ignore_sparse: what happens to a :class:`RowSparse` among the outs. True leaves it as it is, and logs so;
                False gives it all rows of the value that are not zero, for which the whole value travels;
                :meth:`row_sparse_pull` moves rows alone.
            wait: as in :meth:`push`.

        Returns:
            ``out``, or a structure like it where it cannot be written (see the class), or new arrays, for a list or a
            tuple of keys in one like it; with ``wait=False`` a :class:`Work` that returns them.

        Raises:
            KeyNotInitialized: ``init`` was not called for a key.
            ValueMismatch: a shape or a dtype does not fit.
            TypeError: ``out`` is an array of numpy's that cannot be written.
            RankMismatch, PeerFailed: as in :meth:`push`.

        Example:
            >>> import mpikv, numpy as np
            >>> kv = mpikv.create()
            >>> kv.init(["a", "b"], [np.zeros(2), np.ones(1)])
            >>> kv.pull(["a", "b"])
            [array([0., 0.]), array([1.])]
        """
        call = self._collective if wait is True or self._waits("pull", wait) else self._issue
        return call("pull", self._verbs.push_pull.pull, key, out, ignore_sparse, priority)

    def pushpull(self, key: Any, value: Any = None, out: Any = None, priority: Any = 0, *, wait: bool = True) -> Any:
        """Push and pull in one exchange, faster than the two calls; fills ``out``, or without it ``value``. Collective.

        Args:
            key: as in :meth:`push`.
            value: as in :meth:`push`.
            out: as in :meth:`pull`, a dict where ``key`` is one; None writes into the arrays of ``value``. An array
                may be both pushed and pulled into.
            priority: as in :meth:`push`.
            wait: as in :meth:`push`.

        Returns:
            ``out``; if None, ``value``, or without a value the read-only :meth:`view` of each key. A structure like it
            where it cannot be written (see the class). A :class:`RowSparse` that is filled is given the new values of
            its own rows. With ``wait=False`` a :class:`Work` that returns them.

        Raises:
            KeyNotInitialized: ``init`` was not called for a key.
            ValueMismatch: a shape, a dtype or the number of arrays does not fit.
            RankMismatch, PeerFailed: as in :meth:`push`.

        Example:
            >>> import mpikv, numpy as np
            >>> kv = mpikv.create()
            >>> kv.init("g", np.zeros(2))
            >>> kv.pushpull({"g": np.full(2, 3.0)})
            {'g': array([3., 3.])}
        """
        call = self._collective if wait is True or self._waits("pushpull", wait) else self._issue
        return call("pushpull", self._verbs.push_pull.pushpull, key, value, out, priority)

    def capture(self, key: Any, value: Any = None, out: Any = None) -> CapturedStep:
        """Return a function that makes the same :meth:`pushpull` at each call; nothing is pushed yet. Collective.

        Each call of the function is collective, too. On a GPU the second call records the work in a CUDA graph. That
        call and later ones launch it, and the cost to the host does not grow with the number of keys, unless these have
        rates of their own. A learning rate, a schedule, and update counts go on as in any push. Where a GPU cannot
        record the work, the function makes plain calls, its ``captured`` is False, and its ``reason`` says why: on the
        host, for updater functions and optimizers of whole values, compression, ``deterministic``, several arrays for a
        key, and arrays of the host or that are not contiguous. After anything that moves values, or changes how they
        are updated, the work is recorded anew.

        Args:
            key: as in :meth:`push`. The present contents of lists and dicts count.
            value: as in :meth:`pushpull`: the memory that is read at each call. The function keeps the arrays.
            out: as in :meth:`pushpull`: the memory that is written.

        Returns:
            A :class:`CapturedStep`: each call returns the same as ``pushpull``, with ``wait=False`` a :class:`Work`.

        Raises:
            KeyNotInitialized, ValueMismatch, RankMismatch, PeerFailed: as in :meth:`pushpull`.

        Example:
            >>> import mpikv, numpy as np
            >>> kv = mpikv.create()
            >>> weight, gradient = np.zeros(2), np.ones(2)
            >>> kv.init("w", weight)
            >>> kv.set_optimizer("sgd", learning_rate=1.0)
            >>> step = kv.capture("w", gradient, out=weight)
            >>> step()
            array([-1., -1.])
            >>> gradient[0] = 3
            >>> step()
            array([-4., -2.])
            >>> step.captured, step.reason
            (False, 'the store is on the host')
        """
        from .capture import CapturedStep, prepare_capture

        given = self._collective("capture", partial(prepare_capture, self._verbs), key, value, out)
        number, self._captured = self._captured, self._captured + 1
        return CapturedStep(given, number, self._verbs, self._door, self._issue_unless)

    def _issue_unless(self, wait: bool, verb: str, prepare: Callable[..., PreparedCall], *arguments: Any) -> Any:
        """Make a call and return its result; or, if ``wait`` is False, queue it and return its Work. Collective."""
        return (self._collective if self._waits(verb, wait) else self._issue)(verb, prepare, *arguments)

    def row_sparse_pull(self, key: Any, out: Any = None, priority: Any = 0, row_ids: Any = None) -> Any:
        """Fill ``out``, or return new ones, with the rows ``row_ids`` of a key, or of each key of a list. Collective.

        Only these rows travel. ``out`` and ``row_ids`` may differ per rank. The value may be row-sparse or dense, of
        one dimension at least.

        Args:
            key: an int or a str, or a list of them.
            out: a :class:`RowSparse` of the stored shape, which then has the rows asked for and no others, zeros among
                them where the value has none; or an array of that shape, which is given these rows, and zeros
                elsewhere; or a list of either. A dtype of the same kind is cast. None: new ones are returned.
            priority: as in :meth:`push`.
            row_ids: the numbers of the rows: an array of any shape, or a list of numbers, in any order and repeated or
                not; or a list of such, one for each ``out``. One for several outs is pulled once. For a list of keys, a
                list with one of either per key.

        Returns:
            ``out``, or a new :class:`RowSparse` for each array of ``row_ids``, in that form.

        Raises:
            IndexError: a number is negative or not below the number of rows, on this rank; ``PeerFailed`` on others.
            ValueMismatch: the numbers of keys, outs and row_ids, a shape or a dtype do not fit.
            KeyNotInitialized, RankMismatch, PeerFailed: as in :meth:`push`.

        Example:
            >>> import mpikv, numpy as np
            >>> kv = mpikv.create()
            >>> kv.init("words", mpikv.RowSparse([1, 3], np.array([[1.0], [3.0]]), (5, 1)))
            >>> rows = kv.row_sparse_pull("words", row_ids=[3, 0, 3])
            >>> rows.indices, rows.values
            (array([0, 3]), array([[0.],
                   [3.]]))
        """
        return self._collective("row_sparse_pull", self._verbs.rows.row_sparse_pull, key, out, priority, row_ids)

    def buffer(self, key: Any) -> Any:
        """Return this rank's gradient buffer of a key, or a list of buffers; the first call allocates. Collective.

        What is written there is pushed by ``push(key)`` and ``pushpull(key)`` without a value, which then copy nothing
        where all ranks are on one host: every rank reads the others' buffers. Buffers may be filled again when these
        return, and are changed by the store only as ``out``; at first they hold zeros, or what a deleted key left. They
        may be the ``out=`` of any numpy operation, and are valid until the key is deleted or overwritten or the store
        closed. A key that is initialised anew has no buffer until it is asked for.

        Args:
            key: an int or a str, or a list of them.

        Returns:
            An array of the shape and dtype of the value, the same memory at every call.

        Raises:
            KeyNotInitialized: ``init`` was not called for a key.
            MemoryError: on every rank, if one has too little.
            RankMismatch, PeerFailed: as in :meth:`push`.

        Example:
            >>> import mpikv, numpy as np
            >>> kv = mpikv.create()
            >>> kv.init("w", np.zeros(2))
            >>> gradient, weight = kv.buffer("w"), kv.view("w")
            >>> np.multiply([1.0, 2.0], 3.0, out=gradient)
            array([3., 6.])
            >>> kv.pushpull("w")
            array([3., 6.])
            >>> weight
            array([3., 6.])
        """
        return self._collective("buffer", self._verbs.push_pull.buffer, key)

    @hiding_frames
    def view(self, key: Any) -> Any:
        """Return a view of a key's value, read-only on the host, or a list of views; waits for pending calls. Local.

        The view is the store's own memory. It holds the newest value after ``init``, ``set`` and ``broadcast`` of the
        key, after each ``pushpull``, and after each ``pull`` that has it as ``out``, which moves nothing on one host.
        It stays as it is until this rank's next push of the key, and is valid until the key is deleted or overwritten
        or the store closed. After that it may be read, but holds anything.

        Args:
            key: an int or a str, or a list of them.

        Raises:
            KeyNotInitialized: ``init`` was not called for a key.

        Example:
            >>> import mpikv, numpy as np
            >>> kv = mpikv.create()
            >>> kv.init("w", np.zeros(2))
            >>> weight = kv.view("w")
            >>> kv.push("w", np.ones(2))
            >>> kv.pull("w", out=weight)
            array([1., 1.])
        """
        self._door.check_open("view")
        self._pending.drain()
        self._order.rejoin()
        self._door.check_open("view")  # a pending call may have ended it
        plan = self._verbs.operands.plan(key)
        return in_form(key, plan, plan.views)

    def broadcast(self, key: Any, value: Any = None, out: Any = None, priority: Any = 0) -> Any:
        """Store the root's values under keys, new or known, and fill ``out``, or else ``value``. Collective.

        ``value`` is read on the root only; on other ranks it gives shape and dtype. A training begins with it: all
        ranks then compute their first gradients from the same weights.

        Args:
            key: as in :meth:`init`.
            value: as in :meth:`init`.
            out: as in :meth:`pull`, a dict where ``key`` is one; None writes into the arrays of ``value``.
            priority: as in :meth:`push`.

        Returns:
            ``out``; if None, ``value``. A structure like it where it cannot be written (see the class).

        Raises:
            ValueMismatch: a value or ``out`` does not fit a known key, or a dtype cannot be stored.
            RankMismatch, PeerFailed: as in :meth:`push`.

        Example:
            >>> import mpikv, numpy as np
            >>> params = {"w": np.ones(2), "layer": {"b": np.zeros(1)}}
            >>> mpikv.create().broadcast(params) is params
            True
        """
        return self._collective("broadcast", self._verbs.values.broadcast, key, value, out, priority)

    def set(self, key: Any, value: Any = None) -> None:
        """Overwrite stored values by the root's, without the updater; all ranks give arrays that fit. Collective.

        ``value`` is read on the root only; the other ranks' are checked.

        Args:
            key: as in :meth:`init`.
            value: an array of the stored shape, or a list of one per key. A dtype of the same kind is cast.

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
        self._collective("set", self._verbs.values.set, key, value)

    def delete(self, key: Any) -> None:
        """Remove keys, their values and their optimizer state. Collective.

        Args:
            key: an int or a str, or a list of them.

        Raises:
            KeyNotInitialized: a key is unknown.
            RankMismatch, PeerFailed: as in :meth:`push`.

        Example:
            >>> import mpikv, numpy as np
            >>> kv = mpikv.create()
            >>> kv.init("w", np.zeros(2))
            >>> kv.delete("w")
            >>> "w" in kv
            False
        """
        self._collective("delete", self._verbs.values.delete, key)

    def barrier(self) -> None:
        """Wait until every rank has come here. Collective.

        Raises:
            Stalled: a rank did not come within the store's timeout.
        """
        self._collective("barrier", self._control.barrier)

    def check_equal(self, text: str, verb: str = "check_equal") -> None:
        """Compare a text with those of the other ranks; raise RankMismatch if they differ. Collective.

        Args:
            text: the same on every rank, as is ``verb``.
            verb: what it is compared for, for messages.

        Raises:
            RankMismatch: they differ. Both are shown; of a text of several lines, the first line and the first that
                differs.

        Example:
            >>> import mpikv
            >>> mpikv.create().check_equal("dropout 0.1")
        """
        self._collective(verb, lambda: self._control.check_equal(text, verb))

    def any_rank(self, flag: bool) -> bool:
        """Return whether any rank passed True. Collective.

        Example:
            >>> import mpikv
            >>> mpikv.create().any_rank(False)
            False
        """
        return bool(self._collective("any_rank", lambda: self._control.any_rank(flag)))

    def mean(self, value: Any) -> Any:
        """Return the mean of a number over ranks, such as a loss; of a dict, that of each of its numbers. Collective.

        Numbers are Python's floats, or what ``float`` takes: this is for a few metrics. Means of arrays are sums of a
        push, divided by :attr:`size`.

        Example:
            >>> import mpikv
            >>> mpikv.create().mean({"loss": 0.5, "accuracy": 1})
            {'loss': 0.5, 'accuracy': 1.0}
        """
        return self._collective("mean", self._control.mean, value)

    @hiding_frames
    def raise_on_all_ranks(self, error: Exception, verb: str = "raise_on_all_ranks") -> NoReturn:
        """Raise the error here, and have the other ranks' next call, whatever it is, raise PeerFailed. Collective.

        The others may make any call: they raise ``PeerFailed`` with the text of the error, and all may go on.

        Args:
            error: what this rank raises. An error of Python's or of this package is given the rank in its message.
            verb: what was to be done, for the message.

        Example:
            >>> import mpikv
            >>> mpikv.create().raise_on_all_ranks(ValueError("no more data"), "load")
            Traceback (most recent call last):
            ValueError: load: no more data
        """
        self._collective(verb, _fail, error)
        raise error  # never reached: the call has raised it

    def set_controller(self, head: int, controller: Callable[[Any], Any] | None) -> None:
        """Register the function that :meth:`command` calls for ``head`` at the root; None removes it. Local."""
        if controller is not None and not callable(controller):
            raise TypeError(f"a controller is a function of the command's body, not {a_kind(controller)}")
        self._control.controllers[check_head(head)] = controller

    def command(self, head: int, body: Any = None) -> None:
        """Call the function that the root registered for ``head``, if any, with ``body``, at the root. Collective.

        Every rank gives the same command. The controller is given what JSON makes of ``body``, and cannot call the
        store. When it raises, so does the command on every rank.

        Args:
            head: the number, from 0. A command that has no controller does nothing, and is logged.
            body: a string, a number, a truth value, None, or lists and dicts of them.

        Raises:
            TypeError: JSON has no form of ``body``, or ``head`` is no number.
            RankMismatch: ranks gave other commands.
            PeerFailed: the controller raised, at the root.

        Example:
            >>> import mpikv
            >>> kv = mpikv.create()
            >>> kv.set_controller(7, lambda body: print("rate", body["rate"]))
            >>> kv.command(7, {"rate": 0.5})
            rate 0.5
        """
        self._collective("command", self._control.command, head, body)

    _send_command_to_servers = command

    # MXNet's scripts call it so, and set_updater below.
    _barrier = barrier

    def set_updater(self, updater: Callable[[Any, Array, Array], Any] | None) -> None:
        """Set the function that a push calls, once per key, at the root: ``updater(key, input, stored)``. Collective.

        It changes ``stored`` in place or returns the new value; ``input`` is the sum over ranks, ``key`` exactly what
        the caller of ``init`` wrote. Both arrays are valid, and can be written, during the call only; shape and dtype
        of ``stored`` stay. For a push of rows ``input`` is a :class:`RowSparse`, and ``stored`` a copy of the whole
        value all the same. An exception in it is raised on every rank, and no value of that push is changed. None
        returns to ASSIGN. Nothing changes until the next push.

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
        self._collective("set_updater", lambda: self._verbs.settings.set_updater(updater))

    _set_updater = set_updater

    def updater(self, function: Function) -> Function:
        """Set a function as the updater and return it: a decorator. See :meth:`set_updater`. Collective."""
        self.set_updater(function)
        return function

    def set_optimizer(self, optimizer: Any, **arguments: Any) -> None:
        """Set the optimizer that a push runs at the owners of the values; state starts anew. Collective.

        Every rank sets the same one. Settings changed later, as ``optimizer.learning_rate``, count from the next push
        on and must be changed alike on every rank, which the push checks.

        Args:
            optimizer: an object of :mod:`mpikv.optimizers`, or the name of one.
            arguments: for a name, its arguments. ``average=True``, for an object, too, divides each sum by the number
                of ranks; so does a store that loads a checkpoint, by its own number.

        Raises:
            ConfigError: the name or an argument is unknown.
            Unsupported: a stored dtype cannot be optimized; or ``average`` where pushes are not summed (dist_async).
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
        self._collective("set_optimizer", lambda: self._verbs.settings.set_optimizer(optimizer, arguments))

    def set_gradient_compression(self, compression: Any) -> None:
        """Compress pushes from now on, or stop compressing; residuals start anew. Collective.

        Every rank sets the same one. A ``push`` and a ``pushpull`` then send codes in place of gradients, on every
        placement. What is left out of a push is kept on its rank, the residual, and added to the next (error feedback).
        Only finite numbers in float16, bfloat16 and float32 can be pushed meanwhile; all arithmetic is float32.
        ``init``, ``set``, ``broadcast`` and pulled values are never compressed. Residuals start at zero, and do so
        again after this call, ``delete`` and ``init(..., overwrite=True)``; a push that fails leaves them as they were.

        Args:
            compression: a name of :mod:`mpikv.codecs` (``2bit``, ``1bit``, ``fp16``, ``bf16``, ``topk``,
                ``lowrank``); a dict with that as ``type``, and options, as ``{"type": "2bit", "threshold": 0.5}``; a
                codec; or None, which turns compression off. Set the optimizer before, which may change the placement.

        Raises:
            ConfigError: a name or an option is unknown, or a value is out of its range.
            TypeError: an argument is of a wrong type.
            MemoryError: there is too little memory; the store was not changed.
            RankMismatch: ranks gave other settings.

        Example:
            >>> import mpikv, numpy as np
            >>> kv = mpikv.create()
            >>> kv.init("w", np.zeros(4, np.float32))
            >>> kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
            >>> kv.push("w", np.array([0.7, -0.6, 0.2, 0.5], np.float32))
            >>> kv.pull("w")
            array([ 0.5, -0.5,  0. ,  0.5], dtype=float32)
            >>> kv.push("w", np.array([0.0, 0.0, 0.3, 0.0], np.float32))
            >>> kv.pull("w")
            array([0. , 0. , 0.5, 0. ], dtype=float32)
        """
        self._collective("set_gradient_compression", self._verbs.settings.set_compression, compression)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the optimizer's rate from the next push on, as all ranks must; waits for pending calls. Local.

        Call it on every rank, as the next push checks.

        Raises:
            ConfigError: no optimizer is set, or its rate is given by a schedule.
        """
        self._door.check_open("set_learning_rate")
        if self.optimizer is None:
            raise ConfigError("set_learning_rate: no optimizer is set; call set_optimizer(...) first")
        self.optimizer.learning_rate = learning_rate

    def save(self, path: Any, residuals: bool = True, *, wait: bool = True, state: Any = None) -> SaveWork | None:
        """Write the store to a file; with ``wait=False`` a thread does, and ``work.wait()`` completes it. Collective.

        The file has values, versions, the optimizer with settings, state and counts, schedules, and what compressed
        pushes have left out.

        The path is the same on every rank, of a file system that all hosts share. Each rank writes the elements that it
        owns, without copying them, but for those of a GPU, for which the host needs as much memory. The file takes its
        place at ``path`` in one step when it is whole and on the disk: a job that is killed at any moment leaves the
        checkpoint that was there, or the new one.

        An updater function, or an optimizer with an option that is a function, is noted by its name only; to be loaded,
        the store must have been given it before. Buffers, and the arguments of :func:`mpikv.create`, are not saved.

        Args:
            path: a str, bytes or ``os.PathLike``. The form is that of safetensors.
            residuals: whether to save what compressed pushes have left out, which takes as much as float32 values, once
                per rank, and is copied. Of no effect without compression.
            wait: False returns a :class:`SaveWork` when each rank has copied what it owns, and a thread writes the copy
                while the caller goes on. Later calls are not in the file. It takes its place when all ranks call
                :meth:`SaveWork.wait`, which raises what the writing has raised; the next save or load, of the
                optimizer's state too, and :meth:`close` do so first. The store keeps the memory of the copy, as many
                bytes as a rank owns of values and state, for the next such save.
            state: what else the program needs to go on, a dict of names: ``{"epoch": 3}``. :meth:`load` returns it. It
                holds numbers, texts, arrays, tensors, None, and lists, tuples and dicts of them. What is the same on
                all ranks is stored once, and anything else for each rank. Written from a copy.

        Returns:
            None, or the :class:`SaveWork`.

        Raises:
            OSError: the file cannot be written, as on a full disk; the other ranks raise ``PeerFailed``. If it is in
                its place and only the folder could not be flushed, the message says so.
            CheckpointError: another store is being saved to the path.
            Unsupported: a host does not see the file that the root has made, or no reader would take what the store
                holds; or its values are only the sums of a :class:`mpikv.Trainer` with ``update_on_kvstore=False``.
            ConfigError: a setting of the optimizer was changed to need other state than there is.
            MemoryError: with ``wait=False``, there is no memory for the copy; the other ranks raise ``PeerFailed``.
            RankMismatch: ranks gave other paths, or other names in ``state``.
            TypeError: no file can hold the ``state``.

        Example:
            >>> import mpikv, numpy as np, pathlib, tempfile
            >>> path = pathlib.Path(tempfile.mkdtemp(), "digits.mpikv")
            >>> kv = mpikv.create()
            >>> kv.init("w", np.ones(2))
            >>> kv.set_optimizer("sgd", learning_rate=0.5, momentum=0.5)
            >>> kv.push("w", np.ones(2))
            >>> kv.save(path, state={"epoch": 3})
            >>> other = mpikv.create()
            >>> other.load(path)
            {'epoch': 3}
            >>> other.pushpull({"w": np.ones(2)})
            {'w': array([-0.25, -0.25])}
        """
        # Before the pending save ends: all ranks must come to its end, or none.
        waits = self._waits("save", wait)
        self._checkpoints.finish()
        work: SaveWork | None = self._collective("save", self._checkpoints.save, path, residuals, waits, state)
        return work

    def load(self, path: Any) -> dict[str, Any]:
        """Restore values and optimizer, bit for bit, from a :meth:`save` file; return the ``state`` in it. Collective.

        The number of ranks and the placement may be others. The path is the same on every rank, and each reads the
        elements that it owns. The store either has no keys, which are then created, or has exactly those of the file.
        It has no updater yet, or one of the same kind as the file's, which is replaced: :attr:`optimizer` is a new
        object.

        Every array is compared with its checksum. Into a store that has keys nothing is read before the whole file was
        found good, for which it is read twice; a file that is changed between ends the store. What compressed pushes
        of this store have left out is dropped. As many ranks with the same compression take over what those of the file
        have left out; any other store starts with zeros, and logs a warning.

        Returns:
            The ``state`` that :meth:`save` was given; without it ``{}``. What differed between ranks returns to as many
            ranks. On another number it is left out, with a warning.

        Raises:
            CheckpointError: the file is damaged, no checkpoint, or one of another updater.
            ValueMismatch: the store has other keys, shapes or dtypes.
            OSError: the file cannot be read; the other ranks raise ``PeerFailed``.
            Unsupported: the placement cannot run the updater, or a value is bfloat16 and ml_dtypes is not there; or
                the store only sums for a Trainer, as in :meth:`save`.
            RankMismatch: ranks see different files.

        Example: see :meth:`save`.
        """
        self._checkpoints.finish()
        state: dict[str, Any] = self._collective("load", self._checkpoints.load, path)
        return state

    def save_optimizer_states(self, fname: Any, dump_optimizer: bool = False) -> None:
        """Write the optimizer's state and update counts to a file, without the values. Collective.

        The path is as in :meth:`save`.

        Args:
            fname: as in :meth:`save`.
            dump_optimizer: whether the optimizer's settings are written, too.

        Raises:
            ConfigError: the store has no optimizer.
            Unsupported: the settings were asked for, and one of them is a function.
            OSError, CheckpointError, RankMismatch: as in :meth:`save`.

        Example:
            >>> import mpikv, numpy as np, pathlib, tempfile
            >>> path = pathlib.Path(tempfile.mkdtemp(), "digits.states")
            >>> kv = mpikv.create()
            >>> kv.init("w", np.zeros(2))
            >>> kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
            >>> kv.push("w", np.ones(2))
            >>> kv.save_optimizer_states(path)
            >>> kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
            >>> kv.load_optimizer_states(path)
            >>> kv.pushpull({"w": np.zeros(2)})
            {'w': array([-1.5, -1.5])}
        """
        self._checkpoints.finish()
        self._collective("save_optimizer_states", self._checkpoints.save_states, fname, dump_optimizer)

    def load_optimizer_states(self, fname: Any) -> None:
        """Read state and update counts that :meth:`save_optimizer_states` wrote; values stay. Collective.

        The path is as in :meth:`load`. The store has the keys of the file and an optimizer of the same kind. It keeps
        its settings, unless the file has those, too: then :attr:`optimizer` is a new object. With ``multi_precision``
        the float32 masters are state, from which the next push of a key goes on.

        Raises:
            ConfigError: the store has no optimizer.
            CheckpointError: the file is damaged, or holds other state than the optimizer has.
            ValueMismatch, OSError, RankMismatch: as in :meth:`load`.

        Example: see :meth:`save_optimizer_states`.
        """
        self._checkpoints.finish()
        self._collective("load_optimizer_states", self._checkpoints.load_states, fname)

    # --- Restarts

    def keep(self, /, **objects: Any) -> None:
        """Register, before :meth:`steps`, objects that it copies with the store and restores after a death. Local.

        Each rank keeps its own. Objects are restored in place, so that the program's names for them stay valid.

        Args:
            objects: arrays of numpy, tensors, dicts, lists, generators of numpy or ``random``, objects with
                ``state_dict()`` and ``load_state_dict()``, or pairs of functions ``(get, set)``. A state has numbers,
                texts, arrays, tensors, None, and lists, tuples and dicts of them.

        Raises:
            TypeError: an object is none of these.
            ConfigError: the name is taken.
            Unsupported: the loop of :meth:`steps` has begun.

        Example: see :meth:`steps`.
        """
        from ..keep.state import find_state

        if self._has_looped:
            raise Unsupported("keep: the loop has begun, and has put back what was kept; call keep before kv.steps")
        if taken := sorted(objects.keys() & self._kept.keys()):
            raise ConfigError(f"keep: {taken[0]!r} is kept already; give each object a name of its own")
        self._kept |= {name: find_state(name, kept) for name, kept in objects.items()}

    def steps(self, total: int, *, fill: Any = None, path: Any = None, save_every: float = 600.0) -> Iterator[int]:
        """Return an iterator over the steps still to make; a store has one. With ``path``, or under ``mpikv run
        --restarts`` or ``--keep``, restore the newest copy before; collective then.

        Under ``mpikv run --restarts N`` or ``--keep DIR``, each rank copies its part of the store, and what
        :meth:`keep` names, to a file after some of the steps: as often as 2 % of the time allows, and after the last.
        If a rank dies, all ranks start again. The program then makes the store and its objects as in the first start.
        This call puts the newest copy back, and the loop begins with the first step after it. So each step counts
        once, and the bits are those of a run without a death.

        With ``path``, the loop saves all of that as :meth:`save` does, too, and after the last step. The same program
        goes on from there after the loss of a host or of the whole job, under any launcher and on any number of ranks.
        The newest step of both counts. A kept object whose state differs between ranks returns to as many ranks; on
        another number generators start anew, with a warning, and others raise ConfigError.

        With ``path`` or ``--keep DIR``, SIGTERM makes the loop commit and save after one of the next steps, and
        end the program with status 75, unless the program handles SIGTERM. With neither of all these, the loop is that
        of ``range``.

        The loop of ``range`` is local; in any other the end of a step is collective. Keys, updater and codec are set
        before the loop. A Python updater's own state is kept by :meth:`keep`. Buffers are not kept: fill them in each
        step. Ranks of ``dist_async`` meet about once a second; a copy has the pushes of all ranks up to the same step,
        each once.

        Args:
            total: the number of steps, from 0.
            fill: what the begin of the loop pulls into: as ``out`` of :meth:`pull`, a dict of arrays by their keys.
            path: a checkpoint, of a file system that all hosts share; none need be there yet.
            save_every: the seconds between two saves, in which training waits.

        Raises:
            Unsupported: the store has had a loop, is on GPUs without ``path`` alone, or has sums of gradients of a
                Trainer, or of a torch model, that is not kept.
            ConfigError: the copy is of another program, or has no state of a kept object for this number of ranks; or
                another process still writes to it.
            MemoryError: there is no room for copies; on every rank.
            OSError, CheckpointError, ValueMismatch: as in :meth:`save` and :meth:`load`.

        Example:
            >>> import mpikv, numpy as np
            >>> kv, params, rng = mpikv.create(), {"w": np.zeros(2)}, np.random.default_rng(0)
            >>> kv.init(params)
            >>> kv.set_optimizer("sgd", learning_rate=0.5)
            >>> kv.keep(rng=rng)
            >>> for step in kv.steps(3, fill=params):
            ...     gradient = {"w": params["w"] - rng.standard_normal(2)}
            ...     params = kv.pushpull(gradient, out=params)
            >>> kv.restored is None
            True
        """
        from ..keep.commits import Commits, Disk

        total = check_whole("steps: total", total)
        save_every = check_number("steps: save_every", save_every, "(0, inf)")
        self._door.check_open("steps")
        if self._has_looped:
            raise Unsupported("steps: a store has one loop; for epochs, use epoch, batch = divmod(step, batches) in it")
        self._has_looped = True
        folder, disk = keep_directory(), None
        if folder is None and path is None:
            return iter(range(total))
        if path is not None:
            disk = Disk(os.fsdecode(path), save_every, self._checkpoints)
        parts = (self._exchange, self._agreement, self._collective, self._kept)
        facts = (self._config.timeout, self._group.one_host, self._in_rounds)
        commits = self._commits = Commits(*parts, folder, disk, *facts)
        restored = self._restored = commits.open_and_restore(total)
        if fill is not None:  # also on a first start, to find a wrong key then
            self.pull(fill)
        return commits.run(restored.step if restored else 0, total)

    @property
    def restored(self) -> Restored | None:
        """How :meth:`steps` went on after a death: ``step``, ``attempt``, ``again`` and ``why``; None on a first start.

        ``step`` is the first step of the loop, ``attempt`` how often ``mpikv run`` has restarted the ranks, ``again``
        how many steps are made again, and ``why`` names the rank that died.
        """
        return self._restored

    def group(self, ranks: Sequence[int]) -> KVStore | None:
        """Return a new store of some of the ranks, with this one's options; None on other ranks. Collective.

        Every rank calls it with the same list, those that are not in it, too. Both stores can be used, by turns.

        Args:
            ranks: ranks of this store; the new store counts them in this order, and the first is its root.

        Returns:
            The new store, empty; None on the other ranks.

        Raises:
            ConfigError: the list is empty, or something in it is no rank or is in it twice.
            RankMismatch: ranks gave other lists.

        Example:
            >>> import mpikv
            >>> mpikv.create().group([0]).size
            1
        """
        members, comm = self._collective("group", self._control.group, ranks)
        if self.rank not in members:
            return None
        # The variables hold in the new store by themselves, as they do here.
        options = {name: value for name, value in vars(self._config).items() if name not in VARIABLES_ONLY}
        try:
            return self._found(self._type, comm=comm, compression=self.compression, **options)
        finally:
            if self.size > 1:
                comm.Free()  # the new store has a duplicate

    @contextmanager
    def join(self) -> Iterator[None]:
        """In a with block ranks may make unequal numbers of calls: a rank that is done joins the others'. Collective.

        Collective: every rank enters. In the block ranks may push, pull, pushpull, row_sparse_pull and call barrier a
        different number of times. A rank that has left contributes nothing to their sums, whatever its buffers hold,
        and is given nothing; a sum then has fewer terms. An optimizer with ``average`` divides by the number of all
        ranks all the same: a mean over those that have brought something is yours to make.
        Only one store can be used in the block: a rank that has left waits in it. Calls with ``wait=False`` cannot be
        made in it; those that were made before are waited for.

        Raises:
            RankMismatch: the working ranks made different calls, or one that a rank without work cannot take part in.

        Example:
            >>> import mpikv, numpy as np
            >>> kv = mpikv.create()
            >>> kv.init("w", np.zeros(2))
            >>> with kv.join():
            ...     for batch in range(3 + kv.rank):
            ...         kv.push("w", np.ones(2))
        """
        self._door.check_free("join")
        self._pending.drain()
        self._order.rejoin()
        with self._door.joining():
            yield
            self._door.check_open("join")
            self._door.shadow(partial(prepare_empty_part, self._verbs), self._run_in_order)

    def close(self) -> None:
        """End the store and free its memory; raise the first error that nobody has seen. Collective, idempotent.

        The end of a ``with`` block closes the store, too, and so does the end of the program.

        Raises:
            RankMismatch: the other ranks did something else.
            Exception: what a call with ``wait=False`` raised and nobody has seen, once the store is closed. A save that
                is pending is waited for.
        """
        if self._door.state is _ENDED:
            return
        # First, while calls can be made: they may give sums or weights back.
        while self.before_close:
            self.before_close.pop()()
        self._pending.drain()
        # Raised at the end: the store must close all the same, together with the other ranks.
        unseen = self._pending.take_failure()
        try:
            if self._door.state is not _ENDED:  # as it may have by a pending call
                of_save = self._checkpoints.end_save() if "_checkpoints" in vars(self) else None
                unseen = of_save if unseen is None else unseen
            if unseen is not None:
                unseen.__traceback__ = None  # its frames know of memory that could not be freed
            if self._door.state is not _ENDED:
                self._collective("close", lambda: (_CLOSE, self._free))
                self._leave("the store was closed; create a new store")
        except Exception as error:
            error.__cause__ = unseen
            raise
        if unseen is not None:
            raise unseen

    def drain(self) -> None:
        """Wait for pending calls at the end of the program; raise Stalled after the timeout. Local."""
        if not self._pending.drain(self._config.timeout):
            raise Stalled(f"calls with wait=False have not completed after {self._config.timeout:g} s")

    def count_failed(self) -> int:
        """Wait for pending calls; return how many calls failed and left the store open, the same on each rank. Local.

        Pending calls fail in a thread, at another moment on each rank.
        """
        self._pending.drain()
        return self._door.failed_calls

    def unseen(self) -> BaseException | None:
        """Wait for pending calls as long as one completes each second; then return the first unseen error or None, and
        mark all as seen.

        Local. None stands for an error Closed, too.
        """
        self._pending.drain(_LAST_STEPS)
        failure = self._pending.take_failure()
        return None if isinstance(failure, Closed) else failure

    def abandon(self, why: str, tell: bool = True) -> None:
        """Make an open store unusable on this rank, list it as lost, ``tell`` ranks that would wait on GPUs. Local.

        It asks no other rank: used where a collective call could wait for ever.
        """
        if self._leave(why):
            lost_stores().append(self)
            self._order.abandon(why if tell else "")

    def _leave(self, why: str) -> bool:
        """End store, queue, checkpoints and commits on this rank; free nothing; return whether it was open. Local."""
        try:
            self._stores.remove(self)  # which only one of two threads can, that of the pending calls being one
        except ValueError:
            return False
        # The door before the queue: a queued call finds it closed.
        self._door.end(why)
        self._pending.end()
        if (checkpoints := vars(self).pop("_checkpoints", None)) is not None:
            checkpoints.give_up()
        if self._commits is not None:
            self._commits.close()
        self._exchange.values.invalidate_listeners()
        return True

    def announce_shutdown(self) -> tuple[Callable[[], list[int]], float]:
        """Tell other ranks that this one ends; return a function that lists those yet to, and seconds to wait. Local.

        Returns:
            A function that lists the ranks that have not announced their shutdown yet, and the seconds they may take.
        """
        # One that does not know of the failure yet finds it when it closes the store, after the timeout.
        return self._begin_handshake(), self._config.timeout + _LAST_STEPS

    def _begin_handshake(self) -> Callable[[], list[int]]:
        """Tell other ranks that this one ends; return a function that lists those yet to do so. Local."""
        return self._group.announce_shutdown()

    def __enter__(self) -> KVStore:
        """Return the store itself; raise Closed if it has ended. Local."""
        self._door.check_open("with")
        return self

    def __exit__(self, *failure: object) -> None:
        """Close the store, which is collective; after an error end it on this rank alone."""
        if failure[0] is None:
            self.close()
        else:
            # The other ranks may be anywhere; closing together could wait for ever and hide the error.
            self.abandon(f"the store ended with {text_of(failure[1], repr)}; create a new store")

    # --- The way of every collective call

    def _collective(self, verb: str, prepare: Callable[..., PreparedCall], *arguments: Any) -> Any:
        """Prepare a call, compare it with the others, run it, return its result; some errors end the store. Collective.

        ``prepare`` raises for every mistake in this rank's arguments, before data move. Then all ranks raise.
        """
        door, unseen = self._door, None
        if door.running or self._pending.waiting or door.state is _ENDED or UPDATING:
            unseen = door.enter(verb)
        door.running = verb
        try:
            if unseen is not None:
                self._agreement.refuse(Call(verb, 0, show_keys(*arguments[:1])), unseen)
            try:
                if self._has_stream:
                    self._order.begin()
                call, run = prepare(*arguments)
            except BaseException as error:
                # Ctrl-C, but not sys.exit in an updater
                if not (isinstance(error, Exception) or is_marked(error, "settled")):
                    raise
                self._agreement.refuse(Call(verb, 0, show_keys(*arguments[:1])), error)
            # From here on all ranks make this call. A failure before it is one of every rank, and the store goes on. A
            # failure after it may be this rank's alone.
            self._agreement.begin(call, self._exchange.pipeline.prefetched is not None)
            # A caller who has numpy raise at an overflow would have it end halfway, on some ranks.
            quietly = run_quietly if self._exchange.updater.may_raise else self._quiet
            try:
                return self._run_in_order(quietly, run) if self._order.needed else quietly(run)
            except (MemoryError, ValueMismatch) as error:
                self._agreement.name_call_in(error, call)
                raise
        except BaseException as error:
            self._verbs.give_up()
            door.end_unless_settled(verb, error)
            hide_frames(error)
            raise
        finally:
            self._agreement.record.leave()
            door.running = ""

    def _run_in_order(self, quietly: Callable[..., Any], run: Callable[[], Any]) -> Any:
        """Return ``quietly(run)``, run on the store's stream, after other GPU stores' pending calls. Collective."""
        if self._has_stream and len(self._stores) > 1:
            drain_gpu_stores(self)
        return self._order.run(quietly, run)

    def _waits(self, verb: str, wait: object) -> bool:
        """Return ``wait`` as a bool; if it is no truth value, raise TypeError on every rank. Collective only then."""
        if not isinstance(wait, (bool, np.bool_)):
            self.raise_on_all_ranks(TypeError(f"wait={wait!r} is neither True nor False"), verb)
        return bool(wait)

    def _issue_sums(self, keys: Sequence[str], arrays: Sequence[Any]) -> Work:
        """Queue a pushpull for which the caller is sure to wait, so that its error is not logged. Local; as _issue."""
        return self._issue("pushpull", self._verbs.push_pull.pushpull, keys, None, arrays, 0, awaited=True)

    def _issue(self, verb: str, prepare: Callable[..., PreparedCall], *arguments: Any, awaited: bool = False) -> Work:
        """Queue a call for the worker thread, to prepare and make; return its Work. Its key is the first argument, its
        priority the last. On a GPU, first wait for other stores' pending calls. Local, but some mistakes raise on all
        ranks.
        """
        self._door.check_free(verb)
        if not self._group.threads:
            raise Unsupported(f"{verb}: wait=False needs MPI_THREAD_MULTIPLE, and MPI was initialized without it")
        # A rank that has left makes the calls in their order, and cannot know which of a queue is next.
        if self._joining:
            self.raise_on_all_ranks(Unsupported("wait=False cannot be used in join(), where ranks may have left"), verb)
        try:
            issue = self._order.issue()
        except Unsupported as error:
            self.raise_on_all_ranks(error, verb)
        # Two worker threads would use NCCL in an order of their own on each rank.
        if issue is not None:
            drain_gpu_stores(self)
        key, run = arguments[0], partial(self._collective, verb, prepare, *arguments)
        work = Work(self._pending, urgency(arguments[-1]), lambda: f"{verb}({show_keys(key)})", run, issue, awaited)
        return self._pending.add(work)

    @contextmanager
    def _on_worker(self) -> Iterator[None]:
        """In a with block: mark this thread, on the status board and for streams, as maker of pending calls. Local."""
        with self._board.on_worker(), self._order.on_worker():
            yield

    def _least(self, queued: int) -> int:
        """Return the smallest of the ranks' numbers of queued calls with ``wait=False``. Collective."""
        if self.size == 1:
            return queued
        return int(self._collective("next", lambda: self._control.least(queued)))

    def _free(self) -> None:
        """Free values, what ``before_free`` lists, the transport, the board and the communicator. Collective."""
        # The arrays first, then their memory, then the group: each refers to the next.
        self._exchange.close()
        for release in self.before_free:
            release()
        self._transport.close()  # it may wait, and warn by the board
        self._board.close()
        self._group.close()


def open_stores() -> list[KVStore]:
    """Return the list itself of this process's open stores, in the order of creation, the same on all ranks. Local.

    The list keeps a store alive until it is closed: the garbage collector would free it at another moment on each rank.
    """
    return owned("open stores")


def lost_stores() -> list[Any]:
    """Return the list itself of stores, and similar objects, that ended here without a common close. Local.

    They have :meth:`KVStore.announce_shutdown` and :meth:`KVStore.unseen`: not all ranks may come to the end of MPI.
    """
    return owned("lost stores")


def drain_gpu_stores(but: KVStore | None = None) -> None:
    """Wait for pending calls of all GPU stores ``but`` one; return at once in a thread that makes such calls. Local.

    So all ranks use NCCL in the order of the program.
    """
    for store in () if here.place is not None else tuple(open_stores()):
        if store is not but and store._pending.active and store._has_stream:
            store._pending.drain()


def _fail(error: Exception) -> NoReturn:
    """Raise the error: the preparation of :meth:`KVStore.raise_on_all_ranks`. Local."""
    raise error
