"""Faults that are planted into the protocols, each of which simulated ranks must find, and find again by its seed."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv.async_store.ssp import SspClocks
from mpikv.engine.pipeline import TransferPipeline
from mpikv.testing.explore import explore
from mpikv.transports.hierarchical import HierarchicalTransport
from mpikv.transports.requests import Requests
from mpikv.transports.shm import ShmTransport
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


def no_barrier(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShmTransport, "_await_peers", lambda self, peer, arrivals: None)


def clocks_not_kept(patch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the slowest rank."""
    patch.setattr(SspClocks, "wait", lambda self, rank, ticket, least: self._answer(rank, ticket, least))


def not_published(patch: pytest.MonkeyPatch) -> None:
    """Other hosts keep the values that they have."""
    patch.setattr(TransferPipeline, "publish", lambda self, plan, outs=(): None)


def no_fence_between_hosts(patch: pytest.MonkeyPatch) -> None:
    """Values from another host are read before all of them have come."""
    patch.setattr(HierarchicalTransport, "fence", lambda self, send_ready=False: None)
    patch.setattr(Requests, "complete", lambda self, *requests: [request.Test() for request in requests])


Plant = Callable[[pytest.MonkeyPatch], None]
PLANTED: list[tuple[Plant, Callable[..., None]]] = [
    (no_barrier, random_calls),
    (not_published, random_calls),
    (no_fence_between_hosts, random_calls),
    (clocks_not_kept, asynchronous),
]


@pytest.mark.parametrize("program", [random_calls, asynchronous])
def test_the_programs_pass_where_nothing_is_planted(program: Callable[..., None]) -> None:
    assert explore(program, SEEDS, ranks=(2, 6), hosts=(1, 3)) is None


@pytest.mark.deadline(60)
@pytest.mark.parametrize(("plant", "program"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_a_planted_fault_is_found_and_found_again(
    plant: Plant, program: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    found = explore(program, SEEDS, ranks=(2, 6), hosts=(1, 3))
    assert found is not None
    cluster, error = found
    again = explore(program, [cluster.seed], ranks=(2, 6), hosts=(1, 3))
    assert again is not None
    texts = [str(one) for one in (again[1], error)]
    if plant is no_fence_between_hosts:  # it reads memory that nobody has written: the first run's zeros, or old values
        texts = [text.partition(":")[0] for text in texts]
    assert type(again[1]) is type(error)
    assert texts[0] == texts[1]
