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

if typing.TYPE_CHECKING:
    from . import codecs, optimizers, schedules
    from .async_store.async_kvstore import AsyncKVStore
    from .checking.opening import checked
    from .checkpoint.saving import SaveWork
    from .cluster.background import Work
    from .creation import create
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
    from .keep.commits import Restored
    from .memory.row_sparse import RowSparse
    from .store.allreduce_store import AllReduce
    from .store.capture import CapturedStep
    from .store.kvstore import KVStore
    from .store.plugins import KVStoreBase
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
    "Restored",
    "RowSparse",
    "SaveWork",
    "StaleGradient",
    "Stalled",
    "Trainer",
    "TransportError",
    "TransportUnavailable",
    "Unsupported",
    "ValueMismatch",
    "Work",
    "checked",
    "clip_global_norm",
    "codecs",
    "create",
    "optimizers",
    "schedules",
]

# Loaded at first use: ``import torch`` asks this package for its entry point, and may not wait for numpy or a store.
_PLACES = {
    "AllReduce": "store.allreduce_store",
    "AsyncKVStore": "async_store.async_kvstore",
    "CapturedStep": "store.capture",
    "KVStore": "store.kvstore",
    "KVStoreBase": "store.plugins",
    "LossScaler": "train.loss_scaling",
    "Parameter": "train.parameter",
    "Restored": "keep.commits",
    "RowSparse": "memory.row_sparse",
    "SaveWork": "checkpoint.saving",
    "Trainer": "train.trainer",
    "Work": "cluster.background",
    "checked": "checking.opening",
    "clip_global_norm": "train.loss_scaling",
    "create": "creation",
}
_MODULES = ("codecs", "optimizers", "schedules")


def __getattr__(name: str) -> typing.Any:
    """Import a name of ``__all__`` at its first use, keep it here, and return it; AttributeError for other names."""
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in __all__:
        from .errors import no_attribute

        hint = "see mpikv.schedules" if "scheduler" in name.lower() else ""
        raise no_attribute("name in mpikv", name, __all__, hint)
    found = globals()[name] = getattr(importlib.import_module(f".{_PLACES.get(name, 'errors')}", __name__), name)
    return found


def __dir__() -> list[str]:
    """Return all names, those not imported yet included, sorted."""
    return sorted({*globals(), *__all__})
