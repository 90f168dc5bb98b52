"""Contenders on GPUs: the store on GPU arrays, NCCL and kernels by themselves, and copies as a yardstick."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np

from mpikv import optimizers
from mpikv.cli.bench.keysets import KeySet
from mpikv.cli.bench.rounds import Contender
from mpikv.protocols import Array

from .gpus import RankGpu
from .rules import Rule


class OnGpu:
    """A contender with results on the GPU."""

    def __init__(self, own: RankGpu, contender: Contender) -> None:
        self.exact, self.step, self.close = contender.exact, contender.step, contender.close
        self._own, self._contender = own, contender

    def results(self) -> Iterator[Array]:
        return map(self._own.download, self._contender.results())


class Copy:
    """CUDA's own copy on the GPU: the time to move the bytes once."""

    exact = None

    def __init__(self, own: RankGpu, source: Array) -> None:
        self._own, self._source, self._out = own, source, own.filled(source.shape, np.nan)

    def step(self) -> None:
        np.copyto(self._out, self._source)

    def results(self) -> list[Array]:
        return [self._own.download(self._out)]

    def close(self) -> None:
        pass


class Nccl:
    """NCCL's allReduce of one array, called as in nccl-tests: with existing buffers, out of place."""

    exact = False

    def __init__(self, own: RankGpu, value: Array) -> None:
        """Collective."""
        self.out = own.filled(value.shape, np.nan)  # NaN: an unwritten element must not look like a sum
        nccl, comm, gpu = own.find_nccl(), own.communicator(), own.gpu
        places = gpu.address(value), gpu.address(self.out)
        self._own, self._value = own, value
        self.step = partial(comm.allReduce, *places, value.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, own.stream.handle)

    def results(self) -> list[Array]:
        return [self._own.download(self.out)]

    def close(self) -> None:
        pass


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
        self._reduce = Nccl(own, gradients)
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
