"""Which commands start ranks under Slurm: `scripts/slurm_check` in whole, on a cluster of its own where one can be."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.launching import why_no_mpi

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm_check"


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, int], dict[str, str]]:
    if reason := why_no_mpi():
        pytest.skip(reason)
    # Not subprocess.run, whose end at a deadline leaves no time to end the cluster.
    command = [sys.executable, str(SCRIPT), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate()
    finally:
        process.terminate()
        process.wait()
    if process.returncode == 2:
        pytest.skip(err.strip())
    assert out, err
    return {(trial["way"], trial["nodes"]): trial for trial in map(json.loads, out.splitlines())}


@pytest.mark.deadline(600)
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(
    "way",
    [
        *("salloc mpikv run", "sbatch mpikv run", "srun --mpi=pmi2", "srun --mpi=pmix", "srun --mpi=none"),
        *("scancel", "scancel USR1", "time limit", "preemption"),
    ],
)
def test_a_command_does_what_is_said(outcomes: dict[tuple[str, int], dict[str, str]], way: str, nodes: int) -> None:
    trial = outcomes[way, nodes]
    assert trial["right"], trial["text"]
    if trial["outcome"] == "no such srun":
        pytest.skip(trial["text"])
    if trial["outcome"] == "refused":
        assert "does not start this MPI library; use  mpikv run -n" in trial["text"]
