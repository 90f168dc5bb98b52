"""The examples print what their docstrings show, on 1, 2 and 4 ranks alike, and the benchmark of calls runs."""

import ast
import inspect
from pathlib import Path

import pytest
from support import commands

SCRIPTS = commands.ROOT / "scripts"


@pytest.mark.one_library
@pytest.mark.deadline(60)
@pytest.mark.parametrize("path", sorted((SCRIPTS / "examples").glob("*.py")), ids=lambda path: path.stem)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_example_prints_what_it_shows(path: Path, size: int) -> None:
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    shown = text.partition(f"$ mpikv run -n 4 scripts/examples/{path.name}\n")[2].partition("\n\n")[0]
    ran = commands.mpikv("run", "-n", size, path, timeout=55)
    assert (ran.returncode, ran.stdout.splitlines()) == (0, inspect.cleandoc(shown).splitlines()), ran.stderr


@pytest.mark.one_library
@pytest.mark.deadline(60)
@pytest.mark.parametrize("suite", ["agreement", "checks", "halves", "codecs"])
def test_the_benchmark_of_calls(suite: str) -> None:
    small = ("--rounds", 1, "--mebibytes", 1)
    ran = commands.mpikv("run", "-n", 2, SCRIPTS / "bench_calls.py", suite, *small, timeout=55)
    assert (ran.returncode, len(ran.stdout.splitlines()) > 3) == (0, True), ran.stdout + ran.stderr
