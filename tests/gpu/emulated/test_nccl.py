"""The emulated NCCL tells mistakes of ranks. What ranks that make none get is in ``tests/gpu/real``."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = pytest.mark.deadline(120)

BEGIN = """
import sys
import cupy
from cupy.cuda import nccl
rank, size, *names = int(sys.argv[1]), int(sys.argv[2]), *map(bytes.fromhex, sys.argv[3:])
cupy.cuda.Device(rank).use()
comms = [nccl.NcclCommunicator(size, name, rank) for name in names]
one, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
array = cupy.arange(8, dtype=cupy.float32) + rank
cupy.cuda.Device().synchronize()
def add(comm, stream, count=8):
    comm.allReduce(array.data.ptr, array.data.ptr, count, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)
"""


def job(text: str, size: int = 2, **variables: str) -> list[subprocess.CompletedProcess[str]]:
    """Return how a program ends on several ranks, which have two communicators."""
    from cupy.cuda import nccl

    names = [nccl.get_unique_id().hex() for _ in range(2)]
    environ = {name: value for name, value in os.environ.items() if name != "NCCL_LAUNCH_ORDER_IMPLICIT"} | variables
    command = [sys.executable, "-c", BEGIN + text]
    with ThreadPoolExecutor(size) as pool:
        return list(
            pool.map(
                lambda rank: subprocess.run(
                    [*command, str(rank), str(size), *names], env=environ, capture_output=True, text=True, timeout=60
                ),
                range(size),
            )
        )


def test_calls_that_differ() -> None:
    ended = job("add(comms[0], one, 8 if rank else 7)\none.synchronize()")
    assert all("ncclAllReduce of 7 elements" in each.stderr and "ncclAllReduce of 8" in each.stderr for each in ended)


CROSSED = """
order = [(comms[0], one), (comms[1], other)]
for comm, stream in order if rank == 0 else order[::-1]:
    add(comm, stream)
    if {finished}: stream.synchronize()
for stream in (one, other) if rank == 0 else (other, one): stream.synchronize()
print("ended")
"""


@pytest.mark.parametrize("finished", [True, False])
def test_communicators_in_different_orders_are_a_deadlock(finished: bool) -> None:
    """Whether a program waits for each, or NCCL's variable lets each wait for the one that was launched before."""
    ended = job(CROSSED.format(finished=finished), NCCL_LAUNCH_ORDER_IMPLICIT="1")
    assert any("deadlock: ncclAllReduce waits for rank" in each.stderr for each in ended)
    assert not any(each.stdout for each in ended)
