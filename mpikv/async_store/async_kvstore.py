"""The store whose pushes and pulls no rank waits for: each push is applied by the owner of its key when it arrives.

Every key has one owner. The calls of the other ranks come to it as letters, which a thread of its own answers while it
computes; see :mod:`mpikv.transports.rpc`. What the owner does with them is in :mod:`mpikv.async_store.owner`, and how
far ranks may be ahead of each other in :mod:`mpikv.async_store.ssp`, which one rank keeps for all. All other calls are
collective, and each begins with a rest: every rank waits until what it has pushed is answered, so that no letter is on
its way when the ranks agree. Letters carry the number of the last collective call; one that arrives before its owner
has made that call is answered afterwards.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn, TypeVar

import numpy as np

from ..arrays.arrays import local_sum
from ..cluster.agreement import Call, PreparedCall, format_error
from ..cluster.runtime import present
from ..cluster.tracebacks import hidden_from_pytest
from ..cluster.waiting import Waiting
from ..config import Config
from ..engine.keys import Entry, parse
from ..engine.plan import Plan, digest
from ..errors import ConfigError, Stalled, Unsupported, settled
from ..options import naming_arguments, unknown_argument
from ..protocols import Array, Key, Updater
from ..store.door import State
from ..store.kvstore import KVStore
from ..transports.rpc import Endpoint, Request
from ..verbs.arguments import priorities
from ..verbs.comparison import compare_text
from ..verbs.operands import given_to_fill
from ..verbs.renewed import answer
from ..verbs.row_arguments import brings_rows
from .client import NUMBERS, PATIENCE, AsyncClient, Kind, Outcome
from .owner import HalfUpdated, KeyOwner
from .ssp import SspClocks

__all__ = ["AsyncKVStore", "check_options"]

__tracebackhide__ = hidden_from_pytest

Result = TypeVar("Result")

# The rank that keeps the clocks.
_KEEPER = 0
_INSTEAD = "'dist_sync' has it"


@naming_arguments
class AsyncKVStore(KVStore):
    """A store that applies each rank's push when it arrives: ``create("dist_async", staleness=4)``.

    :meth:`push`, :meth:`pull` and :meth:`pushpull` are *not* collective: a rank calls them when it likes, as often as
    it likes, and needs no other rank but the owner of the key, whose thread answers while it computes. Every push makes
    one update of its own; the sum over ranks of :class:`mpikv.KVStore` is not made. Updates of one key come one after
    the other, none is lost, and a pull returns a whole value. In which order the pushes of several ranks come is not
    said; those of one rank to one key come in its order, and it reads what it has pushed.

    With ``staleness=s`` no rank is more than ``s`` calls of push (or pushpull) ahead of another; one that would be
    waits in that call. So what a rank reads after ``c`` of them has at least the first ``c - s`` of every rank's. With
    0 the pushes of a key of all ranks are added up, in rank order, before they make one update, for which the next
    pull, or push of the key, waits: the result is that of ``dist_sync``, and ranks must push keys in one order as
    there. A rank that is in a collective call is not waited for, and all counts start there anew.

    All other methods are collective, as in :class:`mpikv.KVStore`, and begin with a rest: what any rank has pushed
    before is in the values when they run. It has no ``buffer``, ``view``, ``join`` and compression, and ``wait=False``
    only for :meth:`KVStore.save`. Each compares the settings of the optimizer, which count from then on;
    :meth:`set_learning_rate` is one, too.

    Example (one rank; on n ranks w becomes -n, once all have pushed):
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

    def __init__(self, *parts: Any, staleness: int | None = None, **options: Any) -> None:
        """Collective. Use :func:`mpikv.create`. The rest as for :class:`mpikv.KVStore`."""
        super().__init__(*parts, **options)
        group, config = self._group, self._config
        self._bound = staleness
        self._exchange.summed = self.size if staleness == 0 else 0
        self._lock, self._holder = present().lock(), 0
        self._ledger = KeyOwner(group.size, staleness == 0, self._answer)
        self._clocks = SspClocks(group.size, lambda rank, ticket, slowest: self._answer(rank, ticket, slowest, None))
        self._waiting = Waiting(config.timeout, config.warn_after, self._board.warn)
        self._clock = 0
        self._pushes: dict[Key, int] = {}
        self._post = Endpoint(group, self._serve) if group.size > 1 else None
        self._asking = AsyncClient(group.rank, self._post, self._act_here, self._waiting)
        self._freeze()
        self._begin()
        if self._post is not None:
            self._post.start()

    # --- Facts

    @property
    def staleness(self) -> int | None:
        """How many calls of push a rank may be ahead of another; None: any number."""
        return self._bound

    def is_capable(self, capability: str) -> bool:
        """As :meth:`mpikv.KVStore.is_capable`; this store is capable of async. Local."""
        capable = super().is_capable(capability)
        return {"async": True, "compression": False, "sparse": False}.get(capability.lower(), capable)

    def statistics(self) -> dict[str, Any]:
        """Return what the store has found out about itself. Local.

        ``staleness``: the bound, and on the first rank, which keeps the clocks if there is one from 1, the largest lead
        of one rank over another that there was. ``updates``: how many this rank has made as an owner.
        """
        staleness = {"bound": self._bound, "largest": self._clocks.widest}
        return {**super().statistics(), "staleness": staleness, "updates": self._ledger.applied}

    def version(self, key: Key) -> int:
        """Return how many updates the value of a key had seen when this rank last heard of it: by a pull, by a push of
        which it knows the end, or in a collective call. Local.

        Raises:
            KeyNotInitialized: the key is unknown.
        """
        version = super().version(key)
        return self._asking.seen.get(key, version)

    # --- Verbs

    def push(self, key: Any, value: Any = None, priority: Any = 0, *, wait: bool = True, **_unknown: NoReturn) -> None:
        """Send one value per key to its owner, whose updater changes the stored value by it: ``updater(key, value,
        stored)``.

        Not collective. Returns when the value is on its way, with a staleness from 1 when it was applied; a later push
        of the same key waits until this one was. An exception of the updater, which has then changed nothing, is raised
        here, or by the next call that pulls or pushes the key, or by the next collective one, and in place of it. Of a
        list of keys each is applied by itself.

        Args:
            key: as in :meth:`mpikv.KVStore.push`.
            value: as there; needed. A list of arrays is summed on this rank first, and makes one update.
            priority: accepted, and has no effect.
            wait: must be True.

        Raises:
            ConfigError: there is no updater; or an option of the optimizer was set, on which ranks have not agreed yet.
            KeyNotInitialized, ValueMismatch: as in :meth:`mpikv.KVStore.push`.
            PeerFailed: the updater raised, at the owner, in an earlier push.
            Stalled: an owner, or a rank that is behind by the bound, did not come within the store's timeout.
        """
        if _unknown:
            raise unknown_argument(KVStore.push, _unknown)
        self._check_wait("push", wait)
        self._enter("push", self._run_push, key, value, priority)

    def pull(
        self,
        key: Any,
        out: Any = None,
        priority: Any = 0,
        ignore_sparse: bool = True,
        *,
        wait: bool = True,
        **_unknown: NoReturn,
    ) -> Any:
        """Read the value of a key, or of each key of a list, from its owner.

        Not collective. Each value is whole and has all that this rank has pushed; :meth:`version` says how many updates
        it has seen. Values of a list need not be of one moment.

        Args, and what is returned: as in :meth:`mpikv.KVStore.pull`. Raises: as :meth:`push`.
        """
        if _unknown:
            raise unknown_argument(KVStore.pull, _unknown)
        self._check_wait("pull", wait)
        return self._enter("pull", self._run_pull, key, out, priority)

    def pushpull(
        self,
        key: Any,
        value: Any = None,
        out: Any = None,
        priority: Any = 0,
        *,
        wait: bool = True,
        **_unknown: NoReturn,
    ) -> Any:
        """Push, then pull. Not collective. Arguments as in :meth:`mpikv.KVStore.pushpull`; raises as :meth:`push`."""
        if _unknown:
            raise unknown_argument(KVStore.pushpull, _unknown)
        self._check_wait("pushpull", wait)
        return self._enter("pushpull", self._run_pushpull, key, value, out, priority)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the optimizer's learning rate for the pushes that come after. Collective in this store, whose owners
        apply the pushes of all ranks.

        Raises:
            ConfigError: no optimizer is set, its rate is given by a schedule, or this is no rate.
            RankMismatch: ranks have other rates.
        """
        self._collective("set_learning_rate", self._rated, learning_rate)

    def _rated(self, learning_rate: float) -> PreparedCall:
        optimizer = self.optimizer
        if optimizer is None:
            raise ConfigError("no optimizer is set; call set_optimizer(...) first")
        trial = copy.copy(optimizer)
        trial.learning_rate = learning_rate
        call = compare_text("set_learning_rate", trial.settings(), str(learning_rate))
        return call, lambda: setattr(optimizer, "learning_rate", learning_rate)

    def buffer(self, key: Any) -> Any:
        """Not in this store. Raises Unsupported."""
        self._lacks("buffer")

    def view(self, key: Any) -> Any:
        """Not in this store, whose values change at any time. Raises Unsupported."""
        self._lacks("view")

    def init(self, key: Any, value: Any = None, overwrite: bool = False) -> None:
        """As :meth:`mpikv.KVStore.init`, of arrays only."""
        self._collective("init", self._of_arrays, key, value, overwrite)

    def _of_arrays(self, key: Any, value: Any, overwrite: bool) -> PreparedCall:
        if brings_rows(parse(key, value).groups):
            self._lacks("init of a RowSparse")
        return self._verbs.values.init(key, value, overwrite)

    def row_sparse_pull(self, key: Any, out: Any = None, priority: Any = 0, row_ids: Any = None) -> Any:
        """Not in this store. Raises Unsupported."""
        self._lacks("row_sparse_pull")

    def capture(self, key: Any, value: Any = None, out: Any = None) -> NoReturn:
        """Not in this store, whose calls are not those of all ranks. Raises Unsupported."""
        self._lacks("capture")

    def join(self) -> Any:
        """Not in this store, whose ranks have unequal work anyway. Raises Unsupported."""
        self._lacks("join")

    def set_gradient_compression(self, compression: Any) -> None:
        """Not in this store. Raises Unsupported."""
        self._lacks("set_gradient_compression")

    def _lacks(self, verb: str) -> NoReturn:
        raise Unsupported(f"{verb}: the store {self.type!r} has no such call; {_INSTEAD}")

    def _check_wait(self, verb: str, wait: bool) -> None:
        if not wait:
            raise Unsupported(f"{verb}: wait=False is for stores whose calls wait for all ranks; {_INSTEAD}")

    def _run_push(self, key: Any, value: Any, priority: Any) -> None:
        plan, arrays = self._verbs.operands.arrays(key, value)
        priorities(priority, plan.keys)
        self._send(plan, arrays)

    def _run_pull(self, key: Any, out: Any, priority: Any) -> Any:
        plan, arrays, result = self._verbs.operands.pulled(key, out)
        priorities(priority, plan.keys)
        self._fetch(plan, arrays)
        return answer(result)

    def _run_pushpull(self, key: Any, value: Any, out: Any, priority: Any) -> Any:
        plan, arrays = self._verbs.operands.arrays(key, value)
        filled, result = self._verbs.operands.targets(plan, key, given_to_fill(key, value, out), out is None)
        priorities(priority, plan.keys)
        self._send(plan, arrays)
        self._fetch(plan, filled)
        return answer(result)

    def _send(self, plan: Plan, arrays: Sequence[tuple[Array, ...]]) -> None:
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
        asking = self._asking
        asking.wait([self._pushes[key] for key in plan.keys if key in self._pushes])
        asking.raise_failures(plan.keys)
        self._wait_for_slower()
        for entry, group in zip(plan.entries, arrays, strict=True):
            payload = local_sum(group, entry.dtype).astype(entry.dtype, copy=False)
            self._pushes[entry.key] = asking.ask(Kind.PUSH, _owner(entry), entry, payload)
        if self._bound:
            asking.wait([self._pushes[key] for key in plan.keys])
            self._clock += 1
            asking.ask(Kind.TICK, _KEEPER, number=self._clock)
        if self._bound != 0:  # in rounds all ranks raise in the same call, the next one, whoever has come last
            asking.raise_failures(plan.keys)

    def _wait_for_slower(self) -> None:
        """Wait until the next push is not too far ahead."""
        if self._bound and self._clock + 1 - self._bound > self._asking.slowest:
            self._asking.wait([self._asking.ask(Kind.WAIT, _KEEPER, number=self._clock + 1 - self._bound)])

    def _fetch(self, plan: Plan, arrays: Sequence[Any]) -> None:
        tickets = []
        for entry, given in zip(plan.entries, arrays, strict=True):
            outs = (given,) if type(given) is np.ndarray else given
            tickets.append(self._asking.ask(Kind.PULL, _owner(entry), entry, take=_filling(outs)))
        self._asking.wait(tickets)
        self._asking.raise_failures(plan.keys)

    # --- The doors

    def _enter(self, verb: str, run: Callable[..., Result], *arguments: Any) -> Result:
        """Make a call that is not collective."""

        def checked() -> Result:
            with self._translated():
                self._asking.hear()
                result: Result = self._memory.order.run(run, *arguments)
                return result

        self._check_caller(verb)
        return self._door.make_alone(verb, checked)

    def _collective(self, verb: str, prepare: Callable[..., PreparedCall], *arguments: Any) -> Any:
        """Rest; learn how often the owners have updated; then make the call as any store."""
        self._check_caller(verb)
        failure = self._rest(verb)
        try:
            super()._collective(verb, self._rested, verb, failure)
            result = super()._collective(verb, prepare, *arguments)
            if self._door.state is not State.ENDED:
                self._freeze()  # what the call has set, on all ranks alike
            return result
        finally:
            if self._door.state is not State.ENDED:
                self._begin()

    def _rested(self, verb: str, failure: BaseException | None) -> PreparedCall:
        """Prepare to go on with the settings that the optimizer has now, if all ranks have the same."""
        if failure is not None:
            raise failure
        updater = self._exchange.updater
        if updater.revision != self._revision:
            self._exchange.check_slots()
        settings = f"updater {updater.settings()}"
        call = Call(verb, digest(f"rest {settings}"), describe=lambda: [settings])
        return call, self._recount

    def _recount(self) -> None:
        self._exchange.values.recount()
        self._freeze()

    def _freeze(self) -> None:
        """Let this rank's pushes be applied by the updater as it is now, whatever is set meanwhile."""
        updater = self._exchange.updater
        if updater is not self._live or updater.revision != self._revision:
            self._live, self._revision = updater, updater.revision
            self._applied: Updater = copy.copy(updater)
            self._exchange.tell_ranks(self._applied)

    def _rest(self, verb: str) -> BaseException | None:
        """Wait until this rank's pushes are applied, and let no rank wait for more; return what went wrong."""

        def run() -> None:
            with self._translated():
                asking = self._asking
                if self._bound is not None:
                    for rank in range(self.size) if self._bound == 0 else [_KEEPER]:
                        asking.ask(Kind.LEAVE, rank)
                asking.wait_for_all()
                asking.raise_failures()

        try:
            self._door.make_alone(verb, run)
        except BaseException as error:  # sys.exit in an updater, too
            if self._door.state is State.ENDED:
                raise
            return error
        return None

    def _check_caller(self, verb: str) -> None:
        if self._holder == threading.get_ident():
            raise Unsupported(f"{verb}: an updater cannot call the store")
        self._door.check_free(verb)

    def _translated(self) -> Any:
        return self._group.translated("asking other ranks") if self._group.comm else nullcontext()

    # --- What this rank does as an owner

    def _begin(self) -> None:
        """Take requests of after the last collective call."""
        self._asking.begin(self._agreement.calls)
        with self._held(self._config.timeout):
            self._epoch = self._agreement.calls
            self._ledger.begin(self._exchange.values.table, self._applied)
            self._clocks.begin()
        self._clock = 0
        self._pushes.clear()

    def _serve(self, letter: Request) -> bool:
        kind, epoch, ticket, number = letter.head[:4]
        with self._held():
            if epoch > self._epoch:
                return False
            self._act(letter.source, Kind(kind), ticket, number, letter.body)
        return True

    def _act_here(self, kind: Kind, ticket: int, number: int, body: Array | None) -> None:
        with self._held(PATIENCE if kind == Kind.WHO else self._config.timeout):
            self._act(self.rank, kind, ticket, number, body)

    @contextmanager
    def _held(self, timeout: float = -1) -> Iterator[None]:
        if not self._lock.acquire(timeout=timeout):
            raise Stalled(f"waited {timeout:.1f} s for an update of this rank", [self.rank])
        self._holder = threading.get_ident()
        try:
            yield
        finally:
            self._holder = 0
            self._lock.release()

    def _act(self, rank: int, kind: Kind, ticket: int, number: int, body: Array | None) -> None:
        """Do what a rank asks for."""
        if kind == Kind.PUSH:
            assert body is not None
            self._ledger.push(rank, ticket, number, body)
        elif kind == Kind.PULL:
            self._ledger.pull(rank, ticket, number)
        elif kind == Kind.TICK:
            self._clocks.tick(rank, number)
        elif kind == Kind.WAIT:
            self._clocks.wait(rank, ticket, number)
        elif kind == Kind.LEAVE:
            self._ledger.leave(rank)
            self._clocks.leave(rank)
            self._answer(rank, ticket, 0, None)
        else:
            awaited = {*self._ledger.awaited(rank), *self._clocks.awaited(rank)}
            self._answer(rank, ticket, 0, np.array(sorted(awaited), NUMBERS))

    def _answer(self, rank: int, ticket: int, version: int, answer: Array | BaseException | None) -> None:
        if rank == self.rank:
            # An error of the caller's own code is raised as it is.
            if isinstance(answer, BaseException) and not isinstance(answer, HalfUpdated):
                settled(answer)
            self._asking.take(ticket, version, answer)
            return
        assert self._post is not None
        if isinstance(answer, BaseException):
            outcome = Outcome.HALFWAY if isinstance(answer, HalfUpdated) else Outcome.RAISED
            self._post.answer(rank, (ticket, version, outcome), np.frombuffer(format_error(answer).encode(), np.uint8))
        else:
            self._post.answer(rank, (ticket, version, Outcome.WELL), answer)

    # --- Ends

    def _leave(self, why: str) -> bool:
        left = super()._leave(why)
        if left and self._post is not None:
            self._post.stop()
        return left

    def _parting(self) -> Callable[[], list[int]]:
        """As in any store, but not before the thread has ended, and what this rank has sent has arrived; meanwhile it
        takes what others have sent. For a message on its way MPI's end waits without a deadline, or reads memory that
        is gone.
        """
        if (post := self._post) is None:
            return super()._parting()
        said: list[Callable[[], list[int]]] = []
        parting = super()._parting

        def absent() -> list[int]:
            if post.answering:
                return [self.rank]
            if around := post.discard():
                return around
            if not said:
                said.append(parting())
            return said[0]()

        return absent

    def _free(self) -> None:
        if self._post is not None:
            self._post.close(self._waiting)
        self._exchange.close()
        self._begin()  # without keys, whose memory could not be freed while the ledger looks at it
        super()._free()


def check_options(config: Config, given: Mapping[str, Any]) -> None:
    """Raise if a store of this kind cannot have these options, of which some were given and others come from the
    environment. Local.
    """
    asked = {
        "placement": config.placement != "auto",
        "kernels": config.kernels != "numpy",
        "deterministic": config.deterministic,
        "verify_calls": not config.verify_calls,
        "compression": given["compression"] is not None,
    }
    if refused := [name for name, other in asked.items() if other]:
        names = [name if given[name] is not None else f"MPIKV_{name.upper()}" for name in refused]
        raise Unsupported(f"{', '.join(names)}: not in asynchronous mode; leave it out, or use 'dist_sync'")


def _owner(entry: Entry) -> int:
    return entry.place.block.grid.owner(entry.place.start)


def _filling(outs: Sequence[Array]) -> Callable[[Array], None]:
    def fill(value: Array) -> None:
        for out in outs:
            np.copyto(out, value, casting="unsafe")

    return fill
