"""The emulated streams, events, copies and graphs: a program that forgets to wait gets wrong numbers, or is told."""

import threading
from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest

Run = Callable[..., CompletedProcess[str]]
SHARED = """
one, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
source, target = cupy.full(100, 1, np.int32), cupy.zeros(100, np.int32)
cupy.cuda.Device().synchronize()
with one:
    source.fill(2)
{wait}
with other:
    target[...] = source
other.synchronize()
print(target.get()[0])
"""
SEEDS = [str(seed) for seed in range(8)]
CAPTURED = 907


def test_a_stream_that_waits_for_nobody_runs_first(run: Run) -> None:
    assert run(SHARED.format(wait="")).stdout == "1\n"
    assert {run(SHARED.format(wait=""), EMULATED_CUDA_SCHEDULE=seed).stdout for seed in SEEDS} == {"1\n", "2\n"}


@pytest.mark.parametrize("schedule", ["late", *SEEDS[:3]])
@pytest.mark.parametrize("wait", ["other.wait_event(one.record())", "one.synchronize()", "one.record().synchronize()"])
def test_a_stream_that_waits(run: Run, wait: str, schedule: str) -> None:
    assert run(SHARED.format(wait=wait), EMULATED_CUDA_SCHEDULE=schedule).stdout == "2\n"


def test_the_default_stream_waits_for_others_but_for_those_beside_it(cupy: Any) -> None:
    blocking, beside = cupy.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    for stream, expected in ((blocking, 2), (beside, 1)):
        array, copied = cupy.full(100, 1, np.int32), cupy.zeros(100, np.int32)
        cupy.cuda.Device().synchronize()
        with stream:
            array.fill(2)
        cupy.cuda.runtime.memcpyAsync(copied.data.ptr, array.data.ptr, 400, 3, 0)
        assert copied.get()[0] == expected
        stream.synchronize()


def test_pinned_memory_is_read_when_the_copy_runs(cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    for pinned, expected in ((True, 2), (False, 1)):
        host = np.frombuffer(cupy.cuda.alloc_pinned_memory(400), np.int32, 100) if pinned else np.empty(100, np.int32)
        host[:] = 1
        array = cupy.empty(100, np.int32)
        cupy.cuda.runtime.memcpyAsync(array.data.ptr, host.ctypes.data, 400, 4, stream.ptr)
        host[:] = 2
        stream.synchronize()
        assert array.get()[0] == expected


def test_memory_that_nobody_has_written(cupy: Any) -> None:
    fresh = cupy.ndarray(100, np.float32, cupy.cuda.MemoryPool().malloc(400))
    assert np.isnan(fresh.get()).all()


def test_an_event_that_was_destroyed(run: Run) -> None:
    ended = run("e = runtime.eventCreate()\nruntime.eventDestroy(e)\nruntime.eventRecord(e, 0)")
    assert "cudaEventRecord: the event was destroyed" in ended.stderr
    assert "cudaErrorInvalidResourceHandle" in ended.stderr


def test_errors_that_are_planned(run: Run) -> None:
    ended = run(
        "runtime.malloc(1)\nruntime.malloc(1)\nprint('twice')\nruntime.malloc(1)", EMULATED_CUDA_FAIL="cudaMalloc:3=2"
    )
    assert ended.stdout == "twice\n"
    assert "cudaErrorMemoryAllocation" in ended.stderr


@pytest.mark.parametrize("schedule", ["late", *SEEDS])
def test_nodes_of_a_graph_run_in_any_order_that_its_edges_allow(run: Run, schedule: str) -> None:
    """Two streams are forked from one: each adds its digit, and the joined one reads both."""
    ended = run(
        """
one, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
log = cupy.zeros(3, np.int64)
at, a, b = log[:1], log[1:2], log[2:]
plus = cupy.ElementwiseKernel("", "int64 at, int64 mine", "at = at + 1; mine = at", "plus")
def work():
    other.wait_event(one.record())
    with one: plus(at, a)
    with other: plus(at, b)
    one.wait_event(other.record())
    with one: at.fill(0)
work()
cupy.cuda.Device().synchronize()
one.begin_capture(runtime.streamCaptureModeRelaxed)
work()
graph = one.end_capture()
found = set()
for _ in range(8):
    graph.launch(one)
    one.synchronize()
    found.add(tuple(log.get().tolist()))
print(sorted(found))
""",
        EMULATED_CUDA_SCHEDULE=schedule,
    )
    both = [(0, 1, 2), (0, 2, 1)]
    assert ended.stdout.strip() in ({str([both[1]])} if schedule == "late" else {str(both)}), ended.stderr


def test_a_stream_that_was_not_joined(cupy: Any) -> None:
    one, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    array = cupy.zeros(1)
    one.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
    other.wait_event(one.record())
    with other:
        array.fill(1)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="StreamCaptureUnjoined"):
        one.end_capture()


@pytest.mark.parametrize(
    ("mode", "same_thread", "allowed"),
    [(0, True, False), (0, False, False), (1, True, False), (1, False, True), (2, True, True), (2, False, True)],
)
def test_what_may_be_called_during_a_capture(cupy: Any, mode: int, same_thread: bool, allowed: bool) -> None:
    """Of the modes global, local to the thread, and relaxed: by the thread that captures, or another."""
    runtime, stream, found = cupy.cuda.runtime, cupy.cuda.Stream(non_blocking=True), []

    def allocate() -> None:
        try:
            runtime.free(runtime.malloc(1))
            found.append(True)
        except runtime.CUDARuntimeError:
            found.append(False)

    stream.begin_capture(mode)
    if same_thread:
        allocate()
    else:
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
    if allowed:
        stream.end_capture()
    else:
        with pytest.raises(runtime.CUDARuntimeError, match="StreamCaptureInvalidated"):
            stream.end_capture()
    assert found == [allowed]


def test_an_event_of_a_capture(cupy: Any) -> None:
    runtime, stream, event = cupy.cuda.runtime, cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event()
    stream.begin_capture(runtime.streamCaptureModeRelaxed)
    event.record(stream)
    assert runtime.eventQuery(event.ptr) == CAPTURED
    stream.end_capture()
