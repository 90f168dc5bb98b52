"""What tests of stores share."""

from collections.abc import Iterator
from typing import Any

import pytest

import mpikv


@pytest.fixture
def kv(comm: Any) -> Iterator[mpikv.KVStore]:
    with mpikv.create(comm=comm) as store:
        yield store


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every value sent in a stream, as large ones are."""
    monkeypatch.setattr("mpikv.engine.plan._STREAMED_BYTES", 0)
