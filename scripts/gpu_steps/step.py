"""What a step is, and what every step may need."""

import ctypes
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/gpu_step.py"
Numbers: TypeAlias = dict[str, Any]
MB = 1 << 20


class Skip(Exception):
    """The step cannot be done on this machine."""


@dataclass(frozen=True)
class Step:
    """What to run, on how many ranks."""

    run: Callable[[], Numbers]
    seconds: float
    """How long it may take."""
    expected: float
    """How long it took on an H200, or will, as is thought: together these are to stay below the limit of all."""
    ranks: int = 1
    jobs: bool = False
    """Whether it starts jobs of its own."""

    @property
    def what(self) -> str:
        """What it tries, in the words of its function."""
        return " ".join((self.run.__doc__ or "").split())

    @property
    def needs_mpi(self) -> bool:
        """Whether it can only be run where there is an MPI library."""
        return self.jobs or self.ranks > 1


def count_gpus() -> int:
    """Return how many GPUs the driver shows to this process, without any package."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    works = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if works else 0


def prepare(rank: int, size: int) -> None:
    """Let ranks that are more than the GPUs share them. Call it before the import of CuPy."""
    from mpikv.compute.cuda.sharing import sharing

    if count_gpus() < size > 1:
        os.environ |= sharing(rank)


def own_rank() -> int:
    from mpikv.cluster.environment import launch_of

    launch = launch_of()
    return launch.rank if launch is not None else 0


def tell(found: Numbers) -> None:
    """Print a record, on the first rank."""
    if own_rank() == 0:
        print(json.dumps(found), flush=True)


def store(**options: Any) -> Any:
    import mpikv

    return mpikv.create("nccl", **options)
