"""Tests of the emulated CUDA itself, and those that would take a real one too long or say nothing of it."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "EMULATED_CUDA" not in os.environ:
        reason = "this session has no emulated GPU: python tests/support/cuda python -m pytest tests/gpu/emulated"
        for item in items:
            if item.path.parent.name == "emulated":
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def run() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return what runs a program of Python with more variables, in a process of its own."""

    def run(text: str, **variables: str) -> subprocess.CompletedProcess[str]:
        program = f"import cupy\nimport numpy as np\nruntime = cupy.cuda.runtime\n{text}"
        environ = os.environ | variables
        return subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60)

    return run


class Plan:
    """Plans failures of this process's emulated GPU, as ``EMULATED_CUDA_FAIL`` does. A call of NCCL with the status -1
    is held until the next plan; the kernel of one, until its communicator is aborted.
    """

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")

    def __call__(self, text: str = "") -> None:
        self._driver.emulated_plan(text.encode())

    def calls(self, *names: str) -> int:
        """Return how often functions were called so far."""
        return sum(self._driver.emulated_calls(name.encode()) for name in names)


@pytest.fixture
def plan() -> Iterator[Plan]:
    made = Plan()
    yield made
    made()
