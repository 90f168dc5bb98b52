"""The seam of placements: which rank owns which element, hence which collectives run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from .arrays import Array

__all__ = ["Placement", "Shard"]


class Shard(NamedTuple):
    """This rank's elements of a contiguous range, and how many each of the others has."""

    counts: tuple[int, ...]
    """How many elements each rank owns, in rank order; all of them on every rank where values are replicated."""
    low: int
    high: int
    """The elements that this rank owns, which it updates: ``[low, high)``."""


class Placement(Protocol):
    """Decides which rank owns which element, hence which collectives a push and a pull run. Stateless."""

    name: str
    everywhere: bool
    """Whether a push leaves every rank with the newest value, so that publishing has nothing to do."""

    def shard(self, start: int, stop: int, cell: tuple[int, int], bounds: Sequence[int]) -> Shard:
        """Return who owns the elements ``[start, stop)`` of a block, which lie in ``cell`` of its grid.

        For placements that keep values whole, rank r is to own those that begin in ``[bounds[r], bounds[r + 1])``, and
        none reaches beyond. An element's owner depends on its place in its block alone, never on the call, because its
        optimizer state lives with its owner.
        """

    def bind_reduce(self, shard: Shard) -> Callable[[Array, Array], Sequence[Array]]:
        """Return a function of ``send`` and ``total`` that sums a range over ranks: it returns the addends of the sum
        of the elements that this rank owns. The function is collective.

        Where the transport's library adds this sum, the only addend is ``total`` itself; else ``total`` was not used.
        """

    def bind_publish(self, shard: Shard, value: Array) -> Callable[[], None]:
        """Return a function that gives every rank the owners' values of a range, which lie in ``value``. The function
        is collective.
        """
