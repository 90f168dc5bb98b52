"""A store on real GPUs keeps the promises of stores and of transports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv.cluster.environment import visible_gpus
from mpikv.compute.cuda.gpu import find_gpu, find_nccl
from mpikv.config import Config
from mpikv.memory.device import DeviceMemory
from mpikv.testing import StoreContract
from mpikv.testing.device import DeviceTransportContract, InOrder
from mpikv.transports import open_gpu_transport

pytestmark = [pytest.mark.gpu, pytest.mark.deadline(60)]


# Each test makes a store, which takes NCCL a second, and ranks that share a GPU wait milliseconds for each other in
# each step of a sum: so what all stores have in common is tried on two ranks at most.
@pytest.mark.ranks(1, 2)
class TestStore(StoreContract):
    def create(self, **options: Any) -> mpikv.KVStore:
        store = mpikv.create("nccl", **options)
        assert store.is_capable("gpu")
        return store


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("placement", ["root", "sharded", "replicated"])
def test_training_is_that_of_numpy(cupy, ranks, placement, deterministic):
    """Of numbers whose sums are exact, in messages that are smaller than the values."""
    shapes = {"large": (3001, 5), "small": (3,), "none": (0, 2)}
    expected = {key: np.zeros(shape, np.float32) for key, shape in shapes.items()}
    momentum = {key: np.zeros(shape, np.float32) for key, shape in shapes.items()}
    random = np.random.default_rng(5)
    with mpikv.create("nccl", placement=placement, deterministic=deterministic, bucket_bytes=4096) as kv:
        kv.init({key: cupy.asarray(value) for key, value in expected.items()})
        kv.set_optimizer("sgd", learning_rate=0.5, momentum=0.5)
        for _ in range(3):
            gradients = {
                key: random.integers(-8, 8, (ranks, *shape)).astype(np.float32) for key, shape in shapes.items()
            }
            found = kv.pushpull({key: cupy.asarray(each[kv.rank]) for key, each in gradients.items()})
            for key, each in gradients.items():
                momentum[key] = np.float32(0.5) * momentum[key] - np.float32(0.5) * each.sum(axis=0)
                expected[key] = expected[key] + momentum[key]
                assert (found[key].get() == expected[key]).all()


@pytest.mark.ranks(2)
class TestTransport(DeviceTransportContract):
    gathers = False

    @pytest.fixture(autouse=True)
    def counting(self, cupy):
        class Counting(cupy.cuda.MemoryHook):
            name, count = "counting", 0

            def malloc_preprocess(self, **_):
                self.count += 1

        with Counting() as self._counting:
            yield

    def allocations(self):
        return self._counting.count

    def make(self, group, limit, timeout):
        config = Config.read(bucket_bytes=limit, timeout=timeout, deterministic=self.gathers)
        gpu = find_gpu(group.local_rank, len(group.host_ranks), sharing=config.gpu_sharing, visible=visible_gpus())
        return InOrder(open_gpu_transport(group, config, DeviceMemory(gpu), find_nccl() if group.size > 1 else None))


@pytest.mark.ranks(2)
class TestTransportThatGathers(TestTransport):
    gathers = True


@pytest.mark.ranks(1, 2)
def test_sums_without_stored_values(cupy, ranks):
    """In place and into other arrays, of several dtypes; halves with two roundings, too."""
    for native in (False, True):
        with mpikv.create("horovod", native_halves=native) as kv:
            arrays = [
                cupy.full(shape, kv.rank + 1, dtype) for shape, dtype in ((1000, "f4"), ((3, 5), "f2"), (7, "i2"))
            ]
            outs = [cupy.empty_like(array) for array in arrays]
            assert kv.pushpull(["a", "b", "c"], arrays, out=outs) is outs
            kv.pushpull(["a", "b", "c"], arrays)
            for array in (*arrays, *outs):
                assert (array.get() == sum(range(1, ranks + 1))).all()
            assert (kv.broadcast("a", cupy.full(1000, kv.rank, "f4")).get() == 0).all()
            assert kv._on_gpus == {"a", "b", "c"}


def test_a_closed_store_gives_its_memory_back(cupy):
    held = []
    for _ in range(3):
        with mpikv.create("nccl") as kv:
            kv.init("w", cupy.zeros(1 << 20, "f4"))
            kv.push("w", cupy.ones(1 << 20, "f4"))
        held.append(cupy.get_default_memory_pool().total_bytes())
    assert held[2] < held[1] + (1 << 20)


KILLED = """
import os, signal, sys
from mpikv.cluster.environment import launch_of
from mpikv.testing.gpus import sharing
os.environ |= sharing(launch_of().rank)
import cupy, mpikv
kv = mpikv.create("nccl", timeout=5.0)
kv.init("w", cupy.zeros(1 << 20, "f4"))
for step in range(1000):
    kv.push("w", cupy.ones(1 << 20, "f4"))
    assert float(kv.pull("w")[-1]) == kv.size
    if kv.rank == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.deadline(120)
def test_a_killed_rank_ends_the_job(tmp_path: Path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    command = [sys.executable, "-m", "mpikv", "run", "-n", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode != 0
    assert "AssertionError" not in done.stderr, done.stderr
