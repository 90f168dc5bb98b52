"""The comparison of numbered tokens, which a rank may post long before it compares them.

Ranks post one token for each collective call, in order. The agreement posts one and compares it at once. A nonblocking
call posts its token, and compares it when its request is waited for, or in a later call: a program may rely on that no
rank waits where it starts such a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..cluster.process_group import ProcessGroup
from ..cluster.runtime import OfMessages
from ..cluster.shared_memory import memory_barrier
from ..cluster.waiting import Waits
from ..errors import Stalled

# Tokens that a rank may post before the others compare them; beyond, it waits.
_ROOM = 1024
# Words before a rank's tokens: how many it has posted, and compared. A pair of cache lines, as ranks poll the first.
_HEAD = 16
# In place of a number of posts: the rank has given up waiting.
_GONE = 1 << 62
# Polls before a waiting rank yields its core; none if ranks share cores.
_SPINS = 500


class Tickets:
    """Tokens of ranks on any hosts, numbered from 1; MPI compares them. An agreement uses it as a transport."""

    def __init__(self, group: ProcessGroup, waits: Waits) -> None:
        """Collective."""
        self._group, self._waits, self._posted = group, waits, 0
        self._sent: dict[int, tuple[Any, Any, Any]] = {}

    @property
    def control(self) -> Any:
        return self

    def agree(self, token: int, send_ready: bool = False) -> bool:
        """Return whether all ranks passed the same token; wait for all of them. Collective."""
        number = self.post(token)
        self.await_all(number, self._waits)
        return self.are_equal(number)

    def post(self, token: int) -> int:
        """Announce a token, and return its number. Local, unless the others are very far behind."""
        self._posted += 1
        # All tokens are equal exactly if the largest is the smallest. One maximum of (token, -token) finds both.
        offered, highest = np.array([token, -token]), np.empty(2, np.int64)
        request = self._group.comm.Iallreduce(offered, highest, self._group.mpi.MAX)
        self._sent[self._posted] = request, highest, offered
        return self._posted

    def are_here(self, number: int) -> bool:
        """Return whether every rank has posted its token of this number. Local; MPI goes on with its messages."""
        self._group.witness()
        return bool(self._sent[number][0].Test())

    def are_equal(self, number: int) -> bool:
        """Return whether all tokens of this number are equal. Local; once all are here, and in order."""
        _, (largest, opposite), _ = self._sent.pop(number)
        # The reduction ends also if others gave up waiting for this rank: only their notice tells.
        if why := self._group.find_end():
            raise Stalled(why)
        return bool(largest == -opposite)

    def await_all(self, number: int, waits: Waits) -> None:
        """Wait until every rank has posted its token of this number.

        Raises:
            Stalled: a rank did not come, or has given up.
        """
        waits.until(OfMessages(lambda: self.are_here(number)), tuple)


class SharedTickets(Tickets):
    """Tokens in memory that the ranks of a host share. Each rank writes to its own part only."""

    def __init__(self, group: ProcessGroup, waits: Waits) -> None:
        super().__init__(group, waits)
        stride = _HEAD + _ROOM
        self._words = group.allocate(8 * stride * group.size).data.cast("q")
        self._peers = [rank * stride for rank in group.others]
        self._mine, self._order = group.rank * stride, memory_barrier()
        # A number up to which posts take no place of a token that is still needed.
        self._safe = _ROOM if self._peers else math.inf
        self._spins = _SPINS if group.size <= group.host_cores else 0

    def post(self, token: int) -> int:
        words, number = self._words, self._posted + 1
        if number > self._safe:  # its place has a token that a rank may not have read
            self._until(lambda: self._has_room(number), tuple, self._waits)
        words[self._mine + _HEAD + number % _ROOM] = token
        if self._order:
            self._order()
        # Last: a rank that sees the number finds its token.
        words[self._mine] = self._posted = number
        return number

    def are_here(self, number: int) -> bool:
        posted = [self._words[peer] for peer in self._peers]
        if _GONE in posted:
            gone = self._group.others[posted.index(_GONE)]
            raise Stalled(f"rank {gone} has given up waiting")
        if posted and min(posted) < number:
            # Messages of this rank move only inside of MPI, and others may wait for them before they come.
            self._group.comm.Iprobe()
            return False
        return True

    def are_equal(self, number: int) -> bool:
        if self._order:
            self._order()
        words, place = self._words, _HEAD + number % _ROOM
        words[self._mine + 1] = number
        token = words[self._mine + place]
        # Not all(): a generator takes longer than the rest of an agreement.
        for peer in self._peers:  # noqa: SIM110
            if words[peer + place] != token:
                return False
        return True

    def await_all(self, number: int, waits: Waits) -> None:
        words = self._words
        for peer in self._peers:
            if not number <= words[peer] < _GONE:
                for _ in range(self._spins):
                    if number <= words[peer] < _GONE:
                        break
                else:
                    self._until(lambda: self.are_here(number), lambda: self._missing(number), waits)
                    return

    def _missing(self, number: int) -> list[int]:
        return [rank for rank, peer in zip(self._group.others, self._peers, strict=True) if self._words[peer] < number]

    def _has_room(self, number: int) -> bool:
        self._group.comm.Iprobe()
        self._safe = _ROOM + min(self._words[peer + 1] for peer in self._peers)
        return number <= self._safe

    def _until(self, ready: Callable[[], bool], missing: Callable[[], Sequence[int]], waits: Waits) -> None:
        try:
            waits.until(ready, missing)
        except Stalled:
            # A rank that comes later must not go on alone: it would wait inside of MPI for ever.
            self._words[self._mine] = _GONE
            raise
