"""Memory that every rank gets, or none."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mpikv.transports.allocation import allocate_collectively

GROUP = SimpleNamespace(gather=lambda reason: ["", reason or "no more", ""])


def short(nbytes: int) -> np.ndarray:
    raise MemoryError


@pytest.mark.parametrize(
    ("make", "given_back", "reason"),
    [(np.zeros, 1, "no more"), (short, 0, "the process cannot have more")],
    ids=["elsewhere", "here"],
)
def test_too_little_memory_on_one_rank(make, given_back, reason):
    told, calls = [], []
    with pytest.raises(MemoryError, match=rf"^8 bytes for values are needed and ranks \[1\] .* \({reason}\)"):
        allocate_collectively(GROUP, lambda had: told.append(had), make, 8, lambda: calls.append("back"))
    assert told == [bool(given_back)]
    assert calls == ["back"] * given_back


def test_enough_memory():
    assert allocate_collectively(GROUP, lambda had: had, np.zeros, 8).size == 8
