"""Arrays of a real GPU in the calls of stores of the host."""

from __future__ import annotations

import numpy as np
import pytest

import mpikv

pytestmark = [pytest.mark.gpu, pytest.mark.deadline(60)]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("streamed", [False, True])
def test_arrays_come_and_go(cupy, streamed):
    """Larger than the pinned memory through which they travel, and used at once on either side."""
    size = (3 << 20) + 5
    with mpikv.create("dist_sync") as kv:
        cupy.cuda.Device(kv.local_rank % cupy.cuda.runtime.getDeviceCount()).use()
        with cupy.cuda.Stream(non_blocking=True) if streamed else cupy.cuda.Stream.null:
            kv.init("w", cupy.zeros(size, np.float32))
            for number in range(1, 4):
                gradient = cupy.arange(size, dtype=np.float32) * number
                half, strided = cupy.empty(size, np.float16), cupy.zeros((size, 2), np.float32)[:, 0]
                kv.push("w", gradient)
                gradient.fill(np.nan)
                kv.pull("w", out=[half, strided, gradient])
                expected = np.arange(size, dtype=np.float32) * number * kv.size
                for out in (strided, gradient):
                    assert (out.get() == expected).all()
                with np.errstate(over="ignore"):
                    assert (half.get() == expected.astype(np.float16)).all()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", ["horovod", "dist_async"])
def test_other_stores(cupy, name):
    with mpikv.create(name) as kv:
        cupy.cuda.Device(kv.local_rank % cupy.cuda.runtime.getDeviceCount()).use()
        array = cupy.ones(1000, np.float32)
        if name == "dist_async":
            kv.init("w", cupy.zeros(1000, np.float32))
            kv.set_optimizer("sgd", learning_rate=1.0)
            kv.push("w", array)
            kv.barrier()
            kv.pull("w", out=array)
        else:
            kv.pushpull("w", array)
        assert (abs(array.get()) == kv.size).all()


def test_tensors_of_torch(cupy):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    with mpikv.create("dist_sync") as kv:
        weight = torch.ones(1000, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        kv.init("w", weight)
        kv.push("w", torch.full_like(weight, 3))
        out = torch.zeros_like(weight)
        kv.pull("w", out)
        assert (out == 3).all()
