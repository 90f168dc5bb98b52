"""Stand-ins for the GPU of each rank of a job, and for NCCL, in place of CuPy's: ``install()``, before a store is made.

``python tests/support/faked_gpus.py SCRIPT ...`` runs a script with them, or a module after ``-m``. What ranks share is
told by ``FAKED_GPUS``, the number of GPUs.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from mpikv.cluster.environment import launch_of
from mpikv.compute.cuda.gpu import choose_gpu
from mpikv.compute.cuda.sharing import share_gpus
from mpikv.errors import TransportUnavailable
from mpikv.testing.fakegpu import FakeGpu
from mpikv.testing.fakekernels import FakeKernels
from mpikv.testing.fakenccl import FakeNccl


class SparingKernels(FakeKernels):
    """Kernels that leave the sum as it is, which those of CUDA do."""

    def _several(self, arrays: Any, updates: Any) -> Callable[[Any], None]:
        launch, total = super()._several(arrays, updates), arrays[0]

        def sparing(steps: Any) -> None:
            kept = total._beneath.copy()
            launch(steps)
            total._beneath[...] = kept

        return sparing


def install(count: int) -> FakeGpu:
    """Let this process find so many GPUs; return its own. Collective over the ranks of a launch."""
    launch = launch_of()
    rank, size = (launch.rank, launch.size) if launch else (0, 1)
    gpu = FakeGpu(rank % count)
    comm = None
    if launch:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD.Dup()

    def find_gpu(local_rank: int, local_size: int, *, sharing: bool = False, visible: str | None = None) -> FakeGpu:
        if sharing:
            share_gpus(rank)
        choose_gpu(count, local_rank, local_size, sharing, visible)
        if (rank, size) != (local_rank, local_size):
            raise TransportUnavailable("it is asked for another rank's GPU")
        return gpu

    def find_nccl() -> FakeNccl:
        return FakeNccl(gpu, comm)

    for module in map(import_module, ("mpikv.compute.cuda.gpu", "mpikv.creation")):
        mock.patch.object(module, "find_gpu", find_gpu).start()
        mock.patch.object(module, "find_nccl", find_nccl).start()
    mock.patch.object(gpu, "kernels", return_value=SparingKernels(gpu)).start()
    return gpu


def main() -> None:
    own = install(int(os.environ["FAKED_GPUS"]))
    del sys.argv[0]
    try:
        if sys.argv[0] == "-m":
            del sys.argv[0]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(sys.argv[0]).parent))
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        own.checker.assert_clean()


if __name__ == "__main__":
    main()
