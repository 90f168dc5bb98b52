"""Training of PyTorch models: gradients are averaged over ranks while backward computes them.

A script of one process needs three lines, and ``mpikv run -n 4 train.py`` to start it::

    import mpikv.torch
    mpikv.torch.attach(model, optimizer)        # after both are made, before the first step
    sampler = mpikv.torch.sampler(dataset)      # this rank's share of the data

Tensors lie on the host.
"""

from __future__ import annotations

from ..errors import TransportUnavailable

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise TransportUnavailable(
        f"mpikv.torch needs PyTorch, which cannot be imported ({error}); pip install 'mpikv[torch]' installs it"
    ) from error

from .attached import Attached, attach
from .data import broadcast, sampler

__all__ = ["Attached", "attach", "broadcast", "sampler"]
