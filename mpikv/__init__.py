"""A KVStore for distributed training: ``init``, ``push``, ``pull`` and an updater, over shared memory and MPI.

>>> import mpikv, numpy as np
>>> kv = mpikv.create()
>>> kv.init("w", np.zeros(3))
>>> kv.push("w", np.ones(3))
>>> kv.pull("w")
array([1., 1., 1.])
"""

from . import codecs, optimizers, schedules
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
    Stalled,
    TransportError,
    TransportUnavailable,
    Unsupported,
    ValueMismatch,
)
from .registry import create
from .store import KVStore
from .work import Work

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Closed",
    "ConfigError",
    "KVStore",
    "KeyAlreadyInitialized",
    "KeyNotInitialized",
    "MPIKVError",
    "NotFinite",
    "PeerFailed",
    "RankMismatch",
    "Stalled",
    "TransportError",
    "TransportUnavailable",
    "Unsupported",
    "ValueMismatch",
    "Work",
    "codecs",
    "create",
    "optimizers",
    "schedules",
]
