"""Ranks in one process, in an order that a seed draws: for tests of programs that run on many ranks.

It may import all of the package; the package knows nothing of it but the :mod:`mpikv.runtime` that waiting code asks
for the time, threads and locks, and the ``library`` of a communicator.
"""

from .cluster import Cluster, cluster
from .faults import Cut, Delay, Fault, Kill, Pause, draw_faults
from .messages import Communicator, SimulatedError
from .scheduler import Deadlock, Hung

__all__ = [
    "Cluster",
    "Communicator",
    "Cut",
    "Deadlock",
    "Delay",
    "Fault",
    "Hung",
    "Kill",
    "Pause",
    "SimulatedError",
    "cluster",
    "draw_faults",
]
