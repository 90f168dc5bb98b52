"""Packed values of ranks whose memory is not the host's: simulated ranks, with the host's memory under that name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpikv.cluster.process_group import ProcessGroup
from mpikv.codecs import Float16
from mpikv.config import Config
from mpikv.engine.pull_compression import PullCompression
from mpikv.protocols import Shard, Transport
from mpikv.testing import Recording, cluster
from mpikv.transports import open_transport

EACH = 4


class OfGpus(Recording):
    """Records what a transport of such ranks does."""

    data = (*Recording.data, "agree")

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.memory = SimpleNamespace(is_host=False, exceeding=transport.memory.exceeding)


@pytest.mark.parametrize("large", [(), (0,), (1,), (0, 1)])
def test_ranks_of_gpus_send_nothing_packed_unless_all_can(large: tuple[int, ...]) -> None:
    """Who reads a message of a GPU waits for it, so that ranks agree beforehand."""
    exact = np.arange(2.0 * EACH, dtype=np.float32)
    exact[[EACH * rank for rank in large]] = 1e6

    def program(comm: Any) -> tuple[bool, list[str], list[float]]:
        group = ProcessGroup(comm)
        transport = OfGpus(open_transport(group, Config(transport="mpi")))
        pulls = PullCompression(Float16(), transport)
        own, value = slice(EACH * comm.rank, EACH * (comm.rank + 1)), np.zeros(exact.size, np.float32)
        shard = Shard((EACH, EACH), own.start, own.stop)
        bucket: Any = SimpleNamespace(shard=shard, value=value, exact=exact, owned=(own,), runs=())
        sent = pulls.publish(bucket, assigned=False)
        transport.close()
        group.close()
        return sent, transport.take(), value.tolist()

    unsent, sent = (False, ["agree"], [0.0] * exact.size), (True, ["agree", "all_gather"], exact.tolist())
    assert cluster(2).run(program) == [unsent if large else sent] * 2
