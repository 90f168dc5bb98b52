"""The ranks that share a store: who is on which host, and what they tell each other."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence, Set
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ..config import dividing_variables
from ..errors import Stalled, mark_stalled
from ..protocols import Array
from .mpi_library import TranslatedErrors, library_of
from .printing import warn
from .runtime import OfMessages, present
from .shutdown import PATIENCE, announce_shutdown, await_shutdown, complete, end_job, receive_shutdowns
from .waiting import Waiting
from .windows import SharedWindows

__all__ = ["ANSWERS", "ASKS", "GONE", "ProcessGroup", "warn_once"]

# The tags of words: that a rank has given up a call, or has ended the store while others may be in a call of it;
# questions and answers of hosts.
GONE, ENDED, ASKS, ANSWERS = WORDS = (1, 32102, 32103, 32104)
# The longest text, which MPI passes on without either rank's help.
_MOST_TOLD = 500
# What was told by ranks that had ended a store: MPI may still read it.
_last_words: list[Any] = []


class ProcessGroup:
    """The ranks of one store.

    It owns a duplicate of the communicator it was made from, so that two stores, or a store and the caller's own
    messages, never meet.
    """

    def __init__(
        self, comm: Any = None, simulate_ranks_per_host: int = 0, timeout: float = 60.0, *, insists: bool = False
    ) -> None:
        """Collective over ``comm``; without one, the group is this process alone.

        With ``simulate_ranks_per_host`` other than 0 no host is taken to have more ranks: a larger one is split into
        several, which share nothing. Where MPI divides the ranks of one machine, ``insists`` has them share memory.

        Raises:
            Stalled: not all ranks have come within ``timeout`` seconds.
        """
        self.comm: Any = _duplicated(comm, timeout) if comm is not None and comm.size > 1 else None
        self.mpi: Any = library_of(comm) if comm is not None else None
        self.rank = self.comm.rank if self.comm else 0
        self.size = self.comm.size if self.comm else 1
        self._timeout = timeout
        self.windows = SharedWindows()
        self.divided = ""
        """What MPI says of the ranks of one machine, if it takes them for ranks of several hosts."""
        self._end = ""
        self._has_ended = False
        # How many words this rank has sent to each; for itself, less those that it has heard.
        self._words = np.zeros(self.size, np.int64)
        self.witness: Callable[[], None] = lambda: None
        """Answers other hosts that ask about this one. Called by ranks that wait."""
        self._listening = threading.Lock()
        self.host_comm: Any = None
        self._control: Any = None
        """For what ranks tell each other of failures, and at the end."""
        self.ranks_of_hosts: tuple[tuple[int, ...], ...] = ((0,),)
        if self.comm:
            self._join_hosts(simulate_ranks_per_host, insists)
        else:
            self.host_cores = len(os.sched_getaffinity(0))
            self.local_rank, self.hosts, self.host_ranks = 0, (present().host,), (0,)

    def _join_hosts(self, simulate_ranks_per_host: int, insists: bool) -> None:
        # Where a rank came late to a sum, others have a part of it pending, which MPI may match with what comes next.
        self._control = self.comm.Dup()
        machine = self._join_machine(insists)
        # A launcher may bind each rank to cores of its own.
        cores = len(set().union(*machine.allgather(tuple(os.sched_getaffinity(0)))))
        # Also where all stay together: a rank whose settings are bad has defaults here, and calls the same collectives.
        part = machine.rank // simulate_ranks_per_host if simulate_ranks_per_host else 0
        self.host_comm = machine.Split(part, key=self.rank)
        self.host_cores = cores * self.host_comm.size // machine.size
        machine.Free()
        self.local_rank = self.host_comm.rank
        told = self.host_comm.allgather((self.rank, (self.mpi.COMM_WORLD.rank, os.getpid())))
        self.host_ranks, members = zip(*told, strict=True)
        waits = partial(complete, comm=self.host_comm, ranks=self.host_ranks, timeout=self._timeout)
        self.windows = SharedWindows(self.host_comm, self.rank, members, self.divided if insists else "", waits)
        hosts = dict(self.comm.allgather((self.host_ranks, present().host)))
        self.ranks_of_hosts, self.hosts = tuple(hosts), tuple(hosts.values())

    def _join_machine(self, insists: bool) -> Any:
        """Return the communicator of the ranks that share memory, as MPI has it unless this rank ``insists``."""
        machine = self.comm.Split_type(self.mpi.COMM_TYPE_SHARED, key=self.rank)
        said = self.comm.allgather((machine.bcast(self.rank), _describe_machine(self.rank)))
        machines = [name for _, name in said]
        # For each rank, the first one of its machine, which is of the machine of the first rank of its host.
        firsts = [machines.index(machines[leader]) for leader, _ in said]
        if not any(first != leader for first, (leader, _) in zip(firsts, said, strict=True)):
            return machine
        leaders = {leader for leader, _ in said}
        self.divided = _tell_division(leaders, firsts, machines)
        if self.rank == 0 and not insists:
            warn_once(self.divided)
        # Collective, so that also ranks take part that do not insist, as one whose settings are bad.
        ours = self.comm.Split(firsts[self.rank] if insists else said[self.rank][0], self.rank)
        machine.Free()
        return ours

    @property
    def one_host(self) -> bool:
        """Whether all ranks share the memory of one host."""
        return len(self.host_ranks) == self.size

    @property
    def threads(self) -> bool:
        """Whether several threads of this process may use MPI at once."""
        return self.comm is None or bool(self.mpi.Query_thread() == self.mpi.THREAD_MULTIPLE)

    def gather(self, text: str) -> list[str]:
        """Return the texts of all ranks, in rank order. Collective.

        Raises:
            Stalled: not all ranks have come within the timeout.
        """
        if self.comm is None:
            return [text]
        mine = np.frombuffer(text.encode(), np.uint8)
        with self.translated("exchanging texts"):
            sizes = self._join(np.array([mine.nbytes]), [8] * self.size).view(np.int64).tolist()
            joined = self._join(mine, sizes)
        return [joined[end - size : end].tobytes().decode() for size, end in zip(sizes, accumulate(sizes), strict=True)]

    def _join(self, mine: Array, sizes: Sequence[int]) -> Array:
        """Return the bytes of all ranks, one behind the other. Collective."""
        starts = [0, *accumulate(sizes)]
        joined = np.empty(starts[-1], np.uint8)
        joined[starts[self.rank] : starts[self.rank + 1]] = mine.view(np.uint8)
        parts = [joined, (sizes, starts[:-1]), self.mpi.BYTE]
        self._complete(self._control.Iallgatherv(self.mpi.IN_PLACE, parts))
        return joined

    def _complete(self, request: Any) -> None:
        complete(request, self._control, range(self.size), self._timeout)

    def translated(self, doing: str) -> TranslatedErrors:
        """Raise what MPI raises as TransportError."""
        return TranslatedErrors(self.mpi, doing)

    def part(self, ranks: Sequence[int]) -> Any:
        """Return a communicator of these ranks, in this order, which they free; elsewhere a null one. Collective.

        Of a process that is alone, ``COMM_SELF``, or None where no MPI is loaded.
        """
        if self.comm is None:
            mpi = self.mpi or sys.modules.get("mpi4py.MPI")
            return mpi and mpi.COMM_SELF
        place = ranks.index(self.rank) if self.rank in ranks else None
        with self.translated("splitting a communicator"):
            return self.comm.Split(self.mpi.UNDEFINED if place is None else 0, place or 0)

    def tell_end(self, why: str) -> None:
        """Tell the other ranks why this one makes no call of the store any more, unless they know that it is over.
        Local.
        """
        with self._listening:
            if self._has_ended or self._end or not self._may_speak():
                return
            self._has_ended = True
            text = why.encode()[:_MOST_TOLD]
            with self.translated("sending a shutdown notice"):
                for rank in range(self.size):
                    if rank != self.rank:
                        self.send_word(text, rank, ENDED)

    def send_word(self, text: bytes, rank: int, tag: int) -> None:
        """Send what the other rank receives at the end of the store, if not before. Local."""
        self._words[rank] += 1
        _last_words.append(self.comm.Isend(text, rank, tag))

    def hear_word(self, tag: int) -> tuple[int, bytes] | None:
        """Return who has sent a word, and the word; None where there is none. Local."""
        mpi = self.mpi
        status = mpi.Status()
        found = self.comm.Improbe(mpi.ANY_SOURCE, tag, status)
        if found is None:
            return None
        text = bytearray(status.Get_count(mpi.BYTE))
        found.Recv(text)
        self._words[self.rank] -= 1
        return status.source, bytes(text)

    def told_end(self) -> str:
        """Return what a rank has told that has ended the store, or nothing. Local; any thread may ask."""
        if self.comm is None or self._end:
            return self._end
        with self._listening:
            if self._may_speak():
                with self.translated("receiving a shutdown notice"):
                    word = self.hear_word(ENDED)
                if word:
                    self._end = f"rank {word[0]} has left: {word[1].decode(errors='replace')}"
            return self._end

    def _may_speak(self) -> bool:
        """Return whether this thread may use MPI now."""
        return self.comm is not None and not self.mpi.Is_finalized() and (self.threads or self.mpi.Is_thread_main())

    def announce_shutdown(self) -> Callable[[], list[int]]:
        """Tell the other ranks that this one ends; return a function that says which have not told the same yet."""
        return list if self.comm is None else announce_shutdown(self.comm)

    def close(self) -> None:
        """Free the shared memory at which no rank looks, and the communicators. Collective, idempotent.

        Raises:
            Stalled: not all ranks have come within the timeout.
        """
        if self.comm is None:
            return
        with self.translated("closing"):
            self.windows.close()
            self.host_comm.Free()
            with self._listening:  # a watchdog may be about to
                self._complete(self._control.Iallreduce(self.mpi.IN_PLACE, self._words, self.mpi.SUM))
                # The next communicator, which takes this one's number, would find them.
                Waiting(self._timeout).until(OfMessages(self._hear_all), tuple)
                comm, self.comm, self.host_comm = self.comm, None, None
            self._control.Free()
            comm.Free()

    def _hear_all(self) -> bool:
        """Return whether this rank has heard as many words as all have sent to it; hear those that have come."""
        while any(self.hear_word(tag) for tag in WORDS):
            pass
        return bool(self._words[self.rank] == 0)


def _describe_machine(rank: int) -> str:
    """Return the host's name and boot, which equal those of all ranks of this machine, but not of another container."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{present().host} {boot.read_text().strip() if boot.exists() else rank}"


def _tell_division(leaders: Set[int], firsts: Sequence[int], machines: Sequence[str]) -> str:
    """Say what to do about a machine of which MPI makes several hosts, whose first ranks are ``leaders``.

    ``firsts`` has the first rank of its machine for each rank, ``machines`` the machines' names.
    """
    counts = Counter(firsts[leader] for leader in leaders)
    first, hosts = counts.most_common(1)[0]
    way, known = "shm" if hosts == len(leaders) else "hierarchical", dividing_variables()
    cause = f"; set here, and known to cause this: {', '.join(known)}" if known else ""
    return (
        f"MPI reports {hosts} hosts for the {firsts.count(first)} ranks on {machines[first].split()[0]}, so they "
        f"share no memory and some have the same local_rank; set MPIKV_TRANSPORT={way} to share memory{cause}"
    )


@cache
def warn_once(text: str) -> None:
    """Log a warning, unless this process has."""
    warn(text)


def _duplicated(world: Any, timeout: float) -> Any:
    """Return a duplicate of a communicator, which a plain ``Dup`` would make without a deadline. Collective.

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
        # The caller's messages are looked at only where something is wrong.
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
