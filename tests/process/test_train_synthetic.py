"""``scripts/train_synthetic.py`` on the host, and that its check can fail. ``tests/gpu/emulated`` has it on GPUs."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

import pytest
from support.commands import ROOT, mpikv, python

pytestmark = pytest.mark.one_library

SCRIPT = ROOT / "scripts/train_synthetic.py"
SMALL = ("--gigabytes", "0.004", "--steps", "3")


def run(ranks: int, *arguments: str, through: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    start = partial(mpikv, "run", "-n", ranks) if ranks > 1 else python
    return start(*through, SCRIPT, *SMALL, *arguments, CUDA_VISIBLE_DEVICES="")


@pytest.mark.deadline(120)
@pytest.mark.parametrize("size", [1, 3])
def test_every_rank_finds_the_values_that_were_computed_again(size: int) -> None:
    done = run(size, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"Adam on cpu, ranks {size}, keys ")
    figures = lines[1].split()
    assert int(figures[3]) == 2 * int(figures[1]) == pytest.approx(4e6, rel=0.2)
    assert lines[-1] == "check passed, both ends of every value"


@pytest.mark.deadline(120)
def test_a_wrong_value_is_found(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        f"import sys\nsys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "import train_synthetic\nright = train_synthetic.fill\ncalls = []\n"
        "def fill(gradient, tile, by):\n    calls.append(1)\n"
        "    right(gradient, tile, 2 * by if len(calls) == 5 else by)\n"
        "train_synthetic.fill = fill\ndel sys.argv[1]\nsys.exit(train_synthetic.main())\n"
    )
    done = run(1, "--device", "cpu", "--optimizer", "sgd", through=(str(wrong),))
    assert done.returncode == 1, done.stderr
    assert "check failed" in done.stdout
    assert "train_synthetic: wrong on rank 0: 0/value/weight: element 0 is " in done.stderr
    assert done.stderr.count("wrong on rank") == 1


def test_without_a_gpu_it_is_one_line() -> None:
    done = run(1, "--device", "gpu")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("train_synthetic: TransportUnavailable: ")
    assert done.stderr.count("\n") == 1
