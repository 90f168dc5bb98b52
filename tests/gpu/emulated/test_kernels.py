"""Kernels that NVRTC has compiled, on the host: results, and what is told of a wrong one."""

from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest

WRONG = {
    "access outside of any allocation": "out[100000000 + i] = 1;",
    "misaligned access": "*(double*)((char*)out + 4) = 1;",
    "threads wait at different barriers": "if (i < 5) __syncthreads(); else { out[0] = 1; __syncthreads(); }",
    "access beyond shared memory": "__shared__ double board[4]; board[i] = i; __syncthreads(); out[0] = board[31 - i];",
}
OPERATIONS = ("a + b", "a - b", "a * b", "a / b", "a % b", "a >> b", "a << b", "a ^ b", "-a", "a > b ? a : b")


@pytest.mark.parametrize("why", WRONG)
def test_what_is_told(run: Callable[..., CompletedProcess[str]], why: str) -> None:
    source = f'extern "C" __global__ void wrong(double* out) {{ int i = threadIdx.x; {WRONG[why]} }}'
    ended = run(f"cupy.RawKernel({source!r}, 'wrong')((1,), (32,), (cupy.zeros(64),))\nruntime.deviceSynchronize()")
    assert ended.returncode < 0
    assert f"wrong: {why}" in ended.stderr


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "uint32", "int64", "uint64"])
def test_integers(cupy: Any, dtype: str) -> None:
    """All operations in one kernel, beside Python's numbers, of which the low bits are taken."""
    random, kind = np.random.default_rng(1), np.dtype(dtype)
    a = random.integers(1, np.iinfo(kind).max, 300, kind)
    b = random.integers(1, 7, 300, kind)
    lines = "".join(f"out[{place}] = {text};" for place, text in enumerate(OPERATIONS))
    body = f"T* out = &all[i * {len(OPERATIONS)}]; {lines}"
    out = cupy.zeros(300 * len(OPERATIONS), kind)
    cupy.ElementwiseKernel("T a, T b", "raw T all", body, f"every_{dtype}")(cupy.asarray(a), cupy.asarray(b), out)
    python = [text.replace("a / b", "a // b").replace("a > b ? a : b", "max(a, b)") for text in OPERATIONS]
    for x, y, row in zip(a.tolist(), b.tolist(), out.get().reshape(300, -1), strict=True):
        expected = [eval(text, {"a": x, "b": y, "max": max}) & (1 << 8 * kind.itemsize) - 1 for text in python]
        assert row.view(f"u{kind.itemsize}").tolist() == expected


@pytest.mark.parametrize("flags", [(), ("--prec-div=false", "--prec-sqrt=false")])
def test_approximate_operations_are_wrong_in_the_last_place(cupy: Any, flags: tuple[str, ...]) -> None:
    source = 'extern "C" __global__ void both(float* x) { x[0] = x[0] / x[1]; x[2] = sqrtf(x[2]); }'
    array = cupy.array([6, 3, 4], np.float32)
    cupy.RawKernel(source, "both", flags)((1,), (1,), (array,))
    assert [value == 2 for value in array.tolist()] == [not flags, False, not flags]
