"""PyTorch's process groups on mpikv: ``torch.distributed.init_process_group("mpikv")``.

``group`` has the calls of a process group, and ``queue`` the handle of a call, and the thread that makes the calls for
which nobody waits. ``tensors`` shows tensors as flat arrays. ``rendezvous`` finds the ranks of a group. The module
``mpikv.torch_backend`` registers all this with PyTorch, and loads it at the first process group.
"""

from __future__ import annotations

from typing import Any

import torch

from ...errors import Unsupported

# Before, C++ holds no reference to a Python Work: the call of a functional collective would never end.
_OLDEST = (2, 7)


def open_process_group(options: Any) -> Any:
    """Return a new process group. Collective over its ranks; PyTorch calls it, with its ``DistributedBackendOptions``.

    Raises:
        Unsupported: PyTorch is older than 2.7, or nothing can join these ranks.
        Stalled: not all ranks have come.
    """
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _OLDEST:
        raise Unsupported(
            f"the backend 'mpikv' needs PyTorch 2.7 or newer and this is {torch.__version__}; mpikv.torch.attach works "
            "from 2.4 on"
        )
    from .group import MpikvProcessGroup

    return MpikvProcessGroup(options)
