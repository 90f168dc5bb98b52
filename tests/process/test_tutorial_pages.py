"""What the tutorials show is what their commands print."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.launching import why_no_mpi
from support.pages import blocks, read_tutorial

pytestmark = pytest.mark.one_library


def run_commands(folder: Path, page: str) -> list[tuple[str, str, str]]:
    """Run a page's commands with output, in order; return each with what it printed and what the page shows."""
    programs = {"python": [sys.executable], "mpikv": [sys.executable, "-m", "mpikv"]}
    ran = list[tuple[str, str, str]]()
    for block in blocks(page, "console"):
        for command, shown in re.findall(r"^\$ (.*)\n((?:[^$].*\n)+)", block, re.MULTILINE):
            program, *arguments = command.split()
            done = subprocess.run(
                [*programs[program], *arguments], cwd=folder, capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0, done.stderr
            ran.append((command, done.stdout + (done.stderr if "--restarts" in command else ""), shown))
    return ran


def write_scripts(folder: Path, page: str, *names: str) -> None:
    scripts = [block for block in blocks(page, "python") if ">>>" not in block]
    for name, script in zip(names, scripts, strict=True):
        assert f"`{name}`" in page
        (folder / name).write_text(script)


@pytest.mark.deadline(120)
def test_training_and_resuming_print_what_is_shown(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    if reason := why_no_mpi():
        pytest.skip(reason)
    page = read_tutorial("train-on-four-ranks")
    write_scripts(tmp_path, page, "digits.py")
    ran = run_commands(tmp_path, page)
    assert [command.rpartition("digits")[0] for command, _, _ in ran] == [
        "python ",
        "mpikv run -n 4 ",
        "mpikv run -n 4 ",
        "mpikv run -n 2 ",
        "mpikv info ",
    ]
    for command, printed, shown in ran:
        assert printed == shown, command


def test_one_process_and_many_print_what_is_shown(tmp_path: Path) -> None:
    if reason := why_no_mpi():
        pytest.skip(reason)
    page = read_tutorial("from-one-process")
    write_scripts(tmp_path, page, "alone.py", "ranks.py")
    ran = run_commands(tmp_path, page)
    assert [command for command, _, _ in ran] == ["python alone.py", "mpikv run -n 4 ranks.py"]
    assert ran[0][1] == ran[0][2] == ran[1][1] == ran[1][2]
    for line in re.findall(r"^\| `([^`…]+)` \| (?:new|was)", page, re.MULTILINE):
        assert line in (tmp_path / "ranks.py").read_text()
        assert line not in (tmp_path / "alone.py").read_text()


@pytest.mark.deadline(120)
def test_a_killed_rank_prints_what_is_shown_but_for_numbers_of_steps(tmp_path: Path) -> None:
    if reason := why_no_mpi():
        pytest.skip(reason)
    page = read_tutorial("kill-a-rank")
    write_scripts(tmp_path, page, "mean.py")
    (_, whole, shown), (_, killed, shown_killed) = run_commands(tmp_path, page)
    assert whole == shown
    both = killed.replace("one of the ranks 0, 1 was", "rank 1 was")
    lines, printed = (re.sub(r"(step[ =]|again=)\d+", r"\1N", text).splitlines() for text in (shown_killed, both))
    assert set(lines) <= set(printed), killed
