"""Stores on several hosts, which are one: who is taken for a host's rank, what is shared there, and what leaves it."""

import ctypes
import os
import platform
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support.dealt import dealt, shared_files

import mpikv
from mpikv.cluster import shared_memory
from mpikv.cluster.process_group import ProcessGroup
from mpikv.cluster.waiting import Waiting
from mpikv.config import Config
from mpikv.errors import Closed, ConfigError, PeerFailed, RankMismatch, Stalled, TransportError, Unsupported
from mpikv.transports import choose
from mpikv.transports.hierarchical import HierarchicalTransport

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from chaos_program import Program

SEVERAL = pytest.mark.ranks(2, 3, 4)
VARIABLE = "MPIKV_SIMULATE_RANKS_PER_HOST"


# --- Hosts that are pretended


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("most", [0, 1, 2, 3, 100])
def test_a_group_on_hosts_of_so_many_ranks(comm, ranks, most):
    group = ProcessGroup(comm, most)
    size = min(most or ranks, ranks)
    expected = tuple(tuple(range(first, min(first + size, ranks))) for first in range(0, ranks, size))
    assert group.ranks_of_hosts == expected
    assert group.host_ranks == expected[group.rank // size]
    assert group.local_rank == group.rank % size
    assert len(group.hosts) == len(expected)
    assert group.one_host is (len(expected) == 1)
    memory = group.allocate(8)
    memory[group.local_rank] = 1 + group.rank
    if comm:
        comm.Barrier()
    assert list(memory[: len(group.host_ranks)]) == [1 + rank for rank in group.host_ranks]
    del memory
    group.close()


@SEVERAL
def test_a_closed_group_shares_nothing_more(comm):
    group = ProcessGroup(comm)
    group.close()
    with pytest.raises(Closed, match="this group of ranks is closed"):
        group.allocate(8)


@pytest.mark.processes
@SEVERAL
def test_a_closed_store_that_is_still_held_keeps_no_memory(comm):
    before = shared_files()
    kv = mpikv.create(comm=comm)
    during = shared_files()
    kv.close()
    assert during - before
    assert not shared_files() - before


@SEVERAL
@pytest.mark.parametrize("bad", [{"name": "locla"}, {"timeout": -1}, {"transport": "ethernet"}])
def test_a_rank_with_bad_arguments_has_other_settings(comm, monkeypatch, bad):
    """It cannot know into what hosts the others split, and makes the same collective calls."""
    monkeypatch.setenv(VARIABLE, "1")
    for culprit in range(comm.size):
        with pytest.raises((ConfigError, PeerFailed)) as caught:
            mpikv.create(**(bad if comm.rank == culprit else {}))
        assert isinstance(caught.value, ConfigError) is (comm.rank == culprit)
    with mpikv.create() as kv:
        kv.init("w", np.ones(3))
        np.testing.assert_array_equal(kv.pull("w"), np.ones(3))


@SEVERAL
@pytest.mark.parametrize("said", ["several", "-1"])
def test_a_rank_with_a_bad_variable(comm, monkeypatch, said):
    monkeypatch.setenv(VARIABLE, said if comm.rank == 1 else "1")
    with pytest.raises(ConfigError if comm.rank == 1 else PeerFailed, match=r"(?i)simulate_ranks_per_host"):
        mpikv.create()
    monkeypatch.setenv(VARIABLE, "1")
    mpikv.create().close()


@SEVERAL
def test_ranks_of_different_opinions(comm, monkeypatch):
    monkeypatch.setenv(VARIABLE, "1" if comm.rank == comm.size - 1 else "2")
    with pytest.raises(RankMismatch, match="simulate_ranks_per_host 2 on rank 0, 1 on rank"):
        mpikv.create()


# --- The choice


@SEVERAL
def test_the_choice_on_several_hosts(comm, ranks, simulate_ranks_per_host):
    group = ProcessGroup(comm, simulate_ranks_per_host)
    many = "hierarchical", "ranks on 2 hosts"
    assert choose(group, Config()) == many
    assert choose(group, Config(transport="mpi")) == ("mpi", "asked for")
    assert choose(group, Config(transport="hierarchical")) == ("hierarchical", "asked for")
    assert choose(group, Config(deterministic=True))[0] == "mpi"
    with pytest.raises(Unsupported, match="needs all ranks on one host and they are on 2; use 'auto'"):
        choose(group, Config(transport="shm"))
    with pytest.raises(Unsupported, match="'hierarchical' sums on each host first, and deterministic=True"):
        choose(group, Config(transport="hierarchical", deterministic=True))
    group.close()


@SEVERAL
def test_several_hosts_are_asked_for_on_one(comm):
    with pytest.raises(Unsupported, match="'hierarchical' is for several hosts and all ranks are on one"):
        mpikv.create(transport="hierarchical")


@pytest.mark.ranks(3, 4)
def test_a_store_chooses_hosts_by_itself(comm, monkeypatch, simulate_ranks_per_host):
    monkeypatch.setenv(VARIABLE, str(simulate_ranks_per_host))
    with mpikv.create() as kv:
        assert kv.transport == "hierarchical"
        assert kv.placement == "sharded", "a copy of the values for each rank would be one copy twice"
    with mpikv.create(deterministic=True) as kv:
        assert (kv.transport, kv.placement) == ("mpi", "replicated")


@pytest.mark.ranks(2, 3, 4)
def test_sums_between_hosts_are_sharded_unless_compressed(comm, monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    with mpikv.create(bucket_bytes=4096) as kv:
        kv.init(["v", "w"], [np.zeros((2, 3)), np.zeros(9000, np.float32)])
        for codec, placement in ((None, "sharded"), ("bf16", "replicated"), (None, "sharded")):
            kv.push("w", np.full(9000, kv.rank + 1, np.float32))  # the others have no new value yet
            kv.set_gradient_compression(codec)
            assert kv.placement == placement
            assert (kv.pull("w") == sum(range(comm.size + 1))).all()


@pytest.mark.processes
@SEVERAL
def test_ranks_that_see_other_files_are_on_other_hosts(comm):
    with dealt(comm), mpikv.create() as kv:
        assert (kv.transport, kv.local_rank) == ("hierarchical", comm.rank // 2)
    with dealt(comm), pytest.raises(Unsupported, match="'shm' needs all ranks on one host and they are on 2"):
        mpikv.create(transport="shm")


@pytest.mark.processes
@SEVERAL
@pytest.mark.parametrize("placement", ["root", "sharded", "replicated"])
def test_shared_memory_has_no_name(comm, placement):
    with mpikv.create(transport="shm", placement=placement) as kv:
        assert (kv.transport, kv.local_rank, kv._group.hosts) == ("shm", comm.rank, (platform.node(),))
        kv.init("w", np.ones(100_000))
        kv.push("w", np.full(100_000, kv.rank + 1.0))
        np.testing.assert_array_equal(kv.pull("w"), np.full(100_000, kv.size * (kv.size + 1) / 2))
        kept = kv.view("w")
        kv.barrier()
    assert (kept == kv.size * (kv.size + 1) / 2).all()
    assert not [*Path("/dev/shm").glob(f"mpikv-{os.getpid()}-*")]


@pytest.mark.processes
@SEVERAL
def test_shared_memory_that_cannot_be_had(comm, monkeypatch):
    """Every rank hears of it, and what to do."""
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(shared_memory, "_open_memory", refuse)
    with pytest.raises(TransportError if comm.rank == comm.size - 1 else (TransportError, PeerFailed)) as caught:
        mpikv.create(transport="shm")
    assert f"rank {comm.size - 1} cannot share memory with other ranks of this machine: no such" in str(caught.value)


def refuse(path, nbytes, *, new):
    raise OSError("no such directory")


# --- Values


@pytest.mark.ranks(3, 4)
def test_a_host_has_one_copy_of_the_values(comm, monkeypatch, simulate_ranks_per_host):
    monkeypatch.setenv(VARIABLE, str(simulate_ranks_per_host))
    with mpikv.create(timeout=10) as kv:
        kv.init("w", np.zeros(8))
        value = np.ctypeslib.as_array((ctypes.c_double * 8).from_address(kv.view("w").ctypes.data))
        kv.barrier()
        value[kv.local_rank] = kv.rank + 1
        kv.barrier()
        first = kv.rank - kv.local_rank
        host = range(first, min(first + simulate_ranks_per_host, kv.size))
        assert list(value) == [rank + 1 for rank in host] + [0] * (8 - len(host))
        kv.barrier()


@pytest.mark.processes
@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("placement", ["auto", "root", "sharded", "replicated"])
def test_values_of_ranks_that_are_dealt_to_hosts_in_turn(comm, placement):
    options = {"transport": "auto", "placement": placement, "bucket_bytes": 4096, "timeout": 10.0}
    with dealt(comm):
        Program(comm, f"in turn {placement}", **options).run(60)


# --- Memory


@pytest.mark.processes
@pytest.mark.ranks(3, 4)  # a rank that is alone on its host shares no memory
def test_one_host_has_too_little_memory(comm, monkeypatch, simulate_ranks_per_host):
    monkeypatch.setenv(VARIABLE, str(simulate_ranks_per_host))
    kv = mpikv.create(transport="hierarchical", bucket_bytes=4096, timeout=10)
    short, held = list(kv._group.ranks_of_hosts[0]), shared_files()
    with monkeypatch.context() as poor:
        if kv.rank in short:
            poor.setattr("mpikv.cluster.shared_memory._free_bytes", lambda: 1 << 20)
        with pytest.raises(MemoryError) as caught:
            kv.init("large", np.zeros(4 << 20, np.int8))
    said = str(caught.value)
    assert f"ranks {short} have too little memory (" in said
    assert "of shared memory are needed and /dev/shm has" in said
    assert "set MPIKV_TRANSPORT=mpi" in said
    # The other hosts have given back what they had.
    del caught
    assert not shared_files() - held
    kv.init("small", np.ones(5))
    kv.push("small", np.ones(5))
    np.testing.assert_array_equal(kv.pull("small"), np.full(5, kv.size))
    kv.close()


# --- A rank that does not come


@pytest.mark.processes
@SEVERAL
@pytest.mark.parametrize("elements", [64, 1 << 18])
def test_a_rank_comes_late_to_a_sum(comm, simulate_ranks_per_host, elements):
    """The others have begun messages, which are never finished; all can go on without the transport, and end."""
    group = ProcessGroup(comm, simulate_ranks_per_host)
    transport, late = HierarchicalTransport(group, 1 << 20, Waiting(0.3)), comm.size - 1
    send = np.ones(elements, np.float32)
    counts = [elements // comm.size + (elements % comm.size) * (rank == 0) for rank in range(comm.size)]

    def sum_and_agree():
        transport.reduce_scatter(send, send.copy(), counts)
        transport.agree(1)

    started = time.monotonic()
    if comm.rank == late:
        comm.Barrier()
        with pytest.raises(Stalled, match="given up"):
            sum_and_agree()
    else:
        with pytest.raises(Stalled) as caught:
            sum_and_agree()
        # A neighbour is seen to be missing, and may be missing because it waits itself; of another host only that a
        # message does not come.
        assert (late in caught.value.missing) == (late in group.host_ranks)
        assert set(caught.value.missing) <= set(group.host_ranks)
        comm.Barrier()
    assert time.monotonic() - started < 5
    transport.close()
    group.close()
    with mpikv.create(timeout=10) as kv:
        kv.init("w", np.zeros(3))
        kv.push("w", np.ones(3))
        np.testing.assert_array_equal(kv.pull("w"), np.full(3, comm.size))


# --- Traffic


class Counting:
    """A communicator that counts what is sent through it between hosts."""

    def __init__(self, comm, host_of):
        self._comm, self._host_of = comm, host_of
        self.sent, self.messages = 0, 0

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def Isend(self, message, rank, tag):  # noqa: N802
        assert self._host_of[rank] != self._host_of[self._comm.rank], "a message stays on its host"
        self.sent, self.messages = self.sent + memoryview(message).nbytes, self.messages + 1
        return self._comm.Isend(message, rank, tag)


@pytest.mark.processes
@pytest.mark.ranks(4)
@pytest.mark.parametrize("per_host", [1, 2])
@pytest.mark.parametrize(("elements", "pieces"), [(4096, 1), (1 << 16, 2)])
def test_what_leaves_a_host(comm, per_host, elements, pieces):
    """For a sum of m bytes, (H - 1) / H of it, however many ranks the host has; and as much on the way back. Open MPI
    sends it in pieces, less than 64 KiB each, which it sends over TCP at once.
    """
    group = ProcessGroup(comm, per_host)
    openmpi = "Open MPI" in group.mpi.Get_library_version()
    hosts = group.size // per_host
    group.comm = counting = Counting(group.comm, [rank // per_host for rank in range(group.size)])
    transport = HierarchicalTransport(group, elements * 4, Waiting(10))
    memory = transport.allocate(elements * 4).view(np.float32)
    counts = [elements // group.size] * group.size
    even = (hosts - 1) * elements * 4 // hosts
    recv = np.empty(counts[0], np.float32)
    for verb, arguments, expected in [
        ("reduce_scatter", (np.ones(elements, np.float32), recv, counts), even),
        ("all_gather", (memory, counts), even),
        ("reduce", (np.ones(elements, np.float32), np.empty(elements, np.float32), 0), None),
        ("broadcast", (memory, 0), None),
    ]:
        counting.sent = counting.messages = 0
        getattr(transport, verb)(*arguments)
        sent = np.array([counting.sent if group.host_ranks[0] == first else 0 for first in range(group.size)])
        sent = comm.allreduce(sent)[::per_host]
        if expected is not None:
            assert list(sent) == [expected] * hosts
            assert counting.messages == (hosts - 1) * (pieces if openmpi else 1)
        elif per_host == 1:  # MPI's trees carry these, not one rank
            assert not sent.any()
        else:
            assert sent.sum() == (hosts - 1) * elements * 4
            assert (sent > 0).sum() in (1, hosts - 1)
    transport.close()
    group.comm = counting._comm
    group.close()


@pytest.mark.ranks(2, 3)
def test_messages_that_nobody_waits_for_are_a_mistake(comm):
    group = ProcessGroup(comm, 1)
    transport = HierarchicalTransport(group, 64, Waiting(10))
    memory = transport.allocate(128)
    with pytest.raises(AssertionError, match="nobody has waited for"), transport.apart():
        transport.broadcast(memory, 0)  # in two messages, of which sent() returns the last
    transport.close()
    group.close()
