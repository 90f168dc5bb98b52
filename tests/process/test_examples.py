"""The examples print what their docstrings show, on 1, 2 and 4 ranks alike."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.launching import why_no_mpi
from support.pages import ROOT

from mpikv.cli.launchers import clean

EXAMPLES = sorted((ROOT / "scripts/examples").glob("*.py"))


@pytest.mark.one_library
@pytest.mark.deadline(60)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_example_prints_what_it_shows(path: Path, size: int) -> None:
    if size > 1 and (reason := why_no_mpi()):
        pytest.skip(reason)
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    shown = text.partition(f"$ mpikv run -n 4 scripts/examples/{path.name}\n")[2].partition("\n\n")[0]
    launcher = ["-m", "mpikv", "run", "-n", str(size)] if size > 1 else []
    environ = {**clean(os.environ), "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, *launcher, path], env=environ, capture_output=True, text=True, timeout=55)
    assert (ran.returncode, ran.stdout.splitlines()) == (0, inspect.cleandoc(shown).splitlines()), ran.stderr
