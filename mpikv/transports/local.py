"""One rank: a sum is a copy. Needs no MPI library."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import zeros
from ..typing import Array

__all__ = ["LocalTransport"]


class LocalTransport:
    """The transport of a store with a single rank."""

    name = "local"
    rank = 0
    size = 1
    shared = False

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._outbox = zeros(limit)

    def allocate(self, nbytes: int) -> Array:
        return zeros(nbytes)

    def outbox(self, nbytes: int) -> Array:
        return self._outbox[:nbytes]

    def reduce(self, send: Array, recv: Array, root: int) -> None:
        np.copyto(recv, send, casting="safe")

    def allreduce(self, send: Array, recv: Array) -> None:
        np.copyto(recv, send, casting="safe")

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> None:
        np.copyto(recv, send, casting="safe")

    def all_gather(self, buffer: Array, counts: Sequence[int]) -> None:
        pass  # the only part is in place

    def broadcast(self, buffer: Array, root: int) -> None:
        pass  # the root has it

    def fence(self) -> None:
        pass

    def agree(self, token: int) -> bool:
        return True

    def close(self) -> None:
        self._outbox = zeros(0)
