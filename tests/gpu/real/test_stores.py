"""A store on real GPUs keeps the promises of stores and of transports."""

from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import commands

import mpikv
from mpikv.arrays.arrays import accumulator
from mpikv.cluster.environment import visible_gpus
from mpikv.compute.cuda.gpu import find_gpu, find_nccl
from mpikv.config import Config
from mpikv.errors import TransportError
from mpikv.memory.device import DeviceMemory
from mpikv.testing import StoreContract
from mpikv.testing.transport import TransportContract, divisions
from mpikv.testing.wrappers import Wrapper
from mpikv.transports import open_gpu_transport

pytestmark = [pytest.mark.gpu, pytest.mark.deadline(60)]
PLACEMENTS = ("root", "sharded", "replicated")


# Each test makes a store, which takes NCCL a second, and ranks that share a GPU wait milliseconds for each other in
# each step of a sum: so what all stores have in common is tried on two ranks at most.
@pytest.mark.ranks(1, 2)
class TestStore(StoreContract):
    def create(self, **options: Any) -> mpikv.KVStore:
        store = mpikv.create("nccl", bucket_bytes=1 << 14, **options)
        assert store.is_capable("gpu")
        return store


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
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


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_fixed_order_of_addition_gives_the_bits_of_the_host(cupy, placement):
    options = {"placement": placement, "deterministic": True, "bucket_bytes": 4096}
    shapes = {"large": (3001, 5), "small": (3,)}
    with mpikv.create("nccl", **options) as kv, mpikv.create("dist_sync", **options) as host:
        random = np.random.default_rng(kv.rank)
        for store, place in ((kv, cupy.asarray), (host, np.copy)):
            store.init({key: place(np.ones(shape, np.float32)) for key, shape in shapes.items()})
            store.set_optimizer("sgd", learning_rate=0.1, momentum=0.9)
        for _ in range(3):
            gradients = {key: random.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}
            found = kv.pushpull({key: cupy.asarray(gradient) for key, gradient in gradients.items()})
            expected = host.pushpull(gradients)
            assert all(found[key].get().tobytes() == expected[key].tobytes() for key in shapes)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_halves_that_nccl_adds_are_rounded_at_each_addition(cupy, comm, placement):
    """In whatever order it adds them. Their sum then goes on as any other."""
    gradients = [np.random.default_rng(rank).standard_normal(9000).astype(np.float16) for rank in range(comm.size)]
    with mpikv.create("nccl", placement=placement, native_halves=True) as kv:
        kv.init("w", cupy.ones(9000, np.float16))
        kv.set_optimizer("sgd", learning_rate=0.5)
        found = kv.pushpull("w", cupy.asarray(gradients[kv.rank])).get()

    def updated(total):
        return (np.float32(1) - np.float32(0.5) * total.astype(np.float32)).astype(np.float16)

    assert np.any([found == updated(sum(order[1:], order[0])) for order in permutations(gradients)], axis=0).all()
    assert (found != updated(sum(gradients, np.zeros(9000, np.float32)))).any()


class InOrder(Wrapper):
    """Runs the calls that move data as a store does: in the order of the caller's stream."""

    def __init__(self, transport: Any) -> None:
        super().__init__(transport)
        for verb in self.data:
            setattr(self, verb, partial(self.memory.order.run, getattr(transport, verb)))


@pytest.mark.ranks(2, 3)
class TestTransport(TransportContract):
    gathers = False

    def address(self, transport, array):
        return int(transport.memory.gpu.address(array))

    def test_sums_allocate_nothing(self, transport, scarce):
        for dtype in (np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.int16)):
            send = transport.memory.source(np.ones(self.limit // dtype.itemsize, dtype))
            recv = transport.memory.source(np.empty(send.size, accumulator(dtype)))
            counts = divisions(send.size, transport.size)[0]
            transport.all_to_all(send.view(np.uint8), None)
            scarce.taken.clear()
            transport.allreduce(send, recv)
            transport.reduce(send, recv, 0)
            transport.reduce_scatter(send, recv[: counts[transport.rank]], counts)
            transport.all_to_all(send.view(np.uint8), [count * dtype.itemsize for count in counts])
            assert scarce.taken == []

    def make(self, group, limit, timeout):
        config = Config.read(bucket_bytes=limit, timeout=timeout, deterministic=self.gathers)
        gpu = find_gpu(group.local_rank, len(group.host_ranks), sharing=config.gpu_sharing, visible=visible_gpus())
        nccl = find_nccl() if group.size > 1 else None
        return InOrder(open_gpu_transport(group, config, DeviceMemory(gpu), nccl, lambda *_: None))


@pytest.mark.ranks(2, 3)
class TestTransportThatGathers(TestTransport):
    gathers = True

    def test_what_is_received_is_aligned(self, transport):
        send, recv = (transport.memory.source(np.ones(7, np.int8)) for _ in range(2))
        terms = transport.allreduce(send, recv)
        assert not [self.address(transport, term) % 16 for term in terms if self.address(transport, term) % 16]

    def test_what_nccl_refuses_is_told_in_its_words(self, transport):
        with pytest.raises(TransportError, match=r"NCCL 2\S+ failed in broadcast: NCCL_ERROR_INVALID_ARGUMENT.+\(.+\)"):
            transport.broadcast(transport.memory.source(np.ones(7, np.int8)), transport.size)


@pytest.mark.ranks(1, 2)
def test_a_closed_store_gives_its_memory_back(cupy):
    """Though somebody still has it."""
    pool, stores, held = cupy.get_default_memory_pool(), [], []
    for _ in range(3):
        with mpikv.create("nccl") as kv:
            kv.init("w", cupy.zeros(1 << 20, "f4"))
            kv.push("w", cupy.ones(1 << 20, "f4"))
        stores.append(kv)
        held.append(pool.total_bytes())
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
    done = commands.mpikv("run", "-n", 2, script, timeout=100)
    assert done.returncode != 0
    assert "AssertionError" not in done.stderr, done.stderr
