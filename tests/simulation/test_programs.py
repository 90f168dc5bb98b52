"""Programs of random calls on simulated ranks, of few seeds: faults planted into each protocol were found by them."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv.testing.explore import explore
from simulation.random_calls import program as random_calls

SEEDS = range(40)


def asynchronous(comm: Any, seed: int) -> None:
    """Push and pull without rounds; every push must count once, and no rank be too far ahead."""
    draw = random.Random(f"{seed} {comm.rank}")
    with mpikv.create("dist_async", comm=comm, staleness=2, timeout=20.0) as kv:
        kv.init(["v", "w"], [np.zeros(3), np.zeros(50)])
        kv.set_optimizer("sgd", learning_rate=1.0)
        with pytest.raises(mpikv.MPIKVError):  # of one rank, and all go on
            kv.barrier() if comm.rank else kv.set("unknown", np.zeros(1))
        for _ in range(8):
            kv.push("w", np.ones(50))
            if draw.random() < 0.5:
                kv.pull("v")
        kv.barrier()
        assert (kv.pull("w") == -8 * kv.size).all()
        largest = kv.statistics()["staleness"]["largest"]
        assert largest is None or largest <= 2 + 1, f"a rank was {largest} pushes ahead"


@pytest.mark.parametrize("program", [random_calls, asynchronous])
def test_a_program_passes(program: Callable[..., None]) -> None:
    assert explore(program, SEEDS, ranks=(2, 6), hosts=(1, 3)) is None
