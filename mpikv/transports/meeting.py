"""The ranks of one host as a process group without MPI: words to begin with, and then shared memory alone.

At its start a rank knows the others by a :class:`Words`, such as a store of the launcher. Two exchanges of words are
enough to map the first shared memory. From then on the ranks exchange texts there, with a deadline and without the
words' server, which may end with another rank.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np

from ..cluster.process_group import boot_id
from ..cluster.runtime import present
from ..cluster.shared_memory import allocate_shared
from ..cluster.waiting import Waiting
from ..errors import Closed, Unsupported
from ..protocols import Array
from .shm import ShmTransport

__all__ = ["HostGroup", "Words"]

# Bytes of a rank's text per exchange; longer ones take several.
_PIECE = 4096


class Words(Protocol):
    """How ranks that share nothing yet learn of each other."""

    def allgather(self, word: bytes) -> list[bytes]:
        """Return the words of all ranks, in rank order. Collective.

        Raises :class:`~mpikv.errors.Stalled`, which names the missing ranks, if not all come in time.
        """


class HostGroup:
    """The :class:`~mpikv.protocols.Group` of ranks of one host that need no MPI."""

    divided = ""
    one_host = True

    def __init__(self, words: Words, rank: int, size: int, timeout: float) -> None:
        """Collective. Uses the words only here. ``timeout`` is that of an exchange of texts, in seconds.

        Raises:
            Unsupported: on every rank, if they are on several hosts.
            TransportError: on every rank, if they cannot share memory.
            Stalled: not all ranks have come.
        """
        self.rank = self.local_rank = rank
        self.size = size
        self.host_ranks = tuple(range(size))
        self.hosts: tuple[str, ...] = (present().host,)
        self._words: Words | None = words
        self._texts: ShmTransport | None = None
        fact = json.dumps([boot_id() or present().host, present().host, sorted(os.sched_getaffinity(0))])
        boots, hosts, cores = zip(*map(json.loads, self.exchange(fact)), strict=True)
        if len(set(boots)) > 1:
            places = ",".join(f"{hosts[boots.index(boot)]}:{number}" for boot, number in Counter(boots).items())
            raise Unsupported(
                f"{size} ranks on {len(set(boots))} hosts can share memory only by MPI; start them with  mpikv run "
                f"-n {size} --hosts {places} SCRIPT"
            )
        # The union: a launcher may bind each rank to cores of its own.
        self.host_cores = len(set().union(*cores))
        if size > 1:
            self._texts = ShmTransport(self, _PIECE, Waiting(timeout), single_copy=False)
        self._words = None

    def allocate(self, nbytes: int, zeroed: bool = True) -> Array:
        """Return memory that all ranks share. Collective."""
        return allocate_shared(self, nbytes, zeroed)

    def exchange(self, text: str) -> list[str]:
        """Return the texts of all ranks, in rank order, whatever their lengths. Collective.

        Raises:
            Stalled: not all ranks have come within the timeout.
            Closed: after :meth:`close`.
        """
        if self.size == 1:
            return [text]
        if self._words is not None and self._texts is None:
            return [word.decode() for word in self._words.allgather(text.encode())]
        if self._texts is None:
            raise Closed("this group of ranks is closed, and shares nothing more")
        sizes = np.zeros(self.size, np.int64)
        mine = np.frombuffer(text.encode(), np.uint8)
        sizes[self.rank] = mine.size
        self._texts.all_gather(sizes, (1,) * self.size)
        starts = [0, *accumulate(sizes.tolist())]
        joined = np.empty(starts[-1], np.uint8)
        joined[starts[self.rank] : starts[self.rank + 1]] = mine
        self._texts.all_gather(joined, sizes.tolist())
        return [joined[begin:end].tobytes().decode() for begin, end in pairwise(starts)]

    gather = exchange

    def close(self) -> None:
        """Exchange nothing more; shared memory stays. Local, idempotent."""
        if self._texts is not None:
            self._texts.close()
            self._texts = None
