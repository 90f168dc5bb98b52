"""What tests of stores share."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["shm", "mpi", "hierarchical"])
def transport(request: pytest.FixtureRequest, ranks: int) -> str:
    """Return each transport of several ranks, or the one of one rank."""
    if ranks == 1 and request.param != "shm":
        pytest.skip("one rank has one transport")
    return "auto" if ranks == 1 else request.param


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every value sent in a stream, as large ones are."""
    monkeypatch.setattr("mpikv.engine.plan._STREAMED_BYTES", 0)
