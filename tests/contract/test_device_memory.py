"""What stores take of the memory of a GPU, on stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.gpus import store_on
from support.sparing import forbid_more_memory

from mpikv import RowSparse
from mpikv.store.kvstore import KVStore
from mpikv.testing.fakegpu import FakeGpu
from mpikv.verbs import rows as row_verbs

pytestmark = pytest.mark.ranks(2)

BUCKET = 1 << 20
SHAPE = (8000, 16)
"""So many and so wide that what each array takes besides is little."""


@pytest.fixture
def gpu(comm: Any) -> FakeGpu:
    return FakeGpu(comm.rank)


@pytest.fixture(params=[None, "adam"])
def kv(comm: Any, gpu: FakeGpu, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[KVStore]:
    checked = forbid_more_memory(monkeypatch)
    with store_on(gpu, comm, placement="sharded") as kv:
        kv.init("w", RowSparse(np.arange(SHAPE[0]), np.ones(SHAPE, np.float32), SHAPE))
        if request.param:
            kv.set_optimizer(request.param)
        yield kv
        assert checked


def some(step: int) -> RowSparse:
    ids = np.arange(0, SHAPE[0], step)
    return RowSparse(ids, np.ones((ids.size, SHAPE[1]), np.float32), SHAPE)


@pytest.mark.parametrize("deterministic", [False, True])
def test_messages_take_what_the_page_on_gpus_says(comm: Any, gpu: FakeGpu, deterministic: bool) -> None:
    with store_on(gpu, comm, bucket_bytes=BUCKET, deterministic=deterministic):
        taken = sum(block.memory.size for known in gpu._blocks.values() if (block := known()))
        assert taken // BUCKET == 8 + (2 * comm.size if deterministic else 0)


def test_pushes_of_rows_take_no_more_than_was_agreed_on(kv: KVStore) -> None:
    """A rank that found too little later would keep the others waiting."""
    for step in (4, 4000, 3, 1):
        kv.push("w", some(step))


def test_pulls_of_rows_take_no_more_than_was_agreed_on(
    kv: KVStore, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they are cast to what an out has."""
    deliver = row_verbs.deliver

    def frugal(*given: Any) -> None:
        taken = gpu.allocations
        deliver(*given)
        assert gpu.allocations == taken

    monkeypatch.setattr(row_verbs, "deliver", frugal)
    for dtype in (np.float32, np.float64):
        kv.push("w", some(2))
        out = RowSparse([0], gpu.upload(np.ones((1, SHAPE[1]), dtype)), SHAPE)
        kv.row_sparse_pull("w", out=out, row_ids=np.arange(4000))
        assert out.dtype == dtype
