"""A message-passing library between tasks of one process, with the part of mpi4py's interface that mpikv uses.

Messages from one rank to another on one communicator keep their order; the seed draws the order of all else. A
collective operation ends when all its ranks have called it. If a rank calls another operation, or with other counts,
all ranks raise; MPI would give a wrong sum, or wait for ever.
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from ...cluster import runtime
from ...cluster.runtime import OfMessages
from .errors import SimulatedError, Truncated
from .faults import Fault, arrival
from .scheduler import Scheduler

__all__ = ["Communicator", "Library", "make_world"]

Array = Any
T = TypeVar("T")
# Travel times of messages in seconds, least and most: inside a host, and between hosts.
_NEAR, _FAR = (1e-6, 5e-6), (2e-5, 1e-4)


class _Mark:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


class Status:
    source = tag = -1
    _nbytes = 0

    def Get_count(self, unit: Any) -> int:
        return self._nbytes


class Request:
    """A started operation."""

    def __init__(self, test: Callable[[], bool], status: Status | None = None) -> None:
        """A receive fills the ``status``."""
        self._test, self._done, self._status = test, False, status

    def is_complete(self) -> bool:
        """Return whether it is complete. Also a condition of waiting ranks."""
        self._done = self._done or self._test()
        return self._done

    def Test(self, status: Status | None = None) -> bool:
        try:
            return _looked(self.is_complete())
        finally:
            if status is not None and self._status is not None:
                vars(status).update(vars(self._status))

    def Wait(self) -> None:
        wait(self.is_complete)

    def __bool__(self) -> bool:
        return not self._done

    @staticmethod
    def Testall(requests: Sequence[Request]) -> bool:
        # Test each one: a test is what moves an operation on.
        return _looked(sum(request.is_complete() for request in requests) == len(requests))

    @staticmethod
    def Testsome(requests: Sequence[Request]) -> list[int]:
        active = [place for place, request in enumerate(requests) if request]
        return _looked([place for place in active if requests[place].is_complete()])


class Library:
    """The counterpart of ``mpi4py.MPI`` for one simulated rank."""

    COMM_WORLD: Communicator
    COMM_SELF: Communicator

    Exception = SimulatedError
    Request, Status = Request, Status
    IN_PLACE, BYTE, SUM, MAX, LOR = map(_Mark, ("IN_PLACE", "BYTE", "SUM", "MAX", "LOR"))
    COMM_TYPE_SHARED, UNDEFINED, ANY_SOURCE, ANY_TAG = 1, -32766, -1, -1
    THREAD_MULTIPLE, ERR_TRUNCATE = 3, Truncated.number

    def __init__(self, scheduler: Scheduler, hosts: Sequence[int], faults: Sequence[Fault]) -> None:
        """``hosts`` lists the host of each rank."""
        self.scheduler, self.hosts, self.faults = scheduler, tuple(hosts), faults

    def Is_finalized(self) -> bool:
        return False

    def Query_thread(self) -> int:
        return self.THREAD_MULTIPLE

    def Is_thread_main(self) -> bool:
        return True

    def Get_library_version(self) -> str:
        return "simulated"


class _Operation:
    """A collective operation that some ranks have called."""

    def __init__(self, name: tuple[Any, ...], size: int) -> None:
        self.name = name
        self.given: list[Any] = [None] * size
        self.names: dict[int, tuple[Any, ...]] = {}
        self.results: list[Any] | None = None
        self.failure = ""

    def is_complete(self) -> bool:
        if self.failure:
            raise SimulatedError(self.failure)
        return self.results is not None


class _Joined(Request):
    """A rank's part in a collective operation."""

    def __init__(self, operation: _Operation, rank: int) -> None:
        # Pass no method of this object: it would make a cycle, and cycles are not collected while ranks run.
        super().__init__(operation.is_complete)
        self._operation, self._rank = operation, rank

    def result(self) -> Any:
        """Return the rank's result of a complete operation."""
        assert self._operation.results is not None
        return self._operation.results[self._rank]


class _Message:
    def __init__(self, source: int, tag: int, body: bytes) -> None:
        self.source, self.tag, self.body = source, tag, body
        self.arrived = False


class _Posted:
    """A receive that has been called."""

    def __init__(self, source: int, tag: int) -> None:
        self.source, self.tag = source, tag
        self.message: _Message | None = None


class _Shared:
    """The common state of a communicator's ranks."""

    def __init__(self, members: Sequence[int], hosts: Sequence[int]) -> None:
        """``hosts`` lists the host of each rank of the world."""
        self.members, self.hosts = tuple(members), {hosts[member] for member in members}
        self.operations: dict[int, _Operation] = {}
        self.posted: list[list[_Posted]] = [[] for _ in members]
        self.inboxes: list[list[_Message]] = [[] for _ in members]
        self.latest: dict[tuple[int, int], float] = {}

    def tell(self, scheduler: Scheduler) -> None:
        """Wake the ranks: an operation of all of them is complete, or has failed."""
        scheduler.informed(self.members)
        scheduler.changed(*self.hosts)


class Communicator:
    """One rank's view of a group of ranks."""

    def __init__(self, shared: _Shared, rank: int, library: Library) -> None:
        self._shared, self.rank, self.library = shared, rank, library
        self.size = len(shared.members)
        self._called = 0
        self._world_rank = shared.members[rank]

    def __repr__(self) -> str:
        return f"<simulated communicator, rank {self.rank}/{self.size}>"

    @property
    def _scheduler(self) -> Scheduler:
        return self.library.scheduler

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def _check(self, call: str) -> None:
        """Refuse a call from another rank's thread: nothing would wake it."""
        # The scheduler tests conditions in the thread of another rank.
        if self._scheduler.choosing or (here := runtime.present().world) is self.library.COMM_WORLD:
            return
        whose = f"of {here!r}" if here is not None else "no simulated rank, or its run has ended"
        raise SimulatedError(
            f"{call} on {self!r}: this thread is {whose}; call it in the program that was given the communicator"
        )

    def _check_rank(self, call: str, rank: int, least: int = 0) -> None:
        if not least <= rank < self.size:
            raise SimulatedError(f"{call}: rank {rank} is none of this communicator's {self.size} ranks")

    # --- Collective operations

    def _join(self, name: tuple[Any, ...], given: Any, combine: Callable[[list[Any]], list[Any]]) -> _Joined:
        """Take part in the next operation. ``combine`` makes the ranks' results from their inputs. ``name`` holds
        everything that must be equal on all ranks.
        """
        self._check(name[0])
        number, shared = self._called, self._shared
        self._called += 1
        operation = shared.operations.get(number)
        if operation is None:
            operation = shared.operations[number] = _Operation(name, self.size)
        operation.given[self.rank] = given
        operation.names[self.rank] = name
        if name != operation.name and not operation.failure:
            listed = ", ".join(
                f"rank {rank} {' '.join(map(str, name))}" for rank, name in sorted(operation.names.items())
            )
            operation.failure = f"ranks call different operations: {listed}"
        if operation.failure:
            shared.tell(self._scheduler)
        elif len(operation.names) == self.size:
            del shared.operations[number]
            self._complete(operation, combine)
        return _Joined(operation, self.rank)

    def _complete(self, operation: _Operation, combine: Callable[[list[Any]], list[Any]]) -> None:
        """Give all ranks their results, after their inputs have travelled between all their hosts."""
        shared, scheduler, faults = self._shared, self._scheduler, self.library.faults
        ways = itertools.permutations(shared.hosts, 2) if faults else ()
        moment = max((arrival(faults, *way, scheduler.now) for way in ways), default=scheduler.now)

        def finish() -> None:
            try:
                operation.results = combine(operation.given)
            except SimulatedError as error:
                operation.failure = str(error)
            shared.tell(scheduler)

        if moment <= scheduler.now:
            finish()
        elif math.isfinite(moment):
            scheduler.at(moment, finish)

    def together(self, name: str, given: Any, combine: Callable[[list[Any]], list[Any]], *same: Any) -> Any:
        """Take part in an operation, wait for all ranks, and return this rank's result. The arguments ``same`` must be
        equal on all ranks, as the name must.
        """
        request = self._join((name, *same), given, combine)
        request.Wait()
        return request.result()

    def Barrier(self) -> None:
        self.together("Barrier", None, lambda given: given)

    def Ibarrier(self) -> Request:
        return self._join(("Ibarrier",), None, lambda given: given)

    def allgather(self, value: Any) -> list[Any]:
        return [_unpacked(packed) for packed in self.together("allgather", _packed(value), _all_to_all_ranks)]

    def bcast(self, value: Any, root: int = 0) -> Any:
        self._check_rank("bcast from", root)
        return _unpacked(self.together("bcast from", _packed(value), lambda given: [given[root]] * len(given), root))

    def Dup(self) -> Communicator:
        members, hosts = self._shared.members, self.library.hosts
        shared = self.together("Dup", None, lambda given: [_Shared(members, hosts)] * len(given))
        return Communicator(shared, self.rank, self.library)

    def Idup(self) -> tuple[Communicator, Request]:
        members, hosts = self._shared.members, self.library.hosts
        request = self._join(("Idup",), None, lambda given: [_Shared(members, hosts)] * len(given))
        made = Communicator(self._shared, self.rank, self.library)

        def test() -> bool:
            if request.is_complete():
                made._shared = request.result()
            return bool(not request)

        return made, Request(test)

    def Split(self, color: int = 0, key: int = 0) -> Any:
        def combine(given: list[Any]) -> list[Any]:
            parts: dict[int, list[int]] = {}
            for rank, (color, _) in enumerate(given):
                parts.setdefault(color, []).append(rank)
            results: list[Any] = [None] * len(given)
            for color, ranks in parts.items():
                ranks.sort(key=lambda rank: (given[rank][1], rank))
                shared = _Shared([self._shared.members[rank] for rank in ranks], self.library.hosts)
                for place, rank in enumerate(ranks):
                    results[rank] = None if color == self.library.UNDEFINED else (shared, place)
            return results

        part = self.together("Split", (color, key), combine)
        return None if part is None else Communicator(part[0], part[1], self.library)

    def Split_type(self, kind: int, key: int = 0) -> Any:
        return self.Split(self.library.hosts[self._world_rank], key)

    def Free(self) -> None:
        pass

    def Allreduce(self, send: Any, receive: Array, operation: Any = Library.SUM) -> None:
        self.Iallreduce(send, receive, operation).Wait()

    def Iallreduce(self, send: Any, receive: Array, operation: Any = Library.SUM) -> Request:
        given = (receive if send is self.library.IN_PLACE else send).copy()
        name = "Iallreduce", operation, "of", given.size, given.dtype
        return self._filling(name, given, receive, _combining(operation))

    def Ireduce(self, send: Array, receive: Array | None, operation: Any, root: int) -> Request:
        self._check_rank("Ireduce to", root)
        name = "Ireduce", operation, "of", send.size, send.dtype, "to", root
        return self._filling(name, send.copy(), receive, _combining(operation))

    def Ireduce_scatter(self, send: Array, receive: Array, counts: Sequence[int], operation: Any) -> Request:
        name = "Ireduce_scatter", operation, "of", send.dtype, tuple(counts)
        ends = np.cumsum([0, *counts]).tolist()
        return self._filling(name, send.copy(), receive, _combining(operation), ends)

    def _filling(
        self,
        name: tuple[Any, ...],
        given: Any,
        receive: Array | None,
        whole: Callable[[list[Any]], Array],
        ends: Sequence[int] | None = None,
    ) -> Request:
        """Start an operation that fills ranks' memory with the combined inputs, or with each rank's part of them."""

        def combine(every: list[Any]) -> list[Any]:
            result = whole([sent for sent, _ in every]).reshape(-1)
            for rank, (_, filled) in enumerate(every):
                if filled is not None:
                    own = result if ends is None else result[ends[rank] : ends[rank + 1]]
                    filled.reshape(-1)[: own.size] = own
            return every

        return self._join(name, (given, receive), combine)

    def Ibcast(self, buffer: Array, root: int) -> Request:
        self._check_rank("Ibcast from", root)
        sent, filled = (buffer.copy(), None) if self.rank == root else (None, buffer)
        return self._filling(("Ibcast", buffer.size, "from", root), sent, filled, lambda every: every[root])

    def Allgather(self, send: Array, receive: Array) -> None:
        name = "Allgather of", send.size, send.dtype
        self._filling(name, send.copy(), receive, np.concatenate).Wait()

    def Allgatherv(self, send: Any, receive: Any) -> None:
        memory, (lengths, starts), _ = receive
        self._gatherv("Allgatherv", send.copy(), memory, lengths, starts).Wait()

    def Iallgatherv(self, send: Any, receive: Any) -> Request:
        memory, (lengths, starts), _ = receive
        own = memory[starts[self.rank] : starts[self.rank] + lengths[self.rank]].copy()
        return self._gatherv("Iallgatherv", own, memory, lengths, starts)

    def _gatherv(self, name: str, own: Array, memory: Array, lengths: Any, starts: Any) -> Request:
        expected = np.cumsum([0, *lengths]).tolist()
        if own.size != lengths[self.rank] or list(starts) != expected[:-1]:
            raise SimulatedError(f"{name}: rank {self.rank} gives {own.size}, of {lengths} at {starts}")
        return self._filling((name, tuple(lengths)), own, memory, np.concatenate)

    def Ialltoallv(self, send: Any, receive: Any) -> Request:
        (out, (counts, starts), _), (memory, (lengths, places), _) = send, receive
        parts = [out[start : start + count].copy() for start, count in zip(starts, counts, strict=True)]

        def combine(every: list[Any]) -> list[Any]:
            for rank, (_, filled, lengths, places) in enumerate(every):
                for source, (sent, *_) in enumerate(every):
                    part, length = sent[rank], lengths[source]
                    if part.size != length:
                        raise SimulatedError(f"rank {source} sends {part.size} and rank {rank} takes {length} bytes")
                    filled[places[source] : places[source] + length] = part
            return every

        return self._join(("Ialltoallv",), (parts, memory, lengths, places), combine)

    # --- Messages

    def Isend(self, buffer: Any, rank: int, tag: int = 0) -> Request:
        self._check("Isend")
        self._check_rank("Isend to", rank)
        body, shared, scheduler = bytes(_bytes(buffer)), self._shared, self._scheduler
        message = _Message(self.rank, tag, body)
        source, target = self.library.hosts[self._world_rank], self.library.hosts[shared.members[rank]]
        moment = scheduler.now + scheduler.random.uniform(*(_NEAR if source == target else _FAR))
        moment = arrival(self.library.faults, source, target, moment)
        # An earlier message on this way must arrive first.
        moment = shared.latest[self.rank, rank] = max(moment, shared.latest.get((self.rank, rank), 0.0))

        def arrive() -> None:
            shared.inboxes[rank].append(message)
            message.arrived = True
            scheduler.informed((self._world_rank, shared.members[rank]))
            scheduler.changed(source, target)

        if math.isfinite(moment):
            scheduler.at(moment, arrive)
        # As in MPI, a long send completes at its arrival, a short one at once.
        return Request(lambda: message.arrived if len(body) > 4096 else True)

    def Irecv(self, buffer: Any, rank: int, tag: int) -> Request:
        self._check("Irecv")
        self._check_rank("Irecv from", rank, Library.ANY_SOURCE)
        memory, status, posted = _bytes(buffer), Status(), _Posted(rank, tag)
        self._shared.posted[self.rank].append(posted)

        def test() -> bool:
            self._match()
            message = posted.message
            if message is None:
                return False
            status.source, status.tag, status._nbytes = message.source, message.tag, len(message.body)
            if len(message.body) > len(memory):
                raise Truncated(f"a message of {len(message.body)} bytes is received into {len(memory)}")
            memory[: len(message.body)] = message.body
            return True

        return Request(test, status)

    def Recv(self, buffer: Any, rank: int, tag: int) -> None:
        self.Irecv(buffer, rank, tag).Wait()

    def Iprobe(self, source: int = Library.ANY_SOURCE, tag: int = Library.ANY_TAG, status: Any = None) -> bool:
        self._check("Iprobe")
        self._check_rank("Iprobe from", source, Library.ANY_SOURCE)
        message = self._find(source, tag)
        if message is not None and status is not None:
            status.source, status._nbytes = message.source, len(message.body)
        return _looked(message is not None)

    def Improbe(self, source: int, tag: int, status: Any) -> _Found | None:
        self._check("Improbe")
        self._check_rank("Improbe from", source, Library.ANY_SOURCE)
        message = self._take(source, tag)
        if message is None:
            return _looked(None)
        status.source, status.tag, status._nbytes = message.source, message.tag, len(message.body)
        return _Found(message)

    def _match(self) -> None:
        """Give each receive the first message that fits, in the order of the receives."""
        waiting = self._shared.posted[self.rank]
        for posted in tuple(waiting):
            posted.message = self._take(posted.source, posted.tag)
            if posted.message is not None:
                waiting.remove(posted)

    def _find(self, source: int, tag: int) -> _Message | None:
        for message in self._shared.inboxes[self.rank]:
            if source in (message.source, Library.ANY_SOURCE) and tag in (message.tag, Library.ANY_TAG):
                return message
        return None

    def _take(self, source: int, tag: int) -> _Message | None:
        message = self._find(source, tag)
        if message is not None:
            if self._scheduler.choosing:
                raise RuntimeError("a message is received by its own rank alone")
            self._shared.inboxes[self.rank].remove(message)
            self._scheduler.informed((self._world_rank,))
            self._scheduler.changed(self.library.hosts[self._world_rank])
        return message


class _Found:
    """A probed message; only this caller may receive it."""

    def __init__(self, message: _Message) -> None:
        self._message = message

    def Irecv(self, buffer: Any) -> Request:
        memory = _bytes(buffer)
        memory[: len(self._message.body)] = self._message.body
        return Request(lambda: True)

    def Recv(self, buffer: Any) -> None:
        self.Irecv(buffer)


def _looked(found: T) -> T:
    """Report a rank's test without success to the scheduler; return the result of the test."""
    if not found:
        here: Any = runtime.present()
        if here.world is not None:
            here.poll()
    return found


def wait(ready: Callable[[], bool]) -> None:
    """Wait for a condition without a deadline, as MPI's blocking calls do."""
    here = runtime.present()
    if here.world is None:
        raise SimulatedError("Wait: this thread is no simulated rank, or its run has ended: nobody would complete it")
    if ready():
        here.give_way()  # the last rank to arrive need not be the first to continue
    while not ready() and not here.nap(0, ready=OfMessages(ready)):
        pass


# Immutable types, which ranks may share; other objects are copied by pickle.
_PLAIN = (bool, bytes, float, int, str, type(None))


class _Pickled(bytes):
    pass


def _all_to_all_ranks(given: list[Any]) -> list[Any]:
    return [tuple(given)] * len(given)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_is_plain, value)))


def _packed(value: Any) -> Any:
    return value if _is_plain(value) else _Pickled(pickle.dumps(value))


def _unpacked(packed: Any) -> Any:
    return pickle.loads(packed) if type(packed) is _Pickled else packed


def _bytes(buffer: Any) -> memoryview:
    if isinstance(buffer, (list, tuple)):
        memory, nbytes, _ = buffer
        return memoryview(memory).cast("B")[:nbytes]
    view = memoryview(buffer)
    # memoryview cannot cast a view with a zero in its shape.
    return memoryview(bytearray()) if view.nbytes == 0 else view.cast("B")


_FUNCTIONS = {Library.SUM: np.add, Library.MAX: np.maximum, Library.LOR: np.logical_or}


def _combining(operation: Any) -> Callable[[Sequence[Array]], Array]:
    function = _FUNCTIONS[operation]

    def combined(every: Sequence[Array]) -> Array:
        total = every[0].copy()
        with np.errstate(all="ignore"):
            for term in every[1:]:
                total = function(total, term)
        return total.astype(every[0].dtype, copy=False)

    return combined


def make_world(scheduler: Scheduler, hosts: Sequence[int], faults: Sequence[Fault]) -> list[Communicator]:
    """Return every rank's communicator of all ranks."""
    shared, comms = _Shared(range(len(hosts)), hosts), []
    for rank in range(len(hosts)):
        library = Library(scheduler, hosts, faults)
        library.COMM_WORLD = Communicator(shared, rank, library)
        library.COMM_SELF = Communicator(_Shared([rank], hosts), 0, library)
        comms.append(library.COMM_WORLD)
    return comms
