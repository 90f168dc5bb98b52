"""The GPU of a rank in a measurement: its arrays, its clock, and NCCL by itself.

Everything is queued on the stream of the measurement: the default stream would wait for other streams.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpikv.cluster.environment import place_on_host, visible_gpus
from mpikv.compute.cuda import gpu as cuda
from mpikv.config import Config
from mpikv.protocols import Array, Kernels

_FLOAT = np.dtype(np.float32)


def open_gpu(comm: Any, mpi: Any) -> RankGpu:
    """Return this rank's GPU, the one that a GPU store would use. Collective."""
    host = comm.Split_type(mpi.COMM_TYPE_SHARED, key=comm.rank)
    place = place_on_host() or (host.rank, host.size)
    host.Free()
    gpu = cuda.find_gpu(*place, sharing=Config.read().gpu_sharing, visible=visible_gpus())
    return RankGpu(comm, gpu, gpu.kernels())


class RankGpu:
    """A GPU, its kernels, and the stream of the measurement. As a context manager it makes this stream current."""

    def __init__(self, comm: Any, gpu: Any, kernels: Kernels) -> None:
        """Collective. ``gpu`` is a :class:`~mpikv.protocols.Gpu`; its ``mark()`` must return points with a time."""
        self.rank, self.size = comm.rank, comm.size
        self.gpu, self.kernels, self.stream = gpu, kernels, gpu.stream()
        self.shared = len(set(comm.allgather(gpu.uuid))) < comm.size
        """Whether ranks share a GPU; then times say nothing about speed."""
        self._ranks = comm
        self._nccl: Any = None
        self._communicator: Any = None

    def __enter__(self) -> RankGpu:
        self.stream.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self.stream.__exit__(*failure)

    def upload(self, array: Array) -> Array:
        """Copy a host array to the GPU."""
        there: Array = self.gpu.upload(array)
        return there

    def download(self, array: Array) -> Array:
        """Copy a GPU array to the host."""
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
        self._nccl = self._nccl or cuda.find_nccl()
        return self._nccl

    def communicator(self) -> Any:
        """Return a communicator of all ranks that only this measurement uses. Collective at the first call."""
        if self._communicator is None:
            nccl = self.find_nccl()
            identity = self._ranks.bcast(nccl.get_unique_id() if self.rank == 0 else None)
            self._communicator = nccl.NcclCommunicator(self.size, identity, self.rank)
        return self._communicator

    def mark(self) -> Any:
        """Return an event in the current stream's work; the GPU records its time."""
        return self.gpu.cuda.get_current_stream().record(self.gpu.cuda.Event())

    def close(self) -> None:
        """End the communicator. Collective."""
        self.stream.synchronize()
        self._ranks.Barrier()
        if self._communicator is not None:
            self._communicator.destroy()


def time_gpu(own: RankGpu, now: Callable[[], float], work: Callable[[], object]) -> tuple[float, float]:
    """Time work by marks in the GPU's stream; return the seconds to its end, and those of the host until it was queued.

    Both begin on an idle GPU. If the host queues more slowly than the GPU works, the waiting counts. ``now`` is the
    host's clock, in seconds.
    """
    first, began = own.mark(), now()
    work()
    returned, last = now() - began, own.mark()
    last.synchronize()
    return float(own.gpu.cuda.get_elapsed_time(first, last)) / 1e3, returned
