"""Updates that a Trainer makes itself, where its weights lie: on the host, or on a GPU, on the present stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .arrays import accumulator, zeros
from .checkpoint import KeptState
from .optimizers import Optimizer
from .parameter import Parameter
from .typing import Array, Gpu

__all__ = ["Updates", "fetched", "new_state", "prepare", "restart_master", "sent"]


def new_state(optimizer: Optimizer, parameter: Parameter) -> KeptState:
    """Return what the first update of a weight begins with."""
    shape, gpu = parameter.data.shape, parameter.gpu
    slots = optimizer.slots(parameter.data.dtype)
    held = KeptState(
        {
            slot: np.zeros(shape, dtype) if gpu is None else _zeros(gpu, parameter.data.size, dtype).reshape(shape)
            for slot, dtype in slots.items()
        }
    )
    restart_master(held, parameter)
    return held


def _zeros(gpu: Gpu, size: int, dtype: np.dtype[Any]) -> Array:
    return gpu.zeros(size * dtype.itemsize).view(dtype)


def restart_master(held: KeptState, parameter: Parameter) -> None:
    """Copy a weight into the float32 master that the optimizer keeps of it here, if it does."""
    if "master" not in held.state:
        return
    if parameter.gpu is None:
        np.copyto(held.state["master"], parameter.data, casting="unsafe")
    else:
        parameter.gpu.copy((held.state["master"],), (parameter.data,))


def prepare(optimizer: Optimizer, parameters: Iterable[Parameter]) -> None:
    """Compile what the updates of weights on GPUs need, unless it is there.

    Raises:
        Unsupported: there is no kernel for the optimizer, or for a dtype.
        TransportUnavailable: nothing can be compiled here.
    """
    kinds = {(parameter.gpu, parameter.data.dtype) for parameter in parameters if parameter.gpu is not None}
    for gpu, dtype in kinds:
        gpu.kernels().prepare(optimizer, dtype, False)


def fetched(held: KeptState, parameter: Parameter) -> KeptState:
    """Return the state in numpy's arrays."""
    gpu = parameter.gpu
    if gpu is None:
        return held
    state = {slot: np.empty(array.shape, array.dtype) for slot, array in held.state.items()}
    for slot, array in state.items():
        gpu.download(held.state[slot], array)
    return KeptState(state, held.count)


def sent(held: KeptState, parameter: Parameter) -> KeptState:
    """Return the state, given in numpy's arrays, where the weight lies."""
    gpu = parameter.gpu
    if gpu is None:
        return held
    return KeptState({slot: gpu.upload(array) for slot, array in held.state.items()}, held.count)


class Updates:
    """Makes updates one after the other."""

    def __init__(self) -> None:
        self._scratch = np.empty(0, np.uint8)

    def update(self, optimizer: Optimizer, step: Any, held: KeptState, parameter: Parameter) -> None:
        """Update one weight; the gradient, which a rule overwrites, is kept for the caller."""
        gradient, weight = parameter.grad, parameter.data
        assert gradient is not None
        if parameter.gpu is None:
            self._on_host(optimizer, step, held, gradient, weight)
        else:
            _on_gpu(parameter.gpu, optimizer, step, held, gradient, weight)
        held.count += 1

    def _on_host(self, optimizer: Optimizer, step: Any, held: KeptState, gradient: Array, weight: Array) -> None:
        dtype = accumulator(weight.dtype)
        if self._scratch.size < weight.size * dtype.itemsize:
            self._scratch = zeros(weight.size * dtype.itemsize)
        total = self._scratch[: weight.size * dtype.itemsize].view(dtype).reshape(weight.shape)
        np.copyto(total, gradient, casting="same_kind")
        value = np.ascontiguousarray(weight).reshape(weight.shape)
        optimizer.update(step, total, value, held.state)
        if not weight.flags.c_contiguous:
            weight[...] = value


def _on_gpu(gpu: Gpu, optimizer: Optimizer, step: Any, held: KeptState, gradient: Array, weight: Array) -> None:
    total = gpu.empty(weight.shape, accumulator(weight.dtype))
    gpu.copy((total,), (gradient,))
    value = weight
    if not weight.flags.c_contiguous:
        value = gpu.empty(weight.shape, weight.dtype)
        gpu.copy((value,), (weight,))
    gpu.kernels().bind(optimizer, total, value, held.state)(step)
    if value is not weight:
        gpu.copy((weight,), (value,))
