"""A command whose output nobody reads any more ends without a word, as after ``mpikv info | head -1``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.launching import why_no_mpi

from mpikv.cli.launchers import clean
from mpikv.cli.output import UNREAD, has_lost_reader, until_unread

ROOT = Path(__file__).parents[2]
DEADLINE = 40.0


def run_unread(*arguments: str) -> tuple[int, str]:
    """Return the status of a command, and what it says on stderr, with a pipe as stdout that has no reader."""
    reader, writer = os.pipe()
    os.close(reader)
    environ = {**clean(os.environ), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mpikv", *arguments]
    with os.fdopen(writer, "wb") as unread:
        ran = subprocess.run(
            command, env=environ, stdout=unread, stderr=subprocess.PIPE, text=True, timeout=DEADLINE, check=False
        )
    return ran.returncode, ran.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["info"], ["info", "--json"]])
def test_a_command(arguments):
    assert run_unread(*arguments) == (UNREAD, "")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job(tmp_path, ranks):
    if why_no_mpi():
        pytest.skip(why_no_mpi())
    script = tmp_path / "count.py"
    script.write_text("import time\nfor number in range(200):\n    print(number, flush=True)\n    time.sleep(0.1)\n")
    status, said = run_unread("run", "-n", str(ranks), str(script))
    assert status == UNREAD
    assert "mpikv run: rank" not in said
    assert "Traceback" not in said


def test_a_job_that_fails_says_so(tmp_path):
    if why_no_mpi():
        pytest.skip(why_no_mpi())
    script = tmp_path / "fail.py"
    script.write_text("raise SystemExit(3)\n")
    status, said = run_unread("run", "-n", "2", str(script))
    assert status == 3
    assert "ended with status 3" in said


def test_a_job_that_fails_where_nothing_can_be_said_has_its_status(tmp_path):
    if why_no_mpi():
        pytest.skip(why_no_mpi())
    (tmp_path / "fail.py").write_text("raise SystemExit(3)\n")
    command = [sys.executable, "-m", "mpikv", "run", "-n", "2", "fail.py"]
    environ = {**clean(os.environ), "PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            command, cwd=tmp_path, env=environ, stdout=full, stderr=full, timeout=DEADLINE, check=False
        )
    assert ran.returncode == 3


def test_a_command_without_a_standard_output(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert until_unread(lambda: 3) == 3


def test_a_broken_pipe_of_another_kind_is_an_error():
    def command() -> int:
        raise BrokenPipeError

    assert not has_lost_reader()
    with pytest.raises(BrokenPipeError):
        until_unread(command)
