"""The way of a call stays short enough to be followed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.launching import why_no_mpi

ROOT = Path(__file__).parents[2]


def test_a_pushpull_passes_few_files() -> None:
    if reason := why_no_mpi():
        pytest.skip(reason)
    command = [sys.executable, "-m", "mpikv", "run", "-n", "2", "scripts/trace_call"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=50).stdout
    files, switches, calls = map(int, re.findall(r"\d+", printed.splitlines()[-1]))
    # One file, and two or three switches, note who is late.
    assert (files <= 9, switches <= 17, calls <= 50) == (True, True, True), printed
