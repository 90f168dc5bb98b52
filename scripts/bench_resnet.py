"""Time the push and pull of a ResNet-50's parameters beside per-key MPI collectives, in one interleaved run.

    mpikv run -n 2 scripts/bench_resnet.py

Both sides sum 161 private float32 gradients (25,557,032 elements) over the ranks, make one SGD-momentum step and leave
the new weights in private arrays of every rank. The peer is what one writes with mpi4py alone: for each key Reduce to
rank 0, an update there in blocks that fit the cache, Bcast. A case's time is that of its slowest rank; the ratio is
that of the medians over the rounds. Both results are compared with each other: a fast wrong path is a failure.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

import mpikv

LEARNING_RATE, MOMENTUM, BLOCK = 0.01, 0.9, 1 << 16


def resnet50() -> list[tuple[int, ...]]:
    """Return the shapes of ResNet-50's parameters: convolutions with their scales and shifts, and the head."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            layers = [(width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                layers.append((4 * width, channels, 1, 1))
            for layer in layers:
                shapes += [layer, layer[:1], layer[:1]]
            channels = 4 * width
    shapes += [(1000, 2048), (1000,)]
    assert len(shapes) == 161
    assert sum(int(np.prod(shape)) for shape in shapes) == 25_557_032
    return shapes


class PerKey:
    """Reduce, update at rank 0, Bcast, key by key."""

    def __init__(self, weights: list[np.ndarray]) -> None:
        self.weights = [weight.copy() for weight in weights]
        self.sums = [np.empty_like(weight) for weight in weights]
        self.momentum = [np.zeros_like(weight) for weight in weights]
        self.spare = np.empty(BLOCK, np.float32)

    def step(self, gradients: list[np.ndarray]) -> None:
        comm = MPI.COMM_WORLD
        for gradient, total, weight, momentum in zip(gradients, self.sums, self.weights, self.momentum, strict=True):
            comm.Reduce(gradient, total if comm.rank == 0 else None)
            if comm.rank == 0:
                self.update(total.reshape(-1), weight.reshape(-1), momentum.reshape(-1))
            comm.Bcast(weight)

    def update(self, total: np.ndarray, weight: np.ndarray, momentum: np.ndarray) -> None:
        for start in range(0, total.size, BLOCK):
            g, w, m = (array[start : start + BLOCK] for array in (total, weight, momentum))
            spare = self.spare[: g.size]
            np.multiply(m, MOMENTUM, out=m)
            np.multiply(g, LEARNING_RATE, out=spare)
            np.subtract(m, spare, out=m)
            np.add(w, m, out=w)


class Store:
    """One pushpull of all keys."""

    def __init__(self, weights: list[np.ndarray], **options: str) -> None:
        self.kv = mpikv.create("dist_sync", **options)
        self.keys = list(range(len(weights)))
        self.weights = [weight.copy() for weight in weights]
        self.kv.init(self.keys, weights)
        self.kv.set_optimizer("sgd", learning_rate=LEARNING_RATE, momentum=MOMENTUM)

    def step(self, gradients: list[np.ndarray]) -> None:
        self.kv.pushpull(self.keys, gradients, out=self.weights)


def timed(step: Callable[[], None]) -> float:
    """Return the seconds that the slowest rank takes."""
    comm = MPI.COMM_WORLD
    comm.Barrier()
    started = time.perf_counter()
    step()
    return comm.allreduce(time.perf_counter() - started, MPI.MAX)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each case (default 15)")
    parser.add_argument("--transport", default="auto", help="transport of the store (default auto)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    random = np.random.default_rng(comm.rank)
    shapes = resnet50()
    weights = [np.ones(shape, np.float32) for shape in shapes]
    gradients = [random.standard_normal(shape, np.float32) for shape in shapes]
    copies = [np.empty_like(gradient) for gradient in gradients]

    peer, store = PerKey(weights), Store(weights, transport=options.transport)

    def copy() -> None:
        for target, gradient in zip(copies, gradients, strict=True):
            np.copyto(target, gradient)

    cases: dict[str, Callable[[], None]] = {
        "store": lambda: store.step(gradients),
        "per-key MPI": lambda: peer.step(gradients),
        "memcpy": copy,
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(options.rounds + 1):
        for name, step in cases.items():
            took = timed(step)
            if turn:  # the first round warms up
                seconds[name].append(took)
    # Sums of two orders differ by rounding, which momentum adds up.
    for ours, theirs in zip(store.weights, peer.weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=2e-4)
    medians = {name: float(np.median(values)) for name, values in seconds.items()}
    ratio = medians["store"] / medians["per-key MPI"]
    library = MPI.Get_library_version().splitlines()[0].strip("\x00 ")
    if comm.rank == 0 and options.json:
        print(
            json.dumps(
                {
                    "ranks": comm.size,
                    "library": library,
                    "transport": store.kv.transport,
                    "seconds": medians,
                    "ratio": ratio,
                }
            )
        )
    elif comm.rank == 0:
        print(
            f"ResNet-50 set, SGD-momentum, private arrays, {comm.size} ranks, {library}, transport {store.kv.transport}"
        )
        for name, values in seconds.items():
            print(
                f"{name:12} {1e3 * medians[name]:8.2f} ms   (from {1e3 * min(values):.2f} to {1e3 * max(values):.2f})"
            )
        print(f"store / per-key MPI = {ratio:.2f}   store / memcpy = {medians['store'] / medians['memcpy']:.2f}")
    store.kv.close()


if __name__ == "__main__":
    main()
