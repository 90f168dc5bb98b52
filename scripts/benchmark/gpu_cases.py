"""Contenders on GPUs: the store on GPU arrays, NCCL and kernels by themselves, and copies as a yardstick."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import numpy as np

from mpikv import optimizers
from mpikv.cli.bench.keysets import KeySet
from mpikv.cli.bench.rounds import Contender
from mpikv.protocols import Array

from .gpus import RankGpu
from .rules import Rule

COLLECTIVES = ("allReduce", "reduce,broadcast", "reduceScatter", "allGather", "reduce", "broadcast")
"""The collectives of NCCL that are timed by themselves."""


def bus_factor(collectives: str, size: int) -> float:
    """Return the factor from bytes/time to the bus bandwidth, as nccl-tests defines it; for several collectives in
    turn, the sum of their factors.

    >>> bus_factor("allReduce", 4), bus_factor("reduceScatter", 4), bus_factor("reduce,broadcast", 4)
    (1.5, 0.75, 2.0)

    Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    passed = (size - 1) / size
    of_one = {"allReduce": 2 * passed, "reduceScatter": passed, "allGather": passed, "reduce": 1.0, "broadcast": 1.0}
    return sum(of_one[name] for name in collectives.split(","))


class OnGpu:
    """A contender with results on the GPU."""

    def __init__(self, own: RankGpu, contender: Contender) -> None:
        self.exact, self.step, self.close = contender.exact, contender.step, contender.close
        self._own, self._contender = own, contender

    def results(self) -> Iterator[Array]:
        return map(self._own.download, self._contender.results())


class Copy:
    """CUDA's own copy on the GPU: the time to move the bytes once."""

    def __init__(self, own: RankGpu, source: Array, *, checked: bool = False) -> None:
        """``checked``: the source equals the oracle's result."""
        self.exact = True if checked else None
        self._own, self._source, self._out = own, source, own.filled(source.shape, np.nan)

    def step(self) -> None:
        np.copyto(self._out, self._source)

    def results(self) -> list[Array]:
        return [self._own.download(self._out)]

    def close(self) -> None:
        pass


class Pack(Copy):
    """A copy in many parts by one launch, as a message packs the arrays of keys."""

    def __init__(self, own: RankGpu, source: Array, parts: int) -> None:
        super().__init__(own, source, checked=True)
        bounds = [source.size * part // parts for part in range(parts + 1)]
        self._pairs = [[array[low:high] for low, high in pairwise(bounds)] for array in (self._out, self._source)]

    def step(self) -> None:
        self._own.gpu.copy(*self._pairs)


class Nccl:
    """One of :data:`COLLECTIVES` on one array, called as in nccl-tests: with existing buffers, out of place if it has
    two. Missing steps to a sum on every rank run before or after, and are not timed.
    """

    exact = False

    def __init__(self, own: RankGpu, collectives: str, value: Array) -> None:
        """Collective. The number of elements is a multiple of the number of ranks."""
        self.out = own.filled(value.shape, np.nan)  # NaN: an unwritten element must not look like a sum
        nccl, comm, stream = own.find_nccl(), own.communicator(), own.stream.handle
        count, part = value.size, value.size // own.size
        send, recv = own.gpu.address(value), own.gpu.address(self.out)
        mine, sort = recv + own.rank * part * value.itemsize, (nccl.NCCL_FLOAT32, nccl.NCCL_SUM)
        calls: dict[str, Callable[[], object]] = {
            "allReduce": partial(comm.allReduce, send, recv, count, *sort, stream),
            "reduce": partial(comm.reduce, send, recv, count, *sort, 0, stream),
            "broadcast": partial(comm.broadcast, recv, recv, count, sort[0], 0, stream),
            "reduceScatter": partial(comm.reduceScatter, send, mine, part, *sort, stream),
            "allGather": partial(comm.allGather, mine, recv, part, sort[0], stream),
        }
        if (before := _BEFORE.get(collectives)) is not None:
            calls[before]()
        self._own, self._value = own, value
        self._calls = [calls[name] for name in collectives.split(",")]
        self._after = [calls[name] for name in _AFTER.get(collectives, ())]

    def step(self) -> None:
        for call in self._calls:
            call()

    def results(self) -> list[Array]:
        for call in self._after:
            call()
        return [self._own.download(self.out)]

    def close(self) -> None:
        pass


_BEFORE = {"broadcast": "reduce", "allGather": "reduceScatter"}
_AFTER = {"reduce": ("broadcast",), "reduceScatter": ("allGather",)}


class Update:
    """The kernel of an optimizer on one array of weights, all ones at first."""

    def __init__(self, own: RankGpu, rule: Rule, total: Array) -> None:
        """``total`` is the gradient of every update.

        Raises:
            Unsupported: the optimizer has no kernel.
        """
        self.exact = rule.name == "sgd"
        updater = optimizers.create(rule.name, **rule.options)
        self._own, self._weight, self._count, self._updater = own, own.ones(total.shape), 0, updater
        slots = updater.slots(self._weight.dtype)
        state = {name: own.filled(total.shape, 0, dtype) for name, dtype in slots.items()}
        own.kernels.prepare(updater, self._weight.dtype, False)
        self._launch = own.kernels.bind(updater, total, self._weight, state)

    def step(self) -> None:
        self._count += 1
        self._launch(self._updater.step(0, self._count))

    def results(self) -> list[Array]:
        return [self._own.download(self._weight)]

    def close(self) -> None:
        pass


class FlatUpdate:
    """The least work there is: one allReduce sums all gradients in one array, and one kernel updates all weights in one
    array.
    """

    exact = False

    def __init__(self, own: RankGpu, keys: KeySet, rule: Rule, gradients: Array) -> None:
        """Collective. Any number of elements is allowed."""
        self._reduce = Nccl(own, "allReduce", gradients)
        self._update, self._keys = Update(own, rule, self._reduce.out), keys

    def step(self) -> None:
        self._reduce.step()
        self._update.step()

    def results(self) -> list[Array]:
        (whole,) = self._update.results()
        ends = np.cumsum([math.prod(shape) for shape in self._keys.shapes])
        parts = np.split(whole, ends[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self._keys.shapes, strict=True)]

    def close(self) -> None:
        pass


class Tiled:
    """A contender on an array of equal tiles; the oracle knows one tile."""

    def __init__(self, contender: Contender, tiles: int) -> None:
        self.exact, self.step, self.close = contender.exact, contender.step, contender.close
        self._contender, self._tiles = contender, tiles

    def results(self) -> Iterator[Array]:
        for whole in self._contender.results():
            yield common_part(whole, self._tiles)


def common_part(whole: Array, tiles: int) -> Array:
    """Return the common content of all parts of an array, with NaN where two differ.

    >>> common_part(np.array([1.0, 2.0, 1.0, 3.0]), 2)
    array([ 1., nan])
    """
    parts = whole.reshape(tiles, -1)
    return np.where((parts == parts[0]).all(axis=0), parts[0], np.nan)
