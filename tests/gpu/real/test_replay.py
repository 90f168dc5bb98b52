"""A pushpull that is compiled, on real GPUs: its graph makes the updates of plain calls, in the order of streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv import optimizers, schedules

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(1, 2), pytest.mark.deadline(60)]

SHAPES = {"w": (300, 7), "b": (5,), "large": (3001, 5), "none": (0, 2)}
OPTIMIZERS = {
    "momentum": lambda: optimizers.SGD(learning_rate=0.5, momentum=0.5),
    "adam": lambda: optimizers.Adam(
        lr_scheduler=schedules.Cosine(40, base_lr=0.1, warmup_steps=5),
        lr_mult={"compiled/b": 0.5, "plain/b": 0.5},
        wd=0.01,
    ),
}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("optimizer", "placement", "dtype"),
    [
        (None, "replicated", "float32"),
        (None, "sharded", "float16"),
        ("momentum", "root", "float32"),
        ("momentum", "sharded", "float16"),
        ("adam", "sharded", "float32"),
        ("adam", "replicated", "float32"),
    ],
)
def test_replays_have_the_bits_of_plain_calls(
    cupy: Any, ranks: int, optimizer: str | None, placement: str, dtype: str
) -> None:
    random, keys = np.random.default_rng(7), list(SHAPES)
    with mpikv.create("nccl", placement=placement, bucket_bytes=32768) as kv:
        kv.init(
            [f"{way}/{key}" for way in ("compiled", "plain") for key in keys],
            [*zeros(cupy, dtype), *zeros(cupy, dtype)],
        )
        if optimizer:
            kv.set_optimizer(OPTIMIZERS[optimizer]())
        sent, outs, expected = (zeros(cupy, dtype) for _ in range(3))
        step = kv.capture([f"compiled/{key}" for key in keys], sent, outs)
        # Ranks that share a GPU take turns, of some milliseconds.
        for number in range(102 if ranks == 1 else 8):
            for array in sent:
                drawn = random.integers(-8, 8, (ranks, *array.shape))[kv.rank]
                array[...] = cupy.asarray(drawn.astype(dtype))
            assert step() is outs
            assert step.captured is (number > 0), step.reason
            kv.pushpull([f"plain/{key}" for key in keys], sent, out=expected)
            for found, wanted in zip(outs, expected, strict=True):
                assert found.get().tobytes() == wanted.get().tobytes()
        assert kv.version("compiled/w") == kv.version("plain/w") == number + 1


def zeros(cupy: Any, dtype: str) -> list[Any]:
    return [cupy.zeros(shape, dtype) for shape in SHAPES.values()]


@pytest.mark.parametrize("wait", [True, False])
def test_a_replay_is_in_the_order_of_the_caller(cupy: Any, wait: bool) -> None:
    """Its gradient is computed on the way, changed right after, and its result used at once."""
    size = 1 << 20
    with mpikv.create("nccl") as kv, cupy.cuda.Stream(non_blocking=True):
        gradient, out = cupy.zeros(size, np.float32), cupy.zeros(size, np.float32)
        kv.init("w", gradient)
        step = kv.capture("w", gradient, out)
        for number in range(1, 30):
            for _ in range(20):
                gradient.fill(np.nan)
            gradient.fill(number)
            made = step(wait=wait)
            assert wait or made.wait() is out
            gradient.fill(np.nan)
            doubled = out * 2
            out.fill(np.nan)
            assert (doubled.get() == 2 * number * kv.size).all()
        assert step.captured


def test_calls_return_when_they_are_queued_and_stores_end_with_graphs(cupy: Any) -> None:
    kept = []
    for _ in range(2):
        with mpikv.create("nccl") as kv:
            gradient, out = cupy.ones(1 << 20, np.float32), cupy.zeros(1 << 20, np.float32)
            kv.init("w", gradient)
            kv.set_optimizer("adam")
            kept.append(kv.capture("w", gradient, out))
            for _ in range(10):
                kept[-1]()
            assert kept[-1].captured
            kv.set_optimizer("sgd")
            for _ in range(3):
                kept[-1]()
            assert kept[-1].captured
    with pytest.raises(mpikv.Closed):
        kept[0]()
