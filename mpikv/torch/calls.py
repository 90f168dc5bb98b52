"""Calls of the store that several modules make: a mean loss, a comparison with advice, and errors of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import RankMismatch, TransportError, is_marked

if TYPE_CHECKING:
    from ..store.kvstore import KVStore


def mean_loss(kv: KVStore, loss: Any) -> Any:
    """Return the mean of a loss over ranks, or anything but one number unchanged. Collective for a number.

    Collective for a number, and for a tensor or array of one element. A tensor stays a tensor of its shape, without a
    graph. Any other value, such as None, is returned unchanged, locally. Optimizers such as LBFGS decide by the loss
    that the closure of a step returns: all ranks must decide alike.
    """
    is_tensor = isinstance(loss, torch.Tensor) and loss.numel() == 1
    if not (is_tensor or isinstance(loss, Real) or (isinstance(loss, np.ndarray) and loss.size == 1)):
        return loss
    mean = kv.mean(loss if isinstance(loss, Real) else loss.item())
    return torch.full_like(loss, mean, requires_grad=False) if is_tensor else mean


def check_equal(kv: KVStore, text: str, verb: str, advice: str) -> None:
    """Raise RankMismatch on all ranks, with advice before the difference, unless all give one text. Collective."""
    try:
        kv.check_equal(text, verb)
    except RankMismatch as error:
        error.args = (f"{verb}: {advice}: {str(error).removeprefix(f'{verb}: ')}",)
        raise


@contextmanager
def raising_on_all(kv: KVStore, verb: str) -> Iterator[None]:
    """In a with block: raise its error on all ranks, on the others in their next call. Collective if it raises.

    An error of a store's call passes unchanged: all ranks know of it, or the store has ended.
    """
    try:
        yield
    except Exception as error:
        if is_marked(error, "settled") or isinstance(error, TransportError):
            raise
        kv.raise_on_all_ranks(error, verb)
