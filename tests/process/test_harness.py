"""The harness itself: in real jobs over a temporary directory, tests pass, fail, die, hang and are skipped."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.launching import launch, processes_in, remove_abandoned, shared_memory

from mpikv.cli.launchers import clean
from mpikv.cli.watch import shared_files

pytestmark = [pytest.mark.deadline(180), pytest.mark.one_library]

TESTS = Path(__file__).parents[1]

CASES = """
import atexit, os, signal, time
import hypothesis
import hypothesis.strategies
import pytest

alone = pytest.mark.ranks(2)

def test_ordinary(comm, ranks):
    assert (comm, ranks) == (None, 1)

@pytest.mark.deadline(0.5)
def test_hangs_here():
    time.sleep(1000)

@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("word", ["a", "b"])
def test_passes(comm, ranks, word):
    assert ranks == (comm.allreduce(1) if comm else 1)

@alone
def test_fails_on_rank_1(comm):
    print("before the failure")
    assert comm.rank == 0, "a reason"
    comm.Barrier()

@alone
def test_dies(comm):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.Barrier()

@alone
@pytest.mark.deadline(1)
def test_hangs(comm):
    if comm.rank == 1:
        the_line_that_hangs()
    comm.Barrier()

def the_line_that_hangs():
    time.sleep(1000)

@alone
def test_leaves(comm):
    if comm.rank == 1:
        os._exit(3)
    comm.Barrier()

@alone
def test_is_skipped(comm):
    pytest.skip("a cause")

@alone
@pytest.mark.xfail(reason="known")
def test_is_expected_to_fail(comm):
    assert comm is None

@alone
@hypothesis.given(hypothesis.strategies.integers())
def test_draws_the_same_on_each_rank(comm, number):
    assert comm.bcast(number) == number

@alone
def test_after_all_that(comm, tmp_path):
    comm.Barrier()

@pytest.fixture
def broken():
    raise LookupError("no fixture")

@alone
def test_with_a_broken_fixture(broken):
    pass

@pytest.mark.skip(reason="nothing is launched for it")
@pytest.mark.ranks(2, 5)
def test_is_left_out(comm):
    pass

@pytest.mark.ranks(3)
def test_exit_of_the_job(comm):
    if comm.rank == 2:
        atexit.register(os._exit, 4)
"""

# A module that only the ranks of a job cannot import.
BROKEN = """
import os
import pytest

if {"PMI_RANK", "OMPI_COMM_WORLD_RANK"} & set(os.environ):
    raise ImportError("no module here")

@pytest.mark.ranks(4)
@pytest.mark.parametrize("number", [1, 2])
def test_never_starts(number):
    pass
"""

WAITS = """
import pathlib, time
import pytest

@pytest.mark.ranks(2)
@pytest.mark.deadline(100)
def test_waits(comm):
    comm.Barrier()
    pathlib.Path(__file__).with_name("waits").touch()
    time.sleep(1000)
"""


SIMULATED = """
import logging, os, threading, time, warnings
import pytest

pytestmark = pytest.mark.ranks(1, 2, 3)
name = "MPIKV_HARNESS"

def test_passes(comm, ranks):
    assert ranks == (sum(comm.allgather(1)) if comm else 1)

@pytest.mark.deadline(1)
def test_takes_no_time(comm):
    started = time.monotonic()
    time.sleep(1000)
    assert ranks_know_of_each_other(comm) and (not comm or time.monotonic() - started >= 1000)

def ranks_know_of_each_other(comm):
    return comm is None or comm.size == len(comm.allgather(comm.rank))

def test_patches_are_taken_back(comm, monkeypatch):
    for value in "ab":
        monkeypatch.setenv(name, value)
        ranks_know_of_each_other(comm)

def test_patches_were_taken_back():
    assert name not in os.environ

def test_logs_and_warnings_are_a_ranks_own(comm, caplog):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ranks_know_of_each_other(comm)
        warnings.warn("one")
        logging.getLogger("harness").warning("one")
        ranks_know_of_each_other(comm)
    assert (len(caught), len(caplog.records)) == (1, 1)

@pytest.mark.ranks(2)
def test_fails_on_rank_1(comm):
    assert comm.rank == 0, "a reason"
    comm.Barrier()

@pytest.mark.ranks(2)
def test_waits_for_ever(comm):
    if comm.rank == 1:
        comm.Barrier()

def the_line_that_hangs():
    threading.Event().wait()

@pytest.mark.ranks(2)
@pytest.mark.deadline(1)
def test_hangs(comm):
    if comm.rank == 1:
        the_line_that_hangs()
    comm.Barrier()

@pytest.mark.processes
def test_needs_processes():
    raise AssertionError("not simulated")

def test_after_all_that(comm):
    ranks_know_of_each_other(comm)
"""


@dataclass
class Session:
    """What an inner session printed and reported."""

    code: int
    output: str
    seconds: float
    outcomes: Mapping[str, str]
    texts: Mapping[str, str]


def copy_harness(folder: Path) -> None:
    shutil.copy(TESTS / "conftest.py", folder)
    (folder / "support").mkdir()
    for name in ("__init__.py", "launching.py", "processes.py", "simulated.py"):
        shutil.copy(TESTS / "support" / name, folder / "support")


def run(folder: Path, command: Sequence[str], environ: Mapping[str, str]) -> Session:
    """Run pytest on the cases in a folder that has the harness."""
    copy_harness(folder)
    (folder / "setup.cfg").write_text("[tool:pytest]\naddopts = --strict-markers --color=no\n")
    if not (folder / "store").exists():
        (folder / "test_cases.py").write_text(CASES)
    packages = os.pathsep.join([str(TESTS.parent), *filter(None, [environ.get("PYTHONPATH")])])
    began = time.monotonic()
    # Jobs of the inner session are in this folder too.
    environ = {**environ, "PYTHONPATH": packages, "TMPDIR": str(folder)}
    shared_before = shared_memory()
    answer = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    # A job that the user launched is not cleaned up by anyone.
    remove_abandoned(shared_memory() - shared_before)
    return Session(answer.returncode, answer.stdout + answer.stderr, time.monotonic() - began, *read_report(folder))


def read_report(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    outcomes: dict[str, str] = {}
    texts: dict[str, str] = {}
    path = folder / "report.xml"
    for case in ElementTree.parse(path).iter("testcase") if path.exists() else []:
        name = case.attrib["name"]
        parts = [part for part in case if part.tag in ("failure", "error", "skipped")]
        outcomes[name] = parts[0].tag if parts else "passed"
        texts[name] = "\n".join(f"{part.get('message')}\n{part.text}" for part in parts)
    return outcomes, texts


def pytest_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "--junitxml=report.xml", *arguments]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    folder = tmp_path_factory.mktemp("all")
    (folder / "test_broken.py").write_text(BROKEN)
    session = run(folder, pytest_command(), clean(os.environ))
    assert [path for path in folder.iterdir() if path.name.startswith("ranks-")] == [], "a job left its folder"
    assert processes_in(folder) == [], "a job left processes"
    return session


def test_a_failure_costs_one_test_and_not_the_rest(session: Session) -> None:
    bad = {"test_fails_on_rank_1", "test_dies", "test_hangs", "test_leaves"}
    expected = {f"{name}[ranks=2]": "failure" for name in bad}
    expected |= {f"test_passes[{word}-ranks={size}]": "passed" for word in "ab" for size in (1, 2, 3)}
    expected |= {f"test_{what}[ranks=2]": "passed" for what in ("draws_the_same_on_each_rank", "after_all_that")}
    expected |= {"test_ordinary": "passed", "test_hangs_here": "failure"}
    expected |= {f"test_never_starts[{number}-ranks=4]": "failure" for number in (1, 2)}
    expected |= {f"test_is_{what}[ranks=2]": "skipped" for what in ("skipped", "expected_to_fail")}
    expected |= {f"test_is_left_out[ranks={size}]": "skipped" for size in (2, 5)}
    expected |= {"test_with_a_broken_fixture[ranks=2]": "error", "test_exit_of_the_job[ranks=3]": "error"}
    assert session.outcomes == expected, session.texts
    assert session.code == 1


@pytest.mark.parametrize(
    ("test", "words"),
    [
        ("fails_on_rank_1[ranks=2]", ["rank 1 of 2", "a reason", "assert comm.rank == 0", "rank 0: did not finish"]),
        ("dies[ranks=2]", ["rank 1: signal 9", "rank 0: did not finish; last started test_cases.py::test_dies"]),
        ("hangs[ranks=2]", ["did not finish in 1 s", "in the_line_that_hangs"]),
        ("leaves[ranks=2]", ["rank 1: exit status 3"]),
        ("with_a_broken_fixture[ranks=2]", ["rank 0: failed: LookupError: no fixture"]),
        ("is_skipped[ranks=2]", ["a cause"]),
        ("is_expected_to_fail[ranks=2]", ["known"]),
        ("never_starts[1-ranks=4]", ["no module here"]),
        ("never_starts[2-ranks=4]", ["not run"]),
        ("hangs_here", ["did not finish in 0.5 s"]),
        ("exit_of_the_job[ranks=3]", ["all tests ended, but then rank 2: exit status 4"]),
    ],
)
def test_a_report_tells_what_happened(session: Session, test: str, words: list[str]) -> None:
    text = session.texts[f"test_{test}"] + session.output
    assert [word for word in words if word not in text] == []


def test_a_job_of_the_user_runs_its_number_of_ranks_in_place(tmp_path: Path) -> None:
    # A report file of each rank would overwrite those of the others.
    command, environ = launch(2, [sys.executable, "-m", "pytest", "-rA", "-k", "passes or ordinary"])
    session = run(tmp_path, command, environ)
    assert session.code == 0
    assert session.output.count("PASSED") == 3
    assert session.output.count("3 passed, 4 skipped") == 1
    assert "needs 3 ranks, this job has 2" in session.output


def test_a_session_that_is_terminated_leaves_nothing(tmp_path: Path) -> None:
    copy_harness(tmp_path)
    (tmp_path / "test_waits.py").write_text(WAITS)
    environ = {**clean(os.environ), "PYTHONPATH": str(TESTS.parent), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(pytest_command(), cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL) as session:
        while session.poll() is None and not (tmp_path / "waits").exists():
            time.sleep(0.02)
        shared = {file for process in processes_in(tmp_path) for file in shared_files(process)}
        session.terminate()
    assert session.returncode == 143
    assert [path for path in tmp_path.iterdir() if path.name.startswith("ranks-")] == []
    assert processes_in(tmp_path) == []
    assert [file for file in shared if os.path.exists(file)] == []


def test_simulated_ranks(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "test_cases.py").write_text(SIMULATED)
    session = run(tmp_path, pytest_command("--simulate", "-v"), clean(os.environ))
    on_all = "passes patches_are_taken_back patches_were_taken_back logs_and_warnings_are_a_ranks_own after_all_that"
    expected = {f"test_{name}[ranks={size}]": "passed" for name in on_all.split() for size in (1, 2, 3)}
    expected |= {f"test_takes_no_time[ranks={size}]": "passed" for size in (2, 3)}
    expected |= {"test_takes_no_time[ranks=1]": "failure"}  # whose time is not simulated
    bad = {"fails_on_rank_1": "a reason", "waits_for_ever": "wait for each other", "hangs": "in the_line_that_hangs"}
    expected |= {f"test_{name}[ranks=2]": "failure" for name in bad}
    assert session.outcomes == expected, session.texts
    texts = {name: session.texts[f"test_{name}[ranks=2]"] for name in bad}
    assert {name for name, words in bad.items() if words not in texts[name]} == set(), texts
    assert processes_in(tmp_path) == []
