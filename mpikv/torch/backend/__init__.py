"""PyTorch's process groups on mpikv: ``torch.distributed.init_process_group("mpikv")``.

``group`` has the calls of a process group, and ``queue`` the handle of a call, and the thread that makes the calls for
which nobody waits. ``tensors`` shows tensors as flat arrays. ``rendezvous`` finds the ranks of a group. The module
``mpikv.torch_backend`` registers all this with PyTorch, and loads it at the first process group.
"""

import torch

from ...errors import Unsupported

# Before, C++ holds no reference to a Python Work: the call of a functional collective would never end.
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7):  # the version of a build may be 2.7.0a0+git
    raise Unsupported(
        f"the backend 'mpikv' needs PyTorch 2.7 or newer and this is {torch.__version__}; mpikv.torch.attach works "
        "from 2.4 on"
    )
