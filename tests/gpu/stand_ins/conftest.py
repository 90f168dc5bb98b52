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
