"""The loss returned by the closure of a step. Optimizers such as LBFGS decide by it; all ranks must decide alike."""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np
import torch

from ..store.kvstore import KVStore
from .tensors import init_sums


class MeanLoss:
    """The mean of losses over ranks, as one process with the whole batch would have it."""

    def __init__(self, kv: KVStore, prefix: str) -> None:
        """Collective."""
        self._kv, self._key, self._row = kv, f"{prefix}*loss", np.zeros(1)
        init_sums(kv, prefix, [self._key], [self._row])

    def of(self, loss: Any) -> Any:
        """Return the mean of a number, or of a tensor or array of one element. A tensor stays a tensor of its shape,
        without a graph. Any other value, such as None, is returned unchanged. Collective if ``loss`` is a number.
        """
        is_tensor = isinstance(loss, torch.Tensor) and loss.numel() == 1
        if not (is_tensor or isinstance(loss, Real) or (isinstance(loss, np.ndarray) and loss.size == 1)):
            return loss
        self._row[:] = loss.item() if is_tensor else loss
        self._kv.pushpull(self._key, self._row, self._row)
        mean = self._row.item() / self._kv.size
        return torch.full_like(loss, mean, requires_grad=False) if is_tensor else mean
