"""A rank that does not come to a call of the backend "mpikv", or leaves: the others learn of it within the deadline."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mpikv.cli.launchers import clean

from .training import is_too_old

pytestmark = [pytest.mark.processes, is_too_old]
ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
dist.init_process_group("mpikv", timeout=timedelta(seconds=3))
rank = dist.get_rank()
dist.barrier()
FAULT
try:
    dist.all_reduce(torch.ones(2))
except Exception as error:
    print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
    try:
        dist.barrier()
    except Exception as again:
        print(f"rank {rank} again: {type(again).__name__}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.deadline(60)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            "if rank == 1: time.sleep(6)",
            r"rank 0: Stalled: all_reduce: waited 3\.\d s for ranks \[1\], in call #2 all_reduce\(sum, float32\[2\]\): "
            r"rank 1 began call #1 .*program\.py:\d+[\s\S]*rank 0 again: Stalled",
        ),
        # MPICH kills the other rank by the same signal, and may do so before the launcher has looked.
        ("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)", r"(rank 1|one of the ranks 0, 1) was killed by SIGKILL"),
        ("if rank == 1: sys.exit()", "rank 0: RankMismatch: .*rank 1 has reached the end of its program"),
        ("if rank == 1: dist.distributed_c10d._abort_process_group()", "rank 0: TransportError: .*rank 1 has left"),
        ("if rank == 1: raise KeyError('mine')", "KeyError: 'mine'"),
        (
            "if rank == 1: dist.group.WORLD._collectives.all_reduce = None\n"
            "try: dist.all_reduce(torch.ones(2))\n"
            "except TypeError: time.sleep(6)",
            "rank 0: TransportError: .*rank 1 has left: all_reduce failed on this rank alone .TypeError",
        ),
    ],
    ids=["late", "killed", "left", "aborted", "raises", "catches"],
)
def test_a_rank_that_does_not_come(fault: str, words: str, tmp_path: Path) -> None:
    done = run(PROGRAM.replace("FAULT", fault), tmp_path)
    assert re.search(words, done.stdout + done.stderr), done.stdout + done.stderr


ALONE = """
import time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("mpikv", timeout=timedelta(seconds=3))
dist.barrier()
over = Path(__file__).with_name("over")
if dist.get_rank() == 1:
    while not over.exists():
        time.sleep(0.1)
else:
    for call in (lambda: CALL, lambda: dist.send(torch.ones(2), 1)):
        try:
            call()
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)
    over.touch()
dist.destroy_process_group()
"""


@pytest.mark.deadline(60)
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            "dist.recv(torch.ones(2), 1, tag=7)",
            r"(Stalled: recv of 8 bytes with tag 7 from rank 1: waited 3\.0 s; rank 1 began call #1 barrier.*/program\."
            r"py:\d+ in <module>; if a rank is only slow, raise timeout= \[rank 0/2\]\n)\1",
        ),
        (
            "dist.irecv(torch.ones(2), 1).get_future().wait()",
            r"RuntimeError: .*Stalled: recv of 8 bytes with tag 0 from rank 1: waited 3\.0 s[\s\S]*\nStalled: recv.*\n",
        ),
        (
            "dist.new_group([1, 0], timedelta(seconds=3))",
            r"Stalled: waited 3 s for ranks \[1\], which have not made the process group of ranks .0, 1. .rank 0/2.\n",
        ),
    ],
    ids=["message", "future", "group"],
)
def test_a_rank_that_is_alone(call: str, words: str, tmp_path: Path) -> None:
    """After a message that does not come, the group cannot be used."""
    done = run(ALONE.replace("CALL", call), tmp_path)
    assert re.fullmatch(words, done.stdout), done


EARLY = """
import time
import torch.distributed as dist
from mpikv.torch.backend import group
group._PATIENCE = 0.2
dist.init_process_group("mpikv")
if dist.get_rank() == 0:
    time.sleep(3)
    print("rank 0 has worked on", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.deadline(60)
def test_a_rank_that_ends_early_lets_the_others_work_on(tmp_path: Path) -> None:
    done = run(EARLY, tmp_path)
    assert (done.returncode, done.stdout) == (0, "rank 0 has worked on\n"), done


SETTINGS = """
import os
import torch.distributed as dist
if os.environ["RANK"] == "1":
    CHANGE
try:
    dist.init_process_group("mpikv")
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
"""


@pytest.mark.deadline(60)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "os.environ['MPIKV_SINGLE_COPY'] = '0'",
            ["RankMismatch: init_process_group: ranks disagree: single_copy True on rank 0, False on rank 1"] * 2,
        ),
        (
            "os.environ['MPIKV_SINGLE_COPY'] = 'maybe'",
            [
                "PeerFailed: init_process_group: rank 1 raised ConfigError: MPIKV_SINGLE_COPY='maybe' is not a switch",
                "ConfigError: init_process_group: MPIKV_SINGLE_COPY='maybe' is not a switch",
            ],
        ),
        (
            "__import__('mpi4py').rc.thread_level = 'serialized'",
            [
                "PeerFailed: init_process_group: rank 1 raised Unsupported: the backend 'mpikv' needs MPI_THREAD",
                "Unsupported: init_process_group: the backend 'mpikv' needs MPI_THREAD_MULTIPLE",
            ],
        ),
    ],
    ids=["unlike", "bad", "threads"],
)
def test_settings_of_one_rank_are_named_on_all(change: str, words: list[str], tmp_path: Path) -> None:
    done = run(SETTINGS.replace("CHANGE", change), tmp_path)
    lines = done.stdout.splitlines()
    for rank, text in enumerate(words):
        assert any(line.startswith(text) and line.endswith(f"[rank {rank}/2]") for line in lines), done
    assert len(lines) == 2


def run(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program on two ranks."""
    program = folder / "program.py"
    program.write_text(text)
    environ = {**clean(os.environ), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mpikv", "run", "-n", "2", str(program)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=50)
