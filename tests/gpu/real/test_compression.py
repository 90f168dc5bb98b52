"""Compressed pushes on real GPUs: stores have the values of those on hosts."""

from typing import Any

import numpy as np
import pytest

import mpikv

from .. import MANY

pytestmark = [pytest.mark.gpu, pytest.mark.deadline(120)]

F32 = np.float32
NAMES = ("2bit", "1bit", "fp16", "bf16")


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("placement", ["root", "sharded", "replicated"])
@pytest.mark.parametrize("name", [*NAMES, "topk"])
def test_stores_on_gpus_are_as_those_on_hosts(cupy: Any, comm: Any, name: str, placement: str) -> None:
    options = {"placement": placement, "compression": name, "bucket_bytes": 1 << 18}
    shapes = {"large": (301, 501), "small": (3,), "none": (0, 2)}
    host = mpikv.create(comm=comm, transport="mpi" if comm else "local", **options)
    with mpikv.create("nccl", comm=comm, **options) as kv, host:
        for store in (kv, host):
            store.init(list(shapes), [np.zeros(shape, F32) for shape in shapes.values()])
            store.set_optimizer("sgd", learning_rate=0.5, momentum=0.5)
        random = np.random.default_rng(kv.rank)
        for positions in (1, 3, 2):
            arrays = [
                [random.standard_normal(shape).astype(F32) for _ in range(positions)] for shape in shapes.values()
            ]
            kv.push(list(shapes), [[cupy.asarray(each) for each in group] for group in arrays])
            host.push(list(shapes), arrays)
            for found, expected in zip(kv.pull(list(shapes)), host.pull(list(shapes)), strict=True):
                assert found.get().tobytes() == expected.tobytes()


@pytest.mark.ranks(1, 2)
def test_a_gradient_that_is_no_number_stays_here(cupy: Any, comm: Any) -> None:
    """It is computed late, on a stream of the caller's."""
    with mpikv.create("nccl", comm=comm, compression="2bit") as kv:
        kv.init("w", cupy.zeros(MANY, F32))
        with cupy.cuda.Stream(non_blocking=True):
            for _ in range(5):
                gradient = cupy.full(MANY, 0.7, F32)
                kv.push("w", gradient)
                gradient.fill(np.nan)  # the push has read it by then
                assert (kv.pull("w").get() == F32(0.5 * kv.size)).all()
            for wait in (True, False):
                with pytest.raises(mpikv.NotFinite, match=f"key 'w' has {MANY} NaN"):
                    kv.push("w", gradient, wait=wait).wait()
            kv.push("w", cupy.full(MANY, -2, F32))
            assert (kv.pull("w").get() == F32(-0.5 * kv.size)).all()
