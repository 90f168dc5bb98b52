"""Memory that ranks may not read is not lent to them."""

import numpy as np
import pytest

import mpikv
from mpikv.errors import TransportError
from mpikv.transports.cma import Attached

SIZE = 100_003
"""Elements: more than the smallest size that is lent."""


@pytest.mark.ranks(2, 3, 4)
def test_what_a_rank_may_not_read_is_not_lent(comm, monkeypatch):
    """All ranks know."""
    read = Attached.read

    def refuse(attached, place, address, into):
        if comm.rank == comm.size - 1:
            raise TransportError("forbidden")
        read(attached, place, address, into)

    monkeypatch.setattr(Attached, "read", refuse)
    with mpikv.create("dist_sync", comm=comm) as kv:
        assert not kv._exchange.transport.single_copy
        kv.init("w", np.zeros(SIZE))
        kv.push("w", np.arange(SIZE) + float(kv.rank))
        np.testing.assert_array_equal(kv.pull("w"), kv.size * np.arange(SIZE) + sum(range(kv.size)))
