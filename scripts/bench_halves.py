"""Time sums of half precision beside those of float32, in turns.

    mpikv run -n 2 scripts/bench_halves.py

Every round pushes and pulls, without an updater, an array of each dtype: of as many bytes as the float32 one, and of as
many elements, which are half the bytes. What counts is the time of the slowest rank. A ratio is the median, over
rounds, of that time divided by float32's of the same round; the range is that of the middle half of the rounds.
"""

from __future__ import annotations

import argparse
import json
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


def measure(kernels: str, transport: str, mebibytes: float, rounds: int) -> dict[str, list[float]]:
    """Return, for each case, the time of each round divided by float32's."""
    comm = MPI.COMM_WORLD
    size = int(mebibytes * (1 << 20)) // 4
    cases = {("float32", "bytes"): size}
    for name in dtypes():
        if name != "float32":
            cases |= {(name, "bytes"): 2 * size, (name, "elements"): size}
    kv = mpikv.create(transport=transport, kernels=kernels)
    random = np.random.default_rng(comm.rank)
    arrays = {case: random.standard_normal(count).astype(dtypes()[case[0]]) for case, count in cases.items()}
    outs = {case: np.empty_like(array) for case, array in arrays.items()}
    keys = {case: " ".join(case) for case in cases}
    kv.init({keys[case]: array for case, array in arrays.items()})
    times: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    for turn in range(rounds + 1):
        for case in cases:
            comm.Barrier()
            started = time.perf_counter()
            kv.push(keys[case], arrays[case])
            kv.pull(keys[case], outs[case])
            took = comm.allreduce(time.perf_counter() - started, MPI.MAX)
            if turn:  # the first round warms up
                times[case].append(took)
    kv.close()
    single = times.pop(("float32", "bytes"))
    result = {
        " of the same ".join(case): [each / other for each, other in zip(took, single, strict=True)]
        for case, took in times.items()
    }
    return {"float32, seconds": single} | result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=float, default=4, help="MiB of the float32 array (default 4)")
    parser.add_argument("--rounds", type=int, default=101, help="default 101")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--kernels", default="numpy")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    found = measure(options.kernels, options.transport, options.mebibytes, options.rounds)
    quartiles = {name: np.percentile(took, (50, 25, 75)).tolist() for name, took in found.items()}
    if MPI.COMM_WORLD.rank:
        return
    if options.json:
        print(json.dumps({"ranks": MPI.COMM_WORLD.size, **vars(options), "median and quartiles": quartiles}))
        return
    print(f"push and pull of {options.mebibytes:g} MiB, {MPI.COMM_WORLD.size} ranks, {options.rounds} rounds in turns")
    for name, (median, low, high) in quartiles.items():
        print(f"{name:32}{median:10.3g}   {low:.3g} to {high:.3g}")


if __name__ == "__main__":
    main()
