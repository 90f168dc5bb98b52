"""The chaos driver, for seconds: what it plants ends as promised, and it would find what does not."""

import json
import os
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.commands import python
from support.launching import why_no_mpi

from mpikv.cli.job import run_job

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))  # before what follows: chaos is in no package
from chaos_faults import ALL, CONTROLS, FAULTS  # noqa: E402

pytestmark = pytest.mark.deadline(600)


# --- The table


@pytest.fixture(scope="module")
def real() -> Mapping[str, Mapping[str, Any]]:
    if reason := why_no_mpi():
        pytest.skip(reason)
    answer = python(
        SCRIPTS / "chaos", "table", "--json", "--ranks", "3", "--alternate", "--jobs", "2", "--only", *ALL, timeout=580
    )
    assert answer.returncode == 1, answer.stderr  # the controls fail
    return {row["fault"]: row for row in json.loads(answer.stdout)["rows"]}


@pytest.mark.feature("recovery")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_as_promised(real: Mapping[str, Mapping[str, Any]], fault: str) -> None:
    assert real[fault]["problems"] == []


def test_a_trial_can_fail(real: Mapping[str, Mapping[str, Any]]) -> None:
    problems = {fault: "; ".join(real[fault]["problems"]) for fault in CONTROLS}
    assert "raised None, not" in problems["control: no error"]
    assert "all values after control: another value" in problems["control: another value"]
    assert "does not name the culprit" in problems["control: another rank named"]
    assert "the job reports success; rank" in problems["control: nothing happens"]


# --- What the launcher does about dead ranks and their files


def killed_rank(folder: Path, text: str) -> tuple[int, str]:
    """Run a script on a rank that is its own launcher."""
    script = folder / "script.py"
    script.write_text(f"import mmap, os, signal, sys, time\n{text}\nos.kill(os.getpid(), signal.SIGKILL)\n")
    return run_job([sys.executable, "-m", "mpikv.cli.rank", str(script)], os.environ, 1, one_host=True, tell=print)


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
while not os.path.exists({str(others)!r}):
    time.sleep(0.01)
"""

    def make() -> int:
        """Be another job, which starts after this one, and is about to map its file."""
        while not mine.exists():
            time.sleep(0.01)
        return os.open(others, os.O_RDWR | os.O_CREAT)

    try:
        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(make)
            status, reason = killed_rank(tmp_path, text)
            left = [path.exists() for path in (mine, unmapped, users, others)]
            os.close(made.result(10))
    finally:
        for path in (mine, unmapped, users, others):
            path.unlink(missing_ok=True)
    assert (status, reason.partition(";")[0]) == (137, "rank 0 was killed by SIGKILL")
    assert left == [False, False, True, True]
