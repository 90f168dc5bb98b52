"""The ways of elements between two hosts, when each rank receives its part of all ranks' data.

The ranks of a host share the work of its messages. For every other host, the elements that its ranks, the *owners*,
receive are cut evenly among this host's ranks, the *carriers*; a few elements go by some carriers alone, by others to
each host. So each element leaves a host once, whichever rank sums it there, and all ranks of a host send at the same
time. Values from owners take the same routes back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

# Carriers' parts are multiples of so many elements, so a few elements make one message. 64 float32 are 4 cache lines.
_ALIGNMENT = 64
# A host has more shares than owners only if each has so many elements, 32 KiB of float32.
_FEWEST = 8192


class Route(NamedTuple):
    """The elements ``[low, high)`` of a message between one carrier and one owner on another host."""

    carrier: int
    owner: int
    low: int
    high: int


class Routes(NamedTuple):
    """The routes of one rank."""

    as_carrier: tuple[Route, ...]
    as_owner: tuple[Route, ...]


def routes_of(rank: int, hosts: Sequence[Sequence[int]], counts: Sequence[int]) -> Routes:
    """Return a rank's Routes: messages to other hosts that it sends as a carrier, those it receives as an owner. Local.

    Every rank computes the same division.

    ``hosts`` are the ranks of each host. Rank r owns the r-th part, of ``counts[r]`` elements.

    >>> for carrier in 0, 1:
    ...     for route in routes_of(carrier, [(0, 1), (2, 3)], [0, 0, 100, 28]).as_carrier:
    ...         print(*route)
    0 2 64 100
    0 3 100 128
    1 2 0 64
    """
    starts = list(accumulate(counts, initial=0))
    # The same numbers on every rank: no message says who sends which elements.
    place, home = next((place, host) for place, host in enumerate(hosts) if rank in host)
    away = [(number, host) for number, host in enumerate(hosts) if host is not home]
    return Routes(
        tuple(one for to, host in away for one in _between(home, host, to, counts, starts) if one.carrier == rank),
        tuple(one for _, host in away for one in _between(host, home, place, counts, starts) if one.owner == rank),
    )


def _between(
    carriers: Sequence[int], owners: Sequence[int], first: int, counts: Sequence[int], starts: Sequence[int]
) -> Iterator[Route]:
    """Yield the messages from one host's carriers to another's owners: their elements, in equal shares. Local.

    Owners receive in their order. Shares begin with the ``first`` carrier: another one for each host.
    """
    parts = [counts[owner] for owner in owners if counts[owner]]
    shares = min(len(carriers), max(len(parts), sum(parts) // _FEWEST, 1))
    share = -(-sum(parts) // (shares * _ALIGNMENT)) * _ALIGNMENT
    low = 0
    for owner in owners:
        # Carriers divide a host's elements joined together; the shift leads back to the message's own numbers.
        end, shift = low + counts[owner], starts[owner] - low
        while low < end:
            number = low // share
            high = min(end, (number + 1) * share)
            yield Route(carriers[(first + number) % len(carriers)], owner, low + shift, high + shift)
            low = high
