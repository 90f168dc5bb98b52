"""The entry point by which PyTorch knows the backend ``mpikv``: ``import torch`` calls :func:`register`.

It is apart from the package, since loading any module of a package loads the package first. So ``import torch`` loads
neither mpikv nor numpy nor MPI; the first ``init_process_group("mpikv")`` does.
"""

from __future__ import annotations

import warnings
from typing import Any

__all__ = ["register"]


def register() -> None:
    """Make ``torch.distributed.init_process_group("mpikv")`` possible. Local; idempotent.

    A failure is a warning: an error would make ``import torch`` fail.
    """
    try:
        from torch import distributed

        if distributed.is_available() and "mpikv" not in distributed.Backend.backend_list:
            distributed.Backend.register_backend("mpikv", _create, extended_api=True, devices=["cpu"])
    except Exception as error:
        warnings.warn(f"PyTorch has no backend 'mpikv': {type(error).__name__}: {error}", stacklevel=2)


def _create(options: Any, of_backend: Any) -> Any:
    """Make a process group. Collective over its ranks."""
    from mpikv.torch.backend import open_process_group

    return open_process_group(options)
