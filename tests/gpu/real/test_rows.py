"""Rows on real GPUs: what moves them beside numpy; stores beside those on the host, and whole arrays in one process."""

from collections import Counter

import numpy as np
import pytest
from store.test_rows import Program

import mpikv
from mpikv import PeerFailed, RowSparse, TransportUnavailable, Unsupported
from mpikv.cluster.environment import visible_gpus
from mpikv.compute.cuda.gpu import CupyGpu, CupyWorkspace, find_gpu
from mpikv.testing.store import on_host
from mpikv.verbs import rows as row_verbs

pytestmark = [pytest.mark.gpu, pytest.mark.deadline(120)]

VALUE = np.arange(12.0).reshape(6, 2)


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    """Let a call fail that takes more memory than all ranks have agreed on; return the sizes of arrays in that."""
    empty, sizes = CupyWorkspace.empty, []

    def within(tables, shape, dtype):
        array = empty(tables, shape, dtype)
        if tables._memory is not None and array.size:
            sizes.append(array.size)
            assert array.data.mem is tables._memory.data.mem, f"{tables._used} of {tables._memory.size} bytes are used"
        return array

    monkeypatch.setattr(CupyWorkspace, "empty", within)
    return sizes


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64", "bool", "complex128"])
@pytest.mark.parametrize("shape", [(5000, 64), (5000,), (300, 1000), (50, 3, 7), (9, 0)])
def test_rows_are_moved_and_summed_as_by_numpy(cupy, shape, dtype):
    random = np.random.default_rng(1)
    workspace = find_gpu(0, 1, sharing=True, visible=visible_gpus()).workspace()
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
    workspace = find_gpu(0, 1, sharing=True, visible=visible_gpus()).workspace()
    total, terms = cupy.zeros((1, 1), np.float32), cupy.asarray([[2048], [1], [1]], np.float16)
    for term in terms:
        workspace.add_rows(total, np.array([0]), term[None])
    assert float(total[0, 0]) == 2050
    assert float(workspace.sum_runs(terms, np.arange(3), np.array([0]))[0, 0]) == 2050


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(
    ("placement", "optimizer"), [("sharded", "adagrad"), ("root", None), ("replicated", "sgd"), ("sharded", None)]
)
def test_the_bits_are_those_of_the_host(cupy, placement, optimizer, dense):
    shape = (3001, 32 if dense else 33)  # pieces of rows have several elements, or one
    options = {"placement": placement, "bucket_bytes": 1 << 16}
    with mpikv.create("nccl", **options) as kv:
        host = mpikv.create("dist_sync", transport="local" if kv.size == 1 else "mpi", **options)
        random = np.random.default_rng(kv.rank)
        for each in (kv, host):
            zeros = RowSparse([], np.zeros((0, shape[1]), np.float32), shape)
            each.init("w", zeros.to_dense() if dense else zeros)
            if optimizer:
                each.set_optimizer(optimizer, learning_rate=0.1)
        for _ in range(3):
            ids = random.integers(0, 3001, int(random.integers(0, 400)))
            ids = np.unique(ids)
            values = random.standard_normal((ids.size, shape[1])).astype(np.float32)
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


# --- Calls of stores

# Placement, deterministic.
STORES = [("auto", False), ("sharded", False), ("root", True), ("replicated", True)]


class Facade:
    """A store on a GPU for a program of the host's arrays, most of which it gives it on the GPU, on several streams."""

    def __init__(self, kv, gpu, cupy, seed):
        self.kv, self.gpu, self.rng = kv, gpu, np.random.default_rng([seed, kv.rank])
        self.streams = [cupy.cuda.Stream.null, *(cupy.cuda.Stream(non_blocking=True) for _ in range(2))]

    def __getattr__(self, name):
        found = getattr(self.kv, name)
        if name not in ("init", "push", "pushpull", "pull", "row_sparse_pull", "set"):
            return found

        def call(*arguments, **options):
            # The buffers of a push without values were filled on the first.
            with self.streams[0 if name == "push" and len(arguments) == 1 else self.rng.integers(3)]:
                given = [self.there(each) for each in arguments]
                result = found(*given, **{option: self.there(value) for option, value in options.items()})
                for mine, filled in zip(rows_of(arguments), rows_of(given), strict=True):
                    if name == "pushpull" and "out" not in options:
                        mine.replace(filled.indices, here(filled.values))
                return here(result)

        return call

    def there(self, value):
        """Return the same, or nearly always the same on the GPU, of rows in any order and with zeros more than once."""
        if isinstance(value, list):
            return [self.there(each) for each in value]
        if not isinstance(value, (RowSparse, np.ndarray)) or self.rng.integers(4) == 0:
            return value
        if isinstance(value, np.ndarray):
            return self.gpu.upload(value)
        again = value.indices[self.rng.random(len(value)) < 0.3]
        ids = np.concatenate([value.indices, again, again])
        rows = np.concatenate([value.values, np.zeros((2 * again.size, *value.shape[1:]), value.dtype)])
        order = self.rng.permutation(ids.size) if self.rng.integers(3) else np.argsort(ids, kind="stable")
        ids = self.gpu.upload(ids[order]) if self.rng.integers(2) else ids[order]
        return RowSparse(ids, self.gpu.upload(rows[order]), value.shape)

    def buffer(self, key):
        return Writable(self.kv.buffer(key), self.gpu)


class Writable:
    """A buffer on the GPU that is filled from the host."""

    def __init__(self, array, gpu):
        self.array, self.gpu = array, gpu

    def __setitem__(self, index, value):
        self.array[index] = self.gpu.upload(value)


def rows_of(arguments):
    every = [each for value in arguments for each in (value if isinstance(value, list) else [value])]
    return [each for each in every if isinstance(each, RowSparse)]


def here(value):
    """Return what a call returned as the host's."""
    if isinstance(value, list):
        return [here(each) for each in value]
    if isinstance(value, RowSparse):
        return RowSparse(value.indices, on_host(value.values), value.shape)
    return on_host(value)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("store", STORES, ids=str)
def test_random_programs_do_what_whole_arrays_do(cupy, gpu, store):
    placement, deterministic = store
    with mpikv.create("nccl", placement=placement, deterministic=deterministic, bucket_bytes=4096) as kv:
        for seed in range(9):
            try:
                Program(Facade(kv, gpu, cupy, seed), seed, placement in ("auto", "root")).run(12)
            except AssertionError as error:
                raise AssertionError(f"in sequence {seed}: {error}") from error


@pytest.fixture
def filled(gpu):
    """Return a store on the GPU with a row-sparse and a dense value."""
    with mpikv.create("nccl", bucket_bytes=4096) as kv:
        kv.init("s", RowSparse(np.arange(6), gpu.upload(VALUE), (6, 2)))
        kv.init("d", gpu.upload(VALUE))
        yield kv


@pytest.mark.ranks(1, 2)
def test_forms_of_row_sparse_pull(cupy, gpu, filled):
    for ids in (np.array([4, 1, 4]), [4, 1, 4], gpu.upload(np.array([4.0, 1.0])), gpu.upload(np.array([[1, 4]]))):
        for key in ("s", "d"):
            rows = filled.row_sparse_pull(key, row_ids=ids)
            assert isinstance(rows.values, cupy.ndarray)
            assert (rows.indices.tolist(), rows.values.tolist()) == ([1, 4], [[2, 3], [8, 9]])
    expected = np.where(np.isin(np.arange(6), [1, 4])[:, None], VALUE, 0)
    out = RowSparse([0, 5], cupy.ones((2, 2), "f4"), (6, 2))
    of_host = RowSparse([0, 5], np.ones((2, 2), np.float32), (6, 2))
    outs = [out, of_host, cupy.full((6, 2), 7, "f4"), np.full((6, 2), 7.0), cupy.full((6, 4), 7.0)[:, ::2]]
    assert filled.row_sparse_pull("s", out=outs, row_ids=[4, 1]) is outs
    assert (type(out.values), out.dtype) == (cupy.ndarray, np.float32)
    assert (type(of_host.values), of_host.dtype) == (np.ndarray, np.float32)
    for each in (out.to_dense(), of_host.to_dense(), *outs[2:]):
        np.testing.assert_array_equal(on_host(each), expected)
    one, (two, three) = filled.row_sparse_pull(["d", "s"], row_ids=[[1], [np.array([2]), np.array([0, 2])]])
    assert [rows.values.tolist() for rows in (one, two, three)] == [[[2, 3]], [[4, 5]], [[0, 1], [4, 5]]]
    with pytest.raises(IndexError if filled.rank == 0 else PeerFailed, match="row 6"):
        filled.row_sparse_pull("s", row_ids=[6 if filled.rank == 0 else 0])


@pytest.mark.ranks(1, 2)
def test_pull_leaves_rows_as_they_are_or_fills_them(cupy, filled):
    ones = cupy.ones((2, 2))
    filled.push("s", RowSparse([2, 5], ones, (6, 2)))
    outs = [RowSparse([1], cupy.ones((1, 2), "f4"), (6, 2)), RowSparse([1], np.ones((1, 2)), (6, 2))]
    filled.pull("s", out=outs)
    assert [out.indices.tolist() for out in outs] == [[1], [1]]
    filled.pull("s", out=outs, ignore_sparse=False)
    for out, kind in zip(outs, (cupy.ndarray, np.ndarray), strict=True):
        assert type(out.values) is kind
        assert (out.indices.tolist(), out.values.tolist()) == ([2, 5], [[filled.size] * 2] * 2)
    whole = cupy.empty((6, 2))
    filled.pushpull("s", RowSparse([0, 5], ones, (6, 2)), out=[whole, outs[0]])
    assert whole[[0, 2, 5]].tolist() == [[filled.size] * 2, [0, 0], [filled.size] * 2]
    assert outs[0].values.tolist() == [[0, 0], [filled.size] * 2]
    wide = cupy.arange(12.0).reshape(3, 4)
    filled.push("s", RowSparse([0, 2, 5], wide[:, 1:3], (6, 2)))  # rows with gaps between them
    assert filled.pull("s")[[0, 2, 5]].tolist() == (np.array([[1, 2], [5, 6], [9, 10]]) * filled.size).tolist()
    filled.init("d", np.ones((10000, 3)), overwrite=True)
    filled.delete("d")
    filled.init("d", RowSparse([7], np.ones((1, 3)), (10000, 3)))  # in memory that another value has left
    assert filled.pull("d").sum() == 3


@pytest.mark.ranks(1, 2)
def test_rows_of_a_gpu_and_a_store_on_the_host(cupy, filled):
    """They are copied to it, and none are filled; an array of the GPU is."""
    rows = RowSparse([1], cupy.ones((1, 2)), (6, 2))
    with mpikv.create("dist_sync") as kv:
        kv.init("w", rows)
        kv.push("w", [rows, RowSparse([1, 3], np.ones((2, 2)), (6, 2))])
        expected = np.zeros((6, 2))
        expected[[1, 3]] = np.array([[2], [1]]) * kv.size
        np.testing.assert_array_equal(kv.pull("w"), expected)
        dense = cupy.ones((6, 2))
        kv.row_sparse_pull("w", out=dense, row_ids=[1, 2])
        assert (dense.get() == np.where(np.arange(6)[:, None] == 1, expected, 0)).all()
        for call in (
            lambda: kv.row_sparse_pull("w", out=rows, row_ids=[1]),
            lambda: kv.pull("w", out=rows, ignore_sparse=False),
            lambda: kv.pushpull("w", rows),
        ):
            with pytest.raises(Unsupported, match="rows on a GPU and the store its values on the host; pull to a Row"):
                call()
        assert (rows.indices.tolist(), rows.values.tolist()) == ([1], [[1, 1]])


@pytest.mark.ranks(1, 2)
def test_a_kernel_that_cannot_be_compiled_on_one_rank(cupy, filled, monkeypatch):
    """All are told before anything moves."""

    def fail(*dtypes):
        raise TransportUnavailable("on purpose")

    rows, last = RowSparse([1], cupy.ones((1, 2)), (6, 2)), filled.rank == filled.size - 1
    if last:
        monkeypatch.setattr("mpikv.compute.cuda.rows.prepare", fail)
    for call in (
        lambda: filled.push("s", rows),
        lambda: filled.pushpull("s", rows, out=np.zeros((6, 2))),
        lambda: filled.row_sparse_pull("s", row_ids=[1]),
        lambda: filled.pull("s", out=rows, ignore_sparse=False),
        lambda: filled.init("new", rows),
    ):
        with pytest.raises(TransportUnavailable if last else PeerFailed, match="on purpose"):
            call()
    np.testing.assert_array_equal(filled.pull("s").get(), VALUE)
    assert "new" not in filled


@pytest.mark.ranks(1, 2, 3)
def test_the_launches_of_a_push(cupy, monkeypatch):
    """One packs all that goes out, one adds what came from a rank, one updates, and numbers come thrice at most."""
    launches = Counter()

    def noted(kind, work, launch):
        monkeypatch.setattr(kind, work, lambda one, *given: launches.update([work]) or launch(one, *given))

    with mpikv.create("nccl", bucket_bytes=1 << 14) as kv:
        kv.init("w", np.zeros((8192, 4), np.float32))
        kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        rows = RowSparse(np.arange(0, 8192, 7), cupy.ones((1171, 4), "f4"), (8192, 4))
        kv.push("w", rows)
        for work in ("take_rows", "add_rows", "put_rows"):
            noted(CupyWorkspace, work, getattr(CupyWorkspace, work))
        noted(CupyGpu, "upload", CupyGpu.upload)
        kv.push("w", rows)
        several = kv.size > 1
        # Of the value and of its momentum, besides what is sent, and the first term of the sum.
        each = {"take_rows": 2 + several, "put_rows": 2 + several, "upload": 1 + 2 * several}
        assert launches == {**each, **({"add_rows": kv.size - 1} if several else {})}


@pytest.mark.ranks(1, 2, 3)
def test_rows_of_a_dense_value_take_the_memory_of_rows(cupy, scarce):
    """Each rank keeps the state of many ranges, in which rows are cut."""
    shape, ids = (20_000, 3), np.array([0, 5, 341, 342, 6007, 6008, 19_999])
    with mpikv.create("nccl", bucket_bytes=4096) as there, mpikv.create("dist_sync", bucket_bytes=4096) as host:
        for kv, place in ((there, cupy.asarray), (host, np.asarray)):
            kv.set_optimizer("adam")
            kv.init("d", place(np.ones(shape, np.float32)))
            for step in range(3):
                rows = np.arange(3.0 * ids.size, dtype=np.float32).reshape(-1, 3) + step
                scarce.taken.clear()
                kv.push("d", RowSparse(ids, place(rows), shape))
                # Of 240,000 bytes of a value: with each other rank 8,192 more for what it sends.
                assert kv is host or 0 < max(scarce.taken) < 40_000
                kv.push("d", place(np.full(shape, 0.5, np.float32)))
        assert there.pull("d").get().tobytes() == host.pull("d").tobytes()


# --- The memory of calls


@pytest.mark.ranks(2)
@pytest.mark.parametrize("optimizer", [None, "adam"])
def test_calls_take_no_more_memory_than_was_agreed_on(cupy, scarce, checked, monkeypatch, optimizer):
    """A rank that found too little later would keep the others waiting; also where rows are cast to what an out has."""
    shape, deliver = (8000, 16), row_verbs.deliver

    def frugal(*given):
        taken = len(scarce.taken)
        deliver(*given)
        assert len(scarce.taken) == taken

    def some(step):
        ids = np.arange(0, shape[0], step)
        return RowSparse(ids, np.ones((ids.size, shape[1]), np.float32), shape)

    monkeypatch.setattr(row_verbs, "deliver", frugal)
    with mpikv.create("nccl", placement="sharded", bucket_bytes=1 << 14) as kv:
        kv.init("w", some(1))
        if optimizer:
            kv.set_optimizer(optimizer)
        for step in (4, 4000, 3, 1):
            kv.push("w", some(step))
        for dtype in (np.float32, np.float64):
            out = RowSparse([0], cupy.ones((1, shape[1]), dtype), shape)
            kv.row_sparse_pull("w", out=out, row_ids=np.arange(4000))
            assert out.dtype == dtype
    assert checked


@pytest.mark.ranks(2)
@pytest.mark.parametrize("deterministic", [False, True])
def test_messages_take_what_the_page_on_gpus_says(scarce, comm, deterministic):
    bucket = 1 << 20
    mpikv.create("nccl", bucket_bytes=bucket, deterministic=deterministic).close()
    assert sum(scarce.taken) // bucket == 8 + (2 * comm.size if deterministic else 0)
