"""The seams of mpikv: what a transport, a placement, an updater, kernels and a codec promise to the store.

Each is a Protocol: a class that has these attributes is one, and subclassing is never needed. Every implementation is
held to its contract by a class in :mod:`mpikv.testing`. There is a file for each seam. It imports nothing of mpikv.
"""

from .arrays import Array, Key, Slots
from .codec import Codec, ElementwiseCodec, Gather, Rounds, Sum, TensorCodec
from .gpu import Event, Gpu, Graph, Stream
from .kernels import BoundList, GpuKernels, Kernels, ListKernels, StepTable, Whole
from .memory import Issue, Memory, StreamOrder, Workspace
from .placement import Placement, Shard
from .transport import Transport
from .updater import Updater

__all__ = [
    "Array",
    "BoundList",
    "Codec",
    "ElementwiseCodec",
    "Event",
    "Gather",
    "Gpu",
    "GpuKernels",
    "Graph",
    "Issue",
    "Kernels",
    "Key",
    "ListKernels",
    "Memory",
    "Placement",
    "Rounds",
    "Shard",
    "Slots",
    "StepTable",
    "Stream",
    "StreamOrder",
    "Sum",
    "TensorCodec",
    "Transport",
    "Updater",
    "Whole",
    "Workspace",
]
