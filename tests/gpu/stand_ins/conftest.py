"""What tests on stand-ins for GPUs share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mpikv.testing.fakegpu import FakeGpu


@pytest.fixture
def gpu(comm: Any) -> Iterator[FakeGpu]:
    """Return this rank's GPU, on which nothing may have been done in no order."""
    gpu = FakeGpu(comm.rank if comm else 0)
    yield gpu
    gpu.checker.assert_clean()


@pytest.fixture
def known(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Return this rank's GPU, which stores and Trainers on the host take for that of any array of a GPU."""
    for module in ("creation", "train.array_location"):
        monkeypatch.setattr(f"mpikv.{module}.gpu_of", lambda value: gpu)
    return gpu
