"""The seam of placements: the owner of each element, hence the collectives of a push and a pull."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Shard(NamedTuple):
    """This rank's elements of a contiguous range, and the number of elements of every rank."""

    counts: tuple[int, ...]
    """How many elements each rank owns, in rank order. With replicated values every rank owns all."""
    low: int
    high: int
    """This rank owns and updates the elements ``[low, high)``."""
    owner: int | None = None
    """The one rank that owns the whole range, if values stay whole. A push is a reduce to it, a pull its broadcast."""


class Placement(Protocol):
    """Decides the owner of each element. Stateless.

    The collectives of a push and a pull follow from it: an allreduce if each rank owns all, a reduce and a broadcast if
    one rank does, otherwise a reduce-scatter and an all-gather.
    """

    name: str
    everywhere: bool
    """Whether a push leaves every rank with the newest value, so nothing is left to publish."""

    def shard(self, start: int, stop: int, cell: tuple[int, int], bounds: Sequence[int], number: int) -> Shard:
        """Return how many of a block's elements ``[start, stop)``, all in ``cell``, each rank owns, and this rank's
        range, less ``start``.

        The cell is the ``number``-th of all blocks' cells. If values stay whole, rank r owns those that begin in
        ``[bounds[r], bounds[r + 1])``, and none reaches beyond. An element's owner depends on its place in its block
        and on ``number``, never on the call, because its optimizer state lives with its owner.
        """
