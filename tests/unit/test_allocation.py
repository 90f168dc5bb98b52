"""Memory that every rank gets, or none."""

from types import SimpleNamespace

import numpy as np
import pytest

from mpikv.transports.allocation import allocate_collectively

GROUP = SimpleNamespace(gather=lambda reason: ["", reason or "no more", ""])


def short(nbytes: int) -> np.ndarray:
    raise MemoryError


@pytest.mark.parametrize(
    ("make", "had", "reason"),
    [(np.zeros, True, "no more"), (short, False, "the process cannot have more")],
    ids=["elsewhere", "here"],
)
def test_too_little_memory_on_one_rank(make, had, reason):
    told = []
    with pytest.raises(MemoryError, match=rf"^8 bytes for values are needed and ranks \[1\] .* \({reason}\)"):
        allocate_collectively(GROUP, lambda had: told.append(had), make, 8)
    assert told == [had]


def test_enough_memory():
    assert allocate_collectively(GROUP, lambda had: had, np.zeros, 8).size == 8
