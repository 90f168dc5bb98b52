"""The GPU of a rank in a measurement: its arrays, its clock, and NCCL by itself.

Everything is queued on one stream, that of the measurement: the default stream would wait for others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...compute.cuda.gpu import find_gpu, find_nccl
from ...config import Config, place_on_host, visible_gpus
from ...protocols import Array, Kernels

__all__ = ["GpuClock", "RankGpu", "open_gpu"]

_FLOAT = np.dtype(np.float32)


def open_gpu(comm: Any, mpi: Any) -> RankGpu:
    """Return the GPU that a store on GPUs gives to this rank. Collective."""
    host = comm.Split_type(mpi.COMM_TYPE_SHARED, key=comm.rank)
    place = place_on_host() or (host.rank, host.size)
    host.Free()
    gpu = find_gpu(*place, sharing=Config.read().gpu_sharing, visible=visible_gpus())
    return RankGpu(comm, gpu, gpu.kernels())


class RankGpu:
    """A GPU, what computes on it, and the stream of the measurement. As a context manager, that is the present one."""

    def __init__(self, comm: Any, gpu: Any, kernels: Kernels) -> None:
        """Collective. ``gpu`` is a :class:`~mpikv.protocols.Gpu` whose ``mark()`` returns points of known time."""
        self.rank, self.size = comm.rank, comm.size
        self.gpu, self.kernels, self.stream = gpu, kernels, gpu.stream()
        self.shared = len(set(comm.allgather(gpu.uuid))) < comm.size
        """Whether ranks have one GPU together, so that no time says how fast anything is."""
        self._ranks = comm
        self._nccl: Any = None
        self._communicator: Any = None

    def __enter__(self) -> RankGpu:
        self.stream.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self.stream.__exit__(*failure)

    def upload(self, array: Array) -> Array:
        """Return an array of the GPU with the content of one of the host."""
        there: Array = self.gpu.upload(array)
        return there

    def download(self, array: Array) -> Array:
        """Return an array of the host with the content of one of the GPU."""
        out = np.empty(array.shape, array.dtype)
        self.gpu.download(array, out)
        return out

    def filled(self, shape: tuple[int, ...], value: float, dtype: np.dtype[Any] = _FLOAT) -> Array:
        """Return a new array."""
        array: Array = self.gpu.empty(shape, dtype)
        array.fill(value)
        return array

    def ones(self, shape: tuple[int, ...]) -> Array:
        """Return ones, float32."""
        return self.filled(shape, 1)

    def find_nccl(self) -> Any:
        """Return NCCL's module. Local.

        Raises:
            TransportUnavailable: it is not here.
        """
        self._nccl = self._nccl or find_nccl()
        return self._nccl

    def communicator(self) -> Any:
        """Return a communicator of all ranks that only this measurement uses. Collective at the first call."""
        if self._communicator is None:
            nccl = self.find_nccl()
            identity = self._ranks.bcast(nccl.get_unique_id() if self.rank == 0 else None)
            self._communicator = nccl.NcclCommunicator(self.size, identity, self.rank)
        return self._communicator

    def close(self) -> None:
        """End the communicator. Collective."""
        self.stream.synchronize()
        self._ranks.Barrier()
        if self._communicator is not None:
            self._communicator.destroy()


class GpuClock:
    """Times work by marks that the GPU passes. The host's part is the time until the work is queued.

    Both begin on an idle GPU. What it waits for, because the host queues more slowly than it works, counts.
    """

    def __init__(self, own: RankGpu, now: Callable[[], float]) -> None:
        """``now`` is the host's clock, in seconds."""
        self._own, self._now = own, now

    def time(self, work: Callable[[], object]) -> tuple[float, float]:
        first, began = self._own.gpu.mark(), self._now()
        work()
        returned, last = self._now() - began, self._own.gpu.mark()
        return first.seconds_to(last), returned
