"""Every placement keeps the promises of the seam, alone and under a store."""

import numpy as np
import pytest

import mpikv
from mpikv import KVStore, optimizers
from mpikv.cluster.process_group import ProcessGroup
from mpikv.cluster.status_board import StatusBoard
from mpikv.config import Config
from mpikv.engine.placement import Owners, Replicated, Root, Sharded, place
from mpikv.optimizers.updaters import Assign, CallableUpdater
from mpikv.protocols import Placement, Transport
from mpikv.testing import PlacementContract, Recording
from mpikv.transports import open_transport
from mpikv.transports.local import LocalTransport


class TestRoot(PlacementContract):
    whole = True

    def make(self, transport: Transport) -> Placement:
        return Root(transport, 0)


class TestLastRank(TestRoot):
    def make(self, transport: Transport) -> Placement:
        return Root(transport, transport.size - 1)


class TestOwners(PlacementContract):
    whole = True

    def make(self, transport: Transport) -> Placement:
        return Owners(transport)


class TestSharded(PlacementContract):
    def make(self, transport: Transport) -> Placement:
        return Sharded(transport)


class TestReplicated(PlacementContract):
    replicated = True

    def make(self, transport: Transport) -> Placement:
        return Replicated(transport)


class Shared(LocalTransport):
    sharing_size = 2


CALLABLE = CallableUpdater(lambda key, total, stored: None)


@pytest.mark.parametrize(
    ("name", "updater", "transport", "kind"),
    [
        ("auto", Assign(), LocalTransport, Replicated),
        ("auto", CALLABLE, LocalTransport, Root),
        ("auto", optimizers.SGD(), LocalTransport, Sharded),
        ("auto", optimizers.LAMB(), LocalTransport, Owners),
        ("root", optimizers.LAMB(), LocalTransport, Root),
        ("sharded", optimizers.LAMB(), LocalTransport, Owners),
        ("replicated", optimizers.Adam(), LocalTransport, Replicated),
        ("replicated", optimizers.Adam(), Shared, Sharded),
        ("replicated", optimizers.LAMB(), Shared, Owners),
        ("auto", Assign(), Shared, Sharded),
    ],
)
@pytest.mark.feature("placements")
def test_the_placement_is_chosen_by_the_updater(name, updater, transport, kind):
    assert type(place(name, transport(4096), updater, 0)) is kind


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("placement", "updater", "push", "pull"),
    [
        ("root", None, "reduce", "broadcast"),
        ("auto", print, "reduce", "broadcast"),
        ("auto", optimizers.SGD(), "reduce_scatter", "all_gather"),
        ("sharded", optimizers.LAMB(), "reduce", "broadcast"),
        ("replicated", optimizers.SGD(), "allreduce", None),
        ("auto", None, "allreduce", None),
    ],
)
@pytest.mark.feature("placements")
def test_collectives_of_a_store(comm, placement, updater, push, pull):
    group, config = ProcessGroup(comm), Config(transport="mpi", placement=placement, bucket_bytes=4096)
    recording = Recording(open_transport(group, config))
    store = KVStore(group, StatusBoard(group), recording, config, found=mpikv.create)
    if updater is print:
        store.set_updater(lambda key, total, stored: None)
    elif updater:
        store.set_optimizer(updater)
    store.init("w", np.zeros(1000))  # two buckets of 4096 bytes
    recording.take()
    store.push("w", np.ones(1000))
    assert recording.take() == [push] * 2
    store.pull("w")
    assert recording.take() == [pull] * 2 * bool(pull)
    store.pull("w")
    assert recording.take() == [], "every rank has this version"
    store.pushpull("w", np.ones(1000))
    assert sorted(recording.take()) == sorted([push, pull] * 2 if pull else [push] * 2)
    store.close()


@pytest.mark.ranks(2)
def test_neighbours_are_given_to_all_ranks_at_once(comm):
    group, config = ProcessGroup(comm), Config(transport="mpi")
    recording = Recording(open_transport(group, config))
    with KVStore(group, StatusBoard(group), recording, config, found=mpikv.create) as store:
        keys, values = list(range(100)), [np.full(number % 7, number, np.float32) for number in range(100)]
        store.init(keys, values)
        assert recording.take() == ["broadcast"]
        store.set(keys[50:20:-2], values[50:20:-2])
        assert recording.take() == ["broadcast"] * 11, "empty ones join neighbours, or are left out"
        for key, value in zip(keys, values, strict=True):
            np.testing.assert_array_equal(store.pull(key), value)


@pytest.mark.ranks(2, 4)
def test_a_pull_moves_nothing_in_shared_memory(comm):
    group, config = ProcessGroup(comm), Config(transport="shm")
    recording = Recording(open_transport(group, config))
    store = KVStore(group, StatusBoard(group), recording, config, found=mpikv.create)
    store.init(["a", "b"], [np.zeros(10), np.zeros((2, 2))])
    assert recording.take() == []
    store.push(["a", "b"], [np.ones(10), np.ones((2, 2))])
    assert recording.take() == ["reduce_scatter"], "small neighbours are one message"
    store.pull(["a", "b"])
    assert recording.take() == []
    store.close()
