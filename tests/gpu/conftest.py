"""What tests on GPUs share, and on the emulated one."""

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def cupy() -> Any:
    import cupy

    return cupy


@pytest.fixture(autouse=True)
def room() -> None:
    """Free memory of earlier stores: errors keep theirs in cycles, and CuPy keeps what was freed, for each stream."""
    cupy = sys.modules.get("cupy")
    if cupy is None or not cupy.is_available():  # some tests need CuPy and no GPU
        return
    if (pool := cupy.get_default_memory_pool()).total_bytes() > 1 << 30:
        gc.collect()
        pool.free_all_blocks()


@pytest.fixture
def gpu(cupy: Any, comm: Any) -> Any:
    """Return this rank's GPU, which is the thread's present one."""
    from mpikv.compute.cuda.gpu import CupyGpu

    gpu = CupyGpu(cupy, (comm.rank if comm else 0) % cupy.cuda.runtime.getDeviceCount())
    gpu.use()
    return gpu


class Scarce:
    """The memory of a process's GPU, of which an allocation may fail."""

    def __init__(self, cupy: Any) -> None:
        self._memory, self._pool = cupy.cuda.memory, cupy.get_default_memory_pool()
        self.spare: int | None = None
        """How many allocations are left before one fails, once; None: none fails."""
        self.taken = list[int]()
        """The bytes of each."""

    def take(self, nbytes: int) -> Any:
        if nbytes:
            self.taken.append(nbytes)
            if self.spare is not None:
                self.spare = self.spare - 1 if self.spare else None
                if self.spare is None:
                    raise self._memory.OutOfMemoryError(nbytes, 0, 0)
        return self._pool.malloc(nbytes)


@pytest.fixture
def scarce(cupy: Any) -> Iterator[Scarce]:
    made = Scarce(cupy)
    cupy.cuda.set_allocator(made.take)
    yield made
    cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)
