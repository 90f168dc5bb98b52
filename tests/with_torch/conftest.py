"""What the tests of several files use."""

from __future__ import annotations

import pytest

import mpikv


@pytest.fixture
def kv(comm):
    with mpikv.create(comm=comm, timeout=10) as kv:
        yield kv


@pytest.fixture(params=["local", "store"])
def update(request):
    return request.param


@pytest.fixture
def overlapping(monkeypatch):
    """Have gradients sent while backward goes on, in several buckets, as where cores are free or hosts are several."""
    monkeypatch.setattr("mpikv.torch.attached._has_spare_core", lambda kv: True)
