"""Which elements go which way between two hosts, when each rank receives its part of what all ranks send.

The ranks of a host share the work of its messages: for every other host, the elements that its ranks, the *owners*,
are to receive are cut evenly among this host's ranks, the *carriers*. So each element leaves a host once, whoever sums
it there, and all ranks of a host send at the same time. What owners give to all takes the same routes back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

__all__ = ["Route", "Routes", "between", "routes_of"]

# Carriers' parts are multiples of so many elements, so that a few elements are one message.
_ALIGNMENT = 64


class Route(NamedTuple):
    """The elements ``[low, high)`` of a message, which one carrier and one owner on another host exchange."""

    carrier: int
    owner: int
    low: int
    high: int


class Routes(NamedTuple):
    """Those of one rank."""

    as_carrier: tuple[Route, ...]
    as_owner: tuple[Route, ...]


def between(carriers: Sequence[int], owners: Sequence[int], counts: Sequence[int]) -> Iterator[Route]:
    """Yield the routes between two hosts, whose ranks are given, where rank r owns the r-th part, of ``counts[r]``
    elements.

    >>> for route in between([0, 1], [2, 3], [0, 0, 100, 28]):
    ...     print(*route)
    0 2 0 64
    1 2 64 100
    1 3 100 128
    """
    ends = list(accumulate(counts))
    wanted = sum(counts[owner] for owner in owners)
    share = -(-wanted // (len(carriers) * _ALIGNMENT)) * _ALIGNMENT
    done = 0
    for owner in owners:
        low, end = ends[owner] - counts[owner], ends[owner]
        while low < end:
            number = done // share
            high = min(end, low + (number + 1) * share - done)
            yield Route(carriers[number], owner, low, high)
            done += high - low
            low = high


def routes_of(rank: int, hosts: Sequence[Sequence[int]], counts: Sequence[int]) -> Routes:
    """Return the routes of one rank; ``hosts`` are the ranks of each host."""
    home = next(host for host in hosts if rank in host)
    away = [host for host in hosts if host is not home]
    return Routes(
        tuple(route for host in away for route in between(home, host, counts) if route.carrier == rank),
        tuple(route for host in away for route in between(host, home, counts) if route.owner == rank),
    )
