"""Every transport keeps the promises of the seam."""

from itertools import cycle
from typing import Any

import numpy as np
import pytest
from support.dealt import dealt

from mpikv.cluster.process_group import ProcessGroup
from mpikv.cluster.waiting import Waiting
from mpikv.config import Config
from mpikv.errors import Stalled, Unsupported
from mpikv.protocols import Group, Transport
from mpikv.testing import TransportContract
from mpikv.transports import choose, open_transport
from mpikv.transports.hierarchical import HierarchicalTransport
from mpikv.transports.local import LocalTransport
from mpikv.transports.meeting import HostGroup
from mpikv.transports.mpi import MpiTransport
from mpikv.transports.requests import Requests
from mpikv.transports.shm import ShmTransport


@pytest.mark.ranks(1)
class TestLocal(TransportContract):
    def make(self, group: ProcessGroup, limit: int, timeout: float) -> Transport:
        return LocalTransport(limit)


@pytest.mark.ranks(2, 3, 4)
class TestMpi(TransportContract):
    def make(self, group: ProcessGroup, limit: int, timeout: float) -> Transport:
        return MpiTransport(group, limit, Waiting(timeout))


@pytest.mark.ranks(2, 3, 4)
class TestMpiThatGathers(TransportContract):
    def make(self, group: ProcessGroup, limit: int, timeout: float) -> Transport:
        return MpiTransport(group, limit, Waiting(timeout), gathers=True)


@pytest.mark.ranks(2, 3, 4)
class TestShm(TransportContract):
    def make(self, group: ProcessGroup, limit: int, timeout: float) -> Transport:
        return ShmTransport(group, limit, Waiting(timeout))


@pytest.mark.ranks(2, 3, 4)
class TestShmWithoutMpi(TestShm):
    def group(self, comm: Any) -> Group:
        return HostGroup(comm.allgather, comm.rank, comm.size, 20.0)


class Chosen:
    """In place of a choice by time."""

    def __init__(self, *ways: int) -> None:
        self._ways = cycle(ways)

    def next(self) -> int:
        return next(self._ways)

    def took(self, way: int, seconds: float, amount: int) -> None:
        assert seconds >= 0 < amount


class TestShmThatLends(TestShm):
    """Every rank reads what others have where it lies."""

    ways = (1, 1)

    def make(self, group: ProcessGroup, limit: int, timeout: float) -> Transport:
        transport = super().make(group, limit, timeout)
        if not transport.single_copy:
            pytest.skip("the system does not let ranks read each other's memory")
        transport._large = 1
        transport._choice = transport._choice_of_gather = Chosen(*self.ways[group.rank % 2 :])
        return transport


class TestShmThatChanges(TestShmThatLends):
    """Ranks lend and copy as they like."""

    ways = (0, 1, 1, 0, 1)


@pytest.mark.ranks(2, 3, 4)
class TestHosts(TransportContract):
    """On several hosts of one rank each."""

    def group(self, comm: Any) -> ProcessGroup:
        return ProcessGroup(comm, 1)

    def make(self, group: ProcessGroup, limit: int, timeout: float) -> Transport:
        return HierarchicalTransport(group, limit, Waiting(timeout))


class TestHostsOfTwo(TestHosts):
    """With three ranks one host has less, and with two there is one host."""

    def group(self, comm: Any) -> ProcessGroup:
        return ProcessGroup(comm, 2)


class TestHostsInTurn(TestHosts):
    """The ranks are dealt to two hosts, so that no host has neighbouring ones."""

    def group(self, comm: Any) -> ProcessGroup:
        with dealt(comm):
            return ProcessGroup(comm)


@pytest.mark.ranks(1, 2, 4)
def test_the_transport_is_chosen_by_where_the_ranks_are(comm):
    group = ProcessGroup(comm)
    expected = {"local"} if comm is None else {"shm"}
    transport = open_transport(group, Config(bucket_bytes=4096))
    assert {transport.name} == expected == {choose(group, Config())[0]}
    transport.close()
    group.close()


@pytest.mark.ranks(2, 4)
def test_the_transport_of_one_rank_is_refused_for_more(comm):
    group = ProcessGroup(comm)
    with pytest.raises(Unsupported, match="'local' is for one rank"):
        choose(group, Config(transport="local"))
    group.close()


@pytest.mark.ranks(2, 4)
def test_shm_sums_what_lies_in_the_send_buffer_where_it_lies(comm):
    """Preparing a sum in the send buffer is there to save a copy."""
    group = ProcessGroup(comm)
    transport = ShmTransport(group, 1 << 20, Waiting(20.0))
    send = transport.send_buffers[transport.slot].view(np.float32)
    copied = []
    original = np.copyto
    np.copyto = lambda *arguments, **options: (copied.append(1), original(*arguments, **options))
    try:
        transport.allreduce(send, np.empty(send.size, np.float32))
    finally:
        np.copyto = original
    assert not copied
    transport.close()
    group.close()


@pytest.mark.ranks(2, 3, 4)
def test_a_rank_that_gave_up_is_not_heard_by_the_next_group(comm: Any) -> None:
    """MPI gives a new communicator the number of one that was freed, and with it the messages that nobody received."""
    group = ProcessGroup(comm)
    if comm.rank == 0:
        with pytest.raises(Stalled):
            Requests(group, Waiting(0.05)).until(lambda: False, tuple)
    comm.Barrier()
    group.close()
    following = ProcessGroup(comm)
    Requests(following, Waiting(5)).check()
    following.close()
