"""Two hosts for tests of the transport ``hosts``, which one machine has to be taken for, and a folder for all ranks."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def ranks_per_host(ranks: int) -> int:
    """Return how many ranks the larger of two hosts has: both have as many, or the second has one less."""
    return -(-ranks // 2)


@pytest.fixture(autouse=True)
def two_hosts(request: pytest.FixtureRequest, ranks_per_host: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stores of a test with the parameter ``hosts`` find two hosts."""
    spec = getattr(request.node, "callspec", None)
    if spec and any(names_hosts(parameter) for parameter in spec.params.values()):
        monkeypatch.setenv("MPIKV_RANKS_PER_HOST", str(ranks_per_host))


@pytest.fixture
def over(transport: str, ranks_per_host: int) -> dict[str, Any]:
    """Return the transport of a test for :func:`mpikv.testing.faulty.store_over`, which reads no variables."""
    return {"transport": transport, "ranks_per_host": ranks_per_host if transport == "hosts" else 0}


@pytest.fixture
def folder(comm: Any) -> Iterator[Path]:
    """Return a new folder that all ranks see, under one name."""
    made = tempfile.mkdtemp() if comm is None or comm.rank == 0 else None
    made = Path(made if comm is None else comm.bcast(made))
    yield made
    if comm is not None:
        comm.Barrier()
    if comm is None or comm.rank == 0:
        shutil.rmtree(made)


def names_hosts(parameter: Any) -> bool:
    values = parameter if isinstance(parameter, tuple) else (parameter,)
    return any(isinstance(value, str) and value == "hosts" for value in values)
