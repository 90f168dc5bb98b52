"""A rank that does not come to a call of the backend "mpikv", or leaves: the others learn of it within the deadline."""

import re
from pathlib import Path

import pytest
from support import commands

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
    open("told", "w").close()
dist.destroy_process_group()
"""
LATE = "while rank == 1 and not os.path.exists('told'): time.sleep(0.01)\n"
ALONE = LATE + "dist.all_reduce = lambda _: "
MISSED = r"Stalled: recv of 8 bytes with tag 7 from rank 1: waited 3.0 s; rank 1 began call #1 .*program\.py:\d+ in .*;"


@pytest.mark.deadline(60)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            LATE,
            r"rank 0: Stalled: all_reduce: waited \d+\.\d s for ranks \[1\], in call #2 all_reduce\(sum, float32\[2\]\)"
            r": rank 1 began call #1 .*program\.py:\d+[\s\S]*rank 0 again: Stalled",
        ),
        # MPICH kills the other rank by the same signal, and may do so before the launcher has looked.
        ("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)", r"(rank 1|one of the ranks 0, 1) was killed by SIGKILL"),
        ("if rank == 1: sys.exit()", "rank 0: RankMismatch: .*rank 1 has reached the end of its program"),
        (
            "if rank == 1: dist.distributed_c10d._abort_process_group()\n" + LATE,
            "rank 0: TransportError: .*rank 1 has left",
        ),
        ("if rank == 1: raise KeyError('mine')", "KeyError: 'mine'"),
        (
            "if rank == 1: dist.group.WORLD._collectives.all_reduce_each = lambda *_: None + 1\n"
            "try: dist.all_reduce(torch.ones(2))\n"
            "except TypeError:\n    while not os.path.exists('told'): time.sleep(0.01)",
            "rank 0: TransportError: .*rank 1 has left: all_reduce failed on this rank alone .TypeError",
        ),
        (ALONE + "dist.recv(torch.ones(2), 1, tag=7)", rf"rank 0: {MISSED}[\s\S]*rank 0 again: Stalled"),
        (ALONE + "dist.irecv(torch.ones(2), 1, tag=7).get_future().wait()", f"rank 0: RuntimeError: .*{MISSED}"),
        (ALONE + "dist.new_group([1, 0], timedelta(seconds=3))", r"Stalled: waited 3 s for ranks \[1\], which have"),
    ],
    ids=["late", "killed", "left", "aborted", "raises", "catches", "message", "future", "group"],
)
def test_a_rank_that_does_not_come(fault: str, words: str, tmp_path: Path) -> None:
    done = run(PROGRAM.replace("FAULT", fault), tmp_path)
    assert re.search(words, done.stdout + done.stderr), done.stdout + done.stderr


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
    os.environCHANGE
try:
    dist.init_process_group("mpikv")
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
"""


@pytest.mark.deadline(60)
@pytest.mark.parametrize(
    ("change", "first", "second"),
    [
        ("['MPIKV_SINGLE_COPY'] = '0'", *["RankMismatch: ranks disagree: single_copy True on rank 0, False"] * 2),
        ("['MPIKV_ABORT'] = 'a'", "PeerFailed: rank 1 raised ConfigError: MPIKV_AB", "ConfigError: MPIKV_AB"),
        ("['MPI4PY_RC_THREAD_LEVEL'] = 'single'", "PeerFailed: rank 1 raised Uns", "Unsupported: the backend"),
    ],
)
def test_settings_of_one_rank_are_named_on_all(change: str, first: str, second: str, tmp_path: Path) -> None:
    done = run(SETTINGS.replace("CHANGE", change), tmp_path)
    lines = sorted(done.stdout.replace("init_process_group: ", "").splitlines(), key=lambda line: line[-8:])
    for rank, (line, text) in enumerate(zip(lines, (first, second), strict=True)):
        assert line.startswith(text), done
        assert line.endswith(f"[rank {rank}/2]")


def run(text: str, folder: Path) -> commands.Done:
    """Run a program on two ranks."""
    program = folder / "program.py"
    program.write_text(text)
    return commands.mpikv("run", "-n", 2, program, cwd=folder, timeout=50, OMP_NUM_THREADS="1")
