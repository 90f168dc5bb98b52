"""Simulated ranks, and what every transport, placement, updater, kernels, codec and store must do, as test classes.

:func:`cluster` runs a program on many ranks in this process, in an order that a seed draws, with the faults that a test
asks for.

A class of tests holds for every implementation of one seam of :mod:`mpikv.protocols`; a subclass in a test module gives
the factory, and pytest does the rest. All of them are SPMD code, true for any number of ranks, and need pytest. Those
that move data use a fixture ``comm``: the communicator of the ranks that run the test, or None on one rank. It may
import all of the package but ``cli``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .simulation import (
    Cluster,
    Communicator,
    Cut,
    Deadlock,
    Delay,
    Differ,
    Fault,
    FullDisk,
    Hung,
    Kill,
    Leave,
    Missed,
    Pause,
    Planted,
    Raise,
    SimulatedError,
    cluster,
    draw_faults,
)
from .wrappers import Recording

if TYPE_CHECKING:
    from .codec import ElementwiseCodecContract, TensorCodecContract
    from .kernels import KernelsContract
    from .placement import PlacementContract
    from .store import StoreContract
    from .transport import TransportContract
    from .updater import UpdaterContract

__all__ = [
    "Cluster",
    "Communicator",
    "Cut",
    "Deadlock",
    "Delay",
    "Differ",
    "ElementwiseCodecContract",
    "Fault",
    "FullDisk",
    "Hung",
    "KernelsContract",
    "Kill",
    "Leave",
    "Missed",
    "Pause",
    "PlacementContract",
    "Planted",
    "Raise",
    "Recording",
    "SimulatedError",
    "StoreContract",
    "TensorCodecContract",
    "TransportContract",
    "UpdaterContract",
    "cluster",
    "draw_faults",
]

# Loaded when they are asked for: they need pytest, and a simulation does not.
_CONTRACTS = {
    "KernelsContract": "kernels",
    "PlacementContract": "placement",
    "ElementwiseCodecContract": "codec",
    "StoreContract": "store",
    "TransportContract": "transport",
    "UpdaterContract": "updater",
    "TensorCodecContract": "codec",
}


def __getattr__(name: str) -> Any:
    if name not in _CONTRACTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_CONTRACTS[name]}", __name__), name)
