"""Tests of the emulated CUDA itself: they need no GPU, and would say nothing of a real one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "EMULATED_CUDA" not in os.environ:
        reason = "this session has no emulated GPU: python tests/support/cuda python -m pytest tests/gpu/emulated"
        for item in items:
            if item.path.parent.name == "emulated":
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def cupy() -> Any:
    import cupy

    return cupy


@pytest.fixture
def run() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return what runs a program of Python with more variables, in a process of its own."""

    def run(text: str, **variables: str) -> subprocess.CompletedProcess[str]:
        program = f"import cupy\nimport numpy as np\nruntime = cupy.cuda.runtime\n{text}"
        environ = os.environ | variables
        return subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60)

    return run
