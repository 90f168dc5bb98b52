"""How stores over NCCL's transport end, on a stand-in whose calls fail or never end by plan."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from support.gpus import nccl_of, store_on

import mpikv
from mpikv.errors import Closed, TransportError, Unsupported


@pytest.mark.ranks(1, 2)
def test_an_order_of_additions_and_nccls_own_cannot_both_be_had(comm):
    with pytest.raises(Unsupported, match="deterministic=True adds in a fixed order, and native_halves=True in NCCL's"):
        mpikv.create(comm=comm, deterministic=True, native_halves=True)
    with mpikv.create(comm=comm, native_halves=True) as kv:  # the host takes no note of it
        kv.init("w", np.zeros(3, np.float16))
        kv.push("w", np.ones(3, np.float16))
        assert (kv.pull("w") == kv.size).all()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("transport", ["shm", "mpi", "hierarchical"])
@pytest.mark.parametrize("waits", ["for the GPU", "for a call", "for nothing"])
def test_what_ends_a_store_on_one_rank_is_told_to_those_that_wait(
    gpu, comm, simulate_ranks_per_host, transport, waits, monkeypatch
):
    """Whether their hosts wait for work in flight, or for the others, or come back later."""
    hosts = {"simulate_ranks_per_host": simulate_ranks_per_host} if transport == "hierarchical" else {}
    kv = store_on(gpu, comm, timeout=60.0, transport=transport, **hosts)
    nccl, mover = nccl_of(kv), kv._transport
    kv.init("w", np.zeros(5))
    began = time.monotonic()
    if kv.rank == 0:

        def reduce(*_: Any) -> Any:
            raise ZeroDivisionError("planned")

        for verb in ("reduce", "allreduce", "reduce_scatter"):
            monkeypatch.setattr(mover, verb, reduce)
        with pytest.raises(ZeroDivisionError):
            kv.push("w", np.ones(5))
    else:
        kv.push("w", np.ones(5))
        if waits == "for the GPU":
            mover.memory.order.stream.synchronize()
        elif waits == "for nothing":
            time.sleep(1.0)
        with pytest.raises(TransportError, match=r"rank 0 has left: .*ZeroDivisionError\('planned'\)"):
            kv.pull("w")
    assert time.monotonic() - began < 10
    with pytest.raises(Closed):
        kv.push("w", np.ones(5))
    assert nccl.communicators[0].state == "aborted"


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(("wait", "compression"), [(True, None), (False, None), (True, "2bit"), (True, "topk")])
@pytest.mark.parametrize("how", ["fails", "never ends"])
def test_a_store_whose_work_does_not_end_well_is_over_everywhere(gpu, comm, how, wait, compression):
    """Nobody waits longer than it may take: for a value, for the end, or to look at a gradient."""
    kv = store_on(gpu, comm, timeout=0.8, placement="sharded")
    nccl, gradient, out = nccl_of(kv), gpu.upload(np.ones(500, np.float32)), np.empty(500, np.float32)
    kv.set_gradient_compression(compression)
    kv.init("w", np.zeros(500, np.float32))
    if kv.rank == 0:
        following = range(len(nccl.calls) + 1, len(nccl.calls) + 50)
        nccl.fail_at |= dict.fromkeys(following[:1], 5) if how == "fails" else {}
        nccl.stick_at |= set(following if how == "never ends" else ())

    def train() -> None:
        for _ in range(3):
            for made in (lambda: kv.push("w", gradient, wait=wait), lambda: kv.pull("w", out=out, wait=wait)):
                work = made()
                if not wait:
                    work.wait()

    with pytest.raises(TransportError):
        train()
    with pytest.raises(Closed):
        kv.push("w", gradient)
    assert nccl.communicators[0].state == "aborted"
