"""The ranks of one host as a process group without MPI: texts by other means to begin with, then shared memory alone.

At its start a rank reaches the others by a function, such as one of a store of the launcher. Two exchanges of texts
are enough to map the first shared memory. From then on the ranks exchange texts there, with a deadline and without the
server of that store, which may end with another rank.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np

from ..cluster.process_group import gather_texts
from ..cluster.runtime import present
from ..cluster.shared_memory import allocate_shared
from ..cluster.waiting import Waiting
from ..errors import Closed, Unsupported
from ..protocols import Array
from .shm import ShmTransport

# Bytes of a rank's text per exchange; longer ones take several.
_PIECE = 4096
# Bytes of a rank's reason to end, with its length.
_END = 512


class HostGroup:
    """The :class:`~mpikv.protocols.Group` of ranks of one host that need no MPI."""

    one_host = threads = True

    def __init__(self, exchange: Callable[[str], list[str]], rank: int, size: int, timeout: float) -> None:
        """Make the group by ``exchange``, used here only; raise on all ranks if they share no memory. Collective.

        ``exchange`` does as :meth:`exchange`; it may raise Stalled. ``timeout`` is that of later exchanges, in seconds.

        Raises:
            Unsupported: on every rank, if they are on several hosts.
            TransportError: on every rank, if they cannot share memory.
            Stalled: not all ranks have come.
        """
        self.rank = self.local_rank = rank
        self.size = size
        self.host_ranks = tuple(range(size))
        self.hosts: tuple[str, ...] = (present().host,)
        self._exchange: Callable[[str], list[str]] | None = exchange
        fact = json.dumps([present().machine, present().host, sorted(os.sched_getaffinity(0))])
        machines, hosts, cores = zip(*map(json.loads, self.exchange(fact)), strict=True)
        if len(set(machines)) > 1:
            places = ",".join(f"{hosts[machines.index(one)]}:{number}" for one, number in Counter(machines).items())
            raise Unsupported(
                f"{size} ranks on {len(set(machines))} hosts can share memory only by MPI; start them with  mpikv run "
                f"-n {size} --hosts {places} SCRIPT"
            )
        # The union: a launcher may bind each rank to cores of its own.
        self.host_cores = len(set().union(*cores))
        self._texts = ShmTransport(self, _PIECE, Waiting(timeout), single_copy=False)
        self._exchange = partial(gather_texts, rank=rank, size=size, all_gather=self._texts.all_gather)
        ends = self.allocate(size * _END)
        self._reasons = ends.reshape(size, _END)[:, 8:]
        self._ends = ends.data.cast("q")[:: _END // 8]
        """The length of each rank's reason to end, 0 as long as it has none."""

    def allocate(self, nbytes: int, pages_now: bool = True) -> Array:
        """Return zeros that all ranks share, paged in if ``pages_now``; without room MemoryError on all. Collective."""
        return allocate_shared(self, nbytes, pages_now)

    def exchange(self, text: str) -> list[str]:
        """Send a text of any length to all ranks, and return all texts, in rank order. Collective, with a deadline.

        Raises:
            Stalled: not all ranks have come within the timeout.
            Closed: after :meth:`close`.
        """
        if self._exchange is None:
            raise Closed("this group of ranks is closed, and shares nothing more")
        return self._exchange(text)

    gather = exchange

    def announce_end(self, why: str) -> None:
        """Write why this rank leaves to shared memory, for other ranks' find_end(); cut at 504 bytes. Local."""
        reason = np.frombuffer((why or "no reason").encode()[: _END - 8], np.uint8)
        self._reasons[self.rank, : reason.size] = reason
        self._ends[self.rank] = reason.size

    def find_end(self) -> str:
        """Return a text: one other rank, the lowest, has left, and why; "" if none has. Local; any thread may ask."""
        for rank, size in enumerate(self._ends):
            if size and rank != self.rank:
                return f"rank {rank} has left: {self._reasons[rank, :size].tobytes().decode(errors='replace')}"
        return ""

    def announce_shutdown(self) -> Callable[[], list[int]]:
        """Return a function that lists no rank: processes without MPI may end at any time. Local."""
        return list

    def close(self) -> None:
        """Free the memory for texts, so later exchanges raise Closed; other shared memory stays. Local, idempotent."""
        if self._exchange is not None:
            self._texts.close()
            self._exchange = None
