"""The emulated streams and graphs: a program that forgets to wait gets wrong numbers."""

from collections.abc import Callable
from subprocess import CompletedProcess

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


def test_a_stream_that_waits_for_nobody_runs_first(run: Run) -> None:
    assert run(SHARED.format(wait="")).stdout == "1\n"
    assert {run(SHARED.format(wait=""), EMULATED_CUDA_SCHEDULE=seed).stdout for seed in SEEDS} == {"1\n", "2\n"}


@pytest.mark.parametrize("schedule", ["late", *SEEDS[:3]])
@pytest.mark.parametrize("wait", ["other.wait_event(one.record())", "one.synchronize()", "one.record().synchronize()"])
def test_a_stream_that_waits(run: Run, wait: str, schedule: str) -> None:
    assert run(SHARED.format(wait=wait), EMULATED_CUDA_SCHEDULE=schedule).stdout == "2\n"


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
