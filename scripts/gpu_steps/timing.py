"""Clocks of the GPU and of the host, and work that takes the GPU a while."""

import time
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Any

# Few GPUs have a faster clock: so long it takes at least, or a little less.
CYCLES_PER_MS = 2_500_000
SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
  long long begin = clock64();
  while (clock64() - begin < cycles) {}
}
"""


@cache
def _spinner() -> Any:
    import cupy

    return cupy.RawKernel(SPIN, "spin")


def spin(milliseconds: float) -> None:
    """Keep the present stream busy for so long, or somewhat longer."""
    import numpy as np

    _spinner()((1,), (1,), (np.int64(milliseconds * CYCLES_PER_MS),))


def gpu_seconds(run: Callable[[], object], repeat: int = 20) -> float:
    """Return how long the GPU takes for a call, of the present stream, in the mean of several. Where the host queues
    more slowly than the GPU works, that is the host's time.
    """
    import cupy

    run()
    first, last = cupy.cuda.Event(), cupy.cuda.Event()
    first.record()
    for _ in range(repeat):
        run()
    last.record()
    last.synchronize()
    return float(cupy.cuda.get_elapsed_time(first, last)) / 1e3 / repeat


def device_seconds(run: Callable[[], object], tries: int = 7) -> float:
    """Return how long the GPU takes for a call of which all is queued when it begins, the median of some."""
    import cupy

    run()
    taken: list[float] = []
    wait = 20.0
    while len(taken) < tries:
        first, last = cupy.cuda.Event(), cupy.cuda.Event()
        cupy.cuda.get_current_stream().synchronize()
        spin(wait)
        first.record()
        run()
        last.record()
        if first.done:
            wait *= 2
            assert wait < 1000, "the call waits for the GPU, or queues more than CUDA takes"
            continue
        last.synchronize()
        taken.append(float(cupy.cuda.get_elapsed_time(first, last)) / 1e3)
    return median(taken)


def host_seconds(run: Callable[[], object], repeat: int = 200) -> float:
    """Return how long a call takes until it returns, the median of several."""
    import cupy

    taken = []
    for number in range(repeat):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
        if number % 20 == 0:
            cupy.cuda.get_current_stream().synchronize()  # the queue is not to fill
    return sorted(taken)[repeat // 2]
