"""Calls of rows on a stand-in for a GPU take the memory that all ranks were given beforehand, and no more.

A rank that found too little later would keep the others waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gpu.stand_ins.test_device import store_on
from support.sparing import forbid_more_memory

from mpikv import RowSparse, calls
from mpikv.store import KVStore
from mpikv.testing.fakegpu import FakeGpu

pytestmark = pytest.mark.ranks(2)

SHAPE = (8000, 16)
"""So many and so wide that what each array takes besides is little."""


@pytest.fixture
def gpu(comm: Any) -> FakeGpu:
    return FakeGpu(comm.rank)


@pytest.fixture(params=[None, "adam"])
def kv(comm: Any, gpu: FakeGpu, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[KVStore]:
    forbid_more_memory(monkeypatch)
    with store_on(gpu, comm, placement="sharded") as kv:
        kv.init("w", RowSparse(np.arange(SHAPE[0]), np.ones(SHAPE, np.float32), SHAPE))
        if request.param:
            kv.set_optimizer(request.param)
        yield kv


def some(step: int) -> RowSparse:
    ids = np.arange(0, SHAPE[0], step)
    return RowSparse(ids, np.ones((ids.size, SHAPE[1]), np.float32), SHAPE)


def test_pushes(kv: KVStore) -> None:
    for step in (4, 4000, 3, 1):
        kv.push("w", some(step))


def test_pulls(kv: KVStore, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are cast to what an out has."""
    deliver = calls.deliver

    def frugal(*given: Any) -> None:
        taken = gpu.allocations
        deliver(*given)
        assert gpu.allocations == taken

    monkeypatch.setattr(calls, "deliver", frugal)
    for dtype in (np.float32, np.float64):
        kv.push("w", some(2))
        out = RowSparse([0], gpu.upload(np.ones((1, SHAPE[1]), dtype)), SHAPE)
        kv.row_sparse_pull("w", out=out, row_ids=np.arange(4000))
        assert out.dtype == dtype
