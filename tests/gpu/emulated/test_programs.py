"""The programs that measure and train on GPUs, as whole jobs: their results are right, and a planted mistake is found.

On a GPU ``scripts/gpu_check`` runs them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.launching import cleaned, why_no_mpi
from support.pages import ROOT, blocks, read_tutorial

from mpikv.cli.launchers import clean

pytestmark = pytest.mark.deadline(300)

SCRIPTS = ROOT / "scripts"
BENCH = (
    "from benchmark.program import main\nsys.exit(main(['--device', 'gpu', '--quick', '--rounds', '1', *sys.argv[1:]]))"
)
TRAIN = "sys.argv += ['--device', 'gpu', '--gigabytes', '0.004', '--steps', '3']\nsys.exit(train_synthetic.main())"

Job = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Return a function that runs a program on several ranks, and cleans up after it."""
    if why_no_mpi():
        pytest.skip(why_no_mpi())

    def job(ranks: int, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "program.py"
        script.write_text(f"import sys\nsys.path.insert(0, {str(SCRIPTS)!r})\n{program}\n")
        line = [sys.executable, "-m", "mpikv", "run", "-n", str(ranks), str(script), *arguments]
        environ = {**clean(os.environ), "TMPDIR": str(tmp_path)}
        environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), environ["PYTHONPATH"]])
        return subprocess.run(line, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)

    with cleaned(tmp_path):
        yield job


@pytest.fixture
def bench(job: Job, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that measures and returns the groups by their names."""

    def bench(ranks: int, *arguments: str, plant: str = "") -> dict[str, Any]:
        done = job(ranks, plant + BENCH, *arguments, "--json", "all.json")
        assert done.returncode == 0, done.stderr
        (only,) = json.loads((tmp_path / "all.json").read_text())["jobs"]
        assert (only["ranks"], only["functional_only"], only["pinned"]) == (ranks, "", False)
        for group in only["groups"]:
            assert group["wrong"] == {}
            group["cases"] = {case["name"]: case for case in group["cases"]}
        return {group["name"]: group for group in only["groups"]}

    return bench


@pytest.mark.parametrize("size", [1, 3])
def test_sums_are_measured_and_right(bench: Any, size: int) -> None:
    groups = bench(size, "--suite", "latency")
    assert list(groups) == ["sizes/64", "sizes/65536", "sizes/1048576"]
    for group in groups.values():
        cases = group["cases"]
        assert group["skipped"] == {}
        assert group["functional_only"] == ""
        assert all(case["median"] > 0 and len(case["returned_seconds"]) == 1 for case in cases.values())
        assert set(cases) == {"push", "pull", "pushpull", "allReduce", "copy"}
        assert group["elements"] % size == 0
        for case in cases.values():
            assert case["algbw"] == pytest.approx(4e-9 * group["elements"] / case["median"])
        assert cases["pushpull"]["busbw"] == pytest.approx(cases["pushpull"]["algbw"] * 2 * (size - 1) / size)


def test_sets_and_optimizers(bench: Any) -> None:
    groups = bench(2, "--only", "resnet50,small")
    assert list(groups) == ["resnet50/sgd", "resnet50/adam", "small/sgd", "small/adam"]
    for group in groups.values():
        assert set(group["cases"]) == {"store", "allReduce, update", "copy"}
        assert set(group["skipped"]) == {"torch DDP"}


def test_lamb_is_no_single_kernel(bench: Any) -> None:
    group = bench(2, "--only", "small", "--optimizer", "lamb")["small/lamb"]
    assert set(group["cases"]) == {"store", "copy"}
    assert "takes more than one kernel" in group["skipped"]["allReduce, update"]


def test_without_nccl_one_rank_measures_the_rest(bench: Any) -> None:
    plant = (
        "from mpikv.errors import TransportUnavailable\nfrom mpikv.compute.cuda import gpu\n"
        "def lacks():\n    raise TransportUnavailable('no NCCL here')\ngpu.find_nccl = lacks\n"
    )
    group = bench(1, "--only", "sizes", plant=plant)["sizes/64"]
    assert group["skipped"] == {"allReduce": "no NCCL here"}
    assert set(group["cases"]) == {"push", "pull", "pushpull", "copy"}


SILENT = """\
from benchmark.gpu_suites import Nccl
class Silent(Nccl):
    def __init__(self, *given):
        super().__init__(*given)
        self.step = lambda: None
from benchmark import gpu_suites
gpu_suites.Nccl = Silent
"""
UPDATED = """\
from mpi4py import MPI
from benchmark.gpu_cases import Update
right = Update.step
def step(self):
    right(self)
    if MPI.COMM_WORLD.rank:
        self._weight[2:3] = 0.5
Update.step = step
"""


@pytest.mark.parametrize(
    ("plant", "told"),
    [
        (SILENT, "sizes/64, allReduce, rank 0: key 0"),
        (UPDATED, "small/sgd, allReduce, update, rank 1: key 0"),
    ],
)
def test_a_wrong_result_of_a_measurement_is_an_error(job: Job, plant: str, told: str) -> None:
    done = job(2, plant + BENCH, "--only", "sizes,small", "--optimizer", "sgd")
    assert done.returncode == 1, done.stderr
    assert f"wrong result: {told} after" in done.stderr


@pytest.mark.parametrize("size", [1, 3])
def test_every_rank_of_a_training_finds_the_values_that_were_computed_again(job: Job, size: int) -> None:
    done = job(size, f"import train_synthetic\n{TRAIN}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Adam on gpu, ranks {size}, keys ")
    assert done.stdout.endswith("check passed, both ends of every value\n")


def test_a_wrong_value_of_a_training_is_found(job: Job) -> None:
    plant = (
        "import train_synthetic\nright, calls = train_synthetic.fill, []\n"
        "def fill(gradient, tile, by):\n    calls.append(1)\n"
        "    right(gradient, tile, 2 * by if len(calls) == 5 else by)\ntrain_synthetic.fill = fill\n"
    )
    done = job(1, plant + TRAIN, "--optimizer", "sgd")
    assert done.returncode == 1, done.stderr
    assert "check failed" in done.stdout
    assert "train_synthetic: wrong on rank 0: 0/value/weight: element 0 is " in done.stderr
    assert done.stderr.count("wrong on rank") == 1


@pytest.mark.parametrize("size", [1, 4])
def test_the_script_of_the_page_on_gpus_prints_what_is_shown(job: Job, size: int) -> None:
    page, command = read_tutorial("gpus"), "$ mpikv run -n 4 train.py\n"
    done = job(size, next(block for block in blocks(page, "python") if "import cupy" in block))
    (output,) = (block.removeprefix(command) for block in blocks(page, "console") if block.startswith(command))
    assert done.returncode == 0, done.stderr
    assert done.stdout == output.replace("4 ranks", f"{size} ranks")
