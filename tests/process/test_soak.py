"""The soak test, for seconds: it runs, it finds nothing wrong, and it would find something."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.launching import why_no_mpi

LOSSY = """
from mpikv.transports.local import LocalTransport

sums = []

def lossy(self, send, recv, counts=None):
    sums.append(recv)
    recv[...] = send if len(sums) % 50 else np.zeros_like(send)
    return (recv,)

LocalTransport.reduce_scatter = LocalTransport.allreduce = lossy

"""
SOAK = Path(__file__).parents[2] / "scripts" / "soak"
SOAK_NAMES = runpy.run_path(str(SOAK))


def soak(*arguments: str) -> subprocess.CompletedProcess[str]:
    if reason := why_no_mpi():
        pytest.skip(reason)
    command = [sys.executable, str(SOAK), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.deadline(60)
@pytest.mark.parametrize("size", ["1", "2"])
def test_some_rounds(size: str) -> None:
    done = soak("--minutes", "0.03", "--seed", "7", "-n", size)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("nothing lost, nothing wrong, nothing grew\n")
    assert "fault a bad argument" in done.stdout


@pytest.mark.deadline(60)
def test_a_wrong_sum_is_found(tmp_path: Path) -> None:
    """A transport that loses one rank's contribution once in a while must not go unnoticed."""
    text = SOAK.read_text()
    main = 'if __name__ == "__main__":'
    assert main in text
    (tmp_path / "soak").write_text(text.replace(main, LOSSY + main))
    command = [sys.executable, str(tmp_path / "soak"), "--minutes", "0.1", "--seed", "7", "-n", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG in round" in done.stdout
    assert "again:  scripts/soak --seed 7 --round" in done.stdout


def resources(**samples: list[int]) -> Any:
    """Return what a soak would have sampled in so many rounds."""
    found = SOAK_NAMES["Resources"](None)
    found.samples = [dict(zip(samples, values, strict=True)) for values in zip(*samples.values(), strict=True)]
    return found


def test_what_is_kept_each_round_is_growth() -> None:
    assert resources(**{"open files": [*range(28)]}).growth() == ["open files rose from 13 to 21"]
    assert resources(**{"open files": [9] * 20 + [10] * 8}).growth() == ["open files rose from 9 to 10"]


def test_a_busy_round_is_no_growth() -> None:
    assert resources(**{"open files": [9] * 10 + [12] + [9, 10] * 9}).growth() == []


def test_memory_has_room_for_what_an_allocator_keeps() -> None:
    assert resources(**{"resident KiB": [30_000] * 100 + [34_000] * 100}).growth() == []
    assert resources(**{"resident KiB": [30_000] * 100 + [35_000] * 100}).growth() != []
