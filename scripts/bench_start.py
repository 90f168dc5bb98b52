"""Time the start of a program: the import, and the first calls with a hundred thousand keys.

    mpikv run -n 2 scripts/bench_start.py
    mpikv run -n 2 scripts/bench_start.py --keys 1000000

*import*: processes that import numpy alone, and numpy and mpikv, in turns; the first rank starts them while the others
wait. The difference of the medians is the import's own time.

*keys*: a store with so many arrays of 64 B and momentum, from its ``init`` to a load into a new store. Each time is the
slowest rank's. A call with the same keys is planned at its first time, so the second is shown beside it.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpikv

ELEMENTS = 16
ROUNDS = 21


def time_import(code: str) -> float:
    """Return the milliseconds of a process that runs this code."""
    environ = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, env=environ)
    return 1e3 * (time.perf_counter() - started)


def compare_imports() -> str:
    codes = "import numpy", "import numpy, mpikv"
    time_import(codes[1])  # which compiles the modules, as an installation does
    alone, both = zip(*([time_import(code) for code in codes] for _ in range(ROUNDS)), strict=True)
    low, high = statistics.median(alone), statistics.median(both)
    return f"import  numpy {low:.0f} ms, and mpikv {high - low:.0f} ms more"


def timed(name: str, work: Callable[[], object]) -> str:
    """Return a line with the seconds that the slowest rank takes."""
    comm = MPI.COMM_WORLD
    comm.Barrier()
    started = time.perf_counter()
    work()
    return f"keys    {name:24}{comm.allreduce(time.perf_counter() - started, MPI.MAX):8.2f} s"


def time_calls(count: int, folder: Path) -> list[str]:
    names, path = [f"key {number}" for number in range(count)], folder / "checkpoint"
    arrays = [np.ones(ELEMENTS, np.float32) for _ in names]
    with mpikv.create() as kv:
        lines = [timed("init", lambda: kv.init(names, arrays))]
        kv.set_optimizer("sgd", momentum=0.9)
        lines += [timed(f"{turn} push", lambda: kv.push(names, arrays)) for turn in ("first", "second")]
        lines += [timed(f"{turn} pull", lambda: kv.pull(names, arrays)) for turn in ("first", "second")]
        lines += [timed("save", lambda: kv.save(path)), timed("load over the same keys", lambda: kv.load(path))]
    with mpikv.create() as kv:
        return [*lines, timed("load into a new store", lambda: kv.load(path))]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the import, and first calls with many keys.")
    parser.add_argument("--keys", type=int, default=100_000, help="default: 100000")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    lines = [compare_imports()] if comm.rank == 0 else []
    arrived = comm.Ibarrier()
    while not arrived.Test():  # a wait in MPI would keep a core busy
        time.sleep(0.01)
    with tempfile.TemporaryDirectory() as own:
        lines += time_calls(options.keys, Path(comm.bcast(own)))
        comm.Barrier()
    if comm.rank == 0:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
