"""Numbers that are given to codecs."""

from __future__ import annotations

import numpy as np
import pytest

from mpikv.codecs import LowRank, TopK
from mpikv.errors import ConfigError


@pytest.mark.parametrize("value", [True, 1.5, "2", None])
def test_what_is_no_whole_number(value):
    with pytest.raises(TypeError, match=r"^lowrank: rank is a whole number, not .*: "):
        LowRank(value)


def test_whole_numbers():
    assert LowRank(np.int64(2)).rank == 2
    assert LowRank(2, seed=0).seed == 0
    with pytest.raises(ConfigError, match="rank=0 is not a whole number from 1"):
        LowRank(0)
    with pytest.raises(ConfigError, match="count=-1 is not a whole number from 1"):
        TopK(count=-1)
