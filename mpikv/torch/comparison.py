"""Texts that ranks compare: their models and the settings of their optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .tensors import tensors_of


def describe_tensors(model: Any) -> list[str]:
    """Return a line per parameter and buffer: name, dtype, shape, strides, trained or fixed; to be compared. Local."""
    return [
        f"{name} {str(one.dtype).removeprefix('torch.')}{list(one.shape)}"
        + ("" if one.is_contiguous() else f" strides {one.stride()}")
        + (" trained" if one.requires_grad else " fixed")
        for name, one in tensors_of(model).items()
    ]


def settings_of(optimizers: Sequence[Any], named: Mapping[str, Any]) -> list[str]:
    """Return a line for each setting and parameter of optimizers, for ranks to compare. Local."""
    names = {parameter: name for name, parameter in named.items()}
    lines = []
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            of = f"{type(optimizer).__name__}, group {number}:"
            lines += [f"{of} {name} {comparable(value)}" for name, value in group.items() if name != "params"]
            lines += [f"{of} {names.get(parameter, 'a frozen parameter')}" for parameter in group["params"]]
    return lines


def comparable(value: Any) -> Any:
    """Return a setting to compare: tensors, arrays, tuples as lists; a dict or object as its type's name. Local.

    A tensor or array without dimensions becomes a number. The repr of an object may hold an address.
    """
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return list(map(comparable, value))
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__
