"""What a GPU's interface makes of CUDA's errors, each returned by one call of the emulated driver."""

from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import pytest

import mpikv
from mpikv.compute.cuda.gpu import CupyGpu

PROGRAM = """
from mpikv.compute.cuda.gpu import CupyGpu
gpu = CupyGpu(cupy, 1)
stream = gpu.stream()
first, last = gpu.upload(np.zeros(3)), gpu.upload(np.ones(3))
event = stream.record()
try:
    {call}
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("call", "fails", "told"),
    [
        (
            "gpu.empty(1 << 20, np.dtype('f4'))",
            "cudaMalloc:3=700",
            "TransportError CUDA failed on cuda:1, in 'empty': ",
        ),
        ("stream.synchronize()", "cudaStreamSynchronize:1=700", "TransportError what was queued on cuda:1 failed: "),
        ("event.done", "cudaEventQuery:1=700", "TransportError what was queued on cuda:1 failed: "),
        (
            "gpu.copy([first[:1], first[1:]], [last[:1], last[1:]])",
            "cuLaunchKernel:1=700",
            "TransportError the CUDA kernel copy_bytes could not be launched",
        ),
        # Of one array, by CUDA itself; each upload is one, too.
        ("gpu.copy([first], [last])", "cudaMemcpyAsync:3=700", "TransportError CUDA failed on cuda:1, in 'copy': "),
        (
            "stream.begin_capture()",
            "cudaStreamBeginCapture:1=700",
            "TransportError work of cuda:1 cannot be recorded: ",
        ),
    ],
)
def test_what_is_raised(run: Callable[..., CompletedProcess[str]], call: str, fails: str, told: str) -> None:
    ended = run(PROGRAM.format(call=call), EMULATED_CUDA_FAIL=fails)
    assert ended.stdout.startswith(told), ended


def test_a_failure_that_the_watchdog_finds_ends_the_store(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def watch(gpu: CupyGpu) -> None:
        raise mpikv.TransportError("an illegal address")

    def use_until_it_fails() -> None:
        for _ in range(10_000):
            kv.push("w", cupy.ones(3))

    monkeypatch.setattr(CupyGpu, "watch", watch)
    kv = mpikv.create("nccl", timeout=20, bucket_bytes=1 << 14)
    kv.init("w", cupy.zeros(3))
    with pytest.raises(mpikv.TransportError, match="an illegal address"):
        use_until_it_fails()
    with pytest.raises(mpikv.Closed, match="an illegal address"):
        kv.push("w", cupy.ones(3))
