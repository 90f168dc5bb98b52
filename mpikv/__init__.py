"""A KVStore for distributed training: ``init``, ``push``, ``pull`` and an updater, over shared memory and MPI.

>>> import mpikv, numpy as np
>>> kv = mpikv.create()
>>> kv.init("w", np.zeros(3))
>>> kv.push("w", np.ones(3))
>>> kv.pull("w")
array([1., 1., 1.])
"""

import importlib
import typing

from . import optimizers
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
from .errors import (
    no_attribute as _no_attribute,
)
from .memory.row_sparse import RowSparse
from .store.allreduce_store import AllReduce
from .store.kvstore import KVStore
from .store.plugins import KVStoreBase
from .store.scope import Scope

if typing.TYPE_CHECKING:
    from . import codecs, schedules
    from .async_store.async_kvstore import AsyncKVStore
    from .checkpoint import SaveWork
    from .store.capture import CapturedStep
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
    "SaveWork",
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

# Loaded at first use: few programs need them, and that saves a third of the import time beyond numpy's.
_PLACES = {
    "AsyncKVStore": "async_store.async_kvstore",
    "CapturedStep": "store.capture",
    "LossScaler": "train.loss_scaling",
    "Parameter": "train.parameter",
    "SaveWork": "checkpoint",
    "Trainer": "train.trainer",
    "clip_global_norm": "train.loss_scaling",
}


def __getattr__(name: str) -> typing.Any:
    if name in ("codecs", "schedules"):
        return importlib.import_module(f".{name}", __name__)
    if name not in _PLACES:
        hint = "see mpikv.schedules" if "scheduler" in name.lower() else ""
        raise _no_attribute("name in mpikv", name, __all__, hint)
    found = globals()[name] = getattr(importlib.import_module(f".{_PLACES[name]}", __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
