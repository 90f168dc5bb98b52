"""Training scripts as people write them need three more or other lines, and learn the same on two ranks."""

import runpy
from pathlib import Path
from typing import Any

import pytest
from support.commands import mpikv

from .training import assert_close, torch

pytest.importorskip("sklearn")

pytestmark = pytest.mark.processes

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = HERE / "scripts"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
LOADER = "loader = DataLoader(dataset, batch_size=48)\n"
OF_TWO_RANKS = """\
import mpikv.torch
mpikv.torch.attach(model, optimizer)
loader = DataLoader(dataset, batch_size=24, sampler=mpikv.torch.sampler(dataset, shuffle=False))
"""
OPERANDS = {"gan": "nn.ModuleList([generator, discriminator]), [of_generator, of_discriminator]"}


def write_for_ranks(name: str, folder: Path) -> str:
    """Write a script with the three lines in place of its loader's; return the path."""
    text = (FOLDER / f"{name}.py").read_text()
    assert text.count(LOADER) == 1
    path = folder / f"{name}.py"
    path.write_text(
        text.replace(LOADER, OF_TWO_RANKS.replace("model, optimizer", OPERANDS.get(name, "model, optimizer")))
    )
    return str(path)


def job(*command: str) -> None:
    ran = mpikv("run", "-n", 2, *command, timeout=100, OMP_NUM_THREADS="1")
    assert ran.returncode == 0, ran.stderr


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what two ranks have learnt, by script: all run in one job, as importing torch takes seconds."""
    folder = tmp_path_factory.mktemp("scripts")
    kept, scripts = folder / "kept.pt", [write_for_ranks(name, folder) for name in NAMES]
    job(str(HERE / "scripts_on_ranks.py"), str(kept), *scripts)
    learnt: dict[str, Any] = torch.load(kept)
    return {name: learnt[script] for name, script in zip(NAMES, scripts, strict=True)}


@pytest.mark.deadline(120)
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_learn_the_same(name: str, on_ranks: dict[str, Any]) -> None:
    alone = runpy.run_path(str(FOLDER / f"{name}.py"))
    if "weights" in alone:
        assert_close(on_ranks[name], alone["weights"], 1e-9)
    else:
        # Gradients of half a batch are rounded to bfloat16, of 8 bits.
        assert on_ranks[name] == pytest.approx(alone["final_loss"], rel=0.05)
        assert on_ranks[name] < 0.7
