"""Time codecs alone, and pushes with each codec beside pushes without.

    mpikv run -n 2 scripts/bench_codecs.py

First rank 0 packs and unpacks float32 values of 1 MiB with error feedback, in numpy and, if numba is installed,
compiled, while the others sleep: GB of float32 per second, best of many. Then all ranks push a matrix with each codec
and without, in turns, in shared memory and over MPI: the time of the slowest rank, best of the rounds, divided by that
without. A ratio above 1 says that compression costs time there. MPI inside of a host is no network.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
from mpi4py import MPI

import mpikv
from mpikv import codecs
from mpikv.compute.kernels import compile_codec
from mpikv.protocols import ElementwiseCodec

PACKING = ("2bit", "1bit", "fp16", "bf16")
"""What packs any range of a value."""
PUSHING = (*PACKING, "topk", "lowrank")
KERNELS = ("numpy", "numba") if find_spec("numba") else ("numpy",)
SIZE = 1 << 18


def seconds(work: Callable[[], object], times: int) -> float:
    """Return the best of so many times, after one that warms up."""
    took = []
    for _ in range(times + 1):
        started = time.perf_counter()
        work()
        took.append(time.perf_counter() - started)
    return min(took[1:])


def packing(name: str, kernels: str, times: int) -> tuple[float, float] | None:
    """Return how many GB per second are packed, and unpacked and added; None where nothing is compiled."""
    plain = codecs.create(name)
    codec: ElementwiseCodec = compile_codec(plain, kernels)
    if kernels == "numba" and codec is plain:
        return None
    gradient = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)
    residual, total = np.zeros_like(gradient), np.zeros_like(gradient)
    payload = np.empty(codec.nbytes(SIZE), np.uint8)
    pack = seconds(lambda: codec.encode(gradient, payload, residual), times)
    unpack = seconds(lambda: codec.decode_add(payload, total), times)
    return gradient.nbytes / pack / 1e9, gradient.nbytes / unpack / 1e9


def pushing(transport: str, mebibytes: int, rounds: int) -> dict[str, float]:
    """Return how many times as long a push takes with each codec as without."""
    comm = MPI.COMM_WORLD
    gradient = np.random.default_rng(comm.rank).standard_normal((1024, mebibytes << 8)).astype(np.float32)
    stores = {name: mpikv.create(transport=transport, kernels=KERNELS[-1], compression=name) for name in PUSHING}
    stores["none"] = mpikv.create(transport=transport, kernels=KERNELS[-1])
    for kv in stores.values():
        kv.init("w", np.zeros_like(gradient))
    best = dict.fromkeys(stores, np.inf)
    for turn in range(rounds + 1):
        for name, kv in stores.items():
            comm.Barrier()
            started = time.perf_counter()
            kv.push("w", gradient)
            took = comm.allreduce(time.perf_counter() - started, MPI.MAX)
            if turn:  # the first round warms up
                best[name] = min(best[name], took)
    for kv in stores.values():
        kv.close()
    return {name: best[name] / best["none"] for name in PUSHING}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="rounds of pushes (default 9)")
    parser.add_argument("--times", type=int, default=30, help="times that a codec packs (default 30)")
    parser.add_argument("--mebibytes", type=int, default=16, help="MiB of the matrix that is pushed (default 16)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    rates = {}
    if comm.rank == 0:
        rates = {f"{name} {each}": packing(name, each, options.times) for name in PACKING for each in KERNELS}
    done = comm.Ibarrier()
    while not done.Test():  # a rank that waits in MPI would take a core
        time.sleep(0.01)
    transports = ("shm", "mpi") if comm.size > 1 else ("local",)
    ratios = {each: pushing(each, options.mebibytes, options.rounds) for each in transports}
    if comm.rank:
        return
    if options.json:
        print(json.dumps({"ranks": comm.size, "gb_per_second": rates, "times_as_long": ratios}))
        return
    print(f"GB of float32 per second, best of {options.times}\n{'':14}{'pack':>8}{'unpack and add':>16}")
    for name, rate in rates.items():
        if rate is not None:
            print(f"{name:14}{rate[0]:>8.1f}{rate[1]:>16.1f}")
    print(f"\na push of {options.mebibytes} MiB on {comm.size} ranks, kernels {KERNELS[-1]}, times as long as without")
    print(f"{'':14}" + "".join(f"{each:>8}" for each in transports))
    for name in PUSHING:
        print(f"{name:14}" + "".join(f"{ratios[each][name]:>8.1f}" for each in transports))


if __name__ == "__main__":
    main()
