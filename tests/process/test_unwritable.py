"""Jobs and commands whose output cannot be written, or is not read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.launching import launch, why_no_mpi

from mpikv.cli.launchers import clean
from mpikv.cli.output import UNREAD, has_lost_reader, until_unread

pytestmark = [pytest.mark.deadline(120), pytest.mark.skipif(bool(why_no_mpi()), reason=why_no_mpi())]

PROGRAM = """
import os, sys
import mpikv
from mpi4py import MPI

class Tee:
    write = sys.stderr.write

def put_broken_pipe(number):
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, number)

def fail(*_):
    raise KeyError("of the hook")

kv = mpikv.create(timeout=100)
if kv.rank == 1:
    sys.stdout.write("begun")
    exec(sys.argv[1])
MPI.COMM_WORLD.Barrier()
"""

FULL = "full = os.open('/dev/full', os.O_WRONLY); os.dup2(full, 1); os.dup2(full, 2)"
STREAMS = {
    "a full disk": FULL,
    "a closed stdout": "sys.stdout.close()",
    "a closed stderr": "sys.stderr.close()",
    "a broken pipe": "put_broken_pipe(1); put_broken_pipe(2)",
    "no flush": "sys.stdout = sys.stderr = Tee()",
}
# Of those, where the traceback has a way left.
TOLD = {"a closed stdout", "no flush"}


def run(tmp_path: Path, launcher: str, ending: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, *["-m", "mpikv", "run", "-n", "2"] * (launcher == "mpikv run"), "program.py", ending]
    environ = clean(os.environ)
    if launcher == "mpiexec":
        command, environ = launch(2, command)
    environ["PYTHONUNBUFFERED"] = ""
    return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.parametrize(
    ("streams", "launcher"),
    [*((name, "mpikv run") for name in STREAMS), ("a full disk", "mpiexec"), ("no flush", "mpiexec")],
)
def test_an_uncaught_exception_ends_the_job(tmp_path: Path, streams: str, launcher: str) -> None:
    done = run(tmp_path, launcher, f"{STREAMS[streams]}; raise ValueError('wrong')")
    assert done.returncode == 1, done.stderr
    assert ("ValueError: wrong" in done.stderr) == (streams in TOLD)


@pytest.mark.parametrize(("ending", "status"), [("sys.exit('wrong')", 1), ("raise KeyboardInterrupt", 130)])
def test_each_end_of_a_script_ends_the_job(tmp_path: Path, ending: str, status: int) -> None:
    done = run(tmp_path, "mpikv run", f"{FULL}; {ending}")
    assert done.returncode == status, done.stderr


def test_a_hook_that_fails_is_told_with_what_it_was_given(tmp_path: Path) -> None:
    done = run(tmp_path, "mpikv run", "sys.excepthook = fail; raise ValueError('wrong')")
    assert done.returncode == 1
    assert done.stderr.index("ValueError: wrong") < done.stderr.index("KeyError: 'of the hook'")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_a_job_of_a_command_with_closed_files_runs(tmp_path: Path, closed: str) -> None:
    (tmp_path / "program.py").write_text("import pathlib, mpikv; pathlib.Path(f'rank{mpikv.create().rank}').touch()")
    command = f"{sys.executable} -m mpikv run -n 2 program.py {closed}"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=clean(os.environ), timeout=110, check=False)
    assert done.returncode == 0
    assert sorted(path.name for path in tmp_path.glob("rank*")) == ["rank0", "rank1"]


def test_a_job_that_fails_where_nothing_can_be_said_has_its_status(tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text("raise SystemExit(3)\n")
    command = f"{sys.executable} -m mpikv run -n 2 fail.py >/dev/full 2>&1"
    environ = {**clean(os.environ), "PYTHONUNBUFFERED": ""}
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environ, timeout=110, check=False).returncode == 3


# --- Output that nobody reads any more, as after ``mpikv info | head -1``: a command ends without a word


def run_unread(*arguments: str) -> tuple[int, str]:
    """Return the status of a command, and what it says on stderr, with a pipe as stdout that has no reader."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "mpikv", *arguments]
    with os.fdopen(writer, "wb") as unread:
        ran = subprocess.run(
            command, env=clean(os.environ), stdout=unread, stderr=subprocess.PIPE, text=True, timeout=110, check=False
        )
    return ran.returncode, ran.stderr


@pytest.mark.one_library
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["info"], ["info", "--json"]])
def test_a_command(arguments):
    assert run_unread(*arguments) == (UNREAD, "")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job(tmp_path, ranks):
    script = tmp_path / "count.py"
    script.write_text("import time\nfor number in range(200):\n    print(number, flush=True)\n    time.sleep(0.1)\n")
    status, said = run_unread("run", "-n", str(ranks), str(script))
    assert status == UNREAD
    assert "mpikv run: rank" not in said
    assert "Traceback" not in said


def test_a_job_that_fails_says_so(tmp_path):
    script = tmp_path / "fail.py"
    script.write_text("raise SystemExit(3)\n")
    status, said = run_unread("run", "-n", "2", str(script))
    assert status == 3
    assert "ended with status 3" in said


def test_a_broken_pipe_of_another_kind_is_an_error():
    def command() -> int:
        raise BrokenPipeError

    assert not has_lost_reader()
    with pytest.raises(BrokenPipeError):
        until_unread(command)
