"""The order of streams, the life of memory, and the cost of other libraries' arrays, with work that is slow."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from .kernels import find_torch
from .step import MB, Numbers, store
from .timing import fill_late, spin

SLOW = 20.0
"""Milliseconds."""


def pool_hazard() -> Numbers:
    """Let go of an array while another stream still reads it, with CuPy alone, and see what is read."""
    found: Numbers = {}
    for name, keep in (("dropped", False), ("kept", True)):
        same, changed = read_late(keep)
        found[f"{name}_memory_is_given_again"] = same
        found[f"{name}_elements_corrupted"] = changed
    return found


def read_late(keep: bool) -> tuple[bool, int]:
    """Return whether an array's memory was given to another one, and how many elements a late reader found changed."""
    import cupy

    producer, consumer = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    with consumer:
        out = cupy.zeros(MB, "f4")
        spin(0)  # all is compiled
        consumer.synchronize()
    with producer:
        array: Any = cupy.full(MB, 1, "f4")
        address, ready = array.data.ptr, producer.record()
    with consumer:
        consumer.wait_event(ready)
        spin(SLOW)
        cupy.copyto(out, array)
    kept = array if keep else None
    del array
    with producer:
        others = [cupy.full(MB, 2, "f4") for _ in range(4)]
        producer.synchronize()
    consumer.synchronize()
    same = any(other.data.ptr == address for other in others)
    del kept
    return same, int((out.get() != 1).sum())


def waits() -> Numbers:
    """Leave out each of a store's two waits, and count wrong elements. If there are none, no test of order on this GPU
    would find a missing wait.
    """
    found = {f"wrong_elements_without_the_{which}_wait": wrong_without(which) for which in ("store's", "caller's")}
    found["wrong_elements_with_both"] = wrong_without("")
    assert found["wrong_elements_with_both"] == 0
    return found


def wrong_without(left_out: str) -> int:
    """Return how many elements of a pushpull are wrong, on whose both sides work is slow."""
    import cupy

    from mpikv.compute.cuda.gpu import CupyStream

    real = CupyStream.wait
    with store() as kv, cupy.cuda.Stream(non_blocking=True) as caller:

        def wait(self: Any, event: Any) -> None:
            whose = "caller's" if self.handle == caller.ptr else "store's"
            if whose != left_out:
                real(self, event)
            if whose == "store's" and left_out == "caller's":
                with self:
                    spin(SLOW)

        gradient, out = cupy.zeros(MB, "f4"), cupy.zeros(MB, "f4")
        kv.init("w", gradient)
        kv.pushpull("w", gradient, out=out)
        caller.synchronize()
        with mock.patch.object(CupyStream, "wait", wait):
            fill_late(gradient, 3, 0 if left_out == "caller's" else SLOW)
            kv.pushpull("w", gradient, out=out)
            seen = out.copy()
            caller.synchronize()
        return int((seen.get() != 3 * kv.size).sum())


class Described:
    """An array as CUDA's older interface describes it: where it lies, and which stream writes it."""

    def __init__(self, array: Any, stream: Any) -> None:
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "version": 3, "stream": stream.ptr}


def imports() -> Numbers:
    """Time the host as it takes an array that a slow kernel still fills: by CUDA's older interface, for which it waits,
    and by DLPack on one stream. torch_imports tries the order by DLPack.
    """
    import cupy

    producer, consumer = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    with producer:
        array = cupy.zeros(MB, "f4")
        fill_late(array, 1, 0)
        producer.synchronize()
        fill_late(array, 2, SLOW)
        dlpack_ms = elapsed_ms(lambda: cupy.from_dlpack(array))
        producer.synchronize()
        fill_late(array, 3, SLOW)
    with consumer:
        cai_ms = elapsed_ms(lambda: cupy.asarray(Described(array, producer)))
        wrong = int((cupy.asarray(Described(array, producer)).copy().get() != 3).sum())
    return {"slow_kernel_ms": SLOW, "dlpack_ms": dlpack_ms, "cai_ms": cai_ms, "cai_wrong_elements": wrong}


def elapsed_ms(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e3


def torch_imports() -> Numbers:
    """Time the host as it takes a tensor of torch that a slow kernel still fills, and see if the order is kept."""
    torch = find_torch()
    found: Numbers = {"torch": torch.__version__, "slow_kernel_ms": SLOW}
    streams = {"default": torch.cuda.default_stream(), "side": torch.cuda.Stream()}
    for name, stream in streams.items():
        for dtype in ("float32", "bfloat16"):
            with torch.cuda.stream(stream):
                taken, wrong = adopted_late(torch.zeros(MB, dtype=getattr(torch, dtype), device="cuda"), stream)
            found |= {f"{name}_{dtype}_ms": taken, f"{name}_{dtype}_wrong_elements": wrong}
    return found


def adopted_late(tensor: Any, stream: Any) -> tuple[float, int]:
    """Return how long it takes to adopt a tensor behind a slow kernel, and how many elements are read too early."""
    import cupy

    with cupy.cuda.Stream.from_external(Named(stream.cuda_stream)):
        spin(0)
        stream.synchronize()
        spin(SLOW)
    tensor.fill_(2)
    with cupy.cuda.Stream(non_blocking=True):
        arrays: list[Any] = []
        taken = elapsed_ms(lambda: arrays.append(cupy.from_dlpack(tensor)))
        return taken, int((arrays[0].astype("f4").get() != 2).sum())


class Named:
    """A stream of another library, by its handle, as CuPy takes it."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle
