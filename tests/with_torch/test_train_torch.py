"""``scripts/train_torch.py`` learns the digits, and goes on from its file on another number of ranks."""

import re
from pathlib import Path

import pytest
from support.commands import ROOT, python
from support.launching import why_no_mpi

pytest.importorskip("torch", reason="torch is not installed: pip install 'mpikv[torch]'")
pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'mpikv[examples]'")

pytestmark = [pytest.mark.processes, pytest.mark.deadline(200)]

SHOWN = r"epoch +(\d+)  loss (\d\.\d+)  test accuracy (\d\.\d+)"
# The numbers shown have six digits and four; what the number of ranks changes in float64 is far smaller.
TOLERANCE = 2e-6


def run(ranks: int, *arguments: str) -> dict[int, tuple[float, float]]:
    """Return the loss and the accuracy of each epoch."""
    if ranks > 1 and (reason := why_no_mpi()):
        pytest.skip(reason)
    start = ["-m", "mpikv", "run", "-n", ranks] if ranks > 1 else []
    done = python(*start, ROOT / "scripts/train_torch.py", *arguments, timeout=100, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    return {int(epoch): (float(loss), float(accuracy)) for epoch, loss, accuracy in re.findall(SHOWN, done.stdout)}


@pytest.fixture(scope="module")
def unbroken() -> dict[int, tuple[float, float]]:
    return run(1)


def test_it_learns_the_digits(unbroken: dict[int, tuple[float, float]]) -> None:
    assert unbroken[10][1] > 0.97


@pytest.mark.parametrize(("first", "then", "ranks"), [("local", "store", 3), ("store", "local", 1)])
def test_it_goes_on_from_its_file_on_another_number_of_ranks(
    first: str, then: str, ranks: int, tmp_path: Path, unbroken: dict[int, tuple[float, float]]
) -> None:
    arguments = ("--checkpoint", str(tmp_path / "digits.pt"), "--epochs")
    begun, ended = run(2, "--update", first, *arguments, "1"), run(ranks, "--update", then, *arguments, "3")
    assert (list(begun), list(ended)) == ([1], [2, 3])
    for epoch, numbers in (begun | ended).items():
        assert numbers == pytest.approx(unbroken[epoch], abs=TOLERANCE)
