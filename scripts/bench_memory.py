"""What a store holds in memory beyond its values: optimizer state, many ranks.

mpikv run -n 4 scripts/bench_memory.py adam
mpikv run -n 64 scripts/bench_memory.py ranks
"""

import sys
import time
from collections.abc import Callable

import numpy as np
from benchmark.memory import Memory

import mpikv
from mpikv.cli.bench.worker import release_freed

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


def ranks(kv: mpikv.KVStore) -> str:
    """Return what each rank of many holds beyond the values."""
    array = np.ones(4 * MIB, np.float32)
    before = grown(lambda: None)
    kv.init("w", array)
    private = grown(lambda: [kv.pushpull("w", array) for _ in range(8)])
    return f"private {before + private:.0f} MiB more than before"


CASES = {"adam": adam, "ranks": ranks}


def main() -> None:
    """Print the figures of one case, those of the root."""
    if sys.argv[1:] not in [[name] for name in CASES]:
        sys.exit(f"{sys.argv[0]} needs one of these words: {', '.join(CASES)}")
    with mpikv.create(warn_after=600, timeout=1200) as kv:
        text = CASES[sys.argv[1]](kv)
        if kv.is_root:
            print(f"{sys.argv[1]} on {kv.size} ranks: {text}")


if __name__ == "__main__":
    main()
