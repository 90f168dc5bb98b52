"""Stores of one rank and of several: sums, their bits, and graphs."""

from __future__ import annotations

import time

from .step import MB, Numbers, own_rank, store
from .timing import gpu_seconds, host_seconds

REPLAYS = 100


def sums() -> Numbers:
    """Make a store, push arrays of three sizes, and check and time the sums."""
    import cupy

    begin = time.perf_counter()
    with store() as kv:
        found: Numbers = {"create_s": time.perf_counter() - begin}
        for size, name in ((1, "4_B_ms"), (MB // 4, "1_MB_ms"), (4 * MB, "16_MB_ms")):
            kv.init(name, cupy.zeros(size, "f4"))
            gradient = cupy.full(size, kv.rank + 1, "f4")
            found[name] = gpu_seconds(lambda name=name, gradient=gradient: kv.push(name, gradient), 10) * 1e3
            assert (kv.pull(name).get() == kv.size * (kv.size + 1) / 2).all()
    return found


def bits() -> Numbers:
    """Compare the bits of deterministic sums: of two stores on GPUs, and of one on the host."""
    import numpy as np

    import mpikv

    random = np.random.default_rng(own_rank())
    sent = random.standard_normal(100_003).astype(np.float32)
    found = []
    for name in ("nccl", "nccl", "dist_sync"):
        with mpikv.create(name, deterministic=True) as kv:
            kv.init("w", np.zeros_like(sent))
            kv.push("w", sent)
            value = kv.pull("w")
            found.append(value.get() if hasattr(value, "get") else value)
    for what, other in (("from one run to the next", found[1]), ("from the host's", found[2])):
        assert found[0].tobytes() == other.tobytes(), f"{(found[0] != other).sum()} elements differ {what}"
    return {"elements": sent.size}


def graph() -> Numbers:
    """Record a pushpull, with NCCL in it on several ranks, launch it a hundred times, and close the store."""
    import cupy

    begin = time.perf_counter()
    with store(timeout=30.0) as kv:
        weight, gradient = cupy.zeros(MB, "f4"), cupy.full(MB, kv.rank + 1, "f4")
        kv.init("w", weight)
        kv.set_optimizer("sgd", learning_rate=1.0)
        step = kv.capture({"w": gradient}, out={"w": weight})
        found: Numbers = {"create_s": time.perf_counter() - begin}
        step()
        step()
        assert step.captured, step.reason
        found["replay_us"] = host_seconds(step, REPLAYS) * 1e6
        found["replay_ms_of_gpu"] = gpu_seconds(step, 20) * 1e3
        # One more begins the mean of the GPU's time.
        launched = 2 + REPLAYS + 1 + 20
        assert (weight.get() == -launched * kv.size * (kv.size + 1) / 2).all()
        begin = time.perf_counter()
    found["close_s"] = time.perf_counter() - begin
    return found
