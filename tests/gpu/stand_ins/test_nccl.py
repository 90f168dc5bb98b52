"""What NCCL's transport makes of calls that fail, never end, or come too late, over a stand-in that does so by plan.

That it keeps the promises of transports is shown on real GPUs and on the emulated one, in ``tests/gpu/real``.
"""

from __future__ import annotations

import gc
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from mpikv.cluster.process_group import ProcessGroup
from mpikv.cluster.waiting import Waiting
from mpikv.errors import MPIKVError, PeerFailed, Stalled, TransportError, TransportUnavailable
from mpikv.memory.device import DeviceMemory
from mpikv.testing.fakegpu import FakeGpu
from mpikv.testing.fakenccl import FakeCommunicator, FakeNccl, NcclError
from mpikv.testing.fakestreams import FakeStream
from mpikv.transports.local import LocalTransport
from mpikv.transports.nccl import NcclTransport
from mpikv.transports.shm import ShmTransport
from mpikv.transports.watchdog import Watchdog, Work


def joined(group: ProcessGroup, nccl: FakeNccl, timeout: float = 20.0) -> NcclTransport:
    """Return a transport over a fake, with the host's transport of the group to agree by."""
    waiting = Waiting(timeout)
    control = LocalTransport(4096) if group.size == 1 else ShmTransport(group, 4096, waiting)
    return NcclTransport(group, control, DeviceMemory(nccl.gpu), nccl, 4096, waiting)


@pytest.fixture
def nccl(comm: Any) -> Iterator[FakeNccl]:
    """Return NCCL for a rank that waits for others less long than a transport does; at the end it waits no more."""
    group = ProcessGroup(comm)
    fake = FakeNccl(FakeGpu(group.rank), group.comm and group.comm.Dup(), patience=0.7 * TIMEOUT)
    yield fake
    fake.released.set()
    group.close()


@pytest.fixture
def group(comm: Any) -> Iterator[ProcessGroup]:
    group = ProcessGroup(comm)
    yield group
    group.close()


@pytest.fixture
def transport(group: ProcessGroup, nccl: FakeNccl) -> Iterator[NcclTransport]:
    """Return a transport that waits as long as TIMEOUT; close it in the end."""
    made = joined(group, nccl, timeout=TIMEOUT)
    yield made
    made.close()


TIMEOUT = 1.0
# The calls of making a communicator.
FIRST = 5


def push(transport: NcclTransport, verb: str = "allreduce") -> None:
    """Make a call that moves data."""
    memory, size = transport.memory, 10 * transport.size
    send, recv = (memory.source(np.ones(size, np.float32)) for _ in range(2))
    uneven = [size, *[0] * (transport.size - 1)]
    arguments = {
        "allreduce": (send, recv),
        "reduce": (send, recv, 0),
        "reduce_scatter": (send, recv[: uneven[transport.rank]], uneven),
        "all_to_all": (send.view(np.uint8), None),
        "all_gather": (send, uneven),
        "broadcast": (send, 0),
    }
    memory.order.run(getattr(transport, verb), *arguments[verb])


def failure_of(transport: NcclTransport) -> MPIKVError:
    """Return what the next call raises, once work in flight is known to have failed."""
    limit = time.monotonic() + 10
    while time.monotonic() < limit:
        try:
            transport._check()
        except MPIKVError as error:
            with pytest.raises(type(error)):
                push(transport)
            with pytest.raises(type(error)):
                transport.agree(1)
            return error
        time.sleep(0.01)
    raise AssertionError("nothing has failed")


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("status", [1, 5, 6, 7, 8])
def test_a_call_that_fails_ends_the_transport(group, nccl, transport, status):
    if group.rank == 0:
        nccl.fail_at[FIRST] = status
        with pytest.raises(PeerFailed if status == 6 else TransportError, match=r"NCCL 2\.32\.3 failed in") as caught:
            push(transport)
        assert isinstance(caught.value.__cause__, KeyError if status > 6 else NcclError)
        assert "allReduce" in str(caught.value)
    else:
        push(transport)
        assert "allreduce of" in str(failure_of(transport))
    assert failure_of(transport)
    assert [communicator.state for communicator in nccl.communicators] == ["aborted"]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("verb", ["reduce_scatter", "all_to_all", "all_gather"])
def test_a_call_that_fails_in_a_group_ends_the_group(group, nccl, transport, verb):
    if verb == "all_to_all":
        push(transport, verb)  # for the first, all ranks take memory together
    if group.rank == 0:
        nccl.fail_at[len(nccl.calls) + 1] = 5
        with pytest.raises(TransportError, match="invalid usage"):
            push(transport, verb)
        assert failure_of(transport)
    assert not nccl.depth


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("verb", ["reduce", "reduce_scatter", "broadcast"])
def test_work_that_never_ends_is_given_up(group, nccl, transport, verb):
    if group.rank == group.size - 1:
        nccl.stick_at.add(FIRST)
    nccl.asynchronous = 7  # which says that nothing has failed
    started = time.monotonic()
    push(transport, verb)
    # A rank that waits for its GPU meanwhile is let go, too.
    transport.memory.order.stream.synchronize()
    failure = failure_of(transport)
    assert TIMEOUT / 2 < time.monotonic() - started < 5
    assert isinstance(failure, Stalled)
    assert f"with {verb} of {10 * group.size} float32 in flight" in str(failure)
    assert nccl.communicators[0].state == "aborted"


@pytest.mark.ranks(1, 2, 3)
def test_what_was_aborted_is_not_given_to_a_caller(group, nccl, transport):
    nccl.stick_at.add(FIRST)
    memory = transport.memory
    send, recv = (memory.source(np.ones(4)) for _ in range(2))
    memory.order.run(transport.allreduce, send, recv)
    with pytest.raises(Stalled, match="allreduce of 4 float64 in flight"):
        memory.order.run(memory.to_host, recv)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("status", [1, 6, 8])
def test_errors_of_work_in_flight_are_found(group, nccl, status):
    transport = joined(group, nccl, timeout=20.0)
    nccl.stick_at.add(FIRST)
    push(transport)
    nccl.asynchronous = status
    failure = failure_of(transport)
    assert type(failure) is (PeerFailed if status == 6 else TransportError)
    assert "in flight" in str(failure)
    transport.close()


@pytest.mark.ranks(1, 2, 3)
def test_work_that_goes_on_is_no_failure(group, nccl):
    nccl.patience = 20.0
    transport = joined(group, nccl, timeout=2 * TIMEOUT)
    for _ in range(4):
        push(transport)
        time.sleep(0.7 * TIMEOUT)
        transport._check()
    transport.close()
    assert nccl.communicators[0].state == "destroyed"


class Ending:
    """An event that is there after so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._limit = time.monotonic() + seconds

    @property
    def done(self) -> bool:
        return time.monotonic() >= self._limit


def watched(events: Sequence[Any], timeout: float, warn_after: float | None = None) -> list[tuple[str, str]]:
    """Return the failures, and the calls they are about, of work that ends at the events, all queued at once."""
    failures: list[tuple[str, str]] = []
    watchdog = Watchdog(
        Waiting(timeout, warn_after or timeout / 2),
        lambda: None,
        lambda: None,
        lambda error, call: failures.append((type(error).__name__, call)),
        lambda: True,
        rank=3,
    )
    for number, event in enumerate(events):
        work = Work(f"push {number}")
        watchdog.look_after(work)
        work.event = event
    wait_until(lambda: not watchdogs())
    return failures


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Have a watchdog end when nothing is in flight."""
    monkeypatch.setattr("mpikv.transports.watchdog._IDLE", 0.0)


def test_the_deadline_is_that_of_each_call_and_not_of_the_queue():
    assert watched([Ending(0.1 * number) for number in range(10)], 0.5) == []
    assert watched([Ending(0.1), Ending(0.2), Ending(100)], 0.3) == [("Stalled", "push 2")]


def test_an_event_that_fails_is_found_before_the_deadline():
    class Failing:
        @property
        def done(self) -> bool:
            raise TransportError("illegal access")

    assert watched([Failing(), Ending(100)], 100.0) == [("TransportError", "push 0")]


def test_a_warning_says_that_the_gpu_is_waited_for(caplog):
    class EndingWithTheWarning:
        @property
        def done(self) -> bool:
            return bool(caplog.messages)

    assert watched([EndingWithTheWarning()], timeout=9.0, warn_after=0.2) == []
    assert re.fullmatch(r"rank 3 has waited [0-8]\.\d s for the GPU, in push 0", caplog.messages[0])
    assert len(caplog.messages) == 1


def test_every_thread_chooses_its_gpu(group, nccl):
    """Or the stand-in for it would complain in that thread, and the communicator stay as it is."""
    transport = joined(group, nccl, timeout=TIMEOUT)
    push(transport)
    wait_until(lambda: not watchdogs())
    transport._check()
    nccl.stick_at.add(len(nccl.calls) + 1)
    push(transport)
    assert isinstance(failure_of(transport), Stalled)
    assert nccl.communicators[0].state == "aborted"


def test_no_thread_can_be_started_at_the_end_of_a_process(group, nccl, monkeypatch):
    transport = joined(group, nccl)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    transport.abandon()
    assert "the store ended" in str(failure_of(transport))


@pytest.mark.ranks(1, 2, 3)
def test_nobody_looks_where_nothing_is_in_flight(group, nccl):
    transport = joined(group, nccl)
    push(transport)
    wait_until(lambda: not watchdogs())
    nccl.stick_at.add(len(nccl.calls) + 1)
    push(transport)
    time.sleep(0.1)
    assert watchdogs()
    transport.abandon()
    wait_until(lambda: not watchdogs())
    transport.close()


def watchdogs() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mpikv-watchdog"]


def wait_until(ready: Callable[[], bool]) -> None:
    Waiting(10.0).until(ready, tuple)


@pytest.mark.ranks(1, 2, 3)
def test_a_communicator_is_never_collected_as_garbage(group, nccl):
    """Which would wait for the other ranks, wherever they are."""
    transport = joined(group, nccl)
    communicator = weakref.ref(nccl.communicators.pop())
    transport._comm = None
    del transport
    gc.collect()
    assert communicator() is not None


@pytest.mark.ranks(1, 2, 3)
def test_an_abort_that_never_ends_holds_nobody_up(group, nccl, transport):
    nccl.abort_returns = False
    nccl.stick_at.add(FIRST)
    push(transport)
    started = time.monotonic()
    assert isinstance(failure_of(transport), Stalled)
    assert time.monotonic() - started < 5
    nccl.released.set()


@pytest.mark.ranks(1, 2, 3)
def test_a_communicator_that_never_comes_is_given_up(group, nccl):
    if group.rank == 0:
        nccl.init_returns = False
    started = time.monotonic()
    with pytest.raises(TransportError, match="making the communicator" if group.rank == 0 else None):
        joined(group, nccl, timeout=TIMEOUT)
    assert time.monotonic() - started < 5


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("call", range(1, FIRST))
def test_who_connects_when_nobody_waits_any_more_queues_nothing(group, nccl, monkeypatch, call):
    """Whatever call of NCCL returns late, and whether the communicator was aborted meanwhile."""
    given: list[int] = []
    original = FakeCommunicator.allReduce

    def all_reduce(communicator: FakeCommunicator, sendbuf: int, *rest: int) -> None:
        given.append(sendbuf)
        original(communicator, sendbuf, *rest)

    monkeypatch.setattr(FakeCommunicator, "allReduce", all_reduce)
    if group.rank == group.size - 1:
        nccl.hold_at.add(call)
    with pytest.raises(Stalled, match=r"NCCL has (not )?connected.*NCCL_SOCKET_IFNAME"):
        joined(group, nccl, timeout=TIMEOUT)
    nccl.released.set()
    for thread in threading.enumerate():
        if thread.name == "mpikv-nccl":
            thread.join(5)
            assert not thread.is_alive()
    gc.collect()
    assert nccl.calls[call if nccl.hold_at else FIRST :] == []
    # NCCL's kernels may still use what they were given.
    assert all(nccl.gpu.find(address, 16) for address in given)
    assert not any("communicator that was" in fault for fault in nccl.gpu.checker.faults)
    assert {communicator.state for communicator in nccl.communicators} <= {"aborted"}


@pytest.mark.ranks(2, 3)
def test_nccl_refuses_what_was_told_too_late(group, nccl):
    nccl.fail_at[1] = 5
    with pytest.raises(
        TransportError, match=r"invalid usage.*create the first store on GPUs before any other use of NCCL"
    ):
        joined(group, nccl, timeout=TIMEOUT)


@pytest.mark.ranks(2, 3)
def test_a_warning_while_nccl_connects(group, nccl, caplog):
    nccl.hold_at.add(2)
    told: list[float] = []
    threading.Thread(target=lambda: (wait_until(lambda: "to connect" in caplog.text), nccl.released.set())).start()
    waiting = Waiting(20.0, TIMEOUT / 10, lambda waited, missing: told.append(waited))
    control = ShmTransport(group, 4096, Waiting(20.0))
    transport = NcclTransport(group, control, DeviceMemory(nccl.gpu), nccl, 4096, waiting)
    (said,) = [record.getMessage() for record in caplog.records if "to connect" in record.getMessage()]
    about = f"s for NCCL to connect {group.size} ranks; NCCL_DEBUG"
    assert re.match(rf"create: rank {group.rank} has waited \d\.\d {about}", said)
    assert not told
    transport.close()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("call", range(1, FIRST))
def test_a_communicator_that_fails_fails_everywhere(group, nccl, call):
    if group.rank == group.size - 1:
        nccl.fail_at[call] = 2
    with pytest.raises(TransportError):
        joined(group, nccl, timeout=TIMEOUT)
    assert {communicator.state for communicator in nccl.communicators} <= {"aborted"}


@pytest.mark.ranks(2, 3)
def test_a_rank_that_fails_at_once_says_of_what(group, nccl):
    nccl.patience = 3 * TIMEOUT  # the others are in NCCL when it waits for them no more
    if group.rank == 0:
        nccl.fail_at[1] = 1
    with pytest.raises(TransportError, match="a CUDA call failed" if group.rank == 0 else None):
        joined(group, nccl, timeout=TIMEOUT)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("end", ["close", "abandon"])
def test_nobody_asks_a_communicator_that_comes_to_its_end(group, nccl, monkeypatch, end):
    inside, seen = set[int](), list[bool]()

    def check(communicator: FakeCommunicator) -> None:
        inside.add(threading.get_ident())
        time.sleep(0.2)
        inside.clear()

    def noting(original: Callable[..., None]) -> Callable[..., None]:
        def ends(communicator: FakeCommunicator) -> None:
            seen.append(bool(inside))
            original(communicator)

        return ends

    for name in ("destroy", "abort"):
        monkeypatch.setattr(FakeCommunicator, name, noting(getattr(FakeCommunicator, name)))
    monkeypatch.setattr(FakeCommunicator, "check_async_error", check)
    transport = joined(group, nccl)
    if end == "abandon":
        nccl.stick_at.add(FIRST)
    nccl.gpu.lag = 3
    push(transport)
    wait_until(lambda: bool(inside))
    getattr(transport, end)()
    assert seen == [False]


@pytest.mark.ranks(1, 2, 3)
def test_a_call_in_nccl_does_not_hold_up_who_looks_on(group, nccl):
    transport = joined(group, nccl)
    nccl.asynchronous = 1
    with transport._queueing:
        transport._check_async()
    with pytest.raises(TransportError, match="a CUDA call failed"):
        transport._check_async()
    transport.abandon()


@pytest.mark.ranks(1, 2, 3)
def test_a_gpu_that_failed_is_closed(group, nccl, monkeypatch, caplog):
    transport = joined(group, nccl, timeout=TIMEOUT)

    def synchronize(stream: FakeStream) -> None:
        raise TransportError("illegal access")

    monkeypatch.setattr(FakeStream, "synchronize", synchronize)
    transport.close()
    assert "aborted instead of closed: illegal access" in caplog.text
    assert nccl.communicators[0].state == "aborted"
    assert not transport.send_buffers[0].size


@pytest.mark.ranks(2, 3)
def test_a_rank_that_does_not_come_to_the_end_is_not_waited_for(group, nccl, caplog):
    transport = joined(group, nccl, timeout=TIMEOUT)
    if group.rank:
        transport.close()
        assert "aborted instead of closed" in caplog.text
    else:
        time.sleep(2.5 * TIMEOUT)
        transport.abandon()
    assert nccl.communicators[0].state == "aborted"


@pytest.mark.ranks(1, 2, 3)
def test_an_abandoned_transport_leaves_nothing_in_flight(group, nccl):
    transport = joined(group, nccl)
    nccl.stick_at.add(FIRST)
    push(transport)
    transport.abandon()
    transport.abandon()
    assert nccl.communicators[0].state == "aborted"
    transport.memory.order.stream.synchronize()
    assert "the store ended" in str(failure_of(transport))


@pytest.mark.ranks(1)
def test_a_forked_child_leaves_it_alone(group, nccl):
    transport = joined(group, nccl)
    child = os.fork()
    if not child:
        transport.abandon()
        transport.close()
        os._exit(0 if nccl.communicators[0].state == "in use" else 1)
    assert os.waitpid(child, 0)[1] == 0
    push(transport)
    transport.close()
    assert nccl.communicators[0].state == "destroyed"


# --- What is looked at before


def refused(group: ProcessGroup, nccl: FakeNccl) -> str:
    """Return why all ranks refuse to begin, which all say alike, before NCCL is called."""
    with pytest.raises(TransportUnavailable) as caught:
        joined(group, nccl)
    assert len(set(group.gather(str(caught.value)))) == 1
    assert not nccl.calls
    return str(caught.value)


@pytest.mark.ranks(2, 3)
def test_ranks_do_not_share_a_gpu(group, nccl, monkeypatch):
    nccl.gpu.uuid = "GPU-1"
    assert "ranks 0 and 1 use one GPU, fake:1 (GPU-1) of host" in refused(group, nccl)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    nccl.version = 22907
    assert "use one GPU" in refused(group, nccl)
    nccl.version = 23004
    joined(group, nccl).close()
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE")
    monkeypatch.setenv("NCCL_HOSTID", f"host-{group.rank}")
    joined(group, nccl).close()


@pytest.mark.ranks(2, 3)
def test_ranks_have_one_version_of_nccl(group, nccl):
    nccl.version -= 100 * group.rank
    assert refused(group, nccl).startswith("rank 0 has NCCL 2.32.3 and rank 1 has 2.31.3; install")


@pytest.mark.ranks(2, 3)
def test_ranks_have_the_same_settings(group, nccl, monkeypatch):
    if group.rank == 1:
        monkeypatch.setenv("NCCL_ALGO", "Ring")
    order = "'NCCL_LAUNCH_ORDER_IMPLICIT': '1'"
    assert f"rank 0 has {{{order}}} and rank 1 has {{'NCCL_ALGO': 'Ring', {order}}}" in refused(group, nccl)


@pytest.mark.ranks(1, 2, 3)
def test_calls_that_return_before_they_have_begun_are_refused(group, nccl, monkeypatch):
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "0")
    assert "NCCL_COMM_BLOCKING=0 makes NCCL's calls return" in refused(group, nccl)
