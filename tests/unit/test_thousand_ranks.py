"""The table "A thousand ranks" of the page on several hosts is what the classes of a store compute."""

from __future__ import annotations

import math
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv.cli.bench.keysets import resnet50
from mpikv.config import Config
from mpikv.engine.arena import Arena
from mpikv.engine.placement import Sharded
from mpikv.memory.host import HOST
from mpikv.testing import cluster
from mpikv.transports.routes import routes_of

PAGE = Path(__file__).parents[2] / "docs/explanation/several-hosts.md"
FLOAT, LIMIT, PER_HOST = np.dtype(np.float32), Config().bucket_bytes, 8


def buckets(size: int) -> list[tuple[int, ...]]:
    """Return how many elements each rank owns of each message of a ResNet-50."""
    flying = dict.fromkeys(("apart", "sent", "wait_for", "note_read"), len)
    seat = {"size": size, "rank": 0, "ahead": 4, "limit": LIMIT, "memory": HOST, **flying}
    transport = SimpleNamespace(**seat, allocate=lambda n: np.empty(n, np.uint8))
    places = Arena(transport).place([(FLOAT, math.prod(shape)) for shape in resnet50()])
    ends: dict[object, tuple[int, int]] = {}
    for place in places:
        low, high = ends.get(place.block, (place.start, place.start))
        ends[place.block] = min(low, place.start), max(high, place.start + place.size)
    placement = Sharded(transport)
    cut = [(block.grid, *part) for block, span in ends.items() for part in block.grid.cut(*span)]
    return [grid.shard(placement, low, high).counts for grid, low, high in cut]


@pytest.mark.deadline(60)
@pytest.mark.parametrize("size", [128, 1024, 10_000])
def test_the_table_of_a_thousand_ranks(size: int) -> None:
    counts = buckets(size)
    owned = np.array(counts)
    busiest = int((owned > 0).sum(axis=0).argmax())
    hosts = [tuple(range(first, first + PER_HOST)) for first in range(0, size, PER_HOST)]
    routes = {each: routes_of(busiest, hosts, each) for each in set(counts)}
    messages = [route.high - route.low for each in counts for half in routes[each] for route in half]
    # A push sends as a carrier and receives as an owner, a pull the other way round.
    requests, mean = 2 * len(messages), sum(messages) * FLOAT.itemsize / len(messages) / 1024
    shares = owned.sum(axis=0) / owned.sum() * size
    # Messages in flight together: so many hosts receive at a time.
    flights = [owned[at : at + 4].sum(axis=0).reshape(-1, PER_HOST).any(axis=1).sum() for at in range(len(counts) - 3)]
    spread = f"{shares.min():.2f} to {shares.max():.2f} | {min(flights)} to {max(flights)}"
    # Memory of six messages, with what each other host sends for the longest.
    memory = 6 * (len(hosts) - 1) * owned.max() * FLOAT.itemsize / (1 << 20)
    row = f"| {size:,} | {requests:,} | {mean:.1f} KiB | {spread} | {memory:.1f} MiB |"
    assert row in PAGE.read_text(), row


def test_addresses_do_not_grow_with_hosts() -> None:
    """Memory for what comes from other hosts would be a hundred times as large as all else."""
    hosts, limit, sizes = 16, 64 << 20, list[int]()

    def program(comm: Any) -> None:
        with mpikv.create(comm=comm, bucket_bytes=limit) as kv:
            kv.init("w", np.zeros(4096))
            kv.set_optimizer("test", learning_rate=1.0)
            assert kv.pushpull("w", np.ones(4096))[0] == -hosts
            sizes.append(addresses())

    before = addresses()
    cluster(hosts, hosts=hosts).run(program)
    # Six messages to send, eight of MPI's own sums, one of the rank's sums, and some more.
    assert max(sizes) - before < hosts * 24 * limit


def addresses() -> int:
    """Return the bytes that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@pytest.mark.deadline(60)
def test_values_are_right_where_some_ranks_own_a_bucket() -> None:
    size, keys, shapes = 64, [0, 1, 2, 3], [(3,), (300, 7), (70_001,), (0, 2)]

    def program(comm: Any) -> None:
        with mpikv.create(comm=comm) as kv:
            kv.init(keys, [np.zeros(shape) for shape in shapes])
            kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
            for step, sum_of in enumerate((-1, -2.5)):
                values = kv.pushpull(keys, [np.full(shape, kv.rank / size) for shape in shapes])
                assert all((value == sum_of * (size - 1) / 2).all() for value in values), step

    cluster(size, hosts=8).run(program)
