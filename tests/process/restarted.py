"""A training whose ranks kill themselves, in each start at another place that a seed draws.

restarted.py SEED DEATHS; RESTARTED_STORE is the type of the store. To dist_async it pushes whole numbers: their sum
tells of a push that is lost, or is made twice, and is the same in any order.
"""

import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import mpikv

STEPS, STORE = 30, os.environ.get("RESTARTED_STORE", "dist_sync")
SEED, DEATHS = map(int, sys.argv[1:3])


def count_down(name: str, calls: int) -> None:
    """Kill this process in a call of a function of ``os``, before it does anything."""
    real, left = getattr(os, name), [calls]

    def counted(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    setattr(os, name, counted)


def arrange_death(rank: int, size: int, attempt: int) -> int:
    """Arrange for the death of one rank in this start; return the step at which it raises instead, or -1."""
    draw = random.Random(f"{SEED} {attempt}")
    if attempt >= DEATHS or draw.randrange(size) != rank:
        return -1
    # What strikes for certain comes first; the first start has no commit to restore.
    how = draw.choice(["pwrite", "pread", "raise", *["timer", "timer"] * (attempt > 0)])
    if how == "timer":  # at any moment, also in the start
        timer = threading.Timer(draw.uniform(0, 0.4), os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    elif how == "pwrite":  # in a commit, or in the voiding of a restore
        count_down("pwrite", draw.randint(1, 10))
    elif how == "pread":  # in a restore
        count_down("pread", draw.randint(1, 5))
    return draw.randrange(STEPS) if how == "raise" else -1


def main() -> None:
    attempt = 0
    if folder := os.environ.get("MPIKV_KEEP"):
        attempt = json.loads((Path(folder) / "start.json").read_text())[0]
        print("keeps", folder, file=sys.stderr, flush=True)
    kv = mpikv.create(STORE, timeout=30.0)
    raises = arrange_death(kv.rank, kv.size, attempt)
    draw = random.Random(SEED)
    optimizer, codec = draw.choice(["sgd", "adam", "lamb"]), draw.choice([None, "2bit"])
    params = {"a": np.ones(70_000, np.float32), "b": np.ones((30, 7), np.float32)}
    kv.init(params)
    rng, made, updates = np.random.default_rng(kv.rank), [], [0]
    if STORE == "dist_async":

        def count(key: Any, pushed: Any, stored: Any) -> None:
            updates[0] += 1
            stored -= pushed

        kv.set_updater(count)
    else:
        kv.set_optimizer(optimizer, learning_rate=0.05, **({"momentum": 0.9} if optimizer == "sgd" else {}))
        kv.set_gradient_compression(codec if optimizer != "lamb" else None)
    kv.keep(rng=rng, made=made, updates=updates)
    steps = kv.steps(STEPS, fill=params)
    if kv.rank == 0 and kv.restored is not None:
        print("begin", kv.restored.attempt, kv.restored.step, file=sys.stderr, flush=True)
    for step in steps:
        if step == raises:
            raise RuntimeError("planted")
        time.sleep(0.004)
        for keys in (["a"], ["b"]):
            noise = {key: rng.standard_normal(params[key].shape, np.float32) for key in keys}
            if STORE == "dist_async":
                kv.push({key: np.round(9 * noise[key]) for key in keys})
            else:
                kv.pushpull({key: params[key] - noise[key] for key in keys}, out={key: params[key] for key in keys})
        made.append(step)
    kv.barrier()
    kv.pull(params)
    state = *(array.tobytes() for array in params.values()), rng.bit_generator.state, made, updates, kv.version("a")
    digests = kv.comm.gather(hashlib.sha256(repr(state).encode()).hexdigest()) if kv.comm else [repr(state)]
    if kv.rank == 0:
        print("digest", hashlib.sha256(repr(digests).encode()).hexdigest())


main()
