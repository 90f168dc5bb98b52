"""A KVStore for distributed training: ``init``, ``push``, ``pull`` and an updater, over shared memory and MPI.

>>> import mpikv, numpy as np
>>> kv = mpikv.create()
>>> kv.init("w", np.zeros(3))
>>> kv.push("w", np.ones(3))
>>> kv.pull("w")
array([1., 1., 1.])
"""

from . import codecs, optimizers, schedules
from .asynchronous import AsyncKVStore
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
from .gradients import LossScaler, clip_global_norm
from .parameter import Parameter
from .plugins import KVStoreBase
from .replay import Compiled
from .rowsparse import RowSparse
from .scope import Scope
from .store import KVStore
from .storeless import AllReduce
from .trainer import Trainer
from .work import Work

__version__ = "0.1.0"

__all__ = [
    "AllReduce",
    "AsyncKVStore",
    "CheckpointError",
    "Closed",
    "Compiled",
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
