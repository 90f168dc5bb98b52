"""Ranks of any hosts: MPI's own collectives over host memory.

Messages are at most a bucket: both widespread libraries slow down threefold on larger ones, for which they allocate
temporary memory in every call. What has no MPI type (half precision) is summed in float32; bytes are moved as bytes.

Every call is MPI's nonblocking one and a wait of ours, which gives up the core and has a deadline. At the size of a
bucket that costs nothing that could be measured; on small messages some microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..arrays import accumulator, zeros
from ..errors import Stalled, TransportError
from ..typing import Array
from ..waiting import Waiting
from ..world import Group

__all__ = ["MpiTransport"]

# The tag of the message of a rank that has given up.
_GONE = 1


class MpiTransport:
    """The transport for ranks on several hosts."""

    name = "mpi"
    shared = False

    def __init__(self, group: Group, limit: int, waiting: Waiting) -> None:
        """Collective. ``limit`` is in bytes."""
        from mpi4py import MPI

        self.rank, self.size, self.limit = group.rank, group.size, limit
        self._mpi, self._comm, self._waiting = MPI, group.comm, waiting
        self._outbox = zeros(limit)
        # Half-precision messages become twice as large.
        self._widened = zeros(2 * limit).view(np.float32)
        self._offered, self._highest = np.empty(2, np.int64), np.empty(2, np.int64)

    def allocate(self, nbytes: int) -> Array:
        try:
            memory = zeros(nbytes)
        except MemoryError:
            memory = None
        if not self.agree(memory is not None) or memory is None:
            raise MemoryError(f"{nbytes} bytes for values were asked for and a rank has too little memory")
        return memory

    def outbox(self, nbytes: int) -> Array:
        return self._outbox[:nbytes]

    def reduce(self, send: Array, recv: Array, root: int) -> None:
        received = recv if self.rank == root else None
        with self._translated("reduce"):
            self._complete(self._comm.Ireduce(self._wide(send), received, self._operation(send), root))

    def allreduce(self, send: Array, recv: Array) -> None:
        with self._translated("allreduce"):
            self._complete(self._comm.Iallreduce(self._wide(send), recv, self._operation(send)))

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> None:
        with self._translated("reduce_scatter"):
            self._complete(self._comm.Ireduce_scatter(self._wide(send), recv, counts, self._operation(send)))

    def all_gather(self, buffer: Array, counts: Sequence[int]) -> None:
        nbytes = [count * buffer.itemsize for count in counts]
        starts = [sum(nbytes[:rank]) for rank in range(self.size)]
        parts = [buffer.view(np.uint8), (nbytes, starts), self._mpi.BYTE]
        with self._translated("all_gather"):
            self._complete(self._comm.Iallgatherv(self._mpi.IN_PLACE, parts))

    def broadcast(self, buffer: Array, root: int) -> None:
        whole = buffer.view(np.uint8)
        with self._translated("broadcast"):
            for begin in range(0, whole.size, self.limit):
                self._complete(self._comm.Ibcast(whole[begin : begin + self.limit], root))

    def fence(self) -> None:
        pass

    def agree(self, token: int) -> bool:
        # All are equal exactly when the largest token is the smallest; one maximum finds both.
        self._offered[:] = token, -token
        with self._translated("agree"):
            self._complete(self._comm.Iallreduce(self._offered, self._highest, self._mpi.MAX))
            # MPICH's first probe only makes progress, by which the second sees the message.
            if self._comm.Iprobe(tag=_GONE) or self._comm.Iprobe(tag=_GONE):
                raise Stalled("other ranks have given up waiting for this one")
        return bool(self._highest[0] == -self._highest[1])

    def close(self) -> None:
        self._comm = None

    def _wide(self, send: Array) -> Array:
        wider = accumulator(send.dtype)
        if wider == send.dtype:
            return send
        widened = self._widened[: send.size]
        np.copyto(widened, send)
        return widened

    def _operation(self, send: Array) -> Any:
        return self._mpi.LOR if send.dtype == np.bool_ else self._mpi.SUM

    def _complete(self, request: Any) -> None:
        try:
            self._waiting.until(request.Test, tuple)
        except Stalled:
            # A rank that comes later finds its collective complete; this tells it that it is alone.
            farewells = [self._comm.Isend(b"", rank, _GONE) for rank in range(self.size) if rank != self.rank]
            self._mpi.Request.Testall(farewells)
            raise

    @contextmanager
    def _translated(self, operation: str) -> Iterator[None]:
        try:
            yield
        except self._mpi.Exception as error:
            raise TransportError(f"MPI failed in {operation}: {error}") from error
