"""Ranks in one process, in an order that a seed draws: for tests of programs that run on many ranks.

It may import all of the package; the package knows nothing of it but the :mod:`mpikv.cluster.runtime` that waiting code
asks for the time, threads and locks, and the ``library`` of a communicator.
"""

from .cluster import Cluster, cluster
from .errors import Deadlock, Hung, Planted, SimulatedError
from .faults import Cut, Delay, Differ, Fault, FullDisk, Kill, Leave, Missed, Pause, Raise, draw_faults
from .messages import Communicator

__all__ = [
    "Cluster",
    "Communicator",
    "Cut",
    "Deadlock",
    "Delay",
    "Differ",
    "Fault",
    "FullDisk",
    "Hung",
    "Kill",
    "Leave",
    "Missed",
    "Pause",
    "Planted",
    "Raise",
    "SimulatedError",
    "cluster",
    "draw_faults",
]
