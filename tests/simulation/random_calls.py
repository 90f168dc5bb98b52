"""A program of random calls on a store, beside numpy in one process."""

from __future__ import annotations

import random
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

    def arrays(self, number: int, keys: list[str]) -> list[list[np.ndarray]]:
        """Return what each rank brings for each key: small integers, whose sums are exact."""
        generator = np.random.default_rng([number, self.kv.size])
        return [
            [generator.integers(-9, 9, self.values[key].shape).astype(np.float32) for key in keys]
            for _ in range(self.kv.size)
        ]

    def add(self, keys: list[str], every: list[list[np.ndarray]]) -> None:
        for place, key in enumerate(keys):
            total = np.sum([arrays[place] for arrays in every], axis=0, dtype=np.float32)
            self.values[key] = self.values[key] - np.float32(self.rate) * total if self.rate else total

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
        every = self.arrays(number, keys)
        self.kv.push(keys, every[self.kv.rank])
        self.add(keys, every)

    def pull(self, number: int, keys: list[str] | None = None) -> None:
        keys = keys or self.some()
        for key, array in zip(keys, self.kv.pull(keys), strict=True):
            assert np.array_equal(array, self.values[key]), f"{key}: {array} is not {self.values[key]}"

    def pushpull(self, number: int) -> None:
        keys = self.some()
        every = self.arrays(number, keys)
        outs = [np.empty_like(self.values[key]) for key in keys]
        self.kv.pushpull(keys, every[self.kv.rank], out=outs)
        self.add(keys, every)
        for key, out in zip(keys, outs, strict=True):
            assert np.array_equal(out, self.values[key]), f"{key}: {out} is not {self.values[key]}"

    def pending(self, number: int) -> None:
        keys = self.some()
        every = self.arrays(number, keys)
        works = [
            self.kv.push(key, array, wait=False, priority=place)
            for place, (key, array) in enumerate(zip(keys, every[self.kv.rank], strict=True))
        ]
        self.add(keys, every)
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
