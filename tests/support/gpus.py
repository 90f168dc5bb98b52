"""Stores on GPUs that are none."""

from __future__ import annotations

from typing import Any

from mpikv.cluster.connecting import connect
from mpikv.cluster.status_board import StatusBoard
from mpikv.config import Config
from mpikv.memory.device import DeviceMemory
from mpikv.store.kvstore import KVStore
from mpikv.testing.fakegpu import FakeGpu
from mpikv.testing.fakekernels import FakeKernels
from mpikv.testing.fakenccl import FakeNccl
from mpikv.transports import open_gpu_transport


def store_on(gpu: FakeGpu, comm: Any, root: int = 0, **options: Any) -> KVStore:
    """Return a store on a GPU; of several ranks, which move data by a stand-in for NCCL. Collective."""
    config = Config.read(**{"bucket_bytes": 1 << 14, **options})
    group = connect(comm, config)
    board = StatusBoard(group)
    nccl = FakeNccl(gpu, comm.Dup()) if comm else None
    mover = open_gpu_transport(group, config, DeviceMemory(gpu), nccl, board.warn)
    return KVStore(group, board, mover, config, root=root, kernels=FakeKernels(gpu))


def nccl_of(kv: KVStore) -> FakeNccl:
    """Return the stand-in for NCCL of a store of several ranks, whose operations wait briefly for each other."""
    nccl: FakeNccl = kv._transport._nccl  # type: ignore[attr-defined]
    nccl.patience = 0.3
    return nccl


def order_of(kv: KVStore) -> Any:
    """Return the order of the work of a store on a GPU, and of its callers' streams."""
    return kv._transport.memory.order


def entry_of(kv: KVStore, key: Any) -> Any:
    """Return what a store knows of a key."""
    return kv._exchange.values.table[key]
