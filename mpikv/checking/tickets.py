"""Tokens that a rank may post long before it compares them.

Ranks post one token for each collective call, in order. The agreement posts one and compares it at once. A nonblocking
call posts its token, and compares it when its request is waited for, or in a later call: a program may rely on that no
rank waits where it starts such a call.
"""

from __future__ import annotations

from ..cluster.calls import ANY
from ..cluster.process_group import ProcessGroup
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
        """Allocate places for the tokens in memory that the ranks of one host share. Collective."""
        Tickets.__init__(self, group, waiting)
        Arrivals.__init__(self, group, waiting, _HEAD + _ROOM)
        self._place = self._stamp = 0

    def agree(self, token: int, send_ready: bool = False) -> bool:
        """Post a token, wait for all ranks' tokens, and return whether all but ANY are equal. If this rank has posted
        its token early, ``token`` is ignored. Collective.
        """
        number, self.early = self.early or self.post(token), 0
        words, place, stamp = self._flags, self._place, self._stamp
        for peer in self._peers:
            if words[peer + place] != stamp and not any(words[peer + place] == stamp for _ in range(self._spins)):
                return self.meet(number)
        if self._order:
            self._order()
        return True

    def post(self, token: int) -> int:
        """Write a token and its number where the other ranks see them, and return the number. Local; does not wait.

        The caller posts at most ``MOST_PENDING`` before it compares them.
        """
        words, number = self._flags, self._posted + 1
        # With the number: one look tells that a rank has posted the same token, and not long ago.
        self._place, self._stamp = _HEAD + number % _ROOM, token ^ number
        if self._order:
            self._order()
        words[self._mine + self._place] = self._stamp
        if self._order:
            self._order()
        # Last: a rank that sees the number finds its token.
        words[self._mine] = self._posted = number
        return number

    def are_here(self, number: int) -> bool:
        """Return whether every rank has posted its token of this number. Local; does not wait."""
        return min(self._flags[:: self._stride].tolist()) >= number

    def meet(self, number: int) -> bool:
        """Wait for all ranks' tokens of a posted number; return whether all but ANY are equal. At the deadline withdraw
        this rank's token, and raise Stalled. Collective.

        Raises:
            Stalled: a rank did not come, or has given up.
        """
        words, place = self._flags, _HEAD + number % _ROOM
        try:
            for peer in self._peers:
                if not number <= words[peer] < GONE:
                    self._await_peers(peer, number)
        except BaseException:
            words[self._mine + place] = 0  # else a late rank would agree with this one
            raise
        if self._order:
            self._order()
        return len({*words[place :: self._stride].tolist()} - {ANY ^ number}) < 2
