"""Ranks of one host that meet without MPI."""

import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mpikv.cluster import shared_memory
from mpikv.errors import TransportError

PROGRAM = """
import itertools, os, signal, sys, time
from pathlib import Path
import numpy as np
from mpikv.cluster import runtime, shared_memory
from mpikv.cluster.agreement import Agreement
from mpikv.cluster.calls import Call
from mpikv.cluster.status_board import StatusBoard
from mpikv.cluster.waiting import Waiting
from mpikv.errors import *
from mpikv.transports import meeting
from mpikv.transports.shm import ShmTransport

rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])

turns = itertools.count()

def exchange(text):
    turn = next(turns)
    (folder / f"part.{rank}").write_text(text)
    (folder / f"part.{rank}").rename(folder / f"{turn}.{rank}")
    texts = [folder / f"{turn}.{other}" for other in range(size)]
    Waiting(20).until(lambda: all(text.exists() for text in texts), tuple)
    return [text.read_text() for text in texts]

def meet(timeout=20.0):
    return meeting.HostGroup(exchange, rank, size, timeout)

def told(kind, act):
    try:
        act()
    except kind as error:
        print(type(error).__name__, error)
    else:
        print("no error")
"""


@pytest.fixture
def outputs(tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that runs a program on each of three ranks, and returns what each printed."""

    def run(program: str) -> list[str]:
        command = [sys.executable, "-c", PROGRAM + program]
        ranks = [
            subprocess.Popen([*command, str(rank), "3", str(tmp_path)], stdout=subprocess.PIPE, text=True)
            for rank in range(3)
        ]
        try:
            return [rank.communicate(timeout=40)[0].strip() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
            assert not [path for rank in ranks for path in Path("/dev/shm").glob(f"mpikv-{rank.pid}-*")]

    return run


ALL = """
group = meet()
for text in ("", "ä", str(rank) * 100_000, "x" * (rank == 1)):
    texts = group.gather(text)
    assert texts[rank] == text and len(texts) == size, texts
    assert len(set(map(len, texts))) == 1 or texts == ["", "x", ""]
board = StatusBoard(group)
transport = ShmTransport(group, 4096, Waiting(20, 5, board.warn))
agreement = Agreement(transport, group, board)
for turn in range(20):
    agreement.begin(Call("add", 1 + turn))
    terms = transport.allreduce(np.full(500, rank + turn, float), np.empty(500))
    assert (sum(terms) == 3 + 3 * turn).all()
told(RankMismatch, lambda: agreement.begin(Call("add", 1 + (rank == 2), f"{rank // 2}")))
agreement.begin(Call("add", 7))
assert (group.host_ranks, group.local_rank, group.one_host) == ((0, 1, 2), rank, True)
assert group.host_cores >= len(os.sched_getaffinity(0))
assert group.find_end() == ""
group.gather("looked")
if rank == 1:
    group.announce_end("it has had énough")
group.gather("told")
assert rank == 1 or group.find_end() == "rank 1 has left: it has had énough"
transport.close()
group.close()
told(Closed, lambda: group.allocate(8))
maps = Path("/proc/self/maps").read_text()
print("libmpi" in maps, "mpi4py.MPI" in sys.modules)
"""


def test_ranks_agree_and_add_without_mpi(outputs: Callable[..., list[str]]) -> None:
    for said in outputs(ALL):
        mismatch, closed, no_mpi = said.splitlines()
        assert "ranks disagree at call #21: rank 0 calls add(0); rank 2 calls add(1)" in mismatch
        assert closed == "Closed this group of ranks is closed, and shares nothing more"
        assert no_mpi == "False False"


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        pytest.param(
            "runtime.present().machine = 'ab'[rank // 2]",
            "Unsupported 3 ranks on 2 hosts can share memory only by MPI; start them with  mpikv run -n 3 --hosts ",
            id="several hosts",
        ),
        pytest.param(
            "if rank == 2: shared_memory._open_memory = lambda *_, new: os.stat('/dev/shm/none')",
            "TransportError rank 2 cannot share memory with other ranks of this machine: [Errno 2] No such file or "
            "directory: '/dev/shm/none'; MPIKV_SIMULATE_RANKS_PER_HOST=1 lets ranks share none",
            id="separate memory",
        ),
        pytest.param(
            "shared_memory._free_bytes = lambda: 100",
            "MemoryError 384 bytes of shared memory are needed and /dev/shm has 100 free; enlarge it (a container: --s",
            id="little memory",
        ),
    ],
)
def test_ranks_that_cannot_meet(outputs: Callable[..., list[str]], fault: str, expected: str) -> None:
    for said in outputs(f"{fault}\ntold((TransportError, Unsupported, MemoryError), meet)"):
        assert expected in said


KILLED = """
group = meet(2.0)
board = StatusBoard(group)
transport = ShmTransport(group, 4096, Waiting(2))
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
told(Stalled, lambda: group.gather("a"))
told(Stalled, transport.fence)
print(board.report([1]).text)
"""


def test_a_killed_rank_is_named(outputs: Callable[..., list[str]]) -> None:
    first, killed, last = outputs(KILLED)
    assert killed == ""
    for said in (first, last):
        words, data, about = said.splitlines()
        assert words.startswith("Stalled waited 2.0 s for ranks [1]") or "given up" in words
        assert data.startswith("Stalled waited 2.0 s for ranks [1]") or "given up" in data
        assert about == "create: rank 1 has begun no collective call yet and its process is gone"


RINGING = """
from mpikv.cluster.bells import Bells

bells, heard = Bells(meet()), 0
for turn in range(2000):
    for other in range(size):
        if other != rank:
            bells.ring(other)
    if turn % 5 == 0 and heard < 4000:
        heard += bells.listen()
while heard < 4000:
    heard += bells.listen()
print(heard)
"""


def test_no_ring_is_lost(outputs: Callable[..., list[str]]) -> None:
    """Two ranks ring the same bell at once, also while its rank falls asleep; after a lost ring it sleeps for ever."""
    assert outputs(RINGING) == ["4000"] * 3


NO_BELL = """
from mpikv.cluster import bells

if rank == 1:
    bells.system_function = lambda name: lambda *arguments: -1
told(TransportError, lambda: bells.Bells(meet()))
"""


def test_a_bell_that_cannot_be_made(outputs: Callable[..., list[str]]) -> None:
    expected = "TransportError the system makes no semaphores that processes share, on ranks 1 of this host"
    assert outputs(NO_BELL) == [expected] * 3


@pytest.mark.parametrize("machine", [platform.machine(), "unknown"])
def test_a_sleeper_is_woken(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    """And sleeps not at all if the word has changed already, and not beyond its time."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    word = np.zeros(1, np.int32)
    waker = threading.Timer(0.1, lambda: (word.fill(1), shared_memory.wake_sleepers(word.ctypes.data)))
    began = time.monotonic()  # before: the start of a thread may take longer than its timer
    waker.start()
    while not word[0]:
        shared_memory.sleep_on(word.ctypes.data, 0, 30.0)
    shared_memory.sleep_on(word.ctypes.data, 0, 30.0)
    shared_memory.sleep_on(word.ctypes.data, 1, 0.01)
    assert 0.09 <= time.monotonic() - began < 20


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of the call is that of x86-64")
def test_the_kernels_barrier() -> None:
    assert shared_memory.find_membarrier_call("x86_64")() == 0


def test_processors_that_reorder_memory() -> None:
    assert shared_memory.find_flag_fence("x86_64") is None
    with pytest.raises(TransportError, match=r"no memory barrier \(membarrier\) on unknown"):
        shared_memory.find_flag_fence("unknown")
