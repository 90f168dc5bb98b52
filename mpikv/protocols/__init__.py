"""The seams of mpikv: contracts of groups, transports, placements, updaters, kernels and codecs with the store.

Each seam is a Protocol in a file of its own. A class with its attributes implements it; subclassing is never needed. A
class of tests in :mod:`mpikv.testing` holds every implementation to its contract. This package imports nothing of
mpikv.
"""

from .arrays import Array, Key, Slots
from .codec import Codec, ElementwiseCodec, Gather, Rounds, Sum, TensorCodec
from .gpu import Event, Gpu, Graph, Stream
from .group import Group
from .kernels import BoundList, GpuKernels, Kernels, StepTable, Whole
from .memory import Issue, Memory, StreamOrder, Workspace
from .placement import Placement, Shard
from .transport import Carries, ReadsInPlace, SumsInPlace, Transfers, Transport
from .updater import Updater

__all__ = [
    "Array",
    "BoundList",
    "Carries",
    "Codec",
    "ElementwiseCodec",
    "Event",
    "Gather",
    "Gpu",
    "GpuKernels",
    "Graph",
    "Group",
    "Issue",
    "Kernels",
    "Key",
    "Memory",
    "Placement",
    "ReadsInPlace",
    "Rounds",
    "Shard",
    "Slots",
    "StepTable",
    "Stream",
    "StreamOrder",
    "Sum",
    "SumsInPlace",
    "TensorCodec",
    "Transfers",
    "Transport",
    "Updater",
    "Whole",
    "Workspace",
]
