"""NCCL's transport keeps the promises of the seam, over stand-ins for a GPU and for NCCL that check their use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from mpikv.arrays import accumulator
from mpikv.device import DeviceMemory
from mpikv.testing import TransportContract
from mpikv.testing.fakegpu import FakeGpu
from mpikv.testing.fakenccl import FakeNccl
from mpikv.testing.faulty import Wrapper
from mpikv.testing.transport import divisions
from mpikv.transports.local import LocalTransport
from mpikv.transports.nccl import NcclTransport
from mpikv.transports.shm import ShmTransport
from mpikv.typing import Array, Transport
from mpikv.waiting import Waiting
from mpikv.world import Group


class InOrder(Wrapper):
    """Makes the calls that move data as a store does: in the order of the caller's stream."""

    def ordered(self, verb: str, *arguments: Any) -> Any:
        return self.memory.in_order(getattr(self._transport, verb), *arguments)

    def reduce(self, send: Array, recv: Array, root: int) -> Sequence[Array]:
        return self.ordered("reduce", send, recv, root)

    def allreduce(self, send: Array, recv: Array) -> Sequence[Array]:
        return self.ordered("allreduce", send, recv)

    def reduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Sequence[Array]:
        return self.ordered("reduce_scatter", send, recv, counts)

    def all_to_all(self, send: Array, counts: Sequence[int] | None) -> Sequence[Array]:
        return self.ordered("all_to_all", send, counts)

    def all_gather(self, buffer: Array, counts: Sequence[int]) -> None:
        self.ordered("all_gather", buffer, counts)

    def broadcast(self, buffer: Array, root: int) -> None:
        self.ordered("broadcast", buffer, root)


def joined(
    group: Group, nccl: FakeNccl, limit: int = 4096, timeout: float = 20.0, gathers: bool = False, host: Any = None
) -> NcclTransport:
    """Return a transport over a fake, with the host's transport of the group to agree by."""
    waiting = Waiting(timeout)
    make = host or (LocalTransport if group.size == 1 else ShmTransport)
    control = make(limit) if group.size == 1 else make(group, limit, waiting)
    return NcclTransport(group, control, DeviceMemory(nccl.gpu), nccl, limit, waiting, gathers=gathers)


def faked(group: Group, patience: float = 20.0) -> FakeNccl:
    """Return NCCL for this rank, which has a GPU of its own."""
    return FakeNccl(FakeGpu(group.rank), group.comm and group.comm.Dup(), patience)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.deadline(60)
class TestNccl(TransportContract):
    gathers = False

    @pytest.fixture(autouse=True)
    def gpus(self) -> Iterator[None]:
        self._gpus: list[FakeGpu] = []
        yield
        for gpu in self._gpus:
            gpu.checker.assert_clean()

    def make(self, group: Group, limit: int, timeout: float) -> Transport:
        nccl = faked(group)
        self._gpus.append(nccl.gpu)
        return InOrder(joined(group, nccl, limit, timeout, self.gathers))

    def address(self, transport: Transport, array: Array) -> int:
        return self._gpus[-1].address(array)

    def test_sums_allocate_nothing(self, comm: Any) -> None:
        group = self.group(comm)
        transport = self.make(group, self.limit, 20.0)
        for dtype in (np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.int16)):
            send = transport.memory.source(np.ones(self.limit // dtype.itemsize, dtype))
            recv = transport.memory.source(np.empty(send.size, accumulator(dtype)))
            counts = divisions(send.size, transport.size)[0]
            transport.all_to_all(send.view(np.uint8), None)
            before = self._gpus[-1].allocations
            transport.allreduce(send, recv)
            transport.reduce(send, recv, 0)
            transport.reduce_scatter(send, recv[: counts[transport.rank]], counts)
            transport.all_to_all(send.view(np.uint8), [count * dtype.itemsize for count in counts])
            assert self._gpus[-1].allocations == before
        transport.close()
        group.close()


class TestNcclThatGathers(TestNccl):
    gathers = True
