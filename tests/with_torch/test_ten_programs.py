"""Programs of PyTorch's users have gloo's losses on mpikv, with one word changed, however they are started."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.commands import python

pytestmark = [pytest.mark.processes, pytest.mark.deadline(240)]

PROGRAM = Path(__file__).with_name("ten_programs.py")
NAMES = ["ddp", "accumulation", "amp", "fsdp2", "zero", "dtensor", "checkpoint", "compiled", "accelerate", "lightning"]
STARTS = {"torchrun": ["torch.distributed.run", "--nproc-per-node", "2"], "mpikv run": ["mpikv", "run", "-n", "2"]}
READ_THE_LAUNCH = ["ddp", "accelerate", "lightning"]
"""Programs in which something reads the launcher's variables; the others know the process group alone."""


def losses(folder: Path, start: str, backend: str) -> dict[str, list[float]]:
    names = NAMES if start == "torchrun" else READ_THE_LAUNCH
    installed = [name for name in names if name not in ("accelerate", "lightning") or find_spec(name)]
    written = folder / "losses.json"
    ran = python("-m", *STARTS[start], PROGRAM, backend, written, *installed, timeout=200, OMP_NUM_THREADS="1")
    assert ran.returncode == 0, ran.stderr
    found: dict[str, list[float]] = json.loads(written.read_text())
    assert [*found] == installed
    return found


@pytest.fixture(scope="module")
def of_gloo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    return losses(tmp_path_factory.mktemp("gloo"), "torchrun", "gloo")


@pytest.mark.parametrize("start", STARTS)
def test_losses_are_those_of_gloo(start: str, of_gloo: dict[str, list[float]], tmp_path: Path) -> None:
    found = losses(tmp_path, start, "mpikv")
    for name, losses_of_mpikv in found.items():
        assert losses_of_mpikv == pytest.approx(of_gloo[name], rel=1e-12, abs=1e-12), name
