"""Rows on real GPUs: what moves them beside numpy, and a store of them beside one on the host."""

import numpy as np
import pytest

import mpikv
from mpikv import RowSparse
from mpikv.cluster.environment import visible_gpus
from mpikv.compute.cuda.gpu import find_gpu
from mpikv.memory.device import GpuWorkspace

pytestmark = [pytest.mark.gpu, pytest.mark.deadline(120)]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64", "bool", "complex128"])
@pytest.mark.parametrize("shape", [(5000, 64), (5000,), (300, 1000), (50, 3, 7), (9, 0)])
def test_rows_are_moved_and_summed_as_by_numpy(cupy, shape, dtype):
    random = np.random.default_rng(1)
    workspace = GpuWorkspace(find_gpu(0, 1, sharing=True, visible=visible_gpus()))
    workspace.prepare_rows(np.dtype(dtype))
    table, ids = random.integers(0, 5, shape).astype(dtype), random.permutation(shape[0])[: shape[0] // 3]
    some = random.integers(0, 5, (ids.size, *shape[1:])).astype(dtype)
    there = cupy.asarray(table)
    assert (workspace.take_rows(there, ids).get() == table[ids]).all()
    out = cupy.empty_like(cupy.asarray(some))
    assert workspace.take_rows(there, ids, out) is out
    assert (out.get() == table[ids]).all()
    workspace.add_rows(there, ids, cupy.asarray(some))
    table[ids] += some
    assert (there.get() == table).all()
    workspace.put_rows(there, ids[::2], cupy.asarray(some[::2]))
    workspace.put_rows(there, ids[1::2], None)
    table[ids[::2]], table[ids[1::2]] = some[::2], 0
    assert (there.get() == table).all()
    starts = np.arange(0, ids.size, 3)
    found = workspace.sum_runs(there, ids, starts).get()
    assert (found == [table[run].sum(axis=0, dtype=dtype) for run in np.split(ids, starts[1:])]).all()


def test_half_precision_is_added_in_single_precision(cupy):
    workspace = GpuWorkspace(find_gpu(0, 1, sharing=True, visible=visible_gpus()))
    total, terms = cupy.zeros((1, 1), np.float32), cupy.asarray([[2048], [1], [1]], np.float16)
    for term in terms:
        workspace.add_rows(total, np.array([0]), term[None])
    assert float(total[0, 0]) == 2050
    assert float(workspace.sum_runs(terms, np.arange(3), np.array([0]))[0, 0]) == 2050


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    ("placement", "optimizer"), [("sharded", "adagrad"), ("root", None), ("replicated", "sgd"), ("sharded", None)]
)
def test_the_bits_are_those_of_the_host(cupy, placement, optimizer):
    shape = (3001, 33)
    options = {"placement": placement, "bucket_bytes": 1 << 16}
    with mpikv.create("nccl", **options) as kv:
        host = mpikv.create("dist_sync", transport="local" if kv.size == 1 else "mpi", **options)
        random = np.random.default_rng(kv.rank)
        for each in (kv, host):
            each.init("w", RowSparse([], np.zeros((0, 33), np.float32), shape))
            if optimizer:
                each.set_optimizer(optimizer, learning_rate=0.1)
        for _ in range(3):
            ids = random.integers(0, 3001, int(random.integers(0, 400)))
            ids = np.unique(ids)
            values = random.standard_normal((ids.size, 33)).astype(np.float32)
            host.push("w", RowSparse(ids, values, shape))
            kv.push("w", RowSparse(cupy.asarray(ids), cupy.asarray(values), shape))
            wanted = random.integers(0, 3001, 100)
            found, expected = (each.row_sparse_pull("w", row_ids=wanted) for each in (kv, host))
            assert isinstance(found.values, cupy.ndarray)
            assert found.values.get().tobytes() == expected.values.tobytes()
            assert kv.pull("w").get().tobytes() == host.pull("w").tobytes()
        host.close()


@pytest.mark.ranks(1, 2)
def test_rows_given_twice_and_rows_of_other_streams(cupy):
    shape = (1000, 8)
    with mpikv.create("nccl") as kv:
        kv.init("w", cupy.zeros(shape, "f4"))
        with cupy.cuda.Stream(non_blocking=True):
            values = cupy.ones((4000, 8), "f4") * 2
            ids = np.arange(4000) % 500
            kv.push("w", RowSparse(ids, values, shape))
            rows = kv.row_sparse_pull("w", row_ids=np.arange(0, 1000, 2))
            assert (rows.to_dense().get()[0:500:2] == 16 * kv.size).all()
            assert not rows.to_dense().get()[500:].any()


def test_torch_gradients_of_an_embedding(cupy):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no GPU")
    with mpikv.create("nccl") as kv:
        embedding = torch.nn.Embedding(100, 4, sparse=True, device="cuda")
        kv.init("w", RowSparse([], np.zeros((0, 4), np.float32), (100, 4)))
        embedding(torch.tensor([3, 1, 3], device="cuda")).sum().backward()
        kv.push("w", RowSparse.from_torch(embedding.weight.grad))
        assert kv.row_sparse_pull("w", row_ids=[1, 3]).values.get().tolist() == [[1.0] * 4, [2.0] * 4]
