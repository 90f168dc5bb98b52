"""What every placement must do, as tests.

Subclass :class:`PlacementContract` in a test module and give the factory, and the collectives that a push and a pull
run::

    @pytest.mark.ranks(1, 2, 4)
    class TestSharded(PlacementContract):
        collectives = ("reduce_scatter", "all_gather")

        def make(self, transport):
            return Sharded(transport)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from ..arrays.arrays import accumulator, add
from ..cluster.process_group import ProcessGroup
from ..config import Config
from ..protocols import Placement, Shard, Transport
from ..transports import open_transport
from .wrappers import Recording

__all__ = ["PlacementContract"]

CELLS = ((0, 1024), (1024, 2048), (2048, 2500), (0, 1), (64, 65), (2**40, 2**40 + 1000))
"""Cells of a grid: [first, last) in elements, beyond 32 bits too."""


class PlacementContract:
    """The promises of :class:`mpikv.protocols.Placement`."""

    collectives: tuple[str, ...] = ()
    """The collectives that one reduce and one publish of a range run."""
    replicated = False
    """Whether every rank owns everything."""
    transport = "auto"
    """The name of the transport with which data move."""

    def group(self, comm: Any) -> ProcessGroup:
        """Return a new group of the ranks, perhaps on several hosts. Collective."""
        return ProcessGroup(comm)

    def make(self, transport: Transport) -> Placement:
        """Return the placement."""
        raise AssertionError("a subclass of PlacementContract defines make()")

    @pytest.fixture
    def recording(self, comm: Any) -> Iterator[Recording]:
        """Return a transport over all ranks that writes down what is run."""
        group = self.group(comm)
        recording = Recording(open_transport(group, Config(transport=self.transport, bucket_bytes=8192)))
        yield recording
        recording.close()
        group.close()

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

    def test_a_push_and_a_pull(self, recording: Recording) -> None:
        placement = self.make(recording)
        for name in ("int32", "float16", "float32", "float64", "bool"):
            for first, last in ((0, 512), (512, 1024), (1024, 1100)):
                for start, stop in ((first, last), (first + 5, last - 3), (last - 1, last)):
                    self.round(placement, recording, np.dtype(name), (first, last), start, stop)

    def round(
        self,
        placement: Placement,
        recording: Recording,
        dtype: np.dtype[Any],
        cell: tuple[int, int],
        start: int,
        stop: int,
    ) -> None:
        """Sum one range, store the sum at its owners, publish it, and compare."""
        value, shard = np.zeros(stop - start, dtype), placement.shard(start, stop, cell, of_one(cell, recording.size))
        sends = [
            np.random.default_rng((start, rank)).integers(0, 9, stop - start).astype(dtype)
            for rank in range(recording.size)
        ]
        expected = np.add.reduce([send.astype(accumulator(dtype)) for send in sends], axis=0, dtype=accumulator(dtype))
        low, high = shard.low, shard.high
        total = np.zeros(high - low, accumulator(dtype))
        recording.take()
        addends = placement.bind_reduce(shard)(sends[recording.rank], total)
        if total.size and addends[0] is not total:
            add(addends, 0, total.size, total)
        np.testing.assert_array_equal(total, expected[low:high])
        value[low:high] = total
        placement.bind_publish(shard, value)()
        assert tuple(recording.take()) == self.collectives
        np.testing.assert_array_equal(value, expected.astype(dtype))

    def shards(self, ranks: int, start: int, stop: int, cell: tuple[int, int], bounds: Sequence[int]) -> list[Shard]:
        """Return what each of so many ranks says of one range."""
        seats = [cast(Transport, Seat(rank, ranks)) for rank in range(ranks)]
        return [self.make(seat).shard(start, stop, cell, bounds) for seat in seats]

    def owners(self, ranks: int, start: int, stop: int, cell: tuple[int, int], bounds: Sequence[int]) -> list[set[int]]:
        """Return the owners of each element."""
        owners: list[set[int]] = [set() for _ in range(stop - start)]
        for rank, shard in enumerate(self.shards(ranks, start, stop, cell, bounds)):
            for element in range(shard.low, shard.high):
                owners[element].add(rank)
        return owners


@dataclass(frozen=True)
class Seat:
    """What a placement knows of a transport when it divides."""

    rank: int
    size: int


def of_one(cell: tuple[int, int], ranks: int) -> Sequence[int]:
    """Return the bounds by which the last rank has all whole values of a cell."""
    return (0,) * ranks + (cell[1],)


def cases() -> Iterator[tuple[int, tuple[tuple[int, int], int, int, Sequence[int]]]]:
    """Yield numbers of ranks, and cells with ranges in them."""
    random = np.random.default_rng(0)
    for ranks in (1, 2, 3, 4, 7):
        for cell in CELLS:
            first, last = cell
            cuts = sorted(int(cut) for cut in random.integers(first, last, 2))
            for start, stop in ((first, last), (cuts[0], cuts[1] + 1), (first, first + 1), (last - 1, last)):
                yield ranks, (cell, start, stop, of_one(cell, ranks))
                yield ranks, (cell, start, stop, (0, *sorted(random.integers(first, last, ranks - 1).tolist()), last))
