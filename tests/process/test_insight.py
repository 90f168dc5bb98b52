"""``mpikv top``, ``mpikv doctor`` and the last calls of a job that ended badly, with real ranks."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import commands
from support.launching import why_no_mpi

from mpikv.cli.boards import Boards
from mpikv.cli.doctor import Finding, examine
from mpikv.cli.launchers import clean, core_count
from mpikv.cluster.shared_memory import BOARD, SHARED
from mpikv.cluster.status_board import LAYOUT, SLOT

ROOT = Path(__file__).parents[2]
DEADLINE = 60.0
pytestmark = pytest.mark.deadline(2 * DEADLINE)

# Ranks push until they are ended; rank 1 sleeps in each step, and for ever once a file "stay" exists.
SCRIPT = """
import os, time
import numpy as np, mpikv

here = os.path.dirname(__file__)
kv = mpikv.create(timeout=50)
kv.init("w", np.zeros(4))
while not kv.any_rank(False):
    if kv.rank == 1:
        time.sleep(1000 if os.path.exists(f"{here}/stay") else 0.02)
    kv.push("w", np.ones(4))
"""


def environ(folder: Path) -> dict[str, str]:
    return {**clean(os.environ), "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}


def mpikv(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return commands.mpikv(*arguments, timeout=DEADLINE, TMPDIR=str(folder))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A job of three ranks, whose board mpikv run has open."""
    if why_no_mpi():
        pytest.skip(why_no_mpi())
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "mpikv", "run", "-n", "3", str(script)]
    with subprocess.Popen(command, env=environ(tmp_path), stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: any(".board" in os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()))
            yield process
        finally:
            process.send_signal(signal.SIGINT)


def until(condition: Callable[[], Any]) -> Any:
    limit = time.monotonic() + DEADLINE
    while time.monotonic() < limit:
        try:
            if found := condition():
                return found
        except OSError:  # a file was closed meanwhile
            pass
        time.sleep(0.02)
    pytest.fail("it did not become true in time")


def top(folder: Path) -> Any:
    """Return the store of the job. Other jobs of this user may run on this host."""
    shown = mpikv(folder, "top", "--once", "--json", "--delay", "0.3")
    for store in json.loads(shown.stdout)["stores"] if shown.returncode == 0 else []:
        if all(str(folder) in Path(f"/proc/{rank['pid']}/cmdline").read_text() for rank in store["ranks"]):
            return store
    return {"calls_per_second": 0, "ranks": []}


def repeating(store: Any) -> Any:
    """Return a store whose last calls repeat each other: those of its start are forgotten after a while."""
    return store if store["calls_per_second"] > 0 and store["calls_per_step"] == 2 else None


def test_top_shows_the_ranks_of_a_running_job(job: subprocess.Popen[str], tmp_path: Path) -> None:
    store = until(lambda: repeating(top(tmp_path)))
    assert [rank["rank"] for rank in store["ranks"]] == [0, 1, 2]
    assert all(rank["runs"] and rank["call"].startswith("call #") for rank in store["ranks"])
    assert store["steps_per_second"] == store["calls_per_second"] / 2
    assert sum(rank["last"] for rank in store["ranks"]) > 0
    shown = mpikv(tmp_path, "top", "--once", "--delay", "0.2").stdout
    assert "3 of 3 ranks: " in shown
    assert "\x1b" not in shown


def test_the_last_calls_of_a_killed_rank_are_kept(job: subprocess.Popen[str], tmp_path: Path) -> None:
    (tmp_path / "stay").touch()

    def verbs() -> list[str]:
        return [rank["call"].split()[-1].partition("(")[0] for rank in top(tmp_path)["ranks"]]

    until(lambda: verbs() == ["push", "any_rank", "push"])
    late = top(tmp_path)["ranks"][1]
    assert "train.py:" in late["place"]
    os.kill(late["pid"], signal.SIGKILL)
    _, errors = job.communicate(timeout=DEADLINE)
    file = re.search(r"mpikv run: the last calls of each rank: {2}mpikv trace (\S+)\n", errors)
    assert file is not None, errors
    assert os.stat(file[1]).st_mode & 0o777 == 0o600
    calls = json.loads(Path(file[1]).read_text())["stores"][0]
    at_end = [rank["calls"][-1]["call"] for rank in calls]
    assert at_end[0] == at_end[1] == at_end[2]
    assert [rank["is_in_it"] for rank in calls] == [True, False, True]
    shown = mpikv(tmp_path, "trace", file[1])
    assert shown.returncode == 0
    assert (
        f"\n2 of 3 ranks: in call #{at_end[0] + 1} push('w')\nrank 1: after call #{at_end[0]} any_rank" in shown.stdout
    )


def test_a_program_that_makes_stores_in_a_loop_keeps_no_boards_open() -> None:
    """The oldest of those that are closed go first."""
    boards, opened = Boards(), list[int]()
    try:
        for number in range(40):
            slots = np.zeros(2, SLOT)
            slots["layout"], slots["pid"], slots["call"], slots["closed"] = LAYOUT, os.getpid(), number, number > 0
            path = f"{SHARED}/mpikv-{os.getpid()}-{number}{BOARD}"
            opened.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            os.unlink(path)
            os.write(opened[-1], slots.tobytes())
            if number % 8 == 7:
                boards.look(os.getpid())
                while number < 39 and len(opened) > 1:
                    os.close(opened.pop())
        kept = sorted(int(slots["call"][0]) for slots in boards.read().values())
        assert len(kept) == 16
        assert kept[0] == 0, "an open one"
        assert kept[-1] == 39
    finally:
        boards.close()
        for handle in opened:
            os.close(handle)


@pytest.mark.one_library
def test_a_file_without_calls_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("[]")
    shown = mpikv(tmp_path, "trace", str(tmp_path / "other.json"))
    assert (shown.returncode, shown.stdout) == (1, "")
    assert "has no last calls of a job" in shown.stderr


def find(what: str, ranks: int = 1, **variables: str) -> Finding:
    return next(one for one in examine({**clean(os.environ), **variables}, ranks) if what in one.what)


@pytest.mark.one_library
def test_the_doctor_names_the_command_that_mends_it() -> None:
    assert find("cannot load", MPI4PY_LIBMPI="/no/such").mend == "unset MPI4PY_LIBMPI"
    assert find("ranks would share", core_count() + 1).mend == f"mpikv run -n {core_count()} ..."
    threads = find("OMP_NUM_THREADS=999", 2, OMP_NUM_THREADS="999")
    assert threads.mend == "unset OMP_NUM_THREADS"
    assert not threads.wrong


@pytest.mark.one_library
def test_the_doctor_removes_what_dead_jobs_have_left(tmp_path: Path) -> None:
    left = Path(f"/dev/shm/mpikv-{os.getpid()}-0123")
    calls = tmp_path / "mpikv-calls-0123.json"
    for file in (left, calls):
        file.touch()
        os.utime(file, (1, 1))
    shown = mpikv(tmp_path, "doctor", "--clean", "--json")
    assert str(calls) in json.loads(shown.stdout)["removed"]
    assert not left.exists()  # another mpikv run may have removed it, too
    assert not calls.exists()


@pytest.mark.one_library
def test_the_doctor_fails_where_something_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "mpikv-calls-0123.json").touch()
    os.utime(tmp_path / "mpikv-calls-0123.json", (1, 1))
    shown = mpikv(tmp_path, "doctor")
    assert shown.returncode == 1
    assert "mend  mpikv doctor --clean" in shown.stdout
