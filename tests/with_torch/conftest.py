"""What the tests of several files use."""

from datetime import timedelta
from typing import Any

import pytest

import mpikv
from mpikv.cluster.environment import free_port


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


@pytest.fixture
def group(comm: Any) -> Any:
    """Return the process group of all ranks, which the first test of a module makes."""
    dist = pytest.importorskip("torch").distributed
    if not dist.is_initialized():
        port, rank, size = (comm.bcast(free_port()), comm.rank, comm.size) if comm else (free_port(), 0, 1)
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("mpikv", address, timedelta(seconds=15), rank=rank, world_size=size)
    return dist.group.WORLD


@pytest.fixture(scope="module", autouse=True)
def _end_of_group() -> Any:
    yield
    dist = pytest.importorskip("torch").distributed
    if dist.is_initialized():
        dist.destroy_process_group()
