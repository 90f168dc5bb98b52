"""The trainings of ``scripts/restart_faults``: restart_program.py FAULT, or a loop to time and its steps."""

import hashlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from train_digits import gradients, initial

import mpikv
from mpikv.cli.bench.keysets import resnet50

STEPS, AT = 30, 10


def end(number: int, process: int = 0) -> None:
    os.kill(process or os.getpid(), number)


def find_command() -> int:
    """Return the process of ``mpikv run``, which has started the launcher, which has started this one."""
    process = os.getpid()
    while b"\0mpikv\0run\0" not in Path(f"/proc/{process}/cmdline").read_bytes():
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return process


def take_memory() -> None:
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
            end(signal.SIGKILL)


def fail() -> None:
    raise RuntimeError("planted")


# What rank 1 does at a step: in the first start, or in every start.
FAULTS: dict[str, Callable[[], object]] = {
    "SIGKILL": lambda: end(signal.SIGKILL),
    "SIGSTOP": lambda: end(signal.SIGSTOP),
    "out of memory": take_memory,
    "disk fills": fill_disk,
    "mpikv run killed": lambda: (end(signal.SIGKILL, find_command()), time.sleep(60)),
    "exception": fail,
    "mistake": lambda: len(1),  # type: ignore[arg-type]  # the mistake
}
ALWAYS = ("exception", "mistake")


def train(fault: str) -> None:
    """Train through a fault; write down when it came, and when the next step was done."""
    mark = Path(os.environ["RESTART_MARK"])
    kv = mpikv.create(timeout=5.0 if fault == "SIGSTOP" else 60.0)
    params = {"w": np.ones(100_000, np.float32)}
    kv.init(params)
    kv.set_optimizer("sgd", learning_rate=0.05, momentum=0.9)
    rng = np.random.default_rng(kv.rank)
    kv.keep(rng=rng)
    for step in kv.steps(STEPS, fill=params):
        if step == AT and kv.rank == 1 and fault in FAULTS and (fault in ALWAYS or not (mark / "fault").exists()):
            (mark / "fault").write_text(str(time.monotonic()))
            FAULTS[fault]()
        params = kv.pushpull({"w": params["w"] - rng.standard_normal(100_000, np.float32)}, out=params)
        time.sleep(0.01)
        if (mark / "fault").exists() and kv.restored and not (mark / f"next.{kv.rank}").exists():
            (mark / f"next.{kv.rank}").write_text(str(time.monotonic()))
    digests = kv.comm.allgather(hashlib.sha256(repr((params, rng.bit_generator.state)).encode()).hexdigest())
    if kv.rank == 0:
        print("digest", hashlib.sha256(repr((digests, params["w"].tobytes())).encode()).hexdigest())


def measure(loop: str, steps: int) -> None:
    """Print the seconds of a step of a loop, after some to warm up."""
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
    warm, began = steps // 5, math.nan
    for step in kv.steps(warm + steps, fill=params):
        if step == warm:
            began = time.perf_counter()
        kv.pushpull(step_of(), out=params)
    if kv.rank == 0:
        print("seconds", (time.perf_counter() - began) / steps)


if len(sys.argv) == 2:
    train(sys.argv[1])
else:
    measure(sys.argv[1], int(sys.argv[2]))
