"""What a step of a thousand small keys costs on host and GPU, and how long large values take."""

from collections.abc import Callable
from typing import Any

from .kernels import find_torch
from .step import MB, Numbers, store
from .timing import device_seconds, gpu_seconds, host_seconds

COUNT, EACH = 1000, 1024
"""Keys of a step, of 4 KB of float32."""


def compiled_cost() -> Numbers:
    """Time a step of Adam over 1,000 keys of 4 KB: compiled by kv.capture, as a list, and key by key."""
    import cupy

    keys = [str(number) for number in range(COUNT)]
    with store() as kv:
        sent, outs = [cupy.ones(EACH, "f4") for _ in keys], [cupy.ones(EACH, "f4") for _ in keys]
        kv.init(keys, outs)
        kv.set_optimizer("adam")
        step = kv.capture(keys, sent, outs)

        def key_by_key() -> None:
            for key, gradient, out in zip(keys, sent, outs, strict=True):
                kv.pushpull(key, gradient, out=out)

        for _ in range(3):
            step()
        assert step.captured, step.reason
        kv.pushpull(keys, sent, out=outs)
        key_by_key()
        return {
            "compiled_us": host_seconds(step, 100) * 1e6,
            "list_us": host_seconds(lambda: kv.pushpull(keys, sent, out=outs), 100) * 1e6,
            "key_by_key_us": host_seconds(key_by_key, 5) * 1e6,
            **of_device("compiled", step),
            **of_device("list", lambda: kv.pushpull(keys, sent, out=outs)),
        }


def of_device(name: str, step: Callable[[], object]) -> Numbers:
    """Return how long the GPU takes for a step that is queued as a whole, and how many it makes in a second."""
    return {f"{name}_gpu_us": device_seconds(step) * 1e6, f"{name}_per_s": 1 / gpu_seconds(step)}


def torch_cost() -> Numbers:
    """Time torch's Adam, fused and foreach, on as many tensors as compiled_cost has keys, in place."""
    torch = find_torch()
    found: Numbers = {"torch": torch.__version__}
    for name in ("fused", "foreach"):
        weights: list[Any] = [torch.ones(EACH, device="cuda", requires_grad=True) for _ in range(COUNT)]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        step = torch.optim.Adam(weights, lr=1e-3, **{name: True}).step
        found |= {f"{name}_us": host_seconds(step, 20) * 1e6, **of_device(name, step)}
    return found


def large() -> Numbers:
    """Push and pull 256 MB on one rank, beside the copies that this takes."""
    import cupy

    size = 64 * MB
    gradient, out = cupy.ones(size, "f4"), cupy.empty(size, "f4")
    found: Numbers = {"one_copy_ms": gpu_seconds(lambda: cupy.copyto(out, gradient)) * 1e3}
    with store() as kv:
        kv.init("w", gradient)
        found["push_ms"] = gpu_seconds(lambda: kv.push("w", gradient)) * 1e3
        found["pull_ms"] = gpu_seconds(lambda: kv.pull("w", out)) * 1e3
        found["pushpull_ms"] = gpu_seconds(lambda: kv.pushpull("w", gradient, out=out)) * 1e3
    return found
