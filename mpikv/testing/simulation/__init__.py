"""Ranks in one process, in an order drawn by a seed: for tests of programs on many ranks.

The package may import all of mpikv. mpikv knows only two things of it: the :mod:`mpikv.cluster.runtime`, asked by
waiting code for time, threads and locks, and the ``library`` of a communicator.
"""

from .cluster import Cluster, cluster, spend
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
    "spend",
]
