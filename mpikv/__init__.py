"""A KVStore for distributed training: ``init``, ``push``, ``pull`` and an updater, over shared memory and MPI.

>>> import mpikv, numpy as np
>>> kv = mpikv.create()
>>> kv.init("w", np.zeros(3))
>>> kv.push("w", np.ones(3))
>>> kv.pull("w")
array([1., 1., 1.])
"""

from . import codecs, optimizers, schedules
from .async_store.async_kvstore import AsyncKVStore
from .cluster.background import Work
from .create import create
from .errors import (
    CheckpointError,
    Closed,
    ConfigError,
    KeyAlreadyInitialized,
    KeyNotInitialized,
    MPIKVError,
    NotFinite,
    PeerFailed,
    RankMismatch,
    StaleGradient,
    Stalled,
    TransportError,
    TransportUnavailable,
    Unsupported,
    ValueMismatch,
)
from .memory.row_sparse import RowSparse
from .store.allreduce_store import AllReduce
from .store.capture import CapturedStep
from .store.kvstore import KVStore
from .store.plugins import KVStoreBase
from .store.scope import Scope
from .train.loss_scaling import LossScaler, clip_global_norm
from .train.parameter import Parameter
from .train.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "AllReduce",
    "AsyncKVStore",
    "CapturedStep",
    "CheckpointError",
    "Closed",
    "ConfigError",
    "KVStore",
    "KVStoreBase",
    "KeyAlreadyInitialized",
    "KeyNotInitialized",
    "LossScaler",
    "MPIKVError",
    "NotFinite",
    "Parameter",
    "PeerFailed",
    "RankMismatch",
    "RowSparse",
    "Scope",
    "StaleGradient",
    "Stalled",
    "Trainer",
    "TransportError",
    "TransportUnavailable",
    "Unsupported",
    "ValueMismatch",
    "Work",
    "clip_global_norm",
    "codecs",
    "create",
    "optimizers",
    "schedules",
]
