"""The example with PyTorch learns the digits, and goes on from a checkpoint on another number of ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.launching import why_no_mpi

pytest.importorskip("torch", reason="torch is not installed: pip install 'mpikv[torch]'")
pytestmark = [pytest.mark.deadline(120), pytest.mark.skipif(bool(why_no_mpi()), reason=why_no_mpi() or "")]

SCRIPT = Path(__file__).parents[2] / "scripts/train_torch.py"


def trained(ranks: int, *options: str) -> tuple[float, float]:
    """Return the accuracy and the sum of weights that the script has printed last."""
    line = [sys.executable, "-m", "mpikv", "run", "-n", str(ranks), str(SCRIPT), *options]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"^test accuracy (\S+), sum of weights (\S+) \(ranks (\d)\)", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    assert int(found[3]) == ranks
    return float(found[1]), float(found[2])


def test_a_training_goes_on_where_it_was_on_other_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "digits.pt")
    accuracy, weights = trained(1, "--epochs", "3")
    assert accuracy > 0.85
    first = trained(2, "--epochs", "1", "--checkpoint", path, "--update", "store")
    assert first[1] < 0.99 * weights
    resumed = trained(3, "--epochs", "3", "--checkpoint", path)
    # Of float32, whose rounding differs between numbers of ranks.
    assert resumed == (pytest.approx(accuracy, abs=0.02), pytest.approx(weights, rel=1e-3))
