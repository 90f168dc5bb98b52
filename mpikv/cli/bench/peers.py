"""Contenders beside the store: the same work with mpi4py and numpy alone, and the yardstick of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...protocols import Array
from .rules import Rule


class Memcpy:
    """Every rank copies its gradients to its outputs: the time to move the bytes once."""

    exact = None

    def __init__(self, gradients: Sequence[Array], outs: Sequence[Array]) -> None:
        self._pairs = list(zip(outs, gradients, strict=True))

    def step(self) -> None:
        for out, gradient in self._pairs:
            np.copyto(out, gradient)

    def results(self) -> list[Array]:
        return []

    def close(self) -> None:
        pass


class Allreduce:
    """One ``Comm.Allreduce`` of one array."""

    exact = False

    def __init__(self, comm: Any, value: Array) -> None:
        self._comm, self._value, self._out = comm, value, np.empty_like(value)

    def step(self) -> None:
        self._comm.Allreduce(self._value, self._out)

    def results(self) -> list[Array]:
        return [self._out]

    def close(self) -> None:
        pass


class ReducePerKey:
    """For each key Reduce to rank 0, an update there in blocks that fit the cache, and Bcast."""

    exact = False

    def __init__(self, comm: Any, gradients: Sequence[Array], rule: Rule) -> None:
        self._comm, self._gradients, self._apply, self._count = comm, gradients, rule.apply, 0
        self._weights = [np.ones_like(gradient) for gradient in gradients]
        flat = [weight.reshape(-1) for weight in self._weights] if comm.rank == 0 else []
        self._updated = [
            (np.empty_like(weight), weight, [np.zeros_like(weight) for _ in range(rule.states)]) for weight in flat
        ]

    def step(self) -> None:
        self._count += 1
        if self._comm.rank:
            for gradient, weight in zip(self._gradients, self._weights, strict=True):
                self._comm.Reduce(gradient, None)
                self._comm.Bcast(weight)
            return
        for gradient, (total, weight, states) in zip(self._gradients, self._updated, strict=True):
            self._comm.Reduce(gradient, total)
            self._apply(self._count, total, weight, states)
            self._comm.Bcast(weight)

    def results(self) -> list[Array]:
        return self._weights

    def close(self) -> None:
        pass
