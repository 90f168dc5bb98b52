"""Rows on a GPU that is none, with the order of its work checked: the bits are those of a store on the host, in random
programs of all calls those of whole arrays in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from store.test_rows import Program
from support.gpus import store_on
from support.sparing import forbid_more_memory

import mpikv
from mpikv import RowSparse
from mpikv.errors import PeerFailed, Unsupported
from mpikv.store.kvstore import KVStore
from mpikv.testing.fakegpu import FakeArray, FakeGpu
from mpikv.testing.store import on_host

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

# Placement, deterministic.
STORES = [
    ("auto", False),
    ("auto", True),
    ("sharded", False),
    ("root", False),
    ("root", True),
    ("replicated", True),
    ("replicated", False),
]
VALUE = np.arange(12.0).reshape(6, 2)


@pytest.fixture(autouse=True)
def no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_more_memory(monkeypatch)


@pytest.fixture
def filled(gpu: FakeGpu, comm: Any) -> Iterator[KVStore]:
    """Return a store on the GPU with a row-sparse and a dense value."""
    with store_on(gpu, comm, bucket_bytes=4096) as kv:
        kv.init("s", RowSparse(np.arange(6), gpu.upload(VALUE), (6, 2)))
        kv.init("d", gpu.upload(VALUE))
        yield kv


class Facade:
    """A store on a GPU for a program of the host's arrays, most of which it gives it on the GPU."""

    def __init__(self, kv: KVStore, gpu: FakeGpu, seed: int) -> None:
        self.kv, self.gpu, self.rng = kv, gpu, np.random.default_rng([seed, kv.rank])
        self.streams = [gpu.current(), gpu.stream(), gpu.stream()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kv, name)

    def there(self, value: Any) -> Any:
        """Return the same, or nearly always the same on the GPU, of rows in any order and with zeros more than once."""
        if isinstance(value, list):
            return [self.there(each) for each in value]
        if self.rng.integers(4) == 0:
            return value
        if not isinstance(value, RowSparse):
            return self.gpu.upload(value)
        again = value.indices[self.rng.random(len(value)) < 0.3]
        ids = np.concatenate([value.indices, again, again])
        rows = np.concatenate([value.values, np.zeros((2 * again.size, *value.shape[1:]), value.dtype)])
        order = self.rng.permutation(ids.size) if self.rng.integers(3) else np.argsort(ids, kind="stable")
        ids = ids[order]
        return RowSparse(
            self.gpu.upload(ids) if self.rng.integers(2) else ids, self.gpu.upload(rows[order]), value.shape
        )

    def call(self, verb: str, *arguments: Any, **options: Any) -> Any:
        with self.streams[self.rng.integers(3)]:
            given = [self.there(each) if not isinstance(each, str) else each for each in arguments]
            return given, here(getattr(self.kv, verb)(*given, **options))

    def init(self, key: str, value: Any, overwrite: bool) -> None:
        self.kv.init(key, self.there(value), overwrite=overwrite)

    def push(self, keys: Any, *values: Any) -> None:
        if values:
            with self.streams[self.rng.integers(3)]:
                self.kv.push(keys, self.there(values[0]))
        else:
            self.kv.push(keys)

    def pushpull(self, key: str, rows: Any, out: Any = None) -> Any:
        with self.streams[self.rng.integers(3)]:
            given = self.there(rows)
            if out is not None:
                return here(self.kv.pushpull(key, given, out=self.there(out)))
            self.kv.pushpull(key, given)
            for mine, filled in zip(as_list(rows), as_list(given), strict=True):
                mine.replace(filled.indices, here(filled.values))
        return rows

    def pull(self, key: str) -> Any:
        with self.streams[self.rng.integers(3)]:
            return here(self.kv.pull(key))

    def row_sparse_pull(self, keys: Any, row_ids: Any) -> Any:
        with self.streams[self.rng.integers(3)]:
            return here(self.kv.row_sparse_pull(keys, row_ids=[self.there(ids) for ids in row_ids]))

    def set(self, key: str, value: Any) -> None:
        self.kv.set(key, self.there(value))

    def buffer(self, key: str) -> Any:
        return Writable(self.kv.buffer(key), self.gpu)


class Writable:
    """A buffer on the GPU that is filled from the host."""

    def __init__(self, array: FakeArray, gpu: FakeGpu) -> None:
        self.array, self.gpu = array, gpu

    def __setitem__(self, index: Any, value: Any) -> None:
        self.array[index] = self.gpu.upload(value)


def here(value: Any) -> Any:
    """Return what a call returned as the host's."""
    if isinstance(value, list):
        return [here(each) for each in value]
    if isinstance(value, RowSparse):
        return RowSparse(value.indices, on_host(value.values), value.shape)
    return on_host(value)


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@pytest.mark.deadline(120)
@pytest.mark.parametrize("store", STORES, ids=str)
def test_random_programs_do_what_whole_arrays_do(comm: Any, gpu: FakeGpu, store: tuple[str, bool]) -> None:
    placement, deterministic = store
    with store_on(gpu, comm, placement=placement, deterministic=deterministic, bucket_bytes=4096) as kv:
        for seed in range(9):
            try:
                Program(Facade(kv, gpu, seed), seed, placement in ("auto", "root")).run(12)
            except AssertionError as error:
                raise AssertionError(f"in sequence {seed}: {error}") from error


@pytest.mark.ranks(1)
def test_rows_with_gaps_between_them_are_copied(gpu: FakeGpu) -> None:
    with store_on(gpu, None) as kv:
        wide = gpu.upload(np.arange(12.0).reshape(3, 4))
        rows = RowSparse([0, 2, 5], wide[:, 1:3], (6, 2))
        kv.init("w", np.zeros((6, 2)))
        kv.push("w", rows)
        assert on_host(kv.pull("w"))[[0, 2, 5]].tolist() == [[1, 2], [5, 6], [9, 10]]


@pytest.mark.ranks(1)
def test_rows_of_a_gpu_without_a_store() -> None:
    with pytest.raises(Unsupported, match="this process has no store on that GPU; create the store first"):
        RowSparse([0], FakeGpu().upload(np.ones((1, 2))), (6, 2))


@pytest.mark.ranks(1, 2, 3)
def test_rows_of_a_gpu_and_a_store_on_the_host(filled: KVStore, known: FakeGpu, comm: Any) -> None:
    """They are copied to it, and none are filled; an array of the GPU is."""
    gpu = known
    rows = RowSparse([1], gpu.upload(np.ones((1, 2))), (6, 2))
    with mpikv.create(comm=comm) as kv:
        kv.init("w", rows)
        kv.push("w", [rows, RowSparse([1, 3], np.ones((2, 2)), (6, 2))])
        expected = np.zeros((6, 2))
        expected[[1, 3]] = np.array([[2], [1]]) * kv.size
        np.testing.assert_array_equal(kv.pull("w"), expected)
        dense = gpu.upload(np.ones((6, 2)))
        kv.row_sparse_pull("w", out=dense, row_ids=[1, 2])
        np.testing.assert_array_equal(on_host(dense), np.where(np.arange(6)[:, None] == 1, expected, 0))
        calls: list[Callable[[], Any]] = [
            lambda: kv.row_sparse_pull("w", out=rows, row_ids=[1]),
            lambda: kv.pull("w", out=rows, ignore_sparse=False),
            lambda: kv.pushpull("w", rows),
        ]
        for call in calls:
            with pytest.raises(Unsupported, match="rows on a GPU and the store its values on the host; pull to a Row"):
                call()
        assert (rows.indices.tolist(), on_host(rows.values).tolist()) == ([1], [[1, 1]])


# --- What is pulled, and where to


def test_forms_of_row_sparse_pull(filled: KVStore, gpu: FakeGpu) -> None:
    for ids in (np.array([4, 1, 4]), [4, 1, 4], gpu.upload(np.array([4.0, 1.0])), gpu.upload(np.array([[1, 4]]))):
        for key in ("s", "d"):
            rows = filled.row_sparse_pull(key, row_ids=ids)
            assert isinstance(rows.values, FakeArray)
            assert (rows.indices.tolist(), on_host(rows.values).tolist()) == ([1, 4], [[2, 3], [8, 9]])
    expected = np.where(np.isin(np.arange(6), [1, 4])[:, None], VALUE, 0)
    out = RowSparse([0, 5], gpu.upload(np.ones((2, 2), np.float32)), (6, 2))
    of_host = RowSparse([0, 5], np.ones((2, 2), np.float32), (6, 2))
    dense, dense_of_host = gpu.upload(np.full((6, 2), 7, np.float32)), np.full((6, 2), 7.0)
    gaps = gpu.upload(np.full((6, 4), 7.0))[:, ::2]
    outs = [out, of_host, dense, dense_of_host, gaps]
    assert filled.row_sparse_pull("s", out=outs, row_ids=[4, 1]) is outs
    assert (type(out.values), out.dtype) == (FakeArray, np.float32)
    assert (type(of_host.values), of_host.dtype) == (np.ndarray, np.float32)
    for each in (out.to_dense(), of_host.to_dense(), dense, dense_of_host, gaps):
        np.testing.assert_array_equal(on_host(each), expected)
    one, (two, three) = filled.row_sparse_pull(["d", "s"], row_ids=[[1], [np.array([2]), np.array([0, 2])]])
    assert [rows.indices.tolist() for rows in (one, two, three)] == [[1], [2], [0, 2]]
    assert on_host(three.values).tolist() == [[0, 1], [4, 5]]
    with pytest.raises(IndexError if filled.rank == 0 else PeerFailed, match="row 6"):
        filled.row_sparse_pull("s", row_ids=[6 if filled.rank == 0 else 0])


def test_pull_leaves_rows_as_they_are_or_fills_them(filled: KVStore, gpu: FakeGpu) -> None:
    filled.push("s", RowSparse([2, 5], gpu.upload(np.ones((2, 2))), (6, 2)))
    outs = [RowSparse([1], gpu.upload(np.ones((1, 2), np.float32)), (6, 2)), RowSparse([1], np.ones((1, 2)), (6, 2))]
    filled.pull("s", out=outs)
    assert [out.indices.tolist() for out in outs] == [[1], [1]]
    filled.pull("s", out=outs, ignore_sparse=False)
    for out, kind in zip(outs, (FakeArray, np.ndarray), strict=True):
        assert type(out.values) is kind
        assert (out.indices.tolist(), on_host(out.values).tolist()) == ([2, 5], [[filled.size] * 2] * 2)
    given = RowSparse([0, 5], gpu.upload(np.ones((2, 2))), (6, 2))
    whole = gpu.empty((6, 2), np.dtype(np.float64))
    filled.pushpull("s", given, out=[whole, outs[0]])
    assert on_host(whole)[[0, 2, 5]].tolist() == [[filled.size] * 2, [0, 0], [filled.size] * 2]
    assert on_host(outs[0].values).tolist() == [[0, 0], [filled.size] * 2]


# --- With the rest of the store


def test_memory_that_another_value_has_left_is_cleared(comm: Any, gpu: FakeGpu) -> None:
    with store_on(gpu, comm) as kv:
        kv.init("d", np.ones((10000, 3)))
        kv.delete("d")
        kv.init("s", RowSparse([7], np.ones((1, 3)), (10000, 3)))
        assert on_host(kv.pull("s")).sum() == 3


def test_a_kernel_that_cannot_be_compiled_on_one_rank(
    filled: KVStore, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are told before anything moves."""

    def fail(dtype: Any) -> None:
        raise mpikv.TransportUnavailable("on purpose")

    rows = RowSparse([1], gpu.upload(np.ones((1, 2))), (6, 2))
    calls: list[Callable[[], Any]] = [
        lambda: filled.push("s", rows),
        lambda: filled.pushpull("s", rows, out=np.zeros((6, 2))),
        lambda: filled.row_sparse_pull("s", row_ids=[1]),
        lambda: filled.pull("s", out=rows, ignore_sparse=False),
        lambda: filled.init("new", rows),
    ]
    last = filled.rank == filled.size - 1
    for call in calls:
        with monkeypatch.context() as patch:
            if last:
                patch.setattr(filled._transport.memory.workspace, "prepare_rows", fail)
            with pytest.raises(mpikv.TransportUnavailable if last else PeerFailed, match="on purpose"):
                call()
    np.testing.assert_array_equal(on_host(filled.pull("s")), VALUE)
    assert "new" not in filled


@pytest.mark.ranks(1, 2, 3, 4)
def test_the_launches_of_a_push(comm: Any, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """One packs all that goes out, one adds what came from a rank, one updates, and numbers come thrice at most."""
    with store_on(gpu, comm, bucket_bytes=1 << 14) as kv:
        kv.init("w", np.zeros((8192, 4), np.float32))
        kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        rows = RowSparse(np.arange(0, 8192, 7), gpu.upload(np.ones((1171, 4), np.float32)), (8192, 4))
        kv.push("w", rows)
        launches: list[str] = []
        launch = gpu.launch
        monkeypatch.setattr(gpu, "launch", lambda work, *uses: (launches.append(work), launch(work, *uses)))
        kv.push("w", rows)
        several = kv.size > 1
        counted = {work: launches.count(work) for work in ("take_rows", "add_rows", "put_rows", "update", "upload")}
        # Of the value and of its momentum, besides what is sent, and the first term of the sum.
        assert counted == {
            "take_rows": 2 + several,
            "add_rows": kv.size - 1,
            "put_rows": 2 + several,
            "update": 1,
            "upload": 1 + 2 * several,
        }


def test_rows_of_a_dense_value_take_the_memory_of_rows(gpu, comm, monkeypatch):
    """Each rank keeps the state of many ranges, in which rows are cut."""
    shape, ids = (20_000, 3), np.array([0, 5, 341, 342, 6007, 6008, 19_999])
    stores = [store_on(gpu, comm, bucket_bytes=4096), mpikv.create("dist_sync", comm=comm, bucket_bytes=4096)]
    asked, transport = [], stores[0]._exchange.transport
    allocate = transport.allocate
    for kv, there in zip(stores, (gpu.upload, np.asarray), strict=True):
        kv.set_optimizer("adam")
        kv.init("d", there(np.ones(shape, np.float32)))
        monkeypatch.setattr(transport, "allocate", lambda nbytes: asked.append(nbytes) or allocate(nbytes))
        for step in range(3):
            rows = np.arange(3.0 * ids.size, dtype=np.float32).reshape(-1, 3) + step
            kv.push("d", RowSparse(ids, there(rows), shape))
            kv.push("d", there(np.full(shape, 0.5, np.float32)))
    found, expected = (on_host(kv.pull("d")) for kv in stores)
    assert found.tobytes() == expected.tobytes()
    assert 0 < max(asked) < 20_000
    for kv in stores:
        kv.close()
