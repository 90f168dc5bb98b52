"""Time sums of half precision beside those of float32, in turns.

    mpikv run -n 2 scripts/bench_halves.py

Every round pushes and pulls, without an updater, an array of each dtype: of as many bytes as the float32 one, and of as
many elements, which are half the bytes. What counts is the time of the slowest rank. A ratio is the median, over
rounds, of that time divided by float32's of the same round; the range is that of the middle half of the rounds.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from mpi4py import MPI

import mpikv


def dtypes() -> dict[str, np.dtype[Any]]:
    """Return the dtypes that can be stored here."""
    found = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16)}
    try:
        import ml_dtypes
    except ImportError:
        return found
    return found | {"bfloat16": np.dtype(ml_dtypes.bfloat16)}


def measure(kernels: str, mebibytes: float, rounds: int) -> dict[str, list[float]]:
    """Return, for each case, the time of each round divided by float32's."""
    comm = MPI.COMM_WORLD
    size = int(mebibytes * (1 << 20)) // 4
    single, *halves = dtypes().items()
    cases = {"float32, seconds": (size, single[1])}
    for name, dtype in halves:
        cases |= {f"{name} of the same bytes": (2 * size, dtype), f"{name} of the same elements": (size, dtype)}
    kv = mpikv.create(kernels=kernels)
    arrays = {case: np.ones(count, dtype) for case, (count, dtype) in cases.items()}
    outs = {case: np.empty_like(array) for case, array in arrays.items()}
    kv.init(arrays)
    times: dict[str, list[float]] = {case: [] for case in cases}
    for turn in range(rounds + 1):
        for case in cases:
            comm.Barrier()
            started = time.perf_counter()
            kv.push(case, arrays[case])
            kv.pull(case, outs[case])
            took = comm.allreduce(time.perf_counter() - started, MPI.MAX)
            times[case] += [took] * (turn > 0)  # the first round warms up
    kv.close()
    first, *others = times
    return {first: times[first], **{case: np.divide(times[case], times[first]).tolist() for case in others}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=float, default=4, help="MiB of the float32 array (default 4)")
    parser.add_argument("--kernels", default="numpy")
    parser.add_argument("--rounds", type=int, default=101, help="default 101")
    options = parser.parse_args()
    found = measure(options.kernels, options.mebibytes, options.rounds)
    quartiles = {name: np.percentile(took, (50, 25, 75)).tolist() for name, took in found.items()}
    if MPI.COMM_WORLD.rank:
        return
    print(f"push and pull of {options.mebibytes:g} MiB, {MPI.COMM_WORLD.size} ranks, {options.rounds} rounds in turns")
    for name, (median, low, high) in quartiles.items():
        print(f"{name:32}{median:10.3g}   {low:.3g} to {high:.3g}")


if __name__ == "__main__":
    main()
