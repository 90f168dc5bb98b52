"""The loss returned by the closure of a step. Optimizers such as LBFGS decide by it; all ranks must decide alike."""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from ..store.kvstore import KVStore


def mean_loss(kv: KVStore, loss: Any) -> Any:
    """Return the mean of a loss over ranks, or anything but one number unchanged. Collective for a number.

    Collective for a number, and for a tensor or array of one element. A tensor stays a tensor of its shape, without a
    graph. Any other value, such as None, is returned unchanged, locally.
    """
    is_tensor = isinstance(loss, torch.Tensor) and loss.numel() == 1
    if not (is_tensor or isinstance(loss, Real) or (isinstance(loss, np.ndarray) and loss.size == 1)):
        return loss
    mean = kv.mean(loss if isinstance(loss, Real) else loss.item())
    return torch.full_like(loss, mean, requires_grad=False) if is_tensor else mean
