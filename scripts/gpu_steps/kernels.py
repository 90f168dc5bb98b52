"""The bandwidth of kernels: the bytes that they must move, by the time that the GPU takes."""

from collections.abc import Callable
from typing import Any

from .step import MB, Numbers, Skip
from .timing import gpu_seconds

LARGE = 256 * MB
"""Elements: 1 GB of float32."""


def fitting(bytes_each: int) -> int:
    """Return how many elements there is room for, LARGE where all of these fit."""
    import cupy

    return min(LARGE, int(0.8 * cupy.cuda.runtime.memGetInfo()[0]) // bytes_each // MB * MB)


def kernels() -> Numbers:
    """Measure the bandwidth of packing, casts and updates of 1 GB, beside a copy on the GPU."""
    import cupy

    from mpikv.compute.cuda.copies import copy

    size = fitting(18)
    total, value = cupy.full(size, 1e-3, "f4"), cupy.ones(size, "f4")
    found: Numbers = {"elements": size}
    found["copy_GB_s"] = 8 * size / gpu_seconds(lambda: cupy.copyto(value, total)) / 1e9
    part = size // 160
    parts, targets = ([array[i * part : (i + 1) * part] for i in range(160)] for array in (total, value))
    found["pack_GB_s"] = 8 * part * 160 / gpu_seconds(lambda: copy(targets, parts)) / 1e9
    halves = [cupy.empty(size, "f2")]
    found["cast_to_float16_GB_s"] = 6 * size / gpu_seconds(lambda: copy(halves, [total])) / 1e9
    halves.clear()
    for name, updater, dtype, moved in optimizers():
        weight = value if dtype == value.dtype else value.astype(dtype)
        # Nothing keeps the state of one beyond its line, or there would be too little memory for the next.
        found[f"{name}_GB_s"] = moved * size / gpu_seconds(update_of(updater, total, weight)) / 1e9
    return found


def optimizers() -> list[tuple[str, Any, Any, int]]:
    """Return names, optimizers, the dtypes of what they update, and how many bytes must move for an element."""
    import numpy as np

    from mpikv import optimizers
    from mpikv.arrays.arrays import bfloat16

    plain = np.dtype(np.float32)
    return [
        ("momentum", optimizers.SGD(learning_rate=1e-3, momentum=0.9), plain, 20),
        ("adam", optimizers.Adam(learning_rate=1e-3), plain, 28),
        # Of 4 bytes a sum, and a master, a mean and a variance, which are written, too; of 2 a value.
        ("adam_bfloat16_with_master", optimizers.Adam(learning_rate=1e-3, multi_precision=True), bfloat16(), 30),
        # Once for the norms, and once more for the update.
        ("lars", optimizers.LARS(learning_rate=1e-3, momentum=0.9), plain, 28),
        ("lamb", optimizers.LAMB(learning_rate=1e-3), plain, 40),
    ]


def update_of(updater: Any, total: Any, weight: Any) -> Callable[[], None]:
    """Return what makes an update, with a state of its own."""
    import cupy

    from mpikv.compute.cuda.kernels import CudaKernels

    on_gpu = CudaKernels()
    on_gpu.prepare(updater, weight.dtype, False)
    state = {key: cupy.zeros(weight.size, dtype) for key, dtype in updater.slots(weight.dtype).items()}
    update, step = on_gpu.bind(updater, total, weight, state), updater.step("w", 1)
    return lambda: update(step)


def find_torch() -> Any:
    """Return torch, if it is here with CUDA."""
    try:
        import torch
    except ImportError:
        raise Skip("torch is not installed") from None
    if not torch.cuda.is_available():
        raise Skip("this torch has no CUDA")
    return torch
