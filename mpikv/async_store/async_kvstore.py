"""The asynchronous store: a key's owner applies each push when it arrives, and no rank waits for the others.

Every key has one owner. Other ranks send it requests; a thread of the owner answers them while the owner computes, see
:mod:`mpikv.transports.rpc`. :mod:`mpikv.async_store.owner` applies the requests. :mod:`mpikv.async_store.ssp` bounds
the lead of one rank over another; one rank keeps its clocks.

All other calls are collective. Each collective call first drains outstanding requests: every rank waits for the answers
to its pushes, so that no request is in flight when the ranks agree. A request carries the number of its rank's last
collective call. An owner that has not made that call yet answers the request afterwards.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NoReturn, TypeVar

import numpy as np

from ..arrays.arrays import local_sum
from ..cluster.agreement import format_error
from ..cluster.calls import Call, PreparedCall
from ..cluster.runtime import present
from ..cluster.tracebacks import hidden_from_pytest
from ..cluster.waiting import Waiting
from ..config import Config
from ..engine.keys import Entry, parse
from ..engine.plan import Plan, digest
from ..errors import ConfigError, Stalled, TransportError, Unsupported, is_marked, mark
from ..protocols import Array, Key, Updater
from ..store.door import State
from ..store.kvstore import KVStore
from ..transports.rpc import Endpoint, Request
from ..verbs.arguments import priorities
from ..verbs.comparison import text_call
from ..verbs.operands import given_to_fill
from ..verbs.renewed import answer
from ..verbs.row_arguments import brings_rows
from .client import NUMBERS, PATIENCE, AsyncClient, Kind, Outcome, Tick
from .owner import HalfUpdated, KeyOwner
from .ssp import SspClocks

__tracebackhide__ = hidden_from_pytest

Result = TypeVar("Result")

# The rank that keeps the clocks of all.
_KEEPER = 0
_INSTEAD = "'dist_sync' has it"
# Collective calls of its base that it refuses: of row-sparse values, and of pushes that meet.
_LACKING = ("buffer", "capture", "row_sparse_pull", "set_gradient_compression")


class AsyncKVStore(KVStore):
    """A store that applies each rank's push when it arrives: ``create("dist_async", staleness=4)``.

    :meth:`push`, :meth:`pull` and :meth:`pushpull` are *not* collective. A rank calls them at any time and any number
    of times. A call needs the owner of the key only, and the owner's thread answers while the owner computes. Every
    push makes one update of its own; the store does not sum over ranks as :class:`mpikv.KVStore` does. Updates of one
    key run one after the other, none is lost, and a pull returns a whole value. Pushes from different ranks are
    unordered. The pushes of one rank to one key keep their order, and the rank reads its own pushes.

    With ``staleness=s`` no rank is more than ``s`` calls of push (or pushpull) ahead of another; a rank that would be
    waits in that call. So after ``c`` pushes a rank reads values with at least the first ``c - s`` pushes of every
    rank. No rank waits for one that has entered a collective call with its pushes applied, and all counts start there
    anew.

    All other methods are collective, as in :class:`mpikv.KVStore`. They drain outstanding requests first: earlier
    pushes of any rank are in the values. They also compare the settings of the optimizer; these settings count from
    then on. :meth:`set_learning_rate` is collective, too. ``buffer``, ``view``, ``join``, ``capture``,
    ``row_sparse_pull`` and compression raise ``Unsupported``, as does ``wait=False`` but in :meth:`KVStore.save`.

    Example (one rank; on n ranks w becomes -n after the pushes of all):
        >>> import mpikv, numpy as np
        >>> with mpikv.create("dist_async", staleness=2) as kv:
        ...     kv.init("w", np.zeros(2))
        ...     kv.set_optimizer("sgd", learning_rate=1.0)
        ...     kv.push("w", np.ones(2))
        ...     kv.barrier()
        ...     print(kv.pull("w"), kv.version("w"))
        [-1. -1.] 1
    """

    _placement = "owners"
    _live: Updater | None = None
    _revision = 0
    _in_rounds = False

    def __init__(self, group: Any, *parts: Any, staleness: int | None = None, **options: Any) -> None:
        """Use :func:`mpikv.create`. Duplicates the communicator, and starts the thread that answers other ranks, if
        there are any; other options as for :class:`mpikv.KVStore`. Collective.
        """
        # First, as it may fail: then the store is among the open ones. Collective: it duplicates the communicator.
        self._endpoint = Endpoint(group, self._serve) if group.size > 1 else None
        super().__init__(group, *parts, **options)
        config = self._config
        self._bound = staleness
        self._exchange.summed = 0
        # The lock guards owner and clocks: the endpoint's thread and this rank's calls both use them.
        self._lock, self._holder = present().lock(), 0
        self._owner = KeyOwner(self._answer)
        self._clocks = SspClocks(group.size, lambda rank, ticket: self._answer(rank, ticket, 0, None))
        self._waiting = Waiting(config.timeout, config.warn_after, self._board.warn)
        self._clock = 0
        self._pushes: dict[Key, int] = {}
        self._client = AsyncClient(group.rank, self._endpoint, self._act_here, self._waiting)
        self._copy_updater()
        self._begin()
        if self._endpoint is not None:
            self._endpoint.start()

    # --- Facts

    @property
    def staleness(self) -> int | None:
        """How many calls of push a rank may be ahead of another; None: no bound."""
        return self._bound

    def is_capable(self, capability: str) -> bool:
        """Return whether the store has a capability; this one is capable of async, not of rows or codecs. Local."""
        capable = super().is_capable(capability)
        return {"async": True, "compression": False, "sparse": False}.get(capability.lower(), capable)

    def statistics(self) -> dict[str, Any]:
        """Return the dict of any store, with the bound, the largest lead (known to rank 0, elsewhere 0), and the number
        of updates made here as an owner. Local.

        ``staleness``: the bound, and on the first rank, with a bound, the largest lead of one rank over another
        so far. ``updates``: how many updates this rank has made as an owner.
        """
        staleness = {"bound": self._bound, "largest": self._clocks.widest}
        return {**super().statistics(), "staleness": staleness, "updates": self._owner.applied}

    def version(self, key: Key) -> int:
        """Return how many updates a key's value had seen by the last answer about it, or collective call. Local.

        Raises:
            KeyNotInitialized: the key is unknown.
        """
        return self._client.seen.get(key, super().version(key))

    # --- Verbs

    def push(self, key: Any, value: Any = None, priority: Any = 0, *, wait: bool = True) -> None:
        """Send each key's value to its owner, to update by; may wait for earlier pushes or slow ranks. Not collective.

        The owner calls ``updater(key, value, stored)``. This call returns when the value is on its way. A later push of
        the same key waits for the update. If the updater raises, the value keeps its content. This call raises the
        exception, or the next pull or push of the key, or the next collective call instead of its work. Each key of a
        list is updated by itself.

        Args:
            key: as in :meth:`mpikv.KVStore.push`.
            value: as there; needed. A list of arrays is summed on this rank first, and makes one update.
            priority: accepted, and has no effect.
            wait: must be True.

        Raises:
            ConfigError: there is no updater; or an option of the optimizer has changed since ranks last compared them.
            KeyNotInitialized, ValueMismatch: as in :meth:`mpikv.KVStore.push`.
            PeerFailed: the updater raised, at the owner, in an earlier push.
            Stalled: an owner, or a rank that is behind by the bound, did not come within the store's timeout.
        """
        self._enter("push", wait, self._run_push, key, value, priority)

    def pull(
        self, key: Any, out: Any = None, priority: Any = 0, ignore_sparse: bool = True, *, wait: bool = True
    ) -> Any:
        """Read the value of a key, or of each key of a list, from its owner, and wait for it. Not collective.

        Each value is whole and contains all pushes of this rank; :meth:`version` returns its number of
        updates. The values of a list may be from different moments.

        Args, and what is returned: as in :meth:`mpikv.KVStore.pull`. Raises: as :meth:`push`.
        """
        return self._enter("pull", wait, self._run_pull, key, out, priority)

    def pushpull(self, key: Any, value: Any = None, out: Any = None, priority: Any = 0, *, wait: bool = True) -> Any:
        """Push, then pull. Not collective. Arguments as in :meth:`mpikv.KVStore.pushpull`; raises as :meth:`push`."""
        return self._enter("pushpull", wait, self._run_pushpull, key, value, out, priority)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the optimizer's learning rate for later pushes. Collective in this store.

        Raises:
            ConfigError: no optimizer is set, a schedule gives its rate, or the rate is invalid.
            RankMismatch: ranks give different rates.
        """
        self._collective("set_learning_rate", self._prepare_rate, learning_rate)

    def _prepare_rate(self, learning_rate: float) -> PreparedCall:
        """Prepare to set a checked learning rate; raise ConfigError for a wrong one. Local; its run is collective."""
        optimizer = self.optimizer
        if optimizer is None:
            raise ConfigError("no optimizer is set; call set_optimizer(...) first")
        trial = copy.copy(optimizer)
        trial.learning_rate = learning_rate
        call = text_call("set_learning_rate", trial.settings(), str(learning_rate))
        return call, lambda: setattr(optimizer, "learning_rate", learning_rate)

    def view(self, key: Any) -> Any:
        """Not in this store: its values change at any time. Raises Unsupported."""
        self._lacks("view")

    def init(self, key: Any, value: Any = None, overwrite: bool = False) -> None:
        """Store new keys with the root's whole arrays as their values; Unsupported for a RowSparse. Collective."""
        self._collective("init", self._prepare_init, key, value, overwrite)

    def _prepare_init(self, key: Any, value: Any, overwrite: bool) -> PreparedCall:
        """Prepare an init of whole arrays; raise Unsupported for a RowSparse. Local; its run is collective."""
        if brings_rows(parse(key, value).groups):
            self._lacks("init of a RowSparse")
        return self._verbs.values.init(key, value, overwrite)

    def join(self) -> Any:
        """Not in this store: its ranks may make unequal numbers of calls anyway. Raises Unsupported."""
        self._lacks("join")

    def _lacks(self, verb: str) -> NoReturn:
        """Raise Unsupported: this store has no such call. Local."""
        raise Unsupported(f"{verb}: the store {self.type!r} has no such call; {_INSTEAD}")

    def _run_push(self, key: Any, value: Any, priority: Any) -> None:
        """Check a push and send its values to their owners; waits as :meth:`_send`. Not collective."""
        plan, arrays = self._verbs.operands.find_arrays(key, value)
        priorities(priority, plan.keys)
        self._send(plan, arrays)

    def _run_pull(self, key: Any, out: Any, priority: Any) -> Any:
        """Check a pull, ask owners, await their values, raise failed pushes; return pull's result. Not collective."""
        plan, arrays, result = self._verbs.operands.find_pulled(key, out)
        priorities(priority, plan.keys)
        ask, parts = self._client.ask, self._others_first(plan, arrays)
        self._client.wait([ask(Kind.PULL, owner, one, take=_make_fill(given)) for owner, one, given in parts])
        self._client.raise_failures(plan.keys)
        return answer(result)

    def _run_pushpull(self, key: Any, value: Any, out: Any, priority: Any) -> Any:
        """Check a pushpull, send its values, wait until the arrays are filled; return its result. Not collective."""
        plan, arrays = self._verbs.operands.find_arrays(key, value)
        filled, result = self._verbs.operands.find_targets(plan, key, given_to_fill(key, value, out), out is None)
        priorities(priority, plan.keys)
        self._send(plan, arrays, filled)
        return answer(result)

    def _send(self, plan: Plan, arrays: Sequence[tuple[Array, ...]], filled: Sequence[Any] | None = None) -> None:
        """Wait for the keys' earlier pushes and for slow ranks, raise failed pushes, request the pushes. Given
        ``filled``, wait until it has the new values. ConfigError without an updater. Not collective.
        """
        # Pushes are unordered between ranks: without an updater the last to arrive would win, another one in each run.
        if self._exchange.updater.assigns:
            raise ConfigError(
                "no updater is set, so each push would replace the one before it; call set_optimizer(...) or "
                "set_updater(...) on every rank first"
            )
        if self._exchange.updater.revision != self._revision:
            raise ConfigError(
                "an option of the optimizer was changed, and ranks compare options only in collective calls; call "
                "kv.barrier() on every rank first, or change the rate by kv.set_learning_rate(...)"
            )
        client = self._client
        # Two pushes of one key by one rank keep their order only if the first is applied before the second is sent.
        client.wait([self._pushes[key] for key in plan.keys if key in self._pushes])
        client.raise_failures(plan.keys)
        if self._bound and plan.entries and self._clock + 1 - self._bound > client.slowest:
            # Wait until this push is within the bound again.
            client.wait([client.ask(Kind.WAIT, _KEEPER, number=self._clock + 1 - self._bound)])
        ticks: dict[int, Tick] = {}
        if self._bound and plan.entries:  # a push of no keys has no owner that could tell
            # An owner applies the parts of a rank in order, so the last one, by the key's row, tells of all.
            last = {_owner_of(entry): entry.index for entry in plan.entries}
            self._clock += 1
            ticks = dict.fromkeys(last.values(), (self._clock, len(last)))
        try:
            self._ask_all(plan, arrays, filled, ticks)
        except BaseException as error:
            # Ctrl-C in an updater of this rank, or too little memory: the store goes on, and its clocks must, too. Any
            # other Ctrl-C ends it, and may have come once a part was sent: the owner tells of that part.
            is_usual = isinstance(error, Exception) and not isinstance(error, TransportError)
            continues = is_usual or is_marked(error, "settled")
            for tick in ticks.values() if continues else ():
                self._act_here(Kind.TICK, 0, self.rank, None, tick)
            raise
        for entry, given in zip(plan.entries, filled or (), strict=filled is not None):
            if _owner_of(entry) == self.rank:
                client.ask(Kind.PULL, self.rank, entry, take=_make_fill(given))
        if filled is not None:
            client.wait([self._pushes[key] for key in plan.keys])
        client.raise_failures(plan.keys)

    def _ask_all(self, plan: Plan, arrays: Sequence[Any], filled: Sequence[Any] | None, ticks: dict[int, Tick]) -> None:
        """Request a push of each value from its owner, this rank's own at once; keep the tickets in ``_pushes``, and
        remove from ``ticks`` those requested. Answers of others fill their keys' ``filled``, later. Waits for no other
        rank. Local.
        """
        for owner, entry, group, given in self._others_first(plan, arrays, filled or [()] * len(arrays)):
            payload = local_sum(group, entry.dtype).astype(entry.dtype, copy=False)
            # This rank's own answer comes at once, and may fill an array that a later key pushes.
            kind = Kind.PUSH if filled is None or owner == self.rank else Kind.PUSHPULL
            tick = ticks.get(entry.index)
            self._pushes[entry.key] = self._client.ask(kind, owner, entry, payload, _make_fill(given), tick=tick)
            ticks.pop(entry.index, None)

    def _others_first(self, plan: Plan, *lists: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Return a list of (owner, entry, *items of the lists), one per key: first those that others own. Local."""
        # Other owners work while this rank does, and what one of them gets is not cut up by calls of this rank.
        parts = [(_owner_of(entry), entry, *items) for entry, *items in zip(plan.entries, *lists, strict=True)]
        return sorted(parts, key=lambda part: part[0] == self.rank)

    # --- The doors

    def _enter(self, verb: str, wait: bool, run: Callable[..., Result], *arguments: Any) -> Result:
        """Raise Unsupported unless ``wait``; check the caller, take the store, receive answers, return
        ``run(*arguments)``. May wait. Not collective.
        """
        if not wait:
            raise Unsupported(f"{verb}: wait=False is for stores whose calls wait for all ranks; {_INSTEAD}")

        def checked() -> Result:
            """Receive answers, then run the call in stream order; at the end send what is collected."""
            with self._asking():
                self._client.receive()
                return self._memory.order.run(run, *arguments)

        # Before the door is taken: an updater that calls the store runs in the thread of a call that has it.
        self._check_caller(verb)
        return self._door.run_without_agreement(verb, checked)

    def _collective(self, verb: str, prepare: Callable[..., PreparedCall], *arguments: Any) -> Any:
        """Wait for own requests, meet all ranks to adopt settings and counts, then make the call of
        ``prepare(*arguments)`` and return its result. Collective.
        """
        if verb in _LACKING:
            self._lacks(verb)
        self._check_caller(verb)
        # Before the agreement: a request in flight could change a value while ranks agree on it.
        failure = self._drain(verb)
        try:
            super()._collective(verb, self._prepare_drained, verb, failure)
            result = super()._collective(verb, prepare, *arguments)
            if self._door.state is not State.ENDED:
                self._copy_updater()  # the settings of this call, the same on all ranks
            return result
        finally:
            if self._door.state is not State.ENDED:
                self._begin()

    def _prepare_drained(self, verb: str, failure: BaseException | None) -> PreparedCall:
        """Prepare to adopt settings, and counts of owners; raise ``failure`` if given. Local; its run is collective."""
        if failure is not None:
            raise failure
        updater = self._exchange.updater
        if updater.revision != self._revision:
            self._exchange.check_slots()
        settings = f"updater {updater.settings()}"
        call = Call(verb, digest(f"drained {settings}"), describe=lambda: [settings])
        return call, self._gather_counts

    def _gather_counts(self) -> None:
        """Set update counts to the owners', mark stale values, copy the updater for the next pushes. Collective."""
        self._exchange.values.gather_counts()
        self._copy_updater()

    def _copy_updater(self) -> None:
        """If the updater has changed, copy it; the copy applies pushes from the next :meth:`_begin` on. Local."""
        updater = self._exchange.updater
        if updater is not self._live or updater.revision != self._revision:
            self._live, self._revision = updater, updater.revision
            # The thread applies pushes by the copy: a rate that is changed between two collective calls would count on
            # some owners, and not yet on others.
            self._applied: Updater = copy.copy(updater)
            self._exchange.set_rank_count(self._applied)

    def _drain(self, verb: str) -> BaseException | None:
        """Leave the clocks, so that no rank waits for pushes of this one, and await all answers. Return an error to
        tell all, or None; raise one that has ended the store. Not collective.
        """

        def run() -> None:
            """Leave the clocks, await all answers, and raise the first failed push. May wait."""
            with self._asking():
                if self._bound is not None:
                    self._client.ask(Kind.LEAVE, _KEEPER, number=self._clock)
                self._client.wait_for_all()
                self._client.raise_failures()

        try:
            self._door.run_without_agreement(verb, run)
        except BaseException as error:  # also sys.exit in an updater
            if self._door.state is State.ENDED:
                raise
            return error
        return None

    def _check_caller(self, verb: str) -> None:
        """Raise Closed if the store has ended, and Unsupported if it is busy, or in an updater: of this store or,
        unless it has one rank, of any. Local.
        """
        # The lock is held while an updater runs: a call of the store inside would wait for itself.
        if self._holder == threading.get_ident():
            raise Unsupported(f"{verb}: an updater cannot call the store")
        self._door.check_free(verb)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """In a with block for requests: MPI's errors are TransportError; at its end send the collected ones. Local."""
        if self._endpoint is None:
            yield
            return
        with self._group.translated("asking other ranks"):
            try:
                yield
            except BaseException:
                with suppress(Exception):  # the first error says more
                    self._endpoint.hand_over()
                raise
            self._endpoint.hand_over()

    # --- What this rank does as an owner

    def _begin(self) -> None:
        """After a collective call: set clocks to 0, forget pushes, take the key table and the copied updater, and
        accept requests. Waits for the lock. Local.
        """
        self._client.begin(self._agreement.record.calls)
        with self._held(self._config.timeout):
            # First the epoch: the thread may serve early requests as soon as the lock is free.
            self._epoch = self._agreement.record.calls
            self._owner.begin(self._exchange.values.table, self._applied)
            self._clocks.begin()
        self._clock = 0
        # Tickets of before the collective call are all answered; waiting for one would find nothing.
        self._pushes.clear()

    def _serve(self, request: Request) -> bool:
        """Run another rank's request, answer it now or later, and return True; return False, having done nothing, if
        this rank must end a collective call first. Waits for the lock. Local.
        """
        kind, epoch, ticket, number, clock, owners = request.head[:6]
        with self._held():
            # The sender has left a collective call that this rank is still in: serve it after that call.
            if epoch > self._epoch:
                return False
            self._act(request.source, Kind(kind), ticket, number, request.body, (clock, owners) if clock else None)
        return True

    def _act_here(self, kind: Kind, ticket: int, number: int, body: Array | None, tick: Tick | None) -> None:
        """Run a request of this rank to itself, and answer its ticket now or later, also by an updater's error; a tick
        goes on to the keeper's rank. Wait for the lock, else Stalled; may raise HalfUpdated, too. Local.
        """
        with self._held(PATIENCE if kind == Kind.WHO else self._config.timeout):
            self._act(self.rank, kind, ticket, number, body, tick)

    @contextmanager
    def _held(self, timeout: float = -1) -> Iterator[None]:
        """In a with block, hold the lock of owner and clocks; Stalled after ``timeout`` seconds, never if below 0.
        Local.
        """
        if not self._lock.acquire(timeout=timeout):
            raise Stalled(f"waited {timeout:.1f} s for an update of this rank", [self.rank])
        self._holder = threading.get_ident()
        try:
            yield
        finally:
            self._holder = 0
            self._lock.release()

    def _act(self, rank: int, kind: Kind, ticket: int, number: int, body: Array | None, tick: Tick | None) -> None:
        """Run a rank's request on a value or the clocks; answer now, later or (TICK) never. Local; the lock is held."""
        if kind in (Kind.PUSH, Kind.PUSHPULL):
            assert body is not None
            with self._board.on_worker(updating=True):  # a rank that asks where this one is learns the updater's line
                self._owner.push(rank, ticket, number, body, kind == Kind.PUSHPULL)
            if tick:
                self._act(rank, Kind.TICK, 0, rank, None, tick)
        elif kind == Kind.PULL:
            self._owner.pull(rank, ticket, number)
        elif tick and self._endpoint and self.rank != _KEEPER:
            self._endpoint.request(_KEEPER, (kind, self._epoch, 0, number, *tick))
        elif tick:
            self._clocks.tick(number, *tick)
        elif kind == Kind.WAIT:
            self._clocks.wait(rank, ticket, number)
        elif kind == Kind.LEAVE:
            self._clocks.leave(rank, ticket, number)
        else:
            self._answer(rank, ticket, 0, np.array(self._clocks.list_awaited(rank), NUMBERS))

    def _answer(self, rank: int, ticket: int, version: int, answer: Array | BaseException | None) -> None:
        """Collect a copy of an answer to another rank, sent by the endpoint's next flush at the latest; have this rank
        itself take its answer now. Does not wait. Local.
        """
        if rank == self.rank:
            # The updater ran in the caller's own process: its exception is raised as it is, not as PeerFailed.
            if isinstance(answer, BaseException) and not isinstance(answer, HalfUpdated):
                mark(answer, "settled")
            self._client.take(ticket, version, self._clocks.slowest, answer)
            return
        assert self._endpoint is not None
        outcome = Outcome.WELL
        if isinstance(answer, BaseException):
            outcome = Outcome.HALFWAY if isinstance(answer, HalfUpdated) else Outcome.RAISED
            answer = np.frombuffer(format_error(answer).encode(), np.uint8)
        self._endpoint.answer(rank, (ticket, version, self._clocks.slowest, outcome), answer)

    # --- Ends

    def _leave(self, why: str) -> bool:
        """End the store on this rank, and tell the endpoint's thread to end, without a wait; return whether it was
        open. Local.
        """
        left = super()._leave(why)
        if left and self._endpoint is not None:
            self._endpoint.stop()
        return left

    def _begin_handshake(self) -> Callable[[], list[int]]:
        """Return a function to call until it lists no ranks: it announces the shutdown once no messages are in flight,
        and lists those yet to do so. Without an endpoint, announce now. Local.
        """
        # MPI would wait for a message in flight without a deadline, or write to freed memory.
        if (endpoint := self._endpoint) is None:
            return super()._begin_handshake()
        # Its first call announces, and returns the function that lists; later calls return the same one.
        begin = cache(super()._begin_handshake)

        def absent() -> list[int]:
            """Drop what has come; return ranks with messages in flight, this one while its thread runs. Without any,
            announce the shutdown, once, and return the ranks yet to do so.
            """
            if endpoint.answering:
                return [self.rank]
            # Until nothing is in flight in either direction; only then may the communicator be freed.
            return endpoint.discard() or begin()()

        return absent

    def _free(self) -> None:
        """Close the endpoint, drop the keys, then free as any store does. Collective."""
        if self._endpoint is not None:
            self._endpoint.close(self._waiting)
        self._exchange.close()
        self._begin()  # drop the keys: an owner that still refers to their memory would keep it from being freed
        super()._free()


def check_options(config: Config, given: Mapping[str, Any]) -> None:
    """Raise Unsupported for options that this store lacks, given by argument or environment. Local."""
    asked = {
        "placement": config.placement != "auto",
        "kernels": config.kernels != "numpy",
        "deterministic": config.deterministic,
        "check_finite": config.check_finite > 0,
        "compression": given["compression"] is not None,
    }
    wrong = [name for name, other in asked.items() if other]
    if names := [name if given[name] is not None else f"MPIKV_{name.upper()}" for name in wrong]:
        raise Unsupported(f"{', '.join(names)}: not in asynchronous mode; leave it out, or use 'dist_sync'")


def _owner_of(entry: Entry) -> int:
    """Return the rank that owns a key's entry. Local."""
    return entry.place.block.grid.owner(entry.place.start)


def _make_fill(outs: Any) -> Callable[[Array], None]:
    """Return a function that copies a value to all of these arrays, cast to their dtypes. Local."""

    def fill(value: Array) -> None:
        """Copy a value to each array, cast to its dtype."""
        for out in (outs,) if type(outs) is np.ndarray else outs:
            np.copyto(out, value, casting="unsafe")

    return fill
