"""The entry point by which PyTorch knows the backend ``mpikv``: ``import torch`` calls :func:`register`.

It imports nothing else of the package, which loads its names at first use. So ``import torch`` loads neither a store
nor MPI; the first ``init_process_group("mpikv")`` does.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any


def register() -> None:
    """Register the backend ``mpikv`` with torch.distributed, if it is not; warn if that fails. Local.

    A failure is a warning: an error would make ``import torch`` fail.
    """
    try:
        from torch import distributed

        if distributed.is_available() and "mpikv" not in distributed.Backend.backend_list:
            distributed.Backend.register_backend("mpikv", _create, extended_api=True, devices=["cpu"])
    except Exception as error:
        warnings.warn(f"PyTorch has no backend 'mpikv': {type(error).__name__}: {error}", stacklevel=2)


def _create(options: Any, of_backend: Any) -> Any:
    """Return a new process group of torch.distributed; imports mpikv.torch now. Collective over its ranks.

    PyTorch calls it, with its ``DistributedBackendOptions``.

    Raises:
        Unsupported: PyTorch is older than 2.7, or nothing can join these ranks.
        Stalled: not all ranks have come.
    """
    return import_module("mpikv.torch.backend.group").MpikvProcessGroup(options)
