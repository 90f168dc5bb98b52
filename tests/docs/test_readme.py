"""What the README shows is true: its tutorial runs, its script prints what it says, its files are there."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.launching import why_no_mpi

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/**/*.md"))]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def doctest_failures(text: str, name: str) -> int:
    """Run a page's interactive blocks, one after the other in one namespace."""
    runner, names = doctest.DocTestRunner(), dict[str, Any]()
    for number, block in enumerate(block for block in blocks(text, "python") if ">>>" in block):
        test = doctest.DocTestParser().get_doctest(block, names, f"{name}[{number}]", name, 0)
        runner.run(test, clear_globs=False)
        names = test.globs
    return runner.summarize().failed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_are_true(page: Path) -> None:
    assert doctest_failures(page.read_text(encoding="utf-8"), page.name) == 0


def test_the_tutorial_is_there() -> None:
    assert sum(block.count(">>>") for block in blocks(README, "python")) > 20


def script_and_output() -> tuple[str, str]:
    (script,) = (block for block in blocks(README, "python") if ">>>" not in block)
    command = "$ mpikv run -n 4 first.py\n"
    (output,) = (block.removeprefix(command) for block in blocks(README, "console") if block.startswith(command))
    return script, output


def test_the_script_prints_what_is_shown(tmp_path: Path) -> None:
    if reason := why_no_mpi():
        pytest.skip(reason)
    script, output = script_and_output()
    assert len(script.splitlines()) == 12
    (tmp_path / "first.py").write_text(script)
    command = [sys.executable, "-m", "mpikv", "run", "-n", "4", "first.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, output), ran.stderr


def test_the_script_runs_without_a_launcher(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text(script_and_output()[0])
    ran = subprocess.run([sys.executable, "first.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "1 ranks: [1. 1. 1.], then w - 0.1 * [1. 1. 1.] = [0.9 0.9 0.9]\n"


# What leads to the messages under "All ranks call". Line 7 and the name of the function are in them.
DISAGREEING = """\
import time
import numpy as np
import mpikv
from mpikv import MPIKVError

def evaluate():
    time.sleep(2.5)

def told(verb, key):
    try:
        verb(key, np.ones(3))
    except MPIKVError as error:
        if kv.rank == 0:
            print(f"{type(error).__name__}: {error}")

kv = mpikv.create(timeout=1)
kv.init(["w", "b"], [np.ones(3), np.ones(3)])
told(kv.push, "b" if kv.rank == 2 else "w")
if kv.rank == 1:
    evaluate()
told(kv.pull, "w")
"""


def test_the_messages_are_those_shown(tmp_path: Path) -> None:
    if reason := why_no_mpi():
        pytest.skip(reason)
    (tmp_path / "train.py").write_text(DISAGREEING)
    command = [sys.executable, "-m", "mpikv", "run", "-n", "4", "train.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    printed = ran.stdout.replace(f"{tmp_path}/", "")
    printed = re.sub(r"waited \d\.\d s", "waited 60.0 s", printed)
    assert printed.splitlines() == [line for block in blocks(README, "text") for line in block.splitlines()], ran.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_named_scripts_are_there() -> None:
    for path in re.findall(r"\b((?:scripts|tests)/[\w/]+(?:\.py)?)", README):
        assert (ROOT / path).exists(), path
