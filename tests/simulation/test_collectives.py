"""Collectives on simulated ranks that fail: what returns is right, and what fails says who is missing, in time."""

import random
import time
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.communicating import LIMIT, Ranks, brought, reduce_of

from mpikv.cluster.calls import Call
from mpikv.collectives.operations import Op
from mpikv.errors import MPIKVError, RankMismatch, Stalled
from mpikv.testing import Kill, Missed, Pause, Planted, cluster, draw_faults

TIMEOUT = 10.0
MET = 200
"""The number of scheduling points until the ranks have met, or more."""


def program(comm: Any, seed: int) -> None:
    """Make the calls that a seed draws, and compare each with what numpy says, until a fault ends them."""
    draw, began = random.Random(seed), time.monotonic()
    try:
        world = Ranks(comm, timeout=TIMEOUT)
        for number in range(40):
            began = time.monotonic()
            make_call(world, draw, seed, number)
        world.close()
    except (MPIKVError, Planted):
        # A paused rank comes late; the others must be through with waiting after one timeout, and a report.
        assert time.monotonic() - began < 3 * TIMEOUT


def make_call(world: Ranks, draw: random.Random, seed: int, number: int) -> None:
    op, dtype = draw.choice([Op.SUM, Op.MAX, Op.MEAN]), np.dtype(draw.choice(["float32", "float64", "float16"]))
    size, root, verb = draw.choice([1, 100, 3 * LIMIT]), draw.randrange(world.size), draw.randrange(5)
    arrays = [brought(dtype, size, seed, number, rank) for rank in range(world.size)]
    mine, total = arrays[world.rank].copy(), reduce_of(op, arrays)
    if verb == 0:
        world.call("all_reduce_each", [(mine, mine)], op, message=[mine])
        found, expected = mine, total
    elif verb == 1:
        world.call("broadcast", mine, root, message=[mine])
        found, expected = mine, arrays[root]
    elif verb == 2:
        found, expected = np.empty_like(mine), total
        world.call("reduce_scatter", [mine if to == world.rank else arrays[0] for to in range(world.size)], found, op)
        expected = reduce_of(
            op, [arrays[world.rank] if rank == world.rank else arrays[0] for rank in range(world.size)]
        )
    elif verb == 3:
        found, expected = np.zeros((world.size, size), dtype), np.stack(arrays)
        found[world.rank] = mine
        world.call("all_gather", found.reshape(-1), [size] * world.size, message=[mine])
    else:
        found, expected = np.zeros((world.size, size), dtype), np.stack(arrays)
        world.call("all_to_all", [mine] * world.size, list(found))
    assert found.tobytes() == expected.tobytes(), f"call {number}, verb {verb}"


def run(seed: int, faults: bool) -> None:
    draw = random.Random(f"{seed} cluster")
    size = draw.randint(2, 4)
    hosts = draw.randint(1, 2)
    drawn = draw_faults(seed, size, hosts) if faults else ()
    # Not while ranks meet: making shared memory has no deadline.
    late = [replace(fault, at=fault.at + MET) if hasattr(fault, "at") else fault for fault in drawn]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Missed)
        cluster(size, hosts=hosts, seed=seed, faults=late).run(program)


@pytest.mark.deadline(60)
@pytest.mark.parametrize("faults", [False, True])
@pytest.mark.parametrize("seeds", [range(12)])
def test_random_calls(seeds: range, faults: bool) -> None:
    for seed in seeds:
        run(seed, faults)


def all_reduce(world: Ranks, size: int, token: int = 1) -> None:
    array = np.ones(size)
    run = partial(world.communicator.collectives.all_reduce_each, [(array, array)], Op.SUM)
    world.communicator.call(Call("all_reduce", token, f"float64[{size}]"), run, array)


def all_reduce_for_ever(world: Ranks, size: int, began: list[float]) -> None:
    while True:
        began.append(time.monotonic())
        all_reduce(world, size)


@pytest.mark.parametrize(("size", "hosts"), [(3, 1), (4, 2)])
@pytest.mark.parametrize("fault", [Kill(1, 400), Pause(1, 400, 100.0)], ids=["killed", "late"])
@pytest.mark.parametrize("length", [10, 3 * LIMIT])
def test_a_rank_that_does_not_come_is_named(size: int, hosts: int, fault: Any, length: int) -> None:
    def calls(comm: Any) -> str:
        world = Ranks(comm, timeout=TIMEOUT)
        began = [0.0]
        with pytest.raises(Stalled) as first:
            all_reduce_for_ever(world, length, began)
        assert world.rank == 1 or time.monotonic() - began[-1] < TIMEOUT + 5
        with pytest.raises(Stalled) as again:
            all_reduce(world, 1)
        assert again.value is first.value
        return str(first.value)

    texts = cluster(size, hosts=hosts, faults=[fault]).run(calls)
    named = [text for rank, text in enumerate(texts) if rank != 1 and "1" in text.partition("waited")[2]]
    assert named, texts
    assert all(text.startswith("all_reduce: ") for rank, text in enumerate(texts) if rank != 1)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_call_in_another_order_are_told_where(size: int) -> None:
    def calls(comm: Any) -> str:
        world = Ranks(comm, timeout=TIMEOUT)
        with pytest.raises(RankMismatch) as failure:
            all_reduce(world, 3, token=10 + (world.rank == 1))
        for _ in range(3):
            all_reduce(world, 3)
        world.close()
        return str(failure.value)

    for rank, text in enumerate(cluster(size).run(calls)):
        assert "rank 1 calls all_reduce(float64[3])" in text
        assert f"rank 1 is at {__file__}" in text
        assert text.endswith(f"[rank {rank}/{size}]")
