"""Processes beside the ranks: children of a fork, and workers of multiprocessing."""

import re
from pathlib import Path

import pytest
from support.commands import mpikv, python

pytestmark = pytest.mark.deadline(120)

CHILDREN = """
import atexit, contextlib, os, signal, sys
import numpy as np, mpikv

kv = mpikv.create(timeout=10)
kv.init("w", np.zeros(2))
rank = os.getpid()
atexit.register(lambda: os.getpid() == rank or os.write(writer, b"!"))
CLOSED = "with contextlib.suppress(mpikv.Closed): kv.push('w', np.ones(2)); sys.exit(1)"
REFUSED = "with contextlib.suppress(mpikv.Unsupported): mpikv.create(timeout=2); sys.exit(1)"
ends = {"sys.exit(0)": 0, "sys.exit(3)": 3, "raise SystemExit(4)": 4, "1 / 0": 1, "pass": 0, CLOSED: 0, REFUSED: 0}
for end, status in ends.items():
    reader, writer = os.pipe()
    if not (child := os.fork()):
        exec(end)
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status, end
    os.close(writer)
    assert os.read(reader, 9) == b"!", end
kv.push("w", np.ones(2))
assert kv.pull("w")[0] == kv.size
kv.close()
os.write(1, b"ended\\n")
"""

WORKERS = """
import multiprocessing, sys
import mpikv

def work(number):
    for _ in range(2):
        try:
            print(f"{mpikv.create().size} rank")
        except mpikv.Unsupported as error:
            print(error)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    worker = context.Process(target=work, args=(1,))
    worker.start()
    worker.join()
    assert worker.exitcode == 0
"""

HANDLERS = """
import logging, os, signal, time
import numpy as np, mpikv

handle = lambda *_: print("called")
kv = mpikv.create(timeout=20, warn_after=0.25)
kv.init("w", np.zeros(2))
with open(__file__ + ".told", "a", buffering=1) as told:
    if kv.rank == 0:
        logging.getLogger("mpikv").addFilter(lambda log: told.write("\\n" * (" push(" in log.getMessage())) >= 0)
    for turn in range(9):
        number = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG)[turn // 3]
        if kv.rank == 1:
            signal.signal(number, (handle, signal.SIG_DFL, signal.SIG_IGN)[turn % 3])
            while os.stat(told.fileno()).st_size <= turn: time.sleep(0.01)
        kv.push("w", np.ones(2))
assert kv.pull("w")[0] == 2
"""

TAKEN = """
import faulthandler, os, signal, sys, time
if sys.argv[1] == "Python":
    signal.signal(signal.SIGURG, lambda *_: print("called", flush=True))
else:
    faulthandler.register(signal.SIGURG, file=open(sys.argv[1], "w"))
import numpy as np, mpikv

kv = mpikv.create(timeout=20, warn_after=0.25)
kv.init("w", np.zeros(2))
time.sleep(kv.rank)
kv.push("w", np.ones(2))
if kv.rank == 1:
    os.kill(os.getpid(), signal.SIGURG)
    assert sys.argv[1] == "Python" or open(sys.argv[1]).read().count("most recent call first") == 1
"""


def late_pushes(stderr: str) -> list[str]:
    """Return rank 0's warnings of late pushes; on a busy machine an init may be late, too."""
    return [line for line in stderr.splitlines() if re.search(r"rank 0 has waited .* push\(", line)]


def test_ends_of_children_of_a_fork(tmp_path: Path) -> None:
    """MPI at the end of one would be that of its parent, and an exception in one would end the job."""
    (tmp_path / "children.py").write_text(CHILDREN)
    done = mpikv("run", "-n", 2, tmp_path / "children.py")
    assert (done.returncode, done.stdout) == (0, "ended\n" * 2), done.stderr
    assert "MPI" not in done.stderr.replace("Open MPI refuses", "")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_without_a_launcher_are_told_once(tmp_path: Path, method: str) -> None:
    (tmp_path / "workers.py").write_text(WORKERS)
    done = python(tmp_path / "workers.py", method)
    assert (done.returncode, done.stdout) == (0, "1 rank\n" * 2), done.stderr
    assert done.stderr.count("whose store has one rank and shares nothing with the stores of other") == 1


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_rank_are_no_ranks(tmp_path: Path, method: str) -> None:
    """They inherit the variables of a rank, and would wait in the start of MPI for ever."""
    (tmp_path / "workers.py").write_text(WORKERS)
    done = mpikv("run", "-n", 2, tmp_path / "workers.py", method)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        told = f"multiprocessing started this process in rank {rank} of 2, and it is not a rank itself; use the"
        assert done.stdout.count(told) == 2


def test_asking_a_late_rank_calls_no_handler_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "handlers.py").write_text(HANDLERS)
    done = mpikv("run", "-n", 2, tmp_path / "handlers.py")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert ["is now at" in line for line in late_pushes(done.stderr)] == [True] * 6 + [False] * 3


@pytest.mark.parametrize("taken_by", ["Python", "C"])
def test_a_signal_that_the_program_has_taken_is_left_to_it(tmp_path: Path, taken_by: str) -> None:
    """Also where code has, of which Python's own ``getsignal`` knows nothing."""
    (tmp_path / "taken.py").write_text(TAKEN)
    where = "Python" if taken_by == "Python" else str(tmp_path / "answers")
    done = mpikv("run", "-n", 2, tmp_path / "taken.py", where)
    assert (done.returncode, done.stdout) == (0, "called\n" * (taken_by == "Python")), done.stderr
    assert ["does not answer" in line for line in late_pushes(done.stderr)] == [True]


# The end of the program closes the store that was made first, for which rank 1 waits.
ENDED = """\
import numpy as np, mpikv
first, second = mpikv.create(timeout=30), mpikv.create(timeout=3)
second.init("w", np.zeros(2))
if second.is_root:
    second.push("w", np.ones(2))
"""


# Rank 1 leaves rank 0 two seconds to print the same error, which rank 0 has caught.
FAILED = """\
import mpikv
kv = mpikv.create(warn_after=0.3)
try:
    kv.barrier() if kv.is_root else kv.any_rank(True)
except mpikv.RankMismatch:
    if kv.rank: raise
    kv.barrier()
"""
TOLD = {
    ENDED: "rank 1 began call #1 init('w') last and has reached the end of its program",
    FAILED: "rank 1 began call #1 any_rank() last and prints the error that ends it",
}


@pytest.mark.parametrize(("program", "told"), TOLD.items(), ids=["well", "by an error"])
def test_a_rank_at_the_end_of_its_program_is_said_to_be_there(tmp_path: Path, program: str, told: str) -> None:
    (tmp_path / "ended.py").write_text(program)
    done = mpikv("run", "-n", 2, tmp_path / "ended.py")
    assert (done.returncode, told in done.stderr) == (1, True), done.stderr


SKIPPING = """\
import numpy as np, mpikv
kv = mpikv.create(timeout=30)
kv.init("w", np.zeros(2))
if kv.rank == 0:
    kv.push("w", np.ones(2))
"""


def test_a_rank_that_skips_its_last_call_has_reached_the_end_of_its_program(tmp_path: Path) -> None:
    (tmp_path / "skipping.py").write_text(SKIPPING)
    done = mpikv("run", "-n", 2, tmp_path / "skipping.py")
    assert done.returncode == 1
    told = "rank 0 calls push('w'); rank 1 has reached the end of its program, after call #1 init('w');"
    assert f"push: ranks disagree at call #2: {told}" in done.stderr
    assert f"; rank 0 is at {tmp_path / 'skipping.py'}:5 in <module> [rank 0/2]" in done.stderr


SLOW = """\
import time
import numpy as np, mpikv
kv = mpikv.create(timeout=30)
kv.init("w", np.zeros(2))
try:
    kv.push("w", np.ones(3 - kv.rank))
except mpikv.PeerFailed:
    time.sleep(0.05)
    raise
"""


def test_the_rank_that_ends_the_job_leaves_the_others_time_for_their_line(tmp_path: Path) -> None:
    """It ended them before one that had to wait for a processor had printed its own."""
    (tmp_path / "slow.py").write_text(SLOW)
    done = mpikv("run", "-n", 2, tmp_path / "slow.py")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "[rank 1/2] mpikv.errors.PeerFailed: push('w'): rank 0 raised ValueMismatch" in done.stderr
