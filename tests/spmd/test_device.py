"""A store on a GPU that is none: the contract of a store, with the order of its work checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mpikv.board import Board
from mpikv.config import Config
from mpikv.device import DeviceMemory
from mpikv.store import KVStore
from mpikv.testing import StoreContract
from mpikv.testing.fakegpu import FakeGpu, FakeKernels
from mpikv.transports.local import LocalTransport
from mpikv.world import connect


def store_on(gpu: FakeGpu, comm: Any, root: int = 0, **options: Any) -> KVStore:
    config = Config.read(**options)
    group = connect(comm, config)
    mover = LocalTransport(1 << 16, DeviceMemory(gpu))
    return KVStore(group, Board(group), mover, config, root=root, kernels=FakeKernels(gpu))


class TestOnAGpu(StoreContract):
    sparse = False

    @pytest.fixture(autouse=True)
    def on_gpu(self, comm: Any) -> Iterator[None]:
        self.gpu, self.comm = FakeGpu(), comm
        yield
        self.gpu.checker.assert_clean()

    def create(self, **options: Any) -> KVStore:
        return store_on(self.gpu, self.comm, **options)
