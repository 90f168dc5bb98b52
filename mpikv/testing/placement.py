"""The contract of placements, as tests.

Subclass :class:`PlacementContract` in a test module and give the factory::

    class TestSharded(PlacementContract):
        def make(self, transport):
            return Sharded(transport)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from ..protocols import Placement, Shard, Transport

__all__ = ["PlacementContract"]

CELLS = ((0, 1024), (1024, 2048), (2048, 2500), (0, 1), (64, 65), (2**40, 2**40 + 1000))
"""Cells of a grid: [first, last) in elements, beyond 32 bits too."""


class PlacementContract:
    """The promises of :class:`mpikv.protocols.Placement`."""

    replicated = False
    """Whether every rank owns everything."""
    whole = False
    """Whether values stay whole, so that a range with one owner is reduced to it."""

    def make(self, transport: Transport) -> Placement:
        """Return the placement. It reads what :class:`Seat` has of the transport."""
        raise AssertionError("a subclass of PlacementContract defines make()")

    def test_shards_fill_every_range_exactly(self) -> None:
        for ranks, (cell, start, stop, bounds) in cases():
            shards = self.shards(ranks, start, stop, cell, bounds)
            counts = shards[0].counts
            assert len(counts) == ranks
            assert all(shard.counts == counts for shard in shards), "ranks differ on who owns what"
            assert all(shard.high - shard.low == counts[rank] for rank, shard in enumerate(shards))
            if self.replicated:
                assert all((shard.low, shard.high) == (0, stop - start) for shard in shards)
                continue
            assert sum(counts) == stop - start
            for rank, shard in enumerate(shards):
                assert not counts[rank] or shard.low == sum(counts[:rank]), "parts are not in rank order"

    def test_the_owner_depends_on_the_place_alone(self) -> None:
        for ranks, (cell, start, stop, bounds) in cases():
            whole = self.owners(ranks, *cell, cell, bounds)
            part = self.owners(ranks, start, stop, cell, bounds)
            assert part == whole[start - cell[0] : stop - cell[0]]

    def test_one_owner_is_named(self) -> None:
        for ranks, (cell, start, stop, bounds) in cases():
            for shard in self.shards(ranks, start, stop, cell, bounds):
                owns_all = [rank for rank, count in enumerate(shard.counts) if count == stop - start]
                assert shard.owner == (owns_all[0] if self.whole and owns_all else None)

    def shards(self, ranks: int, start: int, stop: int, cell: tuple[int, int], bounds: Sequence[int]) -> list[Shard]:
        """Return the shard of each of ``ranks`` ranks for one range."""
        seats = [cast(Transport, Seat(rank, ranks)) for rank in range(ranks)]
        return [self.make(seat).shard(start, stop, cell, bounds, number=cell[1]) for seat in seats]

    def owners(self, ranks: int, start: int, stop: int, cell: tuple[int, int], bounds: Sequence[int]) -> list[set[int]]:
        """Return the owners of each element."""
        owners: list[set[int]] = [set() for _ in range(stop - start)]
        for rank, shard in enumerate(self.shards(ranks, start, stop, cell, bounds)):
            for element in range(shard.low, shard.high):
                owners[element].add(rank)
        return owners


@dataclass(frozen=True)
class Seat:
    """The part of a transport that a placement reads."""

    rank: int
    size: int
    ahead = 4
    apart = sent = wait_for = note_read = len


def of_one(cell: tuple[int, int], ranks: int) -> Sequence[int]:
    """Return bounds that give all whole values of a cell to the last rank."""
    return (0,) * ranks + (cell[1],)


def cases() -> Iterator[tuple[int, tuple[tuple[int, int], int, int, Sequence[int]]]]:
    """Yield numbers of ranks, and cells with ranges in them."""
    random = np.random.default_rng(0)
    for ranks in (1, 2, 3, 4, 7, 130):
        for cell in CELLS:
            first, last = cell
            cuts = sorted(int(cut) for cut in random.integers(first, last, 2))
            for start, stop in ((first, last), (cuts[0], cuts[1] + 1), (first, first + 1), (last - 1, last)):
                yield ranks, (cell, start, stop, of_one(cell, ranks))
                yield ranks, (cell, start, stop, (0, *sorted(random.integers(first, last, ranks - 1).tolist()), last))
