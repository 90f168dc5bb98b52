#!/usr/bin/env python3
"""What a store holds in memory beyond its values: optimizer state, plans, many ranks.

scripts/bench_memory.py                     # all cases, each in a job of its own
scripts/bench_memory.py adam keys           # these
mpikv run -n 4 scripts/bench_memory.py adam # one, in the ranks of this job
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from benchmark.memory import Memory

import mpikv
from mpikv.cli.bench.worker import release_freed
from mpikv.cluster.environment import launch_of

MIB = 1 << 20


def grown(run: Callable[[], object]) -> float:
    """Return how many MiB of private memory this rank holds more than before."""
    release_freed()
    before = Memory.now().private
    run()
    release_freed()
    return (Memory.now().private - before) / MIB


def adam(kv: mpikv.KVStore) -> str:
    gradient, seconds = np.ones(64 * MIB, np.float32), []
    kv.init("w", gradient)
    kv.set_optimizer("adam")

    def steps() -> None:
        for _ in range(4):
            started = time.perf_counter()
            kv.push("w", gradient)
            kv.barrier()
            seconds.append(time.perf_counter() - started)

    private = grown(steps)
    first, later = seconds[0], sorted(seconds[1:])[1]
    return f"private {private:.0f} MiB, share {512 / kv.size:.0f}; first step {first:.2f} s, later ones {later:.2f} s"


def keys(kv: mpikv.KVStore) -> str:
    array = np.ones(4, np.float32)
    kv.init(list(range(4200)), [array] * 4200)

    def each(count: int) -> float:
        started = time.perf_counter()
        for key in range(count):
            kv.push(key, array)
        return (time.perf_counter() - started) / count

    # All turns of one, then of the other: what is kept of the one is not to help the other.
    turns = [[each(count) for _ in range(4)][1:] for count in (4000, 4200)]
    few, many = np.median(turns, axis=1)
    return f"4,000 keys {1e6 * few:.1f} us each, 4,200 keys {1e6 * many:.1f} us, ratio {many / few:.2f}"


def ranks(kv: mpikv.KVStore) -> str:
    """Return what each rank of many holds beyond the values."""
    array = np.ones(4 * MIB, np.float32)
    before = grown(lambda: None)
    kv.init("w", array)
    private = grown(lambda: [kv.pushpull("w", array) for _ in range(8)])
    return f"private {before + private:.0f} MiB more than before"


CASES: dict[str, tuple[Callable[[mpikv.KVStore], str], tuple[int, ...]]] = {
    "adam": (adam, (2, 4, 8)),
    "keys": (keys, (2,)),
    "ranks": (ranks, (64,)),
}


def measure(name: str) -> None:
    """Print the figures of one case, those of the root."""
    run, _ = CASES[name]
    with mpikv.create(warn_after=600, timeout=1200) as kv:
        text = run(kv)
        if kv.is_root:
            print(f"{name} on {kv.size} ranks: {text}", flush=True)


def main() -> None:
    names = sys.argv[1:] or list(CASES)
    if unknown := set(names) - set(CASES):
        sys.exit(f"unknown case {sorted(unknown)[0]!r} (known: {', '.join(CASES)})")
    if launch_of(os.environ) is not None:
        for name in names:
            measure(name)
        return
    for name in names:
        for size in CASES[name][1]:
            subprocess.run([sys.executable, "-m", "mpikv", "run", "-n", str(size), __file__, name], check=True)


if __name__ == "__main__":
    main()
