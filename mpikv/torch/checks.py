"""Checks of ``attach``. Local: each rank checks its own model and options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ConfigError, Unsupported, a_kind
from ..options import check_choice, check_whole
from ..store.kvstore import KVStore
from .sharded import check_shardable
from .tensors import check_dense, tensors_of

_COMPRESSIBLE = (torch.float32, torch.float16, torch.bfloat16)

OWNER = "_mpikv_attached"
"""The attribute of a parameter for its attachment. It keeps the attachment alive as long as the parameter."""


def check_options(kv: KVStore, update: str, buffers: str, bucket_bytes: int) -> None:
    """Raise ConfigError for a bad option of ``attach``, or a store that does more than add up pushed arrays. Local."""
    check_choice("update", update, ("local", "store"))
    check_choice("buffers", buffers, ("root", "each"))
    check_whole("bucket_bytes", bucket_bytes, 1)
    if not kv._assigns or kv.compression is not None or kv.is_capable("async"):
        raise ConfigError(
            "the store has an updater or compresses, or is 'dist_async', and gradients are only added up in it; pass "
            "mpikv.create(), and compression= to attach"
        )


def check_model(model: Any, optimizers: Sequence[Any], sharded: bool, compressed: bool) -> None:
    """Raise TypeError, ConfigError or Unsupported unless a model and its optimizers can be attached. Local."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"the model is {a_kind(model)}, and not a torch.nn.Module")
    named = dict(model.named_parameters())
    for one in optimizers:
        _check_optimizer(one, named, sharded)
    members = [{one for group in optimizer.param_groups for one in group["params"]} for optimizer in optimizers]
    if sharded and len(set().union(*members)) < sum(map(len, members)):
        raise ConfigError(
            "a parameter is in two optimizers, and update='store' gives each rank one part of it; pass update='local'"
        )
    for name, tensor in tensors_of(model).items():
        if torch.nn.parameter.is_lazy(tensor):
            raise ConfigError(f"{name!r} has no shape yet, as its module is lazy; run one forward pass before attach")
    for name, parameter in named.items():
        check_parameter(name, parameter, compressed)


def _check_optimizer(optimizer: Any, named: dict[str, Any], sharded: bool) -> None:
    """Raise unless an optimizer is torch's, new, of the model's parameters, divisible if ``sharded``. Local."""
    if not (isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "_optimizer_step_pre_hooks")):
        raise TypeError(
            f"attach: the optimizer is {a_kind(optimizer)}, and not a torch.optim.Optimizer; if it wraps one, pass that"
        )
    own = set(named.values())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter not in own:
                raise ConfigError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's, so that "
                    "its gradient would stay on its rank; attach the module that has it"
                )
    if any(state.get("step", 1) for state in optimizer.state.values()):
        raise ConfigError(
            f"{type(optimizer).__name__} has made a step, or loaded its state; attach the model before the first step, "
            "or call optimizer.load_state_dict after attach"
        )
    if sharded:
        check_shardable(optimizer)


def check_parameter(name: str, parameter: Any, compressed: bool) -> None:
    """Raise ConfigError if a parameter is attached, Unsupported if not dense, or not compressible. Local."""
    if getattr(parameter, OWNER, None) is not None:
        raise ConfigError(f"the parameter {name!r} is attached already; call detach() of what attach returned first")
    check_dense(name, parameter)
    if compressed and parameter.requires_grad and parameter.dtype not in _COMPRESSIBLE:
        raise Unsupported(
            f"the parameter {name!r} is {parameter.dtype}, and compression is for float32, float16 and bfloat16; "
            "convert the model, or leave compression out"
        )
