"""The trainings of ``scripts/restart_faults``: restart_program.py FAULT, or LOOP STEPS BLOCKS FIRST."""

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from train_digits import gradients, initial

import mpikv
from mpikv.cli.bench.keysets import resnet50

STEPS, AT = 30, 10


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def take_memory() -> None:
    # Without this the kernel may choose another process: it weighs what each one holds, and they hold nearly the same.
    Path("/proc/self/oom_score_adj").write_text("1000")
    taken = []
    while True:
        taken.append(np.ones(1 << 28, np.uint8))


def fill_disk() -> None:
    """Leave no byte in the folder of commits, and die."""
    with open(Path(os.environ["MPIKV_KEEP"]) / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1000))
        except OSError:
            die()


# What rank 1 does at a step of the first start.
FAULTS: dict[str, Callable[[], None]] = {"SIGKILL": die, "out of memory": take_memory, "disk fills": fill_disk}


def train(fault: str) -> None:
    """Train through a fault; write down when it came, and when the next step was done."""
    mark = Path(os.environ["RESTART_MARK"])
    kv = mpikv.create(timeout=60.0)
    params = {"w": np.ones(100_000, np.float32)}
    kv.init(params)
    kv.set_optimizer("sgd", learning_rate=0.05, momentum=0.9)
    rng = np.random.default_rng(kv.rank)
    kv.keep(rng=rng)
    for step in kv.steps(STEPS, fill=params):
        if step == AT and kv.rank == 1 and fault in FAULTS and not (mark / "fault").exists():
            time.sleep(int(os.environ["RESTART_DELAY"]))
            (mark / "fault").write_text(str(time.monotonic()))
            FAULTS[fault]()
        params = kv.pushpull({"w": params["w"] - rng.standard_normal(100_000, np.float32)}, out=params)
        time.sleep(0.01)
        if (mark / "fault").exists() and kv.restored and not (mark / f"next.{kv.rank}").exists():
            (mark / f"next.{kv.rank}").write_text(str(time.monotonic()))
    digests = kv.comm.allgather(hashlib.sha256(repr((params, rng.bit_generator.state)).encode()).hexdigest())
    if kv.rank == 0:
        print("digest", hashlib.sha256(repr((digests, params["w"].tobytes())).encode()).hexdigest())


def advance(loop: str) -> Iterator[None]:
    """Make a step of a loop of an own store at each turn."""
    kv = mpikv.create()
    if loop == "resnet50":
        params: Any = {str(key): np.zeros(shape, np.float32) for key, shape in enumerate(resnet50())}
        given = {key: np.full_like(value, 1e-3) for key, value in params.items()}
        step_of: Callable[[], Any] = partial(dict, given)
    else:
        params, images = initial("float64", 0), np.random.default_rng(kv.rank).random((64 // kv.size, 64))
        step_of = partial(gradients, params, images, np.arange(len(images)) % 10, 64)
    kv.init(params)
    kv.set_optimizer("sgd", learning_rate=0.01, momentum=0.9)
    for _ in kv.steps(10**9, fill=params):
        kv.pushpull(step_of(), out=params)
        yield


def measure(loop: str, block: int, blocks: int, first: str) -> None:
    """Print the seconds of the blocks of steps with commits, and of as many without, made by turns in one job. The
    store that is made ``first`` has commits, or is the plain one.
    """
    folder, stores, seconds = os.environ.pop("MPIKV_KEEP"), [advance(loop), advance(loop)], [0.0, 0.0]
    for which in (0, 1) if first == "commits" else (1, 0):
        os.environ |= {"MPIKV_KEEP": folder} if which == 0 else {}
        next(stores[which])
        os.environ.pop("MPIKV_KEEP", None)
    for turn in range(-2, blocks):
        for which in (0, 1) if turn % 2 else (1, 0):
            began = time.perf_counter()
            list(islice(stores[which], block))
            seconds[which] += (time.perf_counter() - began) * (turn >= 0)
    if MPI.COMM_WORLD.rank == 0:
        print("seconds", *seconds)


if len(sys.argv) == 2:
    train(sys.argv[1])
else:
    measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
