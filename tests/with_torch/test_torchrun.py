"""torchrun starts ranks of one host without MPI, and the backend "mpikv" joins them."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from mpikv.cli.launchers import clean
from mpikv.cluster.environment import free_port

from .training import torch

pytestmark = [
    pytest.mark.processes,
    pytest.mark.deadline(120),
    pytest.mark.skipif(not hasattr(torch.distributed.ProcessGroup, "abort"), reason="this PyTorch is older than 2.7"),
]

HERE = Path(__file__).parent
PROGRAM = str(HERE / "backend_verbs.py")
ENVIRONMENT = {**clean(os.environ), "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterable[None]:
    before = set(Path("/dev/shm").glob("mpikv-[0-9]*"))
    yield
    left = set(Path("/dev/shm").glob("mpikv-[0-9]*")) - before
    # Tests of others may run beside.
    assert not [path for path in left if not Path(f"/proc/{path.name.split('-')[1]}").exists()]


def torchrun(size: int, *fault: str) -> list[str]:
    """Return what the ranks say, sorted."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", PROGRAM]
    ran = subprocess.run([*command, *fault], env=ENVIRONMENT, capture_output=True, text=True, timeout=110)
    return sorted(re.findall("^rank .: .*", ran.stdout, re.MULTILINE)) or [ran.stderr]


@pytest.mark.parametrize("size", [2, 3])
def test_every_call(size: int) -> None:
    assert torchrun(size) == [f"rank {rank}: all is well, MPI loaded (False, False)" for rank in range(size)]


def test_a_late_rank_is_named() -> None:
    text = "rank 0: Stalled waited 3 s for ranks [1], which have not made the process group of ranks [0, 1] [rank 0/2]"
    assert text in torchrun(2, "late")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("recv", "recv of 8000 bytes with tag 0 from rank 1: the other process is gone"),
        ("barrier", "barrier: rank 1 has begun no collective call yet and its process is gone"),
    ],
)
def test_a_killed_rank_is_named(call: str, text: str) -> None:
    """Not by torchrun, which ends the other rank at once."""
    common = {**ENVIRONMENT, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, PROGRAM, call]
    with (
        subprocess.Popen(command, env={**common, "RANK": "1"}),
        subprocess.Popen(command, env={**common, "RANK": "0"}, stdout=subprocess.PIPE, text=True) as first,
    ):
        lines = first.communicate(timeout=110)[0].splitlines()
    # The group is broken after a message, and the barrier says why.
    assert set(lines) == {f"rank 0: TransportError {text} [rank 0/2]"}
