"""What the README and the tutorials show is true: scripts and commands print what is shown, links lead to files."""

import ast
import doctest
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.commands import Done, python
from support.launching import why_no_mpi
from support.pages import ROOT, blocks, read_tutorial

import mpikv
from mpikv.cli.launchers import clean

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/**/*.md"))]


def doctest_failures(text: str, name: str) -> int:
    """Run a page's interactive blocks, one after the other in one namespace."""
    runner, names = doctest.DocTestRunner(), dict[str, Any]()
    for number, block in enumerate(block for block in blocks(text, "python") if ">>>" in block):
        test = doctest.DocTestParser().get_doctest(block, names, f"{name}[{number}]", name, 0)
        runner.run(test, clear_globs=False)
        names = test.globs
    return runner.summarize().failed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_examples_are_true(page: Path) -> None:
    assert doctest_failures(page.read_text(encoding="utf-8"), page.name) == 0


def test_the_tutorial_is_there() -> None:
    assert sum(block.count(">>>") for block in blocks(read_tutorial("first-store"), "python")) > 20


# The rows of the README's table of speed: the record of each, and how the lines of its ratios begin.
RATIOS = {
    "ResNet-50: 161 arrays, 102 MB": ("mpich-sets", "ResNet-50"),
    "ResNet-50, with Open MPI": ("openmpi-sets", "ResNet-50"),
    "BERT-base: 199 arrays, 438 MB": ("mpich-sets", "BERT-base"),
    "10,000 arrays of 1 to 100 floats": ("mpich-small", "10,000 keys"),
    "100 arrays of 64 B": ("mpich-small", "100 keys"),
    "one array of 64 MB, the sum alone": ("mpich-small", "sum of 64 MB"),
    "one array of 64 B": ("mpich-small", "1 key of 64 B"),
}


def test_the_figures_of_speed_are_those_of_the_record() -> None:
    rows = dict(re.findall(r"^\| ([^|]+) (\|(?: (?:[\d.]+ [mµ]s )?\|){4})$", README, re.MULTILINE))
    assert rows.keys() == RATIOS.keys()
    assert rows["ResNet-50: 161 arrays, 102 MB"] in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for row, (file, name) in RATIOS.items():
        record = (ROOT / "docs" / "bench" / f"{file}.txt").read_text(encoding="utf-8").splitlines()
        recorded = {figure for line in record if line.startswith(name) for figure in re.findall(r"[\d.]+ [mµ]s", line)}
        shown = re.findall(r"[\d.]+ [mµ]s", rows[row])
        assert len(shown) in (2, 4)
        assert set(shown) <= recorded, row


CLAIMS = re.findall(r"^\| .+ \| `(.+)` \|$", README.partition("## Claims")[2].partition("\n## ")[0], re.MULTILINE)
SHOWN = re.findall(r"^\$ ((?:mpikv|scripts|python).*?) *(?:#.*)?$", "".join(blocks(README, "console")), re.MULTILINE)


@pytest.mark.deadline(60)
@pytest.mark.parametrize("line", [*CLAIMS, *(line for line in SHOWN if not re.search(r"\b(first|train)\.py", line))])
def test_the_commands_start(line: str) -> None:
    command, *words = shlex.split(re.sub(r"run -n \d", "run -n 1", line))
    if "run" in words and (reason := why_no_mpi()):
        pytest.skip(reason)
    if "with_torch" in line:
        pytest.importorskip("torch")
    start = [sys.executable, *(["-m", "mpikv"] if command == "mpikv" else [] if command == "python" else [command])]
    if "pytest" in words:
        start += [*words, "--collect-only", "-q"]
    elif command != "python" and command != "mpikv" and "bash" in (ROOT / command).read_text().partition("\n")[0]:
        start = ["bash", "-n", command]  # which would make an environment
    else:
        start += words if "-c" in words else [*words, "--help"]
    ran = subprocess.run(start, cwd=ROOT, env=clean(os.environ), capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr


# What a script may lack: it says so, or is not run then.
OPTIONAL = re.compile(r"\b(numpy|mpi4py|torch|jax|optax|cupy|sklearn|pytest|spack\w*)\b")


def test_the_imports_of_scripts_can_be_had() -> None:
    """Also those inside functions, which ``--help`` does not reach."""
    nodes = (
        node
        for path in (ROOT / "scripts").rglob("*")
        if path.is_file() and (path.suffix == ".py" or path.read_bytes().startswith(b"#!/usr/bin/env python3"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level)
    )
    lines = {line for node in nodes if not OPTIONAL.search(line := ast.unparse(node)) and "__future__" not in line}
    folders = os.pathsep.join(str(ROOT / name) for name in ("", "scripts", "tests"))
    ran = python("-c", "\n".join(sorted(lines)), timeout=60, PYTHONPATH=folders)
    assert ran.returncode == 0, ran.stderr


def script_and_output() -> tuple[str, str]:
    (script,) = (block for block in blocks(README, "python") if "mpikv.create()" in block)
    command = "$ mpikv run -n 4 first.py\n"
    (output,) = (block.removeprefix(command) for block in blocks(README, "console") if block.startswith(command))
    return script, output


def run(folder: Path, script: str, ranks: int, name: str = "first.py") -> Done:
    """Run a script on several ranks, or without a launcher."""
    if ranks > 1 and (reason := why_no_mpi()):
        pytest.skip(reason)
    (folder / name).write_text(script)
    launcher = ["-m", "mpikv", "run", "-n", str(ranks)] if ranks > 1 else []
    return python(*launcher, name, cwd=folder, timeout=60)


def test_the_script_prints_what_is_shown(tmp_path: Path) -> None:
    script, output = script_and_output()
    assert len(script.splitlines()) == 12
    several, one = (run(tmp_path, script, ranks) for ranks in (4, 1))
    assert (several.returncode, several.stdout) == (0, output), several.stderr
    assert (one.returncode, one.stderr) == (0, "")
    assert one.stdout == "1 ranks: [1. 1. 1.], then w - 0.1 * [1. 1. 1.] = [0.9 0.9 0.9]\n"


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_the_lines_for_a_library_are_those_of_its_page(library: str) -> None:
    (lines,) = (block for block in blocks(README, "python") if f"mpikv.{library}" in block)
    page = (ROOT / "docs" / "how-to" / f"{library}.md").read_text(encoding="utf-8")
    code = [line.partition("  #")[0].strip() for line in lines.splitlines()]
    assert len(code) == 3
    assert all(line in page for line in code)
    assert library != "torch" or any(block in page for block in blocks(README, "console") if "train.py" in block)


def test_the_last_lines_of_examples_are_those_of_their_docstrings() -> None:
    rows = re.findall(r"^\| \[.*\]\((scripts/examples/\w+\.py)\).* \| `(.+)` \|$", README, re.MULTILINE)
    assert {ROOT / path for path, _ in rows} == set(ROOT.glob("scripts/examples/*.py"))
    for path, line in rows:
        assert f"    {line}\n\n" in (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.skipif(bool(find_spec("cupy")), reason="the page shows a machine without CuPy")
def test_the_page_on_gpus_shows_what_is_missing() -> None:
    information, error = blocks(read_tutorial("gpus"), "text")
    ran = python("-m", "mpikv", "info", timeout=60)
    assert information.splitlines()[1] in ran.stdout.splitlines()
    with pytest.raises(mpikv.TransportUnavailable) as caught:
        mpikv.create("nccl")
    assert f"{caught.type.__name__}: {caught.value}\n" == error


# What leads to the messages under "Meet an error", which have its lines and the name of the function.
DISAGREEING = """\
import time
import numpy as np
import mpikv

kv = mpikv.create(timeout=1)
def evaluate():
    time.sleep(2.5)

kv.init(["w", "b"], [np.ones(3), np.ones(3)])
try:
    if kv.rank == 2:
        kv.push("b", np.ones(3))
    else:
        kv.push("w", np.ones(3))
except mpikv.RankMismatch as error:
    if kv.rank == 0:
        print(f"{type(error).__name__}: {error}")
try:
    if kv.rank == 1:
        evaluate()
    kv.pull("w")
except mpikv.MPIKVError as error:
    if kv.rank == 0:
        print(f"{type(error).__name__}: {error}")
"""


def test_the_messages_are_those_shown(tmp_path: Path) -> None:
    done = run(tmp_path, DISAGREEING, 4, "train.py")
    printed = done.stdout.replace(f"{tmp_path}/", "")
    printed = re.sub(r"waited \d\.\d s", "waited 60.0 s", printed)
    assert printed.splitlines() == [
        line for block in blocks(read_tutorial("first-store"), "text") for line in block.splitlines()
    ], done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target, heading in re.findall(r"\]\(([^)#\s]*)(#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not heading or heading[1:] in anchors(file.read_text(encoding="utf-8")), f"{target}{heading}"


def anchors(text: str) -> set[str]:
    """Return the names by which a page's headings are linked to, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_named_scripts_are_there() -> None:
    for path in re.findall(r"\b((?:scripts|tests)/[\w/]+(?:\.py)?)", README):
        assert (ROOT / path).exists(), path
