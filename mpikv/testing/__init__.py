"""Simulated ranks, and contracts of the seams as test classes.

:func:`cluster` runs a program on many ranks in this process. A seed draws the order of events; a test may ask for
faults.

A contract tests every implementation of one seam of :mod:`mpikv.protocols`: transport, placement, updater, kernels,
codec, store. A subclass in a test module gives the factory, and pytest does the rest. All contracts are SPMD code, true
for any number of ranks, and need pytest. Contracts that move data use a fixture ``comm``: the communicator of the ranks
that run the test, or None on one rank. The package may import all of mpikv but ``cli``.
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
    spend,
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
    "spend",
]

# Loaded on first use: contracts need pytest, a simulation does not.
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
