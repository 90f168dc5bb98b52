"""Training scripts as people write them need three more or other lines, and learn the same on two ranks."""

from __future__ import annotations

import difflib
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mpikv.cli.launchers import clean

from .training import assert_close, torch

pytest.importorskip("sklearn")

pytestmark = pytest.mark.processes

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = HERE / "scripts"
NAMES = sorted(path.name.removesuffix("_single.py") for path in FOLDER.glob("*_single.py"))
ONE_BY_ITSELF = "mlp"


def job(*command: str) -> None:
    environment = {**clean(os.environ), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", "mpikv", "run", "-n", "2", *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what two ranks have learnt, by script: all run in one job, as importing torch takes seconds."""
    kept = tmp_path_factory.mktemp("scripts") / "kept.pt"
    scripts = [str(FOLDER / f"{name}_mpikv.py") for name in NAMES]
    job(str(HERE / "scripts_on_ranks.py"), str(kept), *scripts)
    learnt: dict[str, Any] = torch.load(kept)
    return {name: learnt[script] for name, script in zip(NAMES, scripts, strict=True)}


def test_there_are_ten() -> None:
    assert len(NAMES) == 10


@pytest.mark.parametrize("name", NAMES)
def test_three_lines_differ(name: str) -> None:
    single, ours = ((FOLDER / f"{name}_{kind}.py").read_text().splitlines() for kind in ("single", "mpikv"))
    assert 15 <= len([line for line in single if line]) <= 50
    differ = [line for line in difflib.ndiff(single, ours) if line[0] in "+-" and line[2:].strip()]
    added = [line[2:] for line in differ if line[0] == "+"]
    assert len(added) <= 3
    assert len(differ) - len(added) <= 1, "the line of the loader"
    assert added[0] == "import mpikv.torch"
    assert added[1].startswith("mpikv.torch.attach(")


@pytest.mark.deadline(60)
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_learn_the_same(name: str, on_ranks: dict[str, Any]) -> None:
    alone = runpy.run_path(str(FOLDER / f"{name}_single.py"))
    if "weights" in alone:
        assert_close(on_ranks[name], alone["weights"], 1e-9)
    else:
        # Gradients of half a batch are rounded to bfloat16, of 8 bits; or one row more is trained on, in place of none.
        assert on_ranks[name] == pytest.approx(alone["final_loss"], rel=0.05 if name == "amp" else 0.02)
        assert on_ranks[name] < 0.7


@pytest.mark.deadline(60)
def test_a_script_runs_by_itself() -> None:
    job(str(FOLDER / f"{ONE_BY_ITSELF}_mpikv.py"))
