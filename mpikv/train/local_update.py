"""Updates that a Trainer makes itself, where its weights lie: on the host, or on a GPU, on the present stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays.arrays import accumulator, zeros
from ..checkpoint import KeptState
from ..errors import ConfigError, Unsupported
from ..optimizers import Optimizer
from ..protocols import Array, Key
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
            kept, memory, weight = self.states[name], parameter.memory, parameter.data
            assert parameter.grad is not None
            total = self._memory_of_sum(parameter)
            memory.copy((total,), (parameter.grad,))
            value = weight
            if not weight.flags.c_contiguous:
                value = memory.empty(weight.shape, weight.dtype)
                memory.copy((value,), (weight,))
            if parameter.gpu is None:
                optimizer.update(step, total, value, kept.state)
            else:
                with parameter.gpu.current():  # which need not be that of the thread's present GPU
                    parameter.gpu.kernels().bind(optimizer, total, value, kept.state)(step)
            if value is not weight:
                memory.copy((weight,), (value,))
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

    def _memory_of_sum(self, parameter: Parameter) -> Array:
        """Return memory for the sum of the gradients of a weight; on the host always the same."""
        weight, dtype = parameter.data, accumulator(parameter.data.dtype)
        if parameter.gpu is not None:
            return parameter.gpu.empty(weight.shape, dtype)
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
        parameter.memory.copy((kept.state["master"],), (parameter.data,))


def _zeros_like(parameter: Parameter, dtype: np.dtype[Any]) -> Array:
    weight = parameter.data
    return parameter.memory.zeros(weight.size * dtype.itemsize).view(dtype).reshape(weight.shape)
