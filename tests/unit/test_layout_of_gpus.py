"""How values of well known networks are divided among GPUs: nothing is moved, so there may be as many as one likes."""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest

from mpikv.cli.bench.keysets import bert_base, resnet50
from mpikv.compute.kernels import NumpyKernels
from mpikv.engine.arena import Arena
from mpikv.engine.keys import KeyTable
from mpikv.engine.placement import Owners, Sharded
from mpikv.engine.plan import Plan, Planner
from mpikv.memory.host import HostMemory
from mpikv.transports.local import LocalTransport

FLOAT, HALF = np.dtype(np.float32), np.dtype(np.float16)
SETS = {
    "ResNet-50": resnet50(),
    "BERT-base": bert_base(),
    "1,000 × 4 KB": [(1024,)] * 1000,
    "1000×1000": [(1000, 1000)],
}
BUCKET_BYTES = 64 << 20
STATES = {"mean": FLOAT, "variance": FLOAT}


class FarMemory(HostMemory):
    """Pages that nobody writes, laid out as those of a GPU."""

    is_host = False


class Seat(LocalTransport):
    """One of several ranks with a GPU each, for what is decided without moving data."""

    def __init__(self, rank, size):
        super().__init__(BUCKET_BYTES, FarMemory())
        self.rank, self.size = rank, size


class Adam:
    """An updater that is never run."""

    may_raise = assigns = by_key = False

    def __init__(self, elementwise=True):
        self.elementwise = elementwise

    def slots(self, dtype):
        return STATES

    def bind(self, total, value, state):
        assert {name: array.size for name, array in state.items()} == dict.fromkeys(STATES, value.size)
        return lambda step: None


@dataclass
class Layout:
    """Where values lie for a number of ranks, and the messages that all of them make."""

    shapes: list
    size: int
    placement: type = Sharded

    def __post_init__(self):
        self.seats = [self._seat(rank) for rank in range(self.size)]

    def _seat(self, rank):
        seat = Seat(rank, self.size)
        arena, table = Arena(seat), KeyTable()
        planner = Planner(
            seat, self.placement(seat), Adam(self.placement is Sharded), NumpyKernels(), seat.memory.zeros(0)
        )
        places = arena.place([(FLOAT, math.prod(shape)) for shape in self.shapes])
        for number, (shape, place) in enumerate(zip(self.shapes, places, strict=True)):
            table.add(number, shape, FLOAT, place)
        for block in arena.blocks:
            block.kept = planner.kept(block)
            block.ensure_state(STATES)
        return arena, list(Plan(planner, list(table.entries())).buckets)

    @property
    def blocks(self):
        return self.seats[0][0].blocks

    @property
    def buckets(self):
        return self.seats[0][1]

    @property
    def nbytes(self):
        return sum(map(math.prod, self.shapes)) * FLOAT.itemsize

    @cached_property
    def equal(self):
        """The share of bytes that travel in equal counts."""
        equal = sum(bucket.value.nbytes for bucket in self.buckets if len(set(bucket.shard.counts)) == 1)
        return equal / sum(bucket.value.nbytes for bucket in self.buckets)

    @cached_property
    def balance(self):
        """The most that a rank owns, to the mean."""
        owned = np.sum([bucket.shard.counts for bucket in self.buckets], axis=0)
        return owned.max() / owned.mean()

    @cached_property
    def message(self):
        return sum(bucket.value.nbytes for bucket in self.buckets) / len(self.buckets)

    @cached_property
    def state(self):
        """The state that a rank keeps, the most of all, to that of all values."""
        return max(
            sum(array.nbytes for block in arena.blocks for array in block.state.values()) for arena, _ in self.seats
        ) / (len(STATES) * self.nbytes)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("name", SETS)
def test_networks_are_divided_equally(name, size):
    layout = Layout(SETS[name], size)
    assert layout.equal == 1
    assert layout.balance <= 1.05
    assert layout.message >= min(25e6, layout.nbytes)
    padding = sum(block.values.nbytes for block in layout.blocks) / layout.nbytes
    assert padding < 1.001
    assert layout.state == pytest.approx(padding / size)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["ResNet-50", "BERT-base"])
def test_whole_values_are_divided_about_equally(name, size):
    layout = Layout(SETS[name], size, Owners)
    largest = max(map(math.prod, SETS[name]))
    mean = sum(map(math.prod, SETS[name])) / size
    assert layout.balance <= (mean + largest) / mean
    assert layout.state <= 1.001 * (mean + largest) / (size * mean)
    for arena, _ in layout.seats:
        for block in arena.blocks:
            assert list(block.grid.bounds) == sorted(block.grid.bounds)


def test_keys_begin_where_gpus_copy_fast():
    arena, _ = Layout([(7,), (100_000,), (3,), (300_000,)], 2).seats[0]
    (block,) = arena.blocks
    places = Arena(Seat(0, 2)).place([(HALF, size) for size in (7, 600_000, 3)])
    assert all(place.start * HALF.itemsize % 256 == 0 for place in places)
    assert block.values.size % (2 * 64) == 0


def test_what_is_beyond_the_values_of_a_list_is_not_given_to_others():
    arena = Arena(Seat(0, 2))
    (first,) = arena.place([(FLOAT, 1_000_001)])
    (second,) = arena.place([(FLOAT, 5)])
    assert second.block is not first.block


def test_the_page_has_these_figures():
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "gpu.md").read_text()
    for name, shapes in SETS.items():
        layouts = [Layout(shapes, size) for size in (2, 4, 8)]
        counts = ", ".join(str(len(layout.buckets)) for layout in layouts)
        messages = f"{layouts[0].message / 1e6:.1f} MB"
        states = ", ".join(f"{layout.state * layout.size:.4f}" for layout in layouts)
        assert f"| {name} | {layouts[0].nbytes / 1e6:.1f} MB | {counts} | {messages} | {states} |\n" in page
