"""Training of PyTorch models: gradients are averaged over ranks while backward computes them.

A script of one process needs three lines, and ``mpikv run -n 4 train.py`` to start it::

    import mpikv.torch
    mpikv.torch.attach(model, optimizer)        # after both are made, before the first step
    sampler = mpikv.torch.sampler(dataset)      # this rank's share of the data

A script with ``torch.distributed`` needs one other word, ``init_process_group("mpikv")``, and not even this import.

Tensors lie on the host.
"""

from ..errors import TransportUnavailable

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise TransportUnavailable(
        f"mpikv.torch needs PyTorch, which cannot be imported ({error}); pip install 'mpikv[torch]' installs it"
    ) from error

from ..cluster.connecting import set_rank_variables_of_mpiexec as _name_rank
from ..torch_backend import register as _register
from .attached import Attached, attach
from .data import broadcast, sampler
from .loops import steps

__all__ = ["Attached", "attach", "broadcast", "sampler", "steps"]

_register()  # of a PyTorch that knows no entry points, or of a copy of mpikv that is not installed
_name_rank()
