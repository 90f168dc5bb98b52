"""Train layers whose optimizer state fills gigabytes, on gradients of which every element is known.

    python scripts/train_synthetic.py --gigabytes 0.1            one rank, on the host
    mpikv run -n 4 scripts/train_synthetic.py --device gpu       a GPU for each rank, 4 GB of state

The layers are blocks of a transformer. A gradient is a random tile, made from the seed, which is repeated over a value
and multiplied by a number of the key, the step and the rank; this happens where the arrays are. So what a few elements
at both ends of every value must be after the last step is computed again on the host, by the rule written by hand.

exit status: 0; 1 where a value is wrong; 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, TypeAlias

import numpy as np
from benchmark.rules import RULES, Rule, floor

import mpikv
from mpikv.cli.bench.rules import EPSILON

Array: TypeAlias = np.ndarray[Any, Any]
Shape: TypeAlias = "tuple[int, ...]"

TILE, ENDS = 1 << 22, 500
# LAMB's rate depends on all elements of a value, of which a few are computed again.
OPTIMIZERS = ("adam", "sgd")


def layers(state_bytes: float, states: int) -> dict[str, Shape]:
    """Return the shapes of blocks whose state takes about so many bytes: as wide as four of them allow, to 4096.

    >>> sum(map(math.prod, layers(4e9, 2).values())) / 5e8
    1.007...
    """
    wanted = state_bytes / (4 * states)
    width = next((width for width in (4096, 2048, 1024, 512, 256, 128, 64, 32) if 48 * width**2 <= wanted), 16)
    block: dict[str, Shape] = {}
    for name in ("query", "key", "value", "out"):
        block |= {f"{name}/weight": (width, width), f"{name}/bias": (width,)}
    block |= {"up/weight": (4 * width, width), "up/bias": (4 * width,)}
    block |= {"down/weight": (width, 4 * width), "down/bias": (width,), "norm": (2, width)}
    count = max(1, round(wanted / sum(map(math.prod, block.values()))))
    return {f"{number}/{name}": shape for number in range(count) for name, shape in block.items()}


def factor(key: int, step: int, rank: int) -> float:
    """Return by what the tile is multiplied: a multiple of 1/8 from 1/8 to 2."""
    return (1 + (7 * key + 3 * step + 5 * rank) % 16) / 8


def make_tile(seed: int) -> Array:
    """Return numbers in [0.5, 1.5): sums that nearly cancel would make large differences of rounding."""
    return np.random.default_rng(seed).random(TILE, np.float32) + np.float32(0.5)


class Host:
    """Arrays of the host."""

    store = "dist_sync"

    def place(self, array: Array) -> Any:
        return array

    def filled(self, shape: Shape, value: float) -> Any:
        return np.full(shape, value, np.float32)

    def fetch(self, array: Any) -> Array:
        return np.asarray(array)

    def settle(self) -> None:
        """Wait for what is queued."""

    def stream(self) -> Any:
        return nullcontext()


class OnGpu:
    """Arrays of this rank's GPU, on a stream of this program."""

    store = "nccl"

    def __init__(self) -> None:
        from mpikv.cluster.environment import launch_of, place_on_host, visible_gpus
        from mpikv.compute.cuda.gpu import find_gpu
        from mpikv.config import Config

        launch = launch_of()
        place = place_on_host() or ((launch.rank, launch.size) if launch else (0, 1))
        self._gpu: Any = find_gpu(*place, sharing=Config.read().gpu_sharing, visible=visible_gpus())
        self._stream = self._gpu.stream()

    def place(self, array: Array) -> Any:
        return self._gpu.upload(array)

    def filled(self, shape: Shape, value: float) -> Any:
        array: Any = self._gpu.empty(shape, np.dtype(np.float32))
        array.fill(value)
        return array

    def fetch(self, array: Any) -> Array:
        out = np.empty(array.shape, array.dtype)
        self._gpu.download(array, out)
        return out

    def settle(self) -> None:
        self._stream.synchronize()

    def stream(self) -> Any:
        return self._stream


def fill(gradient: Any, tile: Any, by: float) -> None:
    """Repeat the tile over a flat array, multiplied by a number."""
    for start in range(0, gradient.size, TILE):
        part = gradient[start : start + TILE]
        np.multiply(tile[: part.size], np.float32(by), out=part)


def ends(size: int) -> Array:
    """Return the places of the elements that are checked."""
    return np.arange(size) if size <= 2 * ENDS else np.concatenate([np.arange(ENDS), np.arange(size - ENDS, size)])


def mistakes(kv: Any, device: Any, values: dict[str, Any], tile: Array, rule: Rule, steps: int) -> Iterator[str]:
    """Yield what is wrong with the values after so many steps."""
    for number, (name, value) in enumerate(values.items()):
        flat = value.reshape(-1)
        places = ends(flat.size)
        parts = [flat[:ENDS], flat[-ENDS:]] if flat.size > 2 * ENDS else [flat]
        found = np.concatenate([device.fetch(part) for part in parts])
        weight = np.ones(places.size, np.float32)
        state = [np.zeros(places.size, np.float32) for _ in range(rule.states)]
        for step in range(steps):
            total = np.zeros(places.size, np.float32)
            for rank in range(kv.size):
                total += tile[places % TILE] * np.float32(factor(number, step, rank))
            rule.apply(step + 1, total, weight, state)
        allowed = rule.tolerance(steps, 3.0 * kv.size, float(np.abs(weight).max())) + EPSILON
        # Not the opposite comparison, which is false for nan.
        good = np.abs(found - weight) <= allowed
        if not good.all():
            place = int(np.argmin(good))
            yield f"{name}: element {places[place]} is {found[place]} and not {weight[place]} (± {allowed:.1g})"


def train(options: argparse.Namespace, device: Any) -> int:
    """Train, print what it took on the root, and return the exit status. Collective."""
    rule = RULES[options.optimizer]
    shapes = layers(options.gigabytes * 1e9, rule.states)
    elements = sum(map(math.prod, shapes.values()))
    tile = make_tile(options.seed)
    with mpikv.create(device.store) as kv, device.stream():
        there = device.place(tile)
        values = {name: device.filled(shape, 1) for name, shape in shapes.items()}
        kv.init(values)
        kv.set_optimizer(rule.name, **rule.options)
        gradients = {name: device.filled(shape, 0) for name, shape in shapes.items()}
        seconds = []
        for step in range(options.steps):
            for number, gradient in enumerate(gradients.values()):
                fill(gradient.reshape(-1), there, factor(number, step, kv.rank))
            device.settle()
            began = time.perf_counter()
            kv.pushpull(gradients, out=values)
            device.settle()
            seconds.append(time.perf_counter() - began)
        wrong = list(mistakes(kv, device, values, tile, rule, options.steps))
        # The first step makes the state, and what it needs besides.
        usual = statistics.median(seconds[1:] or seconds)
        moved = floor(rule, 1, private=False) * elements / kv.size
        if kv.is_root:
            print(f"{rule.title} on {options.device}, ranks {kv.size}, keys {len(shapes)}")
            print(f"values_bytes {4 * elements}  state_bytes {4 * rule.states * elements}")
            print(f"step_ms {usual * 1e3:.3f} (first {seconds[0] * 1e3:.3f}), of {options.steps}")
            print(f"update_GB_s {1e-9 * moved / usual:.3f} for each rank, of the whole step")
            print(f"check {'failed' if wrong else 'passed'}, both ends of every value")
        for text in wrong[:5]:
            print(f"train_synthetic: wrong on rank {kv.rank}: {text}", file=sys.stderr)
        return int(bool(wrong))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where arrays are (%(default)s)")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of optimizer state, in all (%(default)s)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam", help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the gradients (%(default)s)")
    options = parser.parse_args()
    try:
        return run(parser, options)
    except MemoryError as error:
        print(f"train_synthetic: {error}; or ask for fewer --gigabytes", file=sys.stderr)
        return 1


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.steps < 1 or options.gigabytes <= 0:
        parser.error("--steps and --gigabytes must be more than nothing")
    if options.device == "cpu":
        return train(options, Host())
    try:
        device = OnGpu()
    except mpikv.TransportUnavailable as error:
        print(f"train_synthetic: TransportUnavailable: {error}", file=sys.stderr)
        return 2
    return train(options, device)


if __name__ == "__main__":
    sys.exit(main())
