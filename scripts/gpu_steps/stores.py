"""Sums of stores of several ranks."""

import time

from .step import MB, Numbers, store
from .timing import gpu_seconds


def sums() -> Numbers:
    """Make a store, push arrays of three sizes, and check and time the sums."""
    import cupy

    begin = time.perf_counter()
    with store() as kv:
        found: Numbers = {"create_s": time.perf_counter() - begin}
        for size, name in ((1, "4_B_ms"), (MB // 4, "1_MB_ms"), (4 * MB, "16_MB_ms")):
            kv.init(name, cupy.zeros(size, "f4"))
            gradient = cupy.full(size, kv.rank + 1, "f4")
            found[name] = gpu_seconds(lambda name=name, gradient=gradient: kv.push(name, gradient), 10) * 1e3
            assert (kv.pull(name).get() == kv.size * (kv.size + 1) / 2).all()
    return found
