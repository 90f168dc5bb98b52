"""Tensors of a model, tensors over memory of the store, and the memory of a tensor as one row."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ..errors import Unsupported
from ..protocols import Array


def tensors_of(model: Any) -> dict[str, Any]:
    """Return the parameters and buffers of a model by name, including those absent from its ``state_dict``. Local."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def check_dense(name: str, tensor: Any) -> None:
    """Raise Unsupported unless a tensor lies on the host and fills its memory, in any order of dimensions. Local.

    >>> check_dense("weight", torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    >>> check_dense("tied", torch.zeros(3).expand(2, 3))
    Traceback (most recent call last):
    mpikv.errors.Unsupported: 'tied' has strides (0, 1) for shape (2, 3), so its elements do not fill its memory; ...
    """
    if tensor.device.type != "cpu":
        raise Unsupported(
            f"{name!r} is on {tensor.device}, and mpikv.torch needs tensors of the host; call model.cpu() first, or "
            "use mpikv.Trainer, which takes tensors of GPUs"
        )
    if tensor.layout != torch.strided:
        raise Unsupported(f"{name!r} is a {tensor.layout} tensor; make it dense: tensor.to_dense()")
    if not tensor.numel():
        return
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride != expected:
            raise Unsupported(
                f"{name!r} has strides {tensor.stride()} for shape {tuple(tensor.shape)}, so its elements do not fill "
                "its memory; make a copy: tensor.clone(memory_format=torch.contiguous_format)"
            )
        expected *= length


def init_sums(kv: Any, prefix: str, keys: Sequence[str], rows: Sequence[Any], overwrite: bool = False) -> None:
    """Init keys with ``rows``, marked as sums of one step, so that no checkpoint has them. Collective."""
    kv.init(keys, rows, overwrite)
    kv._only_sums(keys, prefix)


def row_of(tensor: Any) -> Any:
    """Return a detached view of a dense tensor's memory, of one dimension, in the order of memory. Local."""
    return torch.as_strided(tensor.detach(), (tensor.numel(),), (1,))


def tensor_over(array: Array, pattern: Any) -> Any:
    """Return a tensor over the memory of a flat array, with dtype, shape and strides of ``pattern``. Local."""
    assert array.size == prod(pattern.shape)
    if pattern.dtype == torch.bfloat16:  # numpy's is a dtype of ml_dtypes, unknown to torch: pass the bits
        row = torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    else:
        row = torch.from_numpy(array)
    return torch.as_strided(row, pattern.shape, pattern.stride())
