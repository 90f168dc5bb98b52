"""Every planted fault once, on three ranks, and what the launcher's side does about dead ranks and their files."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mpikv.cli.job import run_job
from mpikv.cli.launchers import clean, find_library
from mpikv.errors import MPIKVError

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
from fault_cases import ALL, CONTROLS, FAULTS, names  # noqa: E402

pytestmark = pytest.mark.deadline(180)


@pytest.fixture(scope="module")
def rows() -> Mapping[str, Mapping[str, Any]]:
    try:
        find_library(clean(os.environ))
    except MPIKVError as error:
        pytest.skip(str(error))
    options = ["--json", "--ranks", "3", "--alternate", "--jobs", "2", "--only", *ALL]
    command = [sys.executable, str(SCRIPTS / "faults"), *options]
    answer = subprocess.run(command, env=clean(os.environ), capture_output=True, text=True, check=False)
    assert answer.returncode == 1, answer.stderr  # the controls fail
    return {row["fault"]: row for row in json.loads(answer.stdout)["rows"]}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_as_promised(rows: Mapping[str, Mapping[str, Any]], fault: str) -> None:
    assert rows[fault]["problems"] == []


def test_a_trial_can_fail(rows: Mapping[str, Mapping[str, Any]]) -> None:
    problems = {fault: "; ".join(rows[fault]["problems"]) for fault in CONTROLS}
    assert "raised None, not" in problems["control: no error"]
    assert "a value was changed" in problems["control: another value"]
    assert "does not name the culprit" in problems["control: another rank named"]
    assert "the job reports success; rank" in problems["control: nothing happens"]


def killed_rank(folder: Path, text: str) -> tuple[int, str]:
    """Run a script on a rank that is its own launcher."""
    script = folder / "script.py"
    script.write_text(f"import mmap, os, signal, sys, time\n{text}\nos.kill(os.getpid(), signal.SIGKILL)\n")
    return run_job([sys.executable, "-m", "mpikv.cli.rank", str(script)], os.environ, 1, one_host=True)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the system cannot tell who died")
def test_files_of_a_killed_job_are_removed_and_no_others(tmp_path: Path) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    names = ("mpich_a", "osc_sm.b", "users", "mpich_another")
    mine, unmapped, users, others = (Path(f"/dev/shm/{name}_{os.getpid()}") for name in names)
    text = f"""
for name in ({str(users)!r}, {str(unmapped)!r}, {str(mine)!r}):
    with open(name, "w+b") as file:
        file.truncate(4096)
        if "osc_sm" not in name:
            globals()[name] = mmap.mmap(file.fileno(), 4096)
time.sleep(0.5)
"""

    def make() -> mmap.mmap:
        """Be another job, which starts after this one and lives on."""
        while not mine.exists():
            time.sleep(0.01)
        with open(others, "w+b") as file:
            file.truncate(4096)
            return mmap.mmap(file.fileno(), 4096)

    try:
        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(make)
            status, reason = killed_rank(tmp_path, text)
            left = [path.exists() for path in (mine, unmapped, users, others)]
            made.result(10).close()
    finally:
        for path in (mine, unmapped, users, others):
            path.unlink(missing_ok=True)
    assert (status, reason.partition(";")[0]) == (137, "rank 0 was killed by SIGKILL")
    assert left == [False, False, True, True]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("rank 1 raised", True),
        ("ranks 0, 1 call", True),
        ("waited for ranks [1], which", True),
        ("rank 10 raised [rank 1/3]", False),
        ("ranks 0, 2 call", False),
    ],
)
def test_who_is_named(text: str, right: bool) -> None:
    assert names(1, text) is right
