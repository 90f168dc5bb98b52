"""What stores make of NCCL's calls that fail, never end, or come too late, as one rank's emulated NCCL has planned."""

import gc
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv import Closed, MPIKVError, PeerFailed, Stalled, TransportError
from mpikv.cluster.waiting import Waiting

pytestmark = [pytest.mark.ranks(3), pytest.mark.deadline(60)]

TIMEOUT = 2.0
JOINING = ("ncclCommInitRank", "ncclAllReduce", "ncclReduce", "ncclBroadcast")
"""The calls that make a communicator."""
ENDS = ("ncclCommDestroy", "ncclCommAbort")
Create = Callable[..., Any]


def make(**options: Any) -> Any:
    return mpikv.create("nccl", **{"timeout": TIMEOUT, "bucket_bytes": 1 << 14, **options})


@pytest.fixture
def create(cupy: Any, plan: Any) -> Iterator[Create]:
    """Return what makes a store with a value, whose parts on ranks have different sizes. Each communicator has one end:
    a second one, or none where work is in flight, would be NCCL's own end.
    """
    before, made = plan.calls(*ENDS), list[Any]()

    def create(**options: Any) -> Any:
        made.append(make(**options))
        made[-1].init("w", cupy.zeros(7, np.float32))
        stream_of(made[-1]).synchronize()
        return made[-1]

    yield create
    plan()
    for kv in made:
        with suppress(MPIKVError):
            kv.close()
    assert plan.calls(*ENDS) - before == len(made)


def push(kv: Any, cupy: Any, **options: Any) -> None:
    work = kv.push("w", cupy.ones(7, np.float32), **options)
    if options.get("wait") is False:
        work.wait()


def stream_of(kv: Any) -> Any:
    return kv._transport.memory.order.stream


def leave_by_an_error(kv: Any) -> None:
    with pytest.raises(ZeroDivisionError), kv:
        raise ZeroDivisionError
    with pytest.raises(Closed, match="ZeroDivisionError"):
        kv.pull("w")


# --- Calls that fail


@pytest.mark.parametrize(
    ("placement", "call", "status", "text", "transport", "waits"),
    [
        ("replicated", "ncclAllReduce", 1, "NCCL_ERROR_UNHANDLED_CUDA_ERROR", "shm", "for the GPU"),
        ("replicated", "ncclAllReduce", 7, "status 7; NCCL_DEBUG=WARN logs details", "mpi", "for the GPU"),
        ("replicated", "ncclAllReduce", 9, "status 9", "mpi", "for a call"),
        ("root", "ncclReduce", 6, "NCCL_ERROR_REMOTE_ERROR", "hierarchical", "for the GPU"),
        ("root", "ncclReduce", 2, "NCCL_ERROR_SYSTEM_ERROR", "hierarchical", "for a call"),
        # In a group, as parts are uneven.
        ("sharded", "ncclReduce", 5, "NCCL_ERROR_INVALID_USAGE", "shm", "for a call"),
        ("sharded", "ncclReduce", 3, "NCCL_ERROR_INTERNAL_ERROR", "shm", "for nothing"),
    ],
)
def test_a_call_that_fails_ends_the_store_everywhere(
    create: Create, cupy: Any, plan: Any, placement: str, call: str, status: int, text: str, transport: str, waits: str
) -> None:
    """Whether others wait for the GPU, or for the rank, or come back later."""
    kv = create(timeout=30.0, placement=placement, transport=transport)
    began = time.monotonic()
    if kv.rank == 0:
        plan(f"{call}:1={status}")
        kind = PeerFailed if status == 6 else TransportError
        with pytest.raises(kind, match=rf"NCCL 2\.\d+\.\d+ failed in \w+: {text}"):
            push(kv, cupy)
    else:
        push(kv, cupy)
        if waits == "for the GPU":
            stream_of(kv).synchronize()
        elif waits == "for nothing":
            time.sleep(1.0)
        with pytest.raises(TransportError, match=f"rank 0 has left: .*{text}"):
            kv.pull("w")
    assert time.monotonic() - began < 15
    with pytest.raises(Closed):
        push(kv, cupy)
    # The group has come to its end: later calls are none of it.
    other = create(timeout=30.0, placement=placement)
    push(other, cupy)
    assert (other.pull("w").get() == other.size).all()


# --- Work that never ends


@pytest.mark.parametrize(
    ("placement", "told", "status", "kind"),
    [
        ("replicated", "allreduce of", 0, Stalled),
        ("root", "reduce of", 7, Stalled),  # NCCL says that nothing has failed
        ("sharded", "reduce_scatter of", 0, Stalled),
        ("replicated", "allreduce of", 1, TransportError),
        ("root", "reduce of", 6, PeerFailed),
        ("sharded", "reduce_scatter of", 8, TransportError),
    ],
)
def test_work_that_never_ends_is_given_up(
    create: Create, cupy: Any, plan: Any, placement: str, told: str, status: int, kind: type[Exception]
) -> None:
    """At the deadline, or when NCCL reports an error. Who waits for the GPU is let go, and gets no numbers."""
    kv = create(timeout=TIMEOUT if kind is Stalled else 30.0, placement=placement)
    if planned := kv.rank == kv.size - 1:
        # Not in the first looks: they may be at what was queued before.
        plan("ncclKernel:1=-1" + (f",ncclCommGetAsyncError:20={status}" if status else ""))
    began, out = time.monotonic(), np.zeros(7, np.float32)
    push(kv, cupy)
    stream_of(kv).synchronize()
    # The others may have left by the planned rank's word before it raises its own.
    raised = kind if kind is Stalled else (kind, TransportError) if planned else TransportError
    with pytest.raises(raised, match=rf"with {told} \d+ float32 in flight"):
        kv.pull("w", out=out)
    assert not out.any()
    assert (TIMEOUT / 2 if kind is Stalled else 0) < time.monotonic() - began < 15


@pytest.mark.parametrize(("wait", "compression"), [(False, None), (True, "2bit"), (True, "topk")])
def test_a_store_with_work_that_never_ends_is_over_everywhere(
    create: Create, cupy: Any, plan: Any, wait: bool, compression: str | None
) -> None:
    kv = create(placement="sharded", compression=compression)
    if kv.rank == 0:
        plan("ncclKernel:1=-1")

    def train() -> None:
        for _ in range(3):
            push(kv, cupy, wait=wait)
            kv.pull("w").get()

    with pytest.raises(TransportError):
        train()
    with pytest.raises(Closed):
        push(kv, cupy)


def test_a_call_in_nccl_does_not_hold_up_who_looks_on(create: Create, cupy: Any, plan: Any) -> None:
    kv = create(placement="replicated")
    plan("ncclAllReduce:1=-1")
    threading.Timer(1.5 * TIMEOUT, plan).start()
    push(kv, cupy)
    with pytest.raises(Stalled, match=r"with allreduce of \d+ float32 in flight"):
        kv.pull("w")


# --- Communicators


@pytest.mark.parametrize("call", JOINING)
def test_a_communicator_that_fails_fails_everywhere(plan: Any, comm: Any, call: str) -> None:
    text, aborted = r"invalid usage.*create the first store on GPUs before any other use of NCCL", plan.calls(ENDS[1])
    if failing := comm.rank == comm.size - 1:
        plan(f"{call}:1=5")
    with pytest.raises(TransportError, match=text if failing else None):
        make()
    assert plan.calls(ENDS[1]) - aborted == (not failing or call != JOINING[0])


@pytest.mark.parametrize("call", [JOINING[0], JOINING[1], JOINING[3]])
def test_who_connects_when_nobody_waits_any_more_queues_nothing(
    cupy: Any, plan: Any, comm: Any, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """Whatever call of NCCL returns late; its kernels may still use what they were given."""
    late, pool = JOINING[JOINING.index(call) + 1 :], cupy.get_default_memory_pool()
    gc.collect()
    before, aborted, used = plan.calls(*late), plan.calls(ENDS[1]), pool.used_bytes()
    if held := comm.rank == comm.size - 1:
        plan(f"{call}:1=-1")
    with pytest.raises(Stalled, match=r"NCCL has (not )?connected.*NCCL_SOCKET_IFNAME"):
        make(timeout=2 * TIMEOUT, warn_after=TIMEOUT / 10)  # who holds a call gives it up after two seconds more
    plan()
    (said,) = [record.getMessage() for record in caplog.records if "to connect" in record.getMessage()]
    about = f"s for NCCL to connect {comm.size} ranks; NCCL_DEBUG"
    assert re.match(rf"create: rank {comm.rank} has waited \d\.\d {about}", said)
    for thread in threading.enumerate():
        if thread.name == "mpikv-nccl":
            thread.join(5)
            assert not thread.is_alive()
    gc.collect()
    assert not held or plan.calls(*late) == before
    assert plan.calls(ENDS[1]) == aborted + 1
    assert pool.used_bytes() > used


def test_a_communicator_is_never_collected_as_garbage(plan: Any) -> None:
    """Which would wait for the other ranks, wherever they are."""
    kv, before = make(), plan.calls(*ENDS)
    kv._transport._comm = None
    gc.collect()
    assert plan.calls(*ENDS) == before
    leave_by_an_error(kv)


# --- Ends


@pytest.mark.parametrize("comes", [True, False])
def test_a_store_that_cannot_be_closed_is_aborted(
    create: Create, plan: Any, caplog: pytest.LogCaptureFixture, comes: bool
) -> None:
    """As the GPU of rank 0 has failed, or rank 0 does not come."""
    kv, destroyed = create(), plan.calls(ENDS[0])
    if kv.rank == 0 and not comes:
        time.sleep(2.5 * TIMEOUT)
        leave_by_an_error(kv)
        return
    if kv.rank == 0:
        plan("cudaStreamSynchronize:1=700")
    with nullcontext() if comes else pytest.raises(Stalled):
        kv.close()
    assert not comes or "aborted instead of closed" in caplog.text
    assert plan.calls(ENDS[0]) == destroyed


@pytest.mark.parametrize("aborts", [True, False])
def test_a_store_that_is_left_by_an_error_leaves_nothing_in_flight(
    create: Create, cupy: Any, plan: Any, aborts: bool
) -> None:
    """And an abort that never ends holds nobody up."""
    kv = create(timeout=30.0)
    plan("ncclKernel:1=-1" + ("" if aborts else ",ncclCommAbort:1=-1"))
    push(kv, cupy)
    began = time.monotonic()
    leave_by_an_error(kv)
    assert time.monotonic() - began < 5
    if aborts:
        stream_of(kv).synchronize()


def test_no_thread_can_be_started_at_the_end_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    kv = make()
    monkeypatch.setattr(threading.Thread, "start", start)
    leave_by_an_error(kv)


@pytest.mark.parametrize("end", [lambda kv: kv.close(), leave_by_an_error], ids=["close", "abandon"])
def test_nobody_asks_a_communicator_that_comes_to_its_end(
    create: Create, cupy: Any, plan: Any, end: Callable[[Any], None]
) -> None:
    kv, asked, seen = create(), plan.calls("ncclCommGetAsyncError"), list[int]()
    before = plan.calls(*ENDS)

    def release() -> None:
        seen.append(plan.calls(*ENDS))
        plan()

    plan("ncclCommGetAsyncError:1=-1")
    push(kv, cupy)
    Waiting(10.0).until(lambda: plan.calls("ncclCommGetAsyncError") > asked, tuple)
    threading.Timer(0.5, release).start()
    end(kv)
    assert seen == [before]


def test_a_forked_child_leaves_it_alone(create: Create, cupy: Any, plan: Any) -> None:
    kv = create()
    before = plan.calls(*ENDS)
    if not (child := os.fork()):
        kv._transport.abandon()
        kv._transport.close()
        os._exit(plan.calls(*ENDS) - before)
    assert os.waitpid(child, 0)[1] == 0
    push(kv, cupy)
    assert (kv.pull("w").get() == kv.size).all()
