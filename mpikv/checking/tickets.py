"""The comparison of numbered tokens, which a rank may post long before it compares them.

Ranks post one token for each collective call, in order. The agreement posts one and compares it at once. A nonblocking
call posts its token, and compares it when its request is waited for, or in a later call: a program may rely on that no
rank waits where it starts such a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..cluster.calls import ANY
from ..cluster.process_group import ProcessGroup
from ..cluster.shared_memory import memory_barrier
from ..errors import Stalled
from ..protocols import Array
from ..transports.requests import Requests

# Tokens that a rank may post before it compares them. One that has compared its first may be as many ahead of another
# that has not: so the places of twice as many are in use, and one for the end of the program.
MOST_PENDING = 512
_ROOM = 4 * MOST_PENDING
# Words before a rank's tokens; the first is how many it has posted. A pair of cache lines, as ranks poll it.
_HEAD = 16
# In place of a number of posts: the rank has given up waiting.
_GONE = 1 << 62
# Polls before a waiting rank yields its core; none if ranks share cores.
_SPINS = 500


class Tickets:
    """Tokens of ranks on any hosts, numbered from 1; MPI compares them. An agreement uses it as a transport."""

    def __init__(self, group: ProcessGroup, waits: Requests) -> None:
        """Collective."""
        self._group, self.waits, self._posted = group, waits, 0
        self._sent: dict[int, tuple[Any, Any]] = {}

    @property
    def control(self) -> Any:
        return self

    def agree(self, token: int, send_ready: bool = False) -> bool:
        """Return whether all ranks passed the same token, or any; wait for all of them. Collective."""
        number = self.post(token)
        self.await_all(number)
        return self.are_equal(number)

    def post(self, token: int) -> int:
        """Announce a token, and return its number. Local."""
        self._posted += 1
        # All tokens are equal exactly if the largest is the smallest. One maximum of (token, -token) finds both.
        words = np.array([token, -token] if token != ANY else [-_GONE, -_GONE])
        self._sent[self._posted] = (
            self._group.comm.Iallreduce(self._group.mpi.IN_PLACE, words, self._group.mpi.MAX),
            words,
        )
        return self._posted

    def are_here(self, number: int) -> bool:
        """Return whether every rank has posted its token of this number. Local; MPI goes on with its messages."""
        return bool(self._sent[number][0].Test())

    def are_equal(self, number: int) -> bool:
        """Return whether all tokens of this number are equal. Local; once all are here, and in order."""
        largest, opposite = self._sent.pop(number)[1].tolist()
        # The reduction ends also if others gave up waiting for this rank: only their notice tells.
        self.waits.check()
        return bool(largest <= -opposite)

    def await_all(self, number: int) -> None:
        """Wait until every rank has posted its token of this number.

        Raises:
            Stalled: a rank did not come, or has given up.
        """
        self.waits.complete(self._sent[number][0])

    def all_gather(self, buffer: Array, counts: Sequence[int]) -> None:
        """See :class:`~mpikv.protocols.Transport`; ranks have as many elements each. Collective."""
        self.waits.complete(self._group.comm.Iallgather(self._group.mpi.IN_PLACE, buffer))


class SharedTickets(Tickets):
    """Tokens in memory that the ranks of a host share. Each rank writes to its own part only."""

    def __init__(self, group: ProcessGroup, waits: Requests) -> None:
        super().__init__(group, waits)
        self._stride = _HEAD + _ROOM
        self._words = group.allocate(8 * self._stride * group.size).data.cast("q")
        self._peers = [rank * self._stride for rank in group.others]
        self._mine, self._order = group.rank * self._stride, memory_barrier()
        self._spins = _SPINS if group.size <= group.host_cores else 0

    def post(self, token: int) -> int:
        words, number = self._words, self._posted + 1
        words[self._mine + _HEAD + number % _ROOM] = token
        if self._order:
            self._order()
        # Last: a rank that sees the number finds its token.
        words[self._mine] = self._posted = number
        return number

    def are_here(self, number: int) -> bool:
        posted = self._words[:: self._stride].tolist()
        if _GONE in posted:
            raise Stalled(f"rank {posted.index(_GONE)} has given up waiting")
        return min(posted) >= number

    def are_equal(self, number: int) -> bool:
        if self._order:
            self._order()
        words, place = self._words, _HEAD + number % _ROOM
        token = words[self._mine + place]
        for peer in self._peers:
            if words[peer + place] != token:
                return len({*words[place :: self._stride].tolist()} - {ANY}) < 2
        return True

    def await_all(self, number: int) -> None:
        words = self._words
        for peer in self._peers:
            if not number <= words[peer] < _GONE:
                for _ in range(self._spins):
                    if number <= words[peer] < _GONE:
                        break
                else:
                    self._await(number)
                    return

    def _await(self, number: int) -> None:
        def missing() -> list[int]:
            return [rank for rank, posted in enumerate(self._words[:: self._stride].tolist()) if posted < number]

        try:
            self.waits.until(lambda: self.are_here(number), missing)
        except Stalled:
            # A rank that comes later must not go on alone: it would wait inside of MPI for ever.
            self._words[self._mine] = _GONE
            raise
