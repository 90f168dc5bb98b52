"""The ranks that share a store: their hosts, and their messages about failures and the end."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ..errors import Closed, Stalled, mark_stalled
from ..protocols import Array
from .mpi_library import TranslatedErrors, library_of
from .printing import log
from .runtime import OfMessages, present
from .shared_memory import allocate_shared
from .shutdown import PATIENCE, abandon, announce_shutdown, await_shutdown, end_job, receive_shutdowns, wait_or_abandon
from .waiting import Waiting

# Message tags: a rank has given up a call; a rank has ended the store while others may be in a call; questions and
# answers of hosts.
GONE, ENDED, ASKS, ANSWERS = _TAGS = (1, 32102, 32103, 32104)
# Bytes of the longest text. MPI sends so short a message eagerly: the sender need not wait for the receiver.
_LONGEST_TEXT = 500


class ProcessGroup:
    """The ranks of one store.

    It owns a duplicate of its communicator, so messages of two stores, or of a store and the caller, never meet.
    """

    def __init__(self, comm: Any = None, simulate_ranks_per_host: int = 0, timeout: float = 60.0) -> None:
        """Duplicate ``comm`` and find its hosts, collective over it; without one, the group is this process alone.

        If ``simulate_ranks_per_host`` is not 0, a host with more ranks is split into several hosts, which share
        nothing.

        Raises:
            Stalled: not all ranks have come within ``timeout`` seconds.
        """
        self.comm: Any = _duplicate(comm, timeout) if comm is not None and comm.size > 1 else None
        self.mpi: Any = library_of(comm) if comm is not None else None
        self.rank = self.comm.rank if self.comm else 0
        self.size = self.comm.size if self.comm else 1
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self._timeout = timeout
        self.left = dict[int, str]()
        """The ranks that have ended the store, as far as :meth:`find_end` has found them, and why; the first first."""
        self._has_ended = False
        # Messages sent to each rank; at this rank's own place, minus the messages received. Summed over ranks, each
        # place is the number of messages still on their way.
        self._counts = np.zeros(self.size, np.int64)
        self._counting = threading.Lock()
        self.witness: Callable[[], None] = lambda: None
        """Answers other hosts that ask about this one. Called by waiting ranks."""
        self._listening, self._closing = threading.Lock(), False
        self.host_comm: Any = None
        self._control: Any = None
        """For the ranks' messages about failures, and at the end."""
        self.ranks_of_hosts: tuple[tuple[int, ...], ...] = ((0,),)
        self.host_ranks: tuple[int, ...] = (0,)
        self.hosts: tuple[str, ...] = (present().host,)
        self.local_rank = 0
        if self.comm:
            self._join_hosts(simulate_ranks_per_host)
        else:
            self.host_cores = len(os.sched_getaffinity(0))

    def _join_hosts(self, simulate_ranks_per_host: int) -> None:
        """Set hosts and local ranks; make host_comm, and a copy of comm for messages about failures. Collective."""
        # Apart from self.comm: after a late sum, others have a part of it pending there, and MPI could match it with
        # the next collective.
        self._control = self.comm.Dup()
        # Not by Split_type: some launches have MPI take the ranks of one machine for those of several.
        machines = self.comm.allgather(present().machine)
        machine = self.comm.Split(machines.index(present().machine), self.rank)
        # The union: a launcher may bind each rank to cores of its own.
        cores = len(set().union(*machine.allgather(tuple(os.sched_getaffinity(0)))))
        # Split even into one part: a rank with bad settings has defaults here, and must make the same collectives.
        part = machine.rank // simulate_ranks_per_host if simulate_ranks_per_host else 0
        self.host_comm = machine.Split(part, key=self.rank)
        self.host_cores = cores * self.host_comm.size // machine.size
        machine.Free()
        self.local_rank = self.host_comm.rank
        self.host_ranks = tuple(self.host_comm.allgather(self.rank))
        hosts = dict(self.comm.allgather((self.host_ranks, present().host)))
        self.ranks_of_hosts, self.hosts = tuple(hosts), tuple(hosts.values())

    @property
    def one_host(self) -> bool:
        """Whether all ranks share the memory of one host."""
        return len(self.host_ranks) == self.size

    @property
    def threads(self) -> bool:
        """Whether several threads of this process may use MPI at once."""
        return self.comm is None or bool(self.mpi.Query_thread() == self.mpi.THREAD_MULTIPLE)

    def allocate(self, nbytes: int, pages_now: bool = True) -> Array:
        """Return zeros that this host's ranks share; on failure raise on all of them. Collective over the host.

        Raises:
            Closed: after :meth:`close`.
        """
        if self.size > 1 and self.comm is None:
            raise Closed("this group of ranks is closed; memory of this rank alone would not be shared")
        return allocate_shared(self, nbytes, pages_now)

    def exchange(self, text: str) -> list[str]:
        """Send a text to this host's ranks, and return the texts of all, in rank order. Has no deadline. Collective
        over the host.
        """
        with self.translated("exchanging texts"):
            return list(self.host_comm.allgather(text)) if self.comm else [text]

    def gather(self, text: str) -> list[str]:
        """Send a text to all ranks, and return the texts of all, in rank order. Collective.

        Raises:
            Stalled: not all ranks have come within the timeout.
        """
        if self.comm is None:
            return [text]
        with self.translated("exchanging texts"):
            return gather_texts(text, self.rank, self.size, self._all_gather)

    def _all_gather(self, buffer: Array, counts: Sequence[int]) -> None:
        """Fill ``buffer`` with the other ranks' parts, of ``counts`` elements; this rank's part already stands in it.
        Raise Stalled after the timeout. Collective.
        """
        nbytes = [count * buffer.itemsize for count in counts]
        parts = [buffer.view(np.uint8), (nbytes, [0, *accumulate(nbytes[:-1])]), self.mpi.BYTE]
        wait_or_abandon(self._control.Iallgatherv(self.mpi.IN_PLACE, parts), self._control, self._timeout)

    def translated(self, doing: str) -> TranslatedErrors:
        """Return a context that raises MPI's errors as TransportError; ``doing`` names the task."""
        return TranslatedErrors(self.mpi, doing)

    def part(self, ranks: Sequence[int]) -> Any:
        """Return a new communicator of these ranks, in this order, for them to free; others get a null one. In a group
        of one rank return ``COMM_SELF``, not to be freed, or None if no MPI is loaded. Collective.
        """
        if self.comm is None:
            mpi = self.mpi or sys.modules.get("mpi4py.MPI")
            return mpi and mpi.COMM_SELF
        place = ranks.index(self.rank) if self.rank in ranks else None
        with self.translated("splitting a communicator"):
            return self.comm.Split(self.mpi.UNDEFINED if place is None else 0, place or 0)

    def announce_end(self, why: str) -> None:
        """Send other ranks, once, why this one makes no more calls of the store; nothing while this thread may not use
        MPI. Local; does not wait.
        """
        with self._listening:
            # Also after the end of another rank: some may wait for a message of this one.
            if not self._has_ended and self._may_use_mpi():
                self._has_ended = True
                with self.translated("sending a shutdown notice"):
                    self.send_notice(why.encode()[:_LONGEST_TEXT], self.others, ENDED)

    def send_notice(self, text: bytes, ranks: Iterable[int], tag: int) -> None:
        """Send ranks a message without waiting, and count it; :meth:`close` waits until all have it. Local."""
        for rank in ranks:
            with self._counting:  # a watchdog's thread counts, too, and += of an element is several steps
                self._counts[rank] += 1
            abandon([self.comm.Isend(text, rank, tag)])

    def receive_notice(self, tag: int) -> tuple[int, bytes] | None:
        """Receive one message with this tag, if one has come; return (sender, text in bytes), else None. Local."""
        mpi = self.mpi
        status = mpi.Status()
        found = self.comm.Improbe(mpi.ANY_SOURCE, tag, status)
        if found is None:
            return None
        text = bytearray(status.Get_count(mpi.BYTE))
        found.Recv(text)
        with self._counting:
            self._counts[self.rank] -= 1
        return status.source, bytes(text)

    def find_end(self) -> str:
        """Receive other ranks' notices of their ends; return the first reason, or "". Local; any thread may ask."""
        with self._listening:
            if self._may_use_mpi():
                with self.translated("receiving a shutdown notice"):
                    while notice := self.receive_notice(ENDED):
                        self.left[notice[0]] = f"rank {notice[0]} has left: {notice[1].decode(errors='replace')}"
            return next(iter(self.left.values()), "")

    def _may_use_mpi(self) -> bool:
        """Return whether this thread may use the group's MPI now; never once the group begins to close. Local."""
        may = self.comm is not None and not (self._closing or self.mpi.Is_finalized())
        return may and (self.threads or bool(self.mpi.Is_thread_main()))

    def announce_shutdown(self) -> Callable[[], list[int]]:
        """Tell the other ranks that this one shuts down; return a function that lists those yet to say so. Local."""
        return list if self.comm is None else announce_shutdown(self.comm)

    def close(self) -> None:
        """Receive all messages and free the communicators; shared memory stays with its arrays. Collective, idempotent.

        Raises:
            Stalled: not all ranks have come within the timeout.
        """
        if self.comm is None:
            return
        with self.translated("closing"):
            with self._listening:  # a watchdog's thread may be receiving, and does so no more from here on
                self._closing = True
            counted = self._control.Iallreduce(self.mpi.IN_PLACE, self._counts, self.mpi.SUM)
            wait_or_abandon(counted, self._control, self._timeout)
            # MPI gives this communicator's number to the next one, and leftover messages would be received there.
            Waiting(self._timeout).until(OfMessages(self._hear_all), tuple)
            comm, self.comm = self.comm, None
            self.host_comm.Free()
            self._control.Free()
            comm.Free()

    def _hear_all(self) -> bool:
        """Receive the messages that have come; return whether no more are on their way to this rank. Only in
        :meth:`close`, after it has summed the ranks' counts. Local.
        """
        while any(self.receive_notice(tag) for tag in _TAGS):
            pass
        return bool(self._counts[self.rank] == 0)


def gather_texts(text: str, rank: int, size: int, all_gather: Callable[[Array, Sequence[int]], None]) -> list[str]:
    """Return the texts of all ranks, in rank order, by two calls of ``all_gather``. Collective.

    So is ``all_gather``: it fills an array, of so many elements from each rank, in place.
    """
    sizes, mine = np.zeros(size, np.int64), np.frombuffer(text.encode(), np.uint8)
    sizes[rank] = mine.size
    all_gather(sizes, (1,) * size)
    starts = [0, *accumulate(sizes.tolist())]
    joined = np.empty(starts[-1], np.uint8)
    joined[starts[rank] : starts[rank + 1]] = mine
    all_gather(joined, sizes.tolist())
    return [joined[begin:end].tobytes().decode() for begin, end in pairwise(starts)]


@cache
def warn_once(text: str) -> None:
    """Log a warning, once in this process for each text. Local."""
    log(text)


def _duplicate(world: Any, timeout: float) -> Any:
    """Return a duplicate of a communicator; if ranks do not come, raise Stalled and end the job at exit. Collective.

    Raises:
        Stalled: some ranks have not come, or had given up when this one came.
    """
    problem = ""
    missing: list[int] = []
    try:
        Waiting(timeout).until(world.Ibarrier().Test, tuple)
        # A rank that has given up took part in the barrier, and takes part in nothing else.
        comm, request = world.Idup()
        now = present().now
        given_up, late = receive_shutdowns(world), now() + PATIENCE
        # Probes of the caller's communicator start only after a delay: they see the caller's own messages.
        Waiting(timeout).until(lambda: request.Test() or (now() > late and bool(given_up())), tuple)
        if request:
            problem = f"rank {world.rank} was late, and the other ranks have stopped waiting for it"
    except Stalled:
        missing = await_shutdown([announce_shutdown(world)], PATIENCE)
        who = f"ranks {missing}, which have not called it" if missing else "ranks that came late"
        problem = f"waited {timeout:.1f} s for {who}"
    if problem:
        if present().world is None:
            atexit.register(end_job, problem)
        raise mark_stalled(Stalled(f"create: {problem} [rank {world.rank}/{world.size}]", missing), world.rank)
    return comm
