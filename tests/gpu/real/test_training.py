"""A Trainer, clipping and overflows over arrays of a real GPU, beside numpy's."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

import mpikv
from mpikv import LossScaler, Parameter, Trainer, clip_global_norm
from mpikv.compute.cuda import norms
from mpikv.testing.updater import available

pytestmark = [pytest.mark.gpu, pytest.mark.deadline(120)]
CELL = norms.CELL


@pytest.mark.parametrize("dtype", available(), ids=str)
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_clipping(cupy, dtype, max_norm):
    """The norm has numpy's bits, and so have the arrays."""
    random = np.random.default_rng(3)
    sizes = [1, 7, 129, 1000, CELL - 1, CELL, CELL + 1, 5 * CELL + 135, *[3] * 400]
    arrays = [random.standard_normal(size).astype(dtype) for size in sizes]
    there = [cupy.asarray(array) for array in arrays]
    # With gaps, on the host, none, and one twice.
    wide, mixed = cupy.asarray(np.repeat(arrays[3], 2)), arrays[4].copy()
    given = [*there[:3], wide[::2], mixed, None, *there[5:], there[0]]
    assert clip_global_norm(given, max_norm) == clip_global_norm(arrays, max_norm)
    for mine, expected in zip((*there[:3], wide[::2], mixed, *there[5:]), arrays, strict=True):
        assert cupy.asnumpy(mine).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", available(), ids=str)
def test_gradients_are_added_up(cupy, dtype):
    first, more = np.random.default_rng(1).standard_normal((2, 1000)).astype(dtype)
    found, expected = Parameter(cupy.asarray(first), grad_req="add"), Parameter(first.copy(), grad_req="add")
    for gradient in (first, more, more):
        found.grad, expected.grad = cupy.asarray(gradient), gradient
    assert found.grad.get().tobytes() == expected.grad.tobytes()


@pytest.mark.parametrize("place", [0, 7, CELL, 3 * CELL + 5])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_number_is_found(cupy, place, bad):
    array = cupy.ones(4 * CELL, np.float64) * 1e200  # whose squares are inf
    with mpikv.create() as kv:
        assert LossScaler(8.0).divisor(kv, array) == 8.0
        array[place] = bad
        assert LossScaler(8.0).divisor(kv, array) is None


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("store", "on_store"), [*product(["nccl", "dist_sync"], [True, False]), ("horovod", False)])
def test_training_is_that_of_the_host(cupy, store, on_store):
    shapes = {"a": (300, 400), "b": (7,), "c": (CELL + 3,)}
    results = []
    for name in (store, "dist_sync"):
        with mpikv.create(name) as kv:
            cupy.cuda.Device(kv.local_rank % cupy.cuda.runtime.getDeviceCount()).use()
            there = cupy.asarray if not results else np.copy
            params = {key: there(np.ones(shape, np.float32)) for key, shape in shapes.items()}
            options = {"learning_rate": 0.5, "momentum": 0.5}
            trainer = Trainer(
                params, "sgd", options, kvstore=kv, update_on_kvstore=on_store, loss_scaler=LossScaler(4.0)
            )
            for step in range(3):
                random = np.random.default_rng([kv.rank, step])
                trainer.set_grads(
                    {k: there(random.integers(-8, 9, s).astype(np.float32) / 4) for k, s in shapes.items()}
                )
                if on_store:
                    trainer.step(4)
                else:
                    trainer.allreduce_grads()
                    clip_global_norm([one.grad for one in trainer.params.values()], 100.0)
                    trainer.update(4)
            results.append({key: cupy.asnumpy(array) for key, array in params.items()})
    for key, expected in results[1].items():
        assert results[0][key].tobytes() == expected.tobytes()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("placement", "compression"), [("auto", None), ("root", None), ("replicated", None), ("auto", "fp16")]
)
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("lars", {"learning_rate": 0.5, "wd": 0.01}),
        ("lars", {"learning_rate": 0.5, "momentum": 0.9, "multi_precision": True, "skip": ("a_bias",)}),
        ("lamb", {"learning_rate": 0.5, "wd": 0.01, "lr_mult": {"a": 0.5}}),
    ],
)
def test_optimizers_of_whole_values(cupy, placement, compression, optimizer, options):
    """Of gradients whose sums are exact; another updater makes other plans."""
    shapes = {"a": (300, 400), "a_bias": (400,), "c": (CELL + 3,), "h": (7, 3), "none": (0, 2)}
    with mpikv.create("nccl", placement=placement) as there, mpikv.create("dist_sync", placement=placement) as here:
        keys = {key: np.float16 if key == "h" and compression is None else np.float32 for key in shapes}
        for kv, place in ((there, cupy.asarray), (here, np.copy)):
            kv.init({key: place(np.ones(shapes[key], dtype)) for key, dtype in keys.items()})
            kv.set_gradient_compression(compression)
            kv.set_optimizer(optimizer, **options)
        for step in range(4):
            random = np.random.default_rng([there.rank, step])
            gradients = {key: (random.integers(-8, 9, shapes[key]) / 4).astype(dtype) for key, dtype in keys.items()}
            found = there.pushpull({key: cupy.asarray(array) for key, array in gradients.items()})
            expected = here.pushpull(gradients)
            for key in shapes:
                assert found[key].get().tobytes() == expected[key].tobytes()
            for kv in (there, here) if step == 2 else ():
                kv.set_optimizer("lamb")
