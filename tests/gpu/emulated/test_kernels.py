"""What the emulated GPU tells of a wrong kernel. What right ones compute is in ``tests/gpu/real``."""

from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

WRONG = {
    "access outside of any allocation": "out[100000000 + i] = 1;",
    "misaligned access": "*(double*)((char*)out + 4) = 1;",
    "threads wait at different barriers": "if (i < 5) __syncthreads(); else { out[0] = 1; __syncthreads(); }",
    "access beyond shared memory": "__shared__ double board[4]; board[i] = i; __syncthreads(); out[0] = board[31 - i];",
}


@pytest.mark.parametrize("why", WRONG)
def test_what_is_told(run: Callable[..., CompletedProcess[str]], why: str) -> None:
    source = f'extern "C" __global__ void wrong(double* out) {{ int i = threadIdx.x; {WRONG[why]} }}'
    ended = run(f"cupy.RawKernel({source!r}, 'wrong')((1,), (32,), (cupy.zeros(64),))\nruntime.deviceSynchronize()")
    assert ended.returncode < 0
    assert f"wrong: {why}" in ended.stderr
