"""The seam of placements: which rank owns which element, hence which collectives run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

__all__ = ["Placement", "Shard"]


class Shard(NamedTuple):
    """This rank's elements of a contiguous range, and how many each of the others has."""

    counts: tuple[int, ...]
    """How many elements each rank owns, in rank order; all of them on every rank where values are replicated."""
    low: int
    high: int
    """The elements that this rank owns, which it updates: ``[low, high)``."""
    owner: int | None = None
    """The rank that owns all of it, where values stay whole and no other owns something: a push is reduced to it, and a
    pull is its broadcast."""


class Placement(Protocol):
    """Decides which rank owns which element. Stateless. The collectives of a push and a pull follow from it: an
    allreduce where each owns all, a reduce and a broadcast where one rank does, else a reduce-scatter and an
    all-gather.
    """

    name: str
    everywhere: bool
    """Whether a push leaves every rank with the newest value, so that publishing has nothing to do."""

    def shard(self, start: int, stop: int, cell: tuple[int, int], bounds: Sequence[int]) -> Shard:
        """Return who owns the elements ``[start, stop)`` of a block, which lie in ``cell`` of its grid.

        For placements that keep values whole, rank r is to own those that begin in ``[bounds[r], bounds[r + 1])``, and
        none reaches beyond. An element's owner depends on its place in its block alone, never on the call, because its
        optimizer state lives with its owner.
        """
