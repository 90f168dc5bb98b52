"""Transports with messages in GPU memory: a store's way to call them, and their further promises."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ..arrays.arrays import accumulator
from ..protocols import Array, Transport
from .transport import TransportContract, divisions
from .wrappers import Wrapper

__all__ = ["DeviceTransportContract", "InOrder"]


class InOrder(Wrapper):
    """Runs the calls that move data as a store does: in the order of the caller's stream."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        for verb in self.data:
            setattr(self, verb, partial(self.memory.order.run, getattr(transport, verb)))


class DeviceTransportContract(TransportContract):
    """The promises of a :class:`mpikv.protocols.Transport` with messages on a GPU. ``make`` returns it in
    :class:`InOrder`.
    """

    def allocations(self) -> int:
        """Return the number of allocations on this rank's GPU so far."""
        raise AssertionError("a subclass of DeviceTransportContract defines allocations()")

    def address(self, transport: Transport, array: Array) -> int:
        gpu: Any = transport.memory
        return int(gpu.gpu.address(array))

    def test_sums_allocate_nothing(self, comm: Any) -> None:
        group = self.group(comm)
        transport = self.make(group, self.limit, 20.0)
        for dtype in (np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.int16)):
            send = transport.memory.source(np.ones(self.limit // dtype.itemsize, dtype))
            recv = transport.memory.source(np.empty(send.size, accumulator(dtype)))
            counts = divisions(send.size, transport.size)[0]
            transport.all_to_all(send.view(np.uint8), None)
            before = self.allocations()
            transport.allreduce(send, recv)
            transport.reduce(send, recv, 0)
            transport.reduce_scatter(send, recv[: counts[transport.rank]], counts)
            transport.all_to_all(send.view(np.uint8), [count * dtype.itemsize for count in counts])
            assert self.allocations() == before
        transport.close()
        group.close()
