"""``mpikv run --restarts``: ranks that are killed, raise or stop, what goes on, and what is left."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.commands import python
from support.launching import mpi, why_no_mpi
from support.launching import wait as wait_until
from support.processes import is_running

from mpikv.cli.restarts import find_folders

SCRIPTS = Path(__file__).parents[2] / "scripts"
# Enough for four starts on a busy machine.
DEADLINE = 100
WHY = why_no_mpi()
pytestmark = [pytest.mark.deadline(2 * DEADLINE + 20), pytest.mark.skipif(bool(WHY), reason=WHY or "MPI")]

TRAIN = """
import os, pathlib, signal, sys, time
import numpy as np
import mpikv
here = pathlib.Path(sys.argv[1])

def spares():
    return [path.suffix[1:] for path in here.glob("spare.*")]

def wait_for(is_there):
    while not is_there():
        time.sleep(0.01)

kv = mpikv.create(timeout=TIMEOUT)
kv.init("w", np.zeros(1000))
BEFORE
for step in kv.steps(STEPS GIVEN):
    if kv.rank == 1:
        AT
    kv.push("w", np.ones(1000))
    time.sleep(0.02)
if kv.rank == 0:
    print("done", kv.restored, kv.version("w"), flush=True)
"""
ONCE = "(kv.restored is None or kv.restored.attempt == 0)"


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a training; check that it leaves no process, and no file but its last calls."""
    jobs = list[subprocess.Popen[str]]()

    def start(
        at: str, *options: str, before: str = "", timeout: float = 30.0, steps: int = 10, given: str = ""
    ) -> subprocess.Popen[str]:
        script, values = tmp_path / "train.py", {"TIMEOUT": timeout, "BEFORE": before, "STEPS": steps, "GIVEN": given}
        script.write_text(re.sub("[A-Z]{2,7}", lambda name: str({**values, "AT": at}[name[0]]), TRAIN))
        command = [sys.executable, "-m", "mpikv", "run", "-n", "2", *options, str(script), str(tmp_path)]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        (tmp_path / "tmp").mkdir(exist_ok=True)
        path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
        environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": path}
        jobs.append(subprocess.Popen(command, env=environ, text=True, **pipes))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()
        job.communicate()
    left = [path.name for path in (tmp_path / "tmp").iterdir() if not path.name.startswith("mpikv-calls-")]
    assert not left


def wait(job: subprocess.Popen[str], status: int = 0) -> tuple[str, str]:
    output, errors = job.communicate(timeout=DEADLINE)
    assert job.returncode == status, f"{job.returncode}\n{output}\n{errors}"
    return output, errors


ASYNC = ("--store", "dist_async")
ONE = pytest.mark.one_library


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (16, ()),
        (16, ("--spares", "numpy")),
        (3, ASYNC),
        *(pytest.param(*each, marks=ONE) for each in ((0, ()), (5, ASYNC))),
    ],
)
@pytest.mark.feature("restarts-async")
def test_killed_ranks_change_no_bit(seed: int, options: tuple[str, ...]) -> None:
    """On 2, 3 or 4 ranks; in ``dist_async``, no push is lost or made twice."""
    command = [SCRIPTS / "restart_faults", f"--first={seed}", "--restarts=1", "--deaths=3", *options]
    done = python(*command, timeout=2 * DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.feature("restarts-messages")
def test_a_killed_rank_is_named_and_the_loop_goes_on(run: Start) -> None:
    output, errors = wait(run(f"step == 5 and {ONCE} and os.kill(os.getpid(), signal.SIGKILL)", "--restarts", "1"))
    # MPICH's launcher may have killed the other rank, too, before the deaths are seen.
    told = r"^mpikv run: ((?:rank 1|one of the ranks 0, 1) was killed by SIGKILL); restart 1 from step (\d)$"
    ((why, step),) = re.findall(told, errors, re.MULTILINE)
    assert 1 <= int(step) <= 5
    assert f"done Restored(step={step}, attempt=1, again={6 - int(step)}, why={why!r}) 10" in output


def test_an_error_at_a_step_ends_the_job_after_some_restarts(run: Start) -> None:
    _, errors = wait(run("if step == 5: raise RuntimeError('planted')", "--restarts", "2"), status=1)
    assert errors.count("RuntimeError: planted") >= 3
    why = "rank 1 ended with status 1, so the job was stopped; 2 restarts from .* brought no new commit"
    assert re.search(why, errors)


@ONE
@pytest.mark.parametrize("error", ["len(5)", "import no_such_module", "exec('1 +')", "kv.set_optimizer('none')"])
def test_a_mistake_that_comes_twice_at_a_step_ends_the_job(run: Start, error: str) -> None:
    _, errors = wait(run(f"if step == 5: {error}", "--restarts", "9"), status=1)
    assert errors.count("restart 1 from") == 1
    assert "restart 2 from" not in errors
    kind = r"(TypeError|ModuleNotFoundError|SyntaxError|ConfigError) at .*train.py:\d+ in <module>"
    assert re.search(rf"so the job was stopped; {kind} came twice at the same step, and would come again", errors)
    assert errors.count("Traceback (most recent call last)") >= 2


@ONE
def test_a_mistake_at_another_step_is_a_death(run: Start) -> None:
    at = "if step == 2 + 3 * (kv.restored.attempt if kv.restored else 0) < 7: len(5)"
    output, errors = wait(run(at, "--restarts", "2"))
    assert "restart 2 from" in errors
    assert "done" in output


def test_a_stopped_rank_is_killed_and_replaced(run: Start) -> None:
    at = f"step == 3 and {ONCE} and os.kill(os.getpid(), signal.SIGSTOP)"
    output, errors = wait(run(at, "--restarts", "1", timeout=3.0))
    assert "Stalled" in errors
    assert "restart 1 from" in errors
    assert "done" in output


@pytest.mark.parametrize("how", ["path", "--keep", "--restarts"])
@pytest.mark.feature("steps-end-at-sigterm")
def test_a_signal_lets_the_loop_save_and_end(run: Start, tmp_path: Path, how: str) -> None:
    given = f", path={str(tmp_path / 'run')!r}" if how == "path" else ""
    options = {"path": [], "--keep": ["--keep", str(tmp_path / "keep")], "--restarts": ["--restarts", "2"]}[how]
    at = "step == 5 and (here / 'folder').write_text(os.environ.get('MPIKV_KEEP', 'none'))"
    job = run(at, *options, steps=10**6, given=given)
    folder = Path(read_when_there(tmp_path / "folder"))
    assert how != "--restarts" or folder.stat().st_mode & 0o777 == 0o700
    job.send_signal(signal.SIGTERM)
    _, errors = wait(job, status=128 + signal.SIGTERM if how == "--restarts" else 75)
    assert ("mpikv run: stopped by SIGTERM" in errors, "restart 1" in errors) == (True, False)
    assert folder.exists() == (how == "--keep")
    if how != "--restarts":  # whose commits end with the job
        output, _ = wait(run("pass", *options, steps=1, given=given))
        (step,) = re.findall(r"done Restored\(step=(\d+), attempt=0, again=0, why=''\) \1$", output, re.MULTILINE)
        assert int(step) > 5


def test_another_number_of_ranks_goes_on_from_the_disk(run: Start, tmp_path: Path) -> None:
    keep, given = ["--keep", str(tmp_path / "keep")], f", path={str(tmp_path / 'run')!r}"
    # Both a commit and a save of this step.
    wait(run("step == 5 and os.kill(os.getpid(), signal.SIGTERM)", "-n", "3", *keep, given=given), status=75)
    output, _ = wait(run("pass", *keep, given=given))
    (step,) = re.findall(r"done Restored\(step=(\d+), attempt=0, again=0, why=''\) ", output)
    assert int(step) > 5
    assert not list((tmp_path / "keep").iterdir())


@pytest.mark.parametrize("library_status", [3, 75])
def test_a_status_that_asks_for_another_run_is_no_death(run: Start, library_status: int) -> None:
    _, errors = wait(run(f"if step == 3: sys.exit({library_status})", "--restarts", "1"), status=library_status)
    assert errors.count("restart 1 from") == (library_status == 3)


def test_a_killed_command_goes_on_from_its_folder(run: Start, tmp_path: Path) -> None:
    keep = tmp_path / "keep"
    job = run("step == 5 and ((here / 'five').write_text(str(os.getppid())), time.sleep(60))", "--keep", str(keep))
    read_when_there(tmp_path / "five")
    _, errors = wait(run("pass", "--keep", str(keep)), status=2)
    assert f"no commits can be kept in {keep}: another mpikv run uses it" in errors
    job.kill()
    job.communicate()
    remove_files_of_killed(tmp_path / "tmp")
    output, _ = wait(run("pass", "--keep", str(keep)))
    assert re.search(r"done Restored\(step=[1-5], attempt=0, again=\d, why=''\) 10", output)
    # A finished job is not gone on with.
    assert not list(keep.iterdir())


@ONE
def test_the_folder_of_a_killed_command_is_removed_by_the_next(run: Start, tmp_path: Path) -> None:
    job = run("(here / 'folder').write_text(os.environ['MPIKV_KEEP']); time.sleep(60)", "--restarts", "3")
    folder = Path(read_when_there(tmp_path / "folder"))
    job.kill()
    job.communicate()
    remove_files_of_killed(tmp_path / "tmp")
    # Any command of this user removes it, and says so.
    wait(run("pass"))
    assert not folder.exists()


@pytest.mark.feature("restarts-faults")
@pytest.mark.parametrize("fault", ["full tmpfs", "disk fills", "out of memory"])
def test_a_fault_of_the_host_is_survived_or_named(fault: str) -> None:
    apart = ["unshare", "--mount", *["--map-root-user"] * (os.getuid() != 0), "true"]
    if refused := subprocess.run(apart, capture_output=True, text=True).stderr:
        pytest.skip(f"this host refuses it: {refused}")
    done = python(SCRIPTS / "restart_faults", "--only", fault, timeout=2 * DEADLINE)
    if "may make no cgroup" in done.stderr:
        pytest.skip(f"this host refuses it: {done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr


# --- Spares

# A module that spares import, and no script.
NOTED = """
import os, pathlib, time
print("imported", flush=True)
pathlib.Path(__file__).with_name(f"spare.{os.getpid()}").touch()
"""
WITH_SPARES = ("--restarts", "1", "--spares", "noted")
DIES = f"if step == 5 and {ONCE}: wait_for(lambda: BEFORE_DEATH); os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.feature("restarts-spares")
@pytest.mark.parametrize("more", ["", "time.sleep(1)", "raise ValueError"])
def test_spares_take_the_places_of_dead_ranks(run: Start, tmp_path: Path, more: str) -> None:
    """As soon as they are ready. They print what they import, and have the environment, as in another restart."""
    (tmp_path / "noted.py").write_text(NOTED + more)
    before = "if kv.rank == 1: print('begins', 'noted' in sys.modules, *sorted(os.environ), flush=True)"
    cold, _ = wait(run(DIES.replace("BEFORE_DEATH", "True"), "--restarts", "1", before=before))
    output, errors = wait(run(DIES.replace("BEFORE_DEATH", "len(spares()) == 2"), *WITH_SPARES, before=before))
    assert re.findall("restart . from", errors) == ["restart 1 from"]
    assert re.search(r"(?m)done Restored\(step=[1-5], attempt=1, again=\d, why='.* killed by SIGKILL'\) 10$", output)
    (_, after_cold), (_, after) = (re.findall("^begins (.*)$", text, re.MULTILINE) for text in (cold, output))
    assert after == after_cold.replace("False", str(more != "raise ValueError"), 1)
    assert output.index("begins") < output.index("imported")
    assert output.count("imported") == 2


def test_ranks_start_anew_where_spares_have_ended(run: Start, tmp_path: Path) -> None:
    (tmp_path / "noted.py").write_text(NOTED + "os._exit(3)")
    gone = "spares() and not any(os.path.exists(f'/proc/{spare}') for spare in spares())"
    output, errors = wait(run(DIES.replace("BEFORE_DEATH", gone), *WITH_SPARES))
    assert errors.count("restart 1 from") == output.count("done Restored") == 1


HANGS = """#!/bin/sh
MPIEXEC "$@"; status=$?
[ ! -e HERE/dead ] || { rm HERE/dead; echo $$ >HERE/pid; mv HERE/pid HERE/hangs; exec sleep 600; }
exit $status
"""


def test_a_launcher_that_hangs_is_ended_while_its_spares_train(run: Start, tmp_path: Path) -> None:
    (tmp_path / "noted.py").write_text(NOTED)
    wrapper = tmp_path / "mpiexec"
    wrapper.write_text(HANGS.replace("MPIEXEC", str(mpi()[1].path)).replace("HERE", str(tmp_path)))
    wrapper.chmod(0o700)
    dies = DIES.replace("BEFORE_DEATH)", "len(spares()) == 2); (here / 'dead').touch()")
    # Spares may come to this step before the launcher hangs.
    gone = "(here / 'hangs').exists() and not os.path.exists('/proc/' + (here / 'hangs').read_text().strip())"
    wait(run(f"{dies}\n        if step == 6: wait_for(lambda: {gone})", "--launcher", str(wrapper), *WITH_SPARES))


@pytest.mark.parametrize("more", ["", "time.sleep(1)"])
@pytest.mark.parametrize("how", ["end", "SIGINT", "SIGTERM", "SIGKILL"])
def test_spares_end_with_their_job(run: Start, tmp_path: Path, how: str, more: str) -> None:
    """Ready or not."""
    (tmp_path / "noted.py").write_text(NOTED + more)
    job = run("if step == 5: wait_for((here / 'go').exists)", *WITH_SPARES)
    wait_for(lambda: len(list(tmp_path.glob("spare.*"))) == 2)
    status = {"end": 0, "SIGKILL": -signal.SIGKILL, "SIGINT": 128 + signal.SIGINT, "SIGTERM": 128 + signal.SIGTERM}[how]
    (tmp_path / "go").touch() if how == "end" else job.send_signal(signal.Signals[how])
    output, errors = wait(job, status)
    wait_for(lambda: not any(is_running(path.suffix[1:]) for path in tmp_path.glob("spare.*")))
    assert "imported" not in output
    assert "restart" not in errors
    if how == "SIGKILL":
        remove_files_of_killed(tmp_path / "tmp")
        find_folders(remove=True)  # as the next command of this user would


def remove_files_of_killed(folder: Path) -> None:
    # Its launcher removes some at the same time.
    wait_for(lambda: not [shutil.rmtree(left, ignore_errors=True) for left in folder.iterdir()])


def read_when_there(path: Path) -> str:
    wait_for(lambda: path.exists() and path.read_text() != "")
    return path.read_text()


def wait_for(is_there: Callable[[], bool]) -> None:
    assert wait_until(is_there, DEADLINE)
