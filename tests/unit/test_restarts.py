"""Whether ``mpikv run`` starts ranks again, as their commits tell it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpikv.cli.job import Job
from mpikv.cli.restarts import Restarts, open_folder
from mpikv.errors import ConfigError
from mpikv.keep.folder import Briefing, read_briefing, read_progress, write_briefing
from mpikv.keep.slots import Slots


def commit(folder: Path, epoch: int, step: int, ranks: int = 2) -> None:
    for rank in range(ranks):
        slots = Slots(folder, 1, rank)
        slots.open(0.0)
        slots.write(epoch, step, [memoryview(b"text")])


def test_new_commits_give_new_restarts(tmp_path: Path) -> None:
    told = list[str]()
    restarts = Restarts(tmp_path, 2, 2, False, told.append)
    assert [restarts.go_on("rank 0 died") for _ in range(2)] == [True, True]
    commit(restarts.folder, 1, 7)
    assert [restarts.go_on("rank 1 died") for _ in range(3)] == [True, True, False]
    assert told[0] == "rank 0 died; restart 1 from the beginning"
    assert told[3] == "rank 1 died; restart 4 from step 7"
    assert read_briefing(restarts.folder)[:2] == (4, "rank 1 died")
    assert restarts.end(1) == "; 2 restarts from step 7 brought no new commit"
    assert restarts.end(0) == ""
    assert not list(tmp_path.iterdir())


def test_a_commit_counts_that_all_ranks_have(tmp_path: Path) -> None:
    commit(tmp_path, 1, 7)
    commit(tmp_path, 2, 9, ranks=1)
    assert read_progress(tmp_path) == (1, 7)
    (tmp_path / "1.1.0").write_bytes(b"\0" * 20)
    assert read_progress(tmp_path) == (1, 7)


def test_commits_of_another_boot_are_refused(tmp_path: Path) -> None:
    folder = Restarts(tmp_path, 2, 2, True, print).folder
    commit(folder, 1, 7)
    write_briefing(folder, Briefing(boot="another"))
    with pytest.raises(ConfigError, match="were made before the last boot of this host, or on another host"):
        Restarts(tmp_path, 2, 2, True, print)
    write_briefing(folder, Briefing())  # of several hosts, which flush them
    assert Restarts(tmp_path, 2, 2, True, print, flushed=True).go_on("rank 0 died")
    assert read_briefing(folder).boot == ""


def test_a_job_goes_on_where_no_spares_can_start(tmp_path: Path) -> None:
    told, restarts = list[str](), Restarts(tmp_path, 2, 2, True, print)
    job = Job(["/no/such/launcher"], {}, 2, True, told.append, 1.0, restarts, "numpy")
    commit(restarts.folder, 1, 7)
    for _ in range(2):
        job.prepare()
    assert (job.spares, job.others) == (None, [])
    assert len(told) == 1
    assert "no spares could be started ([Errno 2]" in told[0]


CLOSES = """
import signal
from mpikv.cli import job, starts
signal.signal(signal.SIGINT, lambda *_: None)
stubborn = job.Job(["sh", "-c", "trap '' TERM; while :; do sleep 0.1; done"], {}, 2, True, print, 1.0, None, "numpy")
stubborn.others.append(starts.LauncherProcess(stubborn.command, {}))
stubborn.others[0].prepare("numpy")
print("closes", flush=True)
stubborn.close()
signal.signal(signal.SIGINT, signal.SIG_IGN)
"""


def test_a_signal_ends_stubborn_spares_at_once() -> None:
    """Without a signal it may take 6 s."""
    with subprocess.Popen([sys.executable, "-c", CLOSES], stdout=subprocess.PIPE) as closing:
        assert next(iter(closing.stdout or ())) == b"closes\n"
        time.sleep(0.5)
        closing.send_signal(signal.SIGINT)
        assert closing.wait(3) == 0


def test_a_folder_has_one_job(tmp_path: Path) -> None:
    with open_folder(str(tmp_path / "new")) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        with pytest.raises(ConfigError, match="another mpikv run uses it"):
            open_folder(str(folder)).__enter__()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"no commits can be kept in .*file: File exists; give another folder"):
        open_folder(str(tmp_path / "file")).__enter__()


def test_ranks_are_told_of_newer_commits_of_another_number(tmp_path: Path) -> None:
    three = Restarts(tmp_path, 3, 2, True, print)
    commit(three.folder, 1, 7, ranks=3)
    two = Restarts(tmp_path, 2, 2, True, print)
    assert read_briefing(two.folder)[4:] == (7, str(three.folder))
    (tmp_path / "9-ranks").mkdir()
    two.end(0)
    # A folder that no job has made stays.
    assert [path.name for path in tmp_path.iterdir()] == ["9-ranks"]
