"""The emulated NCCL: sums of several processes, and the mistakes that it tells."""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
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


def lines(ended: Sequence[subprocess.CompletedProcess[str]]) -> list[str]:
    assert not any(each.returncode for each in ended), [each.stderr for each in ended]
    return [each.stdout.strip() for each in ended]


def test_a_rank_that_waits_for_nothing_takes_part() -> None:
    """Rank 1 has queued its part and does something else; the emulated GPU goes on all the same."""
    ended = job(
        """
add(comms[0], one)
if rank == 0:
    one.synchronize()
    print(array.get()[0])
else:
    import time
    time.sleep(5)  # the other rank ends long before
"""
    )
    assert lines(ended) == ["1.0", ""]


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


def test_the_order_of_launches_can_be_that_of_all_communicators() -> None:
    """Streams that nothing orders: with NCCL's variable the launches are, in the order that both ranks have."""
    text = CROSSED.replace("order if rank == 0 else order[::-1]", "order").format(finished=False)
    assert lines(job(text, NCCL_LAUNCH_ORDER_IMPLICIT="1")) == ["ended"] * 2


def test_an_abort_ends_what_waits() -> None:
    ended = job(
        """
import threading, time
if rank == 0:
    add(comms[0], one)
    waiting = threading.Thread(target=one.synchronize)
    waiting.start()
    time.sleep(0.1)
    assert waiting.is_alive()
    comms[0].abort()
    waiting.join()
print("ended")
"""
    )
    assert lines(ended) == ["ended"] * 2


def test_a_message_outside_of_a_group_waits_for_its_receiver() -> None:
    """So ranks that all send first wait for ever."""
    ended = job(
        """
import threading, time
comms[0].send(array.data.ptr, 8, nccl.NCCL_FLOAT32, 1 - rank, one.ptr)
waiting = threading.Thread(target=one.synchronize)
waiting.start()
time.sleep(0.3)
assert waiting.is_alive()
comms[0].abort()
waiting.join(), time.sleep(3)  # a rank that ends would end the other's wait
print("ended")
"""
    )
    assert lines(ended) == ["ended"] * 2


def test_a_rank_that_ends_is_an_error_of_the_communicator() -> None:
    ended = job(
        """
if rank == 0:
    add(comms[0], one)
    one.synchronize()
    try:
        comms[0].check_async_error()
    except nccl.NcclError as error:
        print(error.args[0])
"""
    )
    assert "REMOTE_ERROR" in lines(ended)[0]


@pytest.mark.parametrize("schedule", ["late", "1", "2", "3"])
def test_a_graph_with_a_collective(schedule: str) -> None:
    ended = job(
        """
one.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
add(comms[0], one)
graph = one.end_capture()
for _ in range(3): graph.launch(one)
one.synchronize()
print(array.get()[0])
""",
        EMULATED_CUDA_SCHEDULE=schedule,
    )
    assert lines(ended) == ["4.0"] * 2


def test_memory_that_is_not_the_gpus(cupy: Any) -> None:
    from cupy.cuda import nccl

    comm = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    host = np.zeros(8, np.float32)
    with pytest.raises(nccl.NcclError):
        comm.broadcast(host.ctypes.data, host.ctypes.data, 8, nccl.NCCL_FLOAT32, 0, 0)
