"""Runs a program of a test to its end, in an environment without the launcher of the test itself."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mpikv.cli.launchers import clean

from .launching import why_no_mpi

ROOT = Path(__file__).parents[2]
Done = subprocess.CompletedProcess[str]
# What a job leaves, such as its last calls, goes with this process. The ranks of a launch have a folder already.
FOLDER = tempfile.TemporaryDirectory(prefix="mpikv-test-")


def python(*arguments: object, cwd: Path | None = None, timeout: float = 110.0, **variables: str) -> Done:
    """Run Python with these arguments, and with this package."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environ = {"TMPDIR": FOLDER.name, **clean(os.environ), "PYTHONPATH": paths, **variables}
    command, silent = [sys.executable, *map(str, arguments)], subprocess.DEVNULL
    return subprocess.run(command, cwd=cwd, env=environ, stdin=silent, capture_output=True, text=True, timeout=timeout)


def mpikv(*arguments: object, cwd: Path | None = None, timeout: float = 110.0, **variables: str) -> Done:
    """Run a command of mpikv. Without an MPI library a job of several ranks skips the test."""
    if arguments[0] == "run" and (reason := why_no_mpi()):
        pytest.skip(reason)
    return python("-m", "mpikv", *arguments, cwd=cwd, timeout=timeout, **variables)
