"""A store with compiled kernels has the bits of one without, on any number of ranks."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import mpikv
from mpikv import optimizers

pytest.importorskip("numba", reason="numba is not installed: pip install 'mpikv[numba]'")

STORES = [
    {"transport": "shm"},
    {"transport": "shm", "placement": "root", "bucket_bytes": 4096},
    {"transport": "mpi", "bucket_bytes": 4096},
    {"transport": "mpi", "placement": "replicated"},
]
OPTIMIZERS = {
    "sgd": {"momentum": 0.9, "wd": 0.01, "clip_gradient": 1.5},
    "adam": {"rescale_grad": 0.3},
    "adamw": {"wd": 0.1, "lr_mult": {"small": 2.0}},
    "rmsprop": {"centered": True},
    "ftrl": {},
    "lamb": {"wd": 0.1},
}
VALUES = {
    "large": ((333, 331), np.float32),
    "small": ((7,), np.float32),
    "wide": ((70_001,), np.float64),
    "half": ((100,), np.float16),
    "empty": ((0, 3), np.float32),
}


def training(random, **options):
    """Yield the values and what is pushed, in a training that changes its options."""
    name = options.pop("name")
    with mpikv.create(timeout=30, **options) as kv:
        shapes = {key: shape for key, (shape, _) in VALUES.items()}
        kv.init({key: random.standard_normal(shape).astype(dtype) for key, (shape, dtype) in VALUES.items()})
        kv.set_optimizer(name, **OPTIMIZERS[name])
        buffers = dict(zip(VALUES, kv.buffer(list(VALUES)), strict=True))
        for count in range(6):
            if count == 2:
                kv.set_learning_rate(0.03)
            if count == 4:
                kv.optimizer.clip_gradient = 0.5
                if name == "sgd":
                    kv.optimizer.nesterov = True
            # Every rank draws for all.
            drawn = [{key: random.standard_normal(shape) for key, shape in shapes.items()} for _ in range(kv.size)]
            mine = {key: drawn[kv.rank][key].astype(dtype) for key, (_, dtype) in VALUES.items()}
            if count % 2:
                for key, buffer in buffers.items():
                    buffer[...] = mine[key]
                result = dict(zip(VALUES, kv.pushpull(list(VALUES)), strict=True))
            else:
                result = kv.pushpull(mine, out={key: np.empty_like(array) for key, array in mine.items()})
            yield {key: array.tobytes() for key, array in result.items()}


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.deadline(60)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("options", STORES, ids=lambda options: "-".join(map(str, options.values())))
def test_same_bits_as_a_store_with_numpy(name, options, comm):
    results = [
        list(training(np.random.default_rng(5), name=name, comm=comm, kernels=kernels, **options))
        for kernels in ("numpy", "numba")
    ]
    assert results[0] == results[1]
    assert len({result["large"] for result in results[0]}) == 6


@pytest.mark.ranks(2, 4)
@pytest.mark.deadline(60)
def test_numba_is_missing_on_one_rank(comm, monkeypatch):
    if comm.rank == 1:
        monkeypatch.setitem(sys.modules, "mpikv.optimizers.compiled", None)
        monkeypatch.delattr(optimizers, "compiled", raising=False)
    with pytest.raises((mpikv.TransportUnavailable, mpikv.PeerFailed), match="numba") as caught:
        mpikv.create(comm=comm, kernels="numba")
    assert isinstance(caught.value, mpikv.TransportUnavailable if comm.rank == 1 else mpikv.PeerFailed)


@pytest.mark.ranks(2, 4)
@pytest.mark.deadline(60)
def test_kernels_are_the_same_on_every_rank(comm):
    with pytest.raises(mpikv.RankMismatch, match="kernels 'numba' on rank 0, 'numpy' on rank 1"):
        mpikv.create(comm=comm, kernels="numpy" if comm.rank else "numba")
