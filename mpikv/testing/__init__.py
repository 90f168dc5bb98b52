"""What every transport, placement, updater, kernels, codec and store must do, as test classes to subclass.

A class of tests holds for every implementation of one seam of :mod:`mpikv.typing`; a subclass in a test module gives
the factory, and pytest does the rest. All of them are SPMD code, true for any number of ranks, and need pytest. Those
that move data use a fixture ``comm``: the communicator of the ranks that run the test, or None on one rank.
"""

from .codec import RangeCodecContract, ValueCodecContract
from .kernels import KernelsContract
from .placement import PlacementContract
from .store import StoreContract
from .transport import TransportContract
from .updater import UpdaterContract
from .wrappers import Recording

__all__ = [
    "KernelsContract",
    "PlacementContract",
    "RangeCodecContract",
    "Recording",
    "StoreContract",
    "TransportContract",
    "UpdaterContract",
    "ValueCodecContract",
]
