"""Updates that a Trainer makes itself, where its weights lie: on the host, or on a GPU, on the present stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays.arrays import accumulator, zeros
from ..checkpoint import KeptState
from ..errors import ConfigError, Unsupported
from ..optimizers import Optimizer
from ..protocols import Array, Gpu, Key
from .parameter import Parameter

__all__ = ["LocalUpdate", "can_update", "place_state"]


def can_update(optimizer: Optimizer, parameter: Parameter) -> bool:
    """Return whether an optimizer updates values of a parameter's dtype."""
    try:
        optimizer.slots(parameter.data.dtype)
    except Unsupported:
        return False
    return True


class LocalUpdate:
    """The state that optimizers keep of parameters on this rank, and their updates."""

    def __init__(self) -> None:
        self.states: dict[Key, KeptState] = {}
        """By the name of the parameter; of those that an update was prepared for."""
        self._scratch = np.empty(0, np.uint8)

    def prepare(self, optimizer: Optimizer, parameters: Mapping[str, Parameter]) -> list[Any]:
        """Return the optimizer's step for each parameter; make or check its state, and compile what GPUs need.

        Raises:
            ConfigError: the optimizer was changed to keep other state.
            Unsupported: there is no kernel for the optimizer, or for a dtype.
            TransportUnavailable: nothing can be compiled here.
        """
        for gpu, dtype in {(one.gpu, one.data.dtype) for one in parameters.values()}:
            if gpu is not None:
                gpu.kernels().prepare(optimizer, dtype, False)
        for name, parameter in parameters.items():
            self.states[name] = self._state(optimizer, name, parameter)
        return [optimizer.step(name, self.states[name].count + 1) for name in parameters]

    def run(self, optimizer: Optimizer, parameters: Mapping[str, Parameter], steps: Sequence[Any]) -> None:
        """Update the weights by the prepared steps. The gradients, which a rule overwrites, are kept for the caller."""
        for (name, parameter), step in zip(parameters.items(), steps, strict=True):
            kept, gpu, weight = self.states[name], parameter.gpu, parameter.data
            assert parameter.grad is not None
            total = self._memory_of_sum(gpu, weight)
            _copy(gpu, total, parameter.grad)
            value = weight
            if not weight.flags.c_contiguous:
                value = _empty(gpu, weight.shape, weight.dtype)
                _copy(gpu, value, weight)
            if gpu is None:
                optimizer.update(step, total, value, kept.state)
            else:
                gpu.kernels().bind(optimizer, total, value, kept.state)(step)
            if value is not weight:
                _copy(gpu, weight, value)
            kept.count += 1

    def restart_master(self, name: str, parameter: Parameter) -> None:
        """Copy a weight into the float32 master that the optimizer keeps of it here, if it does."""
        if name in self.states:
            _restart_master(self.states[name], parameter)

    def on_host(self, optimizer: Optimizer, name: Key, parameter: Parameter) -> KeptState:
        """Return the state of a parameter in numpy's arrays. What has none yet is given none: its weight may be set
        until its first update.
        """
        kept, gpu = self._state(optimizer, name, parameter), parameter.gpu
        if gpu is None:
            return kept
        state = {slot: np.empty(array.shape, array.dtype) for slot, array in kept.state.items()}
        for slot, array in state.items():
            gpu.download(kept.state[slot], array)
        return KeptState(state, kept.count)

    def _state(self, optimizer: Optimizer, name: Key, parameter: Parameter) -> KeptState:
        """Return the state of a parameter, or what its first update would begin with."""
        slots = optimizer.slots(parameter.data.dtype)
        kept = self.states.get(name)
        if kept is None:
            kept = KeptState({slot: _zeros_like(parameter, dtype) for slot, dtype in slots.items()})
            _restart_master(kept, parameter)
        elif slots.keys() != kept.state.keys():
            raise ConfigError(
                f"the optimizer was changed to keep {sorted(slots)} per element and there is "
                f"{sorted(kept.state)}; make a new Trainer, whose state starts anew"
            )
        return kept

    def _memory_of_sum(self, gpu: Gpu | None, weight: Array) -> Array:
        """Return memory for the sum of the gradients of a weight; on the host always the same."""
        dtype = accumulator(weight.dtype)
        if gpu is not None:
            return gpu.empty(weight.shape, dtype)
        nbytes = weight.size * dtype.itemsize
        if self._scratch.size < nbytes:
            self._scratch = zeros(nbytes)
        return self._scratch[:nbytes].view(dtype).reshape(weight.shape)


def place_state(kept: KeptState, parameter: Parameter) -> KeptState:
    """Return the state, given in numpy's arrays, where the weight lies."""
    gpu = parameter.gpu
    if gpu is None:
        return kept
    return KeptState({slot: gpu.upload(array) for slot, array in kept.state.items()}, kept.count)


def _restart_master(kept: KeptState, parameter: Parameter) -> None:
    if "master" in kept.state:
        _copy(parameter.gpu, kept.state["master"], parameter.data)


def _zeros_like(parameter: Parameter, dtype: np.dtype[Any]) -> Array:
    weight, gpu = parameter.data, parameter.gpu
    if gpu is None:
        return np.zeros(weight.shape, dtype)
    return gpu.zeros(weight.size * dtype.itemsize).view(dtype).reshape(weight.shape)


def _empty(gpu: Gpu | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return np.empty(shape, dtype) if gpu is None else gpu.empty(shape, dtype)


def _copy(gpu: Gpu | None, target: Array, source: Array) -> None:
    if gpu is None:
        np.copyto(target, source, casting="unsafe")
    else:
        gpu.copy((target,), (source,))
