"""Wrappers of a transport: a test observes its calls, or acts before one."""

from __future__ import annotations

from collections.abc import Sequence

from ..protocols import Array, Transport

__all__ = ["Recording", "Wrapper"]


class Wrapper:
    """Passes every call on; before a call that waits for other ranks, it calls :meth:`before`."""

    data = ("reduce", "allreduce", "reduce_scatter", "all_to_all", "all_gather", "broadcast")
    """The calls that move data; ranks make them only after an agreement."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.name, self.rank, self.size = transport.name, transport.rank, transport.size
        self.shared, self.limit = transport.shared, transport.limit
        self.sharing_size, self.sharing_rank, self.single_copy = (
            transport.sharing_size,
            transport.sharing_rank,
            transport.single_copy,
        )
        self.memory = transport.memory

    def before(self, call: str) -> None:
        """Act before the collective with that name."""

    @property
    def control(self) -> Transport:
        return self if self.memory.is_host else self._transport.control

    def allocate(self, nbytes: int) -> Array:
        return self._transport.allocate(nbytes)

    @property
    def send_buffers(self) -> tuple[Array, ...]:
        return self._transport.send_buffers

    @property
    def slot(self) -> int:
        return self._transport.slot

    def reduce(self, send: Array, recv: Array, root: int) -> Sequence[Array]:
        self.before("reduce")
        return self._transport.reduce(send, recv, root)

    def allreduce(self, send: Array, recv: Array) -> Sequence[Array]:
        self.before("allreduce")
        return self._transport.allreduce(send, recv)

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Sequence[Array]:
        self.before("reduce_scatter")
        return self._transport.reduce_scatter(send, recv, counts)

    def all_to_all(self, send: Array, counts: Sequence[int] | None) -> Sequence[Array]:
        self.before("all_to_all")
        return self._transport.all_to_all(send, counts)

    def all_gather(self, buffer: Array, counts: Sequence[int]) -> None:
        self.before("all_gather")
        self._transport.all_gather(buffer, counts)

    def broadcast(self, buffer: Array, root: int) -> None:
        self.before("broadcast")
        self._transport.broadcast(buffer, root)

    def fence(self) -> None:
        self.before("fence")
        self._transport.fence()

    def agree(self, token: int, send_ready: bool = False) -> bool:
        self.before("agree")
        return self._transport.agree(token, send_ready)

    def close(self) -> None:
        self._transport.close()


class Recording(Wrapper):
    """Passes every call on, and records the collectives that moved data.

    Example:
        >>> import numpy as np
        >>> from mpikv.transports.local import LocalTransport
        >>> transport = Recording(LocalTransport(4096))
        >>> (total,) = transport.allreduce(np.ones(2), np.zeros(2))
        >>> transport.take()
        ['allreduce']
        >>> transport.take()
        []
    """

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.calls: list[str] = []
        """The names of these collectives, in order."""

    def before(self, call: str) -> None:
        if call in self.data:
            self.calls.append(call)

    def take(self) -> list[str]:
        """Return the calls since the last time."""
        taken, self.calls = self.calls, []
        return taken
