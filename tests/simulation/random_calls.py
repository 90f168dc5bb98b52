"""A program of random calls on a store, beside numpy in one process."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import numpy as np

import mpikv

CALLS, KEYS = 20, 8
SHAPES = [(), (1,), (7,), (3, 5), (0,), (400,), (2, 3, 4)]


def program(comm: Any, seed: int) -> None:
    """Make the calls that a seed draws, and compare each pull with what numpy says."""
    draw = random.Random(seed)
    placement = draw.choice(["auto", "root", "sharded", "replicated"])
    bucket = draw.choice([4096, 1 << 20])
    with mpikv.create(comm=comm, placement=placement, bucket_bytes=bucket, timeout=30.0) as kv:
        Calls(kv, draw).run()


@lru_cache(maxsize=4)
def brought(number: int, size: int, shapes: tuple[tuple[int, ...], ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return what all ranks bring to a call: for each shape small integers, whose sums are exact, a row for a rank; and
    the sum over ranks.
    """
    generator = np.random.default_rng([number, size])
    every = [generator.integers(-9, 9, (size, *shape)).astype(np.float32) for shape in shapes]
    pairs = [(arrays, arrays.sum(axis=0)) for arrays in every]
    for array in (array for pair in pairs for array in pair if array.ndim):
        array.flags.writeable = False  # all ranks see the same
    return pairs


class Calls:
    """The calls on one rank, and the values that all of them should see."""

    def __init__(self, kv: mpikv.KVStore, draw: random.Random) -> None:
        self.kv, self.draw = kv, draw
        self.values: dict[str, np.ndarray] = {}
        self.rate = 0.0

    def run(self) -> None:
        for number in range(CALLS):
            verbs = [self.push, self.pull, self.pushpull, self.set, self.barrier, self.pending] if self.values else []
            if len(self.values) < KEYS:
                verbs += [self.init, self.broadcast]
            if len(self.values) > 2:
                verbs.append(self.delete)
            if not self.rate:
                verbs.append(self.optimize)
            self.draw.choice(verbs)(number)
        self.pull(CALLS, sorted(self.values))

    def some(self) -> list[str]:
        return self.draw.sample(sorted(self.values), self.draw.randint(1, len(self.values)))

    def brought(self, number: int, keys: list[str]) -> list[np.ndarray]:
        """Return what this rank brings for each key, and note what the call makes of the values."""
        every = brought(number, self.kv.size, tuple(self.values[key].shape for key in keys))
        for key, (_, total) in zip(keys, every, strict=True):
            self.values[key] = self.values[key] - np.float32(self.rate) * total if self.rate else total
        return [arrays[self.kv.rank].copy() for arrays, _ in every]

    def new(self, number: int) -> tuple[str, np.ndarray]:
        shape = self.draw.choice(SHAPES)
        return f"key{number}", np.full(shape, number, np.float32)

    def init(self, number: int) -> None:
        key, value = self.new(number)
        self.kv.init(key, value + self.kv.rank)
        self.values[key] = value

    def broadcast(self, number: int) -> None:
        key, value = self.new(number)
        out = np.empty_like(value)
        self.kv.broadcast(key, value + self.kv.rank, out)
        self.values[key] = value
        assert np.array_equal(out, value)

    def push(self, number: int) -> None:
        keys = self.some()
        self.kv.push(keys, self.brought(number, keys))

    def pull(self, number: int, keys: list[str] | None = None) -> None:
        keys = keys or self.some()
        for key, array in zip(keys, self.kv.pull(keys), strict=True):
            assert np.array_equal(array, self.values[key]), f"{key}: {array} is not {self.values[key]}"

    def pushpull(self, number: int) -> None:
        keys = self.some()
        outs = [np.empty_like(self.values[key]) for key in keys]
        self.kv.pushpull(keys, self.brought(number, keys), out=outs)
        for key, out in zip(keys, outs, strict=True):
            assert np.array_equal(out, self.values[key]), f"{key}: {out} is not {self.values[key]}"

    def pending(self, number: int) -> None:
        keys = self.some()
        works = [
            self.kv.push(key, array, wait=False, priority=place)
            for place, (key, array) in enumerate(zip(keys, self.brought(number, keys), strict=True))
        ]
        for work in works[self.kv.rank % 2 :]:
            work.wait()

    def set(self, number: int) -> None:
        key = self.some()[0]
        value = np.full_like(self.values[key], number)
        self.kv.set(key, value)
        self.values[key] = value

    def delete(self, number: int) -> None:
        key = self.some()[0]
        self.kv.delete(key)
        del self.values[key]

    def barrier(self, number: int) -> None:
        self.kv.barrier()

    def optimize(self, number: int) -> None:
        self.rate = 0.5
        self.kv.set_optimizer("sgd", learning_rate=self.rate)
