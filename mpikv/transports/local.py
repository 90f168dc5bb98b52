"""One rank: a sum is a copy. Needs no MPI library."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import mark
from ..memory.host import HOST
from ..protocols import Array, Memory
from .unshared import Unshared
from .watchdog import Watchdog


class LocalTransport(Unshared):
    """The transport of a store with a single rank."""

    name = "local"
    rank = 0
    size = 1

    def __init__(self, limit: int, memory: Memory = HOST, watchdog: Watchdog | None = None) -> None:
        """Allocate a send buffer of ``limit`` bytes in ``memory``; keep the watchdog, for :meth:`close`. Local."""
        self.limit, self.memory, self._watchdog = limit, memory, watchdog
        self.send_buffers: tuple[Array, ...] = (memory.zeros(limit),)
        self.slot = 0

    @property
    def control(self) -> LocalTransport:
        """The transport by which ranks agree: this one, or for GPU memory a host's, a new one at each access. Local."""
        # Of a GPU's memory a new one for the host: arrays of agreements are numpy's.
        return self if self.memory.is_host else LocalTransport(self.limit)

    def allocate(self, nbytes: int) -> Array:
        """Return zeros in this transport's memory, the host's or the GPU's; if there is too little, raise MemoryError,
        marked as known to all ranks. Local.
        """
        try:
            return self.memory.zeros(nbytes)
        except MemoryError as error:
            mark(error, "settled")  # this rank is all ranks: they agree on the failure
            raise

    def reduce(self, send: Array, recv: Array, root: int) -> Sequence[Array]:
        """Return (send,), uncopied; on a GPU copy it to ``recv``, cast if need be, and return (recv,). Local."""
        return self.allreduce(send, recv)

    def allreduce(self, send: Array, recv: Array, op: str = "") -> Sequence[Array]:
        """Return (send,), uncopied; on a GPU copy it to ``recv``, cast if need be, and return (recv,). Local."""
        if self.memory.is_host:
            return (send,)
        if send is not recv:
            self.memory.copy((recv,), (send,))
        return (recv,)

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int], op: str = "") -> Sequence[Array]:
        """Return (send,), uncopied; on a GPU copy it to ``recv``, cast if need be, and return (recv,). Local."""
        return self.allreduce(send, recv)

    def all_to_all(self, send: Array, counts: Sequence[int] | None) -> Sequence[Array]:
        """Return (send,): the only rank has sent to itself. Local."""
        return (send,)

    def exchange(self, sends: Sequence[Array], receives: Sequence[Array]) -> None:
        """Copy the only array of ``sends`` to that of ``receives``, cast where the dtypes differ. Local."""
        self.memory.copy(receives, sends)

    def all_gather(self, buffer: Array, counts: Sequence[int]) -> None:
        """Do nothing: the only part is in place. Local."""

    def broadcast(self, buffer: Array, root: int) -> None:
        """Do nothing: the only rank is the root. Local."""

    def agree(self, token: int, send_ready: bool = False) -> bool:
        """Return True: this rank is all ranks. Local."""
        return True

    def close(self) -> None:
        """Wait for the GPU's work, if any, and release the buffer and the streams; tell the watchdog to end. Local."""
        self.send_buffers = (np.empty(0, np.uint8),)
        self.memory.order.close()
        if self._watchdog is not None:
            self._watchdog.stop()
