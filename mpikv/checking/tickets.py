"""Tokens that a rank may post long before it compares them.

Ranks post one token for each collective call, in order. The agreement posts one and compares it at once. A nonblocking
call posts its token, and compares it when its request is waited for, or in a later call: a program may rely on that no
rank waits where it starts such a call.
"""

from __future__ import annotations

from ..cluster.calls import ANY
from ..cluster.process_group import ProcessGroup
from ..errors import Stalled
from ..transports.mpi import Tickets
from ..transports.requests import Requests
from ..transports.shm import GONE, Arrivals

# Tokens that a rank may post before it compares them. One that has compared its first may be as many ahead of another
# that has not: so the places of twice as many are in use, and one for the end of the program.
MOST_PENDING = 512
_ROOM = 4 * MOST_PENDING
# Words before a rank's tokens: a pair of cache lines, as ranks poll the number of its posts.
_HEAD = 16


class SharedTickets(Tickets, Arrivals):
    """Tokens in memory that the ranks of a host share."""

    def __init__(self, group: ProcessGroup, waiting: Requests) -> None:
        Tickets.__init__(self, group, waiting)
        Arrivals.__init__(self, group, waiting, _HEAD + _ROOM)

    def post(self, token: int) -> int:
        words, number = self._flags, self._posted + 1
        words[self._mine + _HEAD + number % _ROOM] = token
        if self._order:
            self._order()
        # Last: a rank that sees the number finds its token.
        words[self._mine] = self._posted = number
        return number

    def are_here(self, number: int) -> bool:
        posted = self._flags[:: self._stride].tolist()
        if GONE in posted:
            raise Stalled(f"rank {posted.index(GONE)} has given up waiting")
        return min(posted) >= number

    def meet(self, number: int) -> bool:
        words, place = self._flags, _HEAD + number % _ROOM
        for peer in self._peers:
            if not number <= words[peer] < GONE:
                self._await(peer, number)
        if self._order:
            self._order()
        token = words[self._mine + place]
        for peer in self._peers:
            if words[peer + place] != token:
                return len({*words[place :: self._stride].tolist()} - {ANY}) < 2
        return True
