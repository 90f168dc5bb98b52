"""The Trainer's own updates, on the device of the weights: the host, or a GPU's current stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays.arrays import accumulator, zeros
from ..checkpoint.checkpoints import KeptState
from ..errors import Unsupported
from ..optimizers import Optimizer
from ..optimizers.updaters import check_state
from ..protocols import Array, Key
from .parameter import Parameter


def can_update(optimizer: Optimizer, parameter: Parameter) -> bool:
    """Return whether an optimizer can update values of a parameter's dtype; it may log a warning once. Local."""
    try:
        optimizer.slots(parameter.data.dtype)
    except Unsupported:
        return False
    return True


class LocalUpdate:
    """The optimizer's state for the parameters of this rank, and their updates. Local."""

    def __init__(self) -> None:
        self.states: dict[Key, KeptState] = {}
        """The states by the parameter's name; only parameters with a prepared update have one."""
        self._scratch = np.empty(0, np.uint8)

    def prepare(self, optimizer: Optimizer, parameters: Mapping[str, Parameter]) -> list[Any]:
        """Return the optimizer's step for each parameter; make and keep missing states, check others, compile kernels
        of GPUs. Local.

        Raises:
            ConfigError: the optimizer has changed and needs other state.
            Unsupported: there is no kernel for the optimizer, or for a dtype.
            TransportUnavailable: this process cannot compile kernels.
        """
        for gpu, dtype in {(one.gpu, one.data.dtype) for one in parameters.values()}:
            if gpu is not None:
                gpu.kernels().prepare(optimizer, dtype, False)
        for name, parameter in parameters.items():
            self.states[name] = self._state(optimizer, name, parameter)
        return [optimizer.step(name, self.states[name].count + 1) for name in parameters]

    def run(self, optimizer: Optimizer, parameters: Mapping[str, Parameter], steps: Sequence[Any]) -> None:
        """Update weights in place by prepared steps, counted in the states; gradients stay. Queued on a GPU. Local."""
        for (name, parameter), step in zip(parameters.items(), steps, strict=True):
            kept, memory, weight = self.states[name], parameter.memory, parameter.data
            assert parameter.grad is not None
            total = self._memory_of_sum(parameter)
            # A copy: a rule may overwrite its sum, and the gradient is the caller's.
            memory.copy((total,), (parameter.grad,))
            value = weight
            # Rules and kernels take flat memory: a weight with gaps is updated in a copy.
            if not weight.flags.c_contiguous:
                value = memory.empty(weight.shape, weight.dtype)
                memory.copy((value,), (weight,))
            if parameter.gpu is None:
                optimizer.update(step, total, value, kept.state)
            else:
                with parameter.gpu.current():  # the thread's current GPU may be another one
                    parameter.gpu.kernels().bind(optimizer, total, value, kept.state)(step)
            if value is not weight:
                memory.copy((weight,), (value,))
            # After the update: a rule that raised has made no step.
            kept.count += 1

    def state_on_host(self, optimizer: Optimizer, name: Key, parameter: Parameter) -> KeptState:
        """Return a parameter's state and count, in numpy arrays: its own, or copies of a GPU's, waited for. If it has
        none, new ones, not kept. Local.
        """
        # A parameter without state gets it at its first update, and not here: its weight may still be set, and the
        # master would keep the old one.
        kept, gpu = self._state(optimizer, name, parameter), parameter.gpu
        if gpu is None:
            return kept
        return KeptState({slot: gpu.download(array) for slot, array in kept.state.items()}, kept.count)

    def _state(self, optimizer: Optimizer, name: Key, parameter: Parameter) -> KeptState:
        """Return a parameter's state, or a new one, not kept; ConfigError if the optimizer needs another. Local."""
        kept, weight = self.states.get(name), parameter.data
        if kept is not None:
            check_state(optimizer, weight.dtype, kept.state)
            return kept
        slots, zeros_of = optimizer.slots(weight.dtype), parameter.memory.zeros
        rows = {slot: zeros_of(weight.size * dtype.itemsize).view(dtype) for slot, dtype in slots.items()}
        kept = KeptState({slot: row.reshape(weight.shape) for slot, row in rows.items()})
        restart_master(kept, parameter)
        return kept

    def _memory_of_sum(self, parameter: Parameter) -> Array:
        """Return memory of any content for a sum of gradients; on the host all parameters share it. Local."""
        weight, dtype = parameter.data, accumulator(parameter.data.dtype)
        if parameter.gpu is not None:
            return parameter.gpu.empty(weight.shape, dtype)
        nbytes = weight.size * dtype.itemsize
        if self._scratch.size < nbytes:
            self._scratch = zeros(nbytes)
        return self._scratch[:nbytes].view(dtype).reshape(weight.shape)


def place_state(kept: KeptState, parameter: Parameter) -> KeptState:
    """Return a state of numpy arrays on the weight's device: itself for the host, a copy for a GPU. Local."""
    gpu = parameter.gpu
    if gpu is None:
        return kept
    return KeptState({slot: gpu.upload(array) for slot, array in kept.state.items()}, kept.count)


def restart_master(kept: KeptState, parameter: Parameter) -> None:
    """Copy a weight into the float32 master of its state, if there is one. Local."""
    if "master" in kept.state:
        parameter.memory.copy((kept.state["master"],), (parameter.data,))
