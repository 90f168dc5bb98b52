"""Commands to the root's controllers, and the count of ranks that have ended."""

import subprocess
import sys

import numpy as np
import pytest

import mpikv
from mpikv import PeerFailed, RankMismatch, Unsupported

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


@pytest.fixture
def kv(comm):
    with mpikv.create(comm=comm, timeout=5, root=(1 if comm is None else comm.size) - 1) as kv:
        yield kv


@pytest.mark.feature("commands", "commands-unknown")
def test_a_command_reaches_the_root(kv, caplog):
    heard = []
    kv.set_controller(7, heard.append)
    body = {"rate": 0.5, "names": ["w", None, True], "count": 3}
    kv._send_command_to_servers(7, body)
    kv.command(np.int64(7), "again")
    kv.command(8, "nobody listens")
    lost = ["command 8 has no controller at the root, and does nothing"] if kv.is_root else []
    assert [record.getMessage() for record in caplog.records] == lost
    kv.command(7)
    assert heard == ([body, "again", None] if kv.is_root else [])
    kv.set_controller(7, None)
    kv.command(7, "nobody any more")
    assert len(heard) == (3 if kv.is_root else 0)
    with pytest.raises(TypeError, match="a controller is a function"):
        kv.set_controller(7, 3)


@pytest.mark.parametrize("kind", [KeyError, mpikv.TransportError, mpikv.Stalled, KeyboardInterrupt])
def test_a_controller_that_raises(kv, kind):
    """The error says nothing of this store, and all ranks have heard of it."""

    def controller(body):
        raise kind(f"no {body}")

    kv.set_controller(7, controller)
    with pytest.raises(kind if kv.is_root else PeerFailed, match="no such thing"):
        kv.command(7, "such thing")
    kv.barrier()


def test_a_controller_cannot_call_the_store(kv):
    kv.set_controller(7, lambda body: kv.barrier())
    with pytest.raises(Unsupported if kv.is_root else PeerFailed, match="the store is in command"):
        kv.command(7)
    kv.barrier()


@pytest.mark.parametrize(
    ("head", "body"), [(7, {1, 2}), (7, np.ones(2)), (7, float("nan")), (-1, 0), ("7", 0), (True, 0)]
)
def test_a_bad_command_on_one_rank(kv, head, body):
    with pytest.raises((TypeError, ValueError) if kv.is_root else PeerFailed):
        kv.command(head, body) if kv.is_root else kv.command(7)
    kv.barrier()


@pytest.mark.ranks(2, 3)
def test_ranks_with_other_commands(kv):
    with pytest.raises(RankMismatch, match=r"command\(7, 0\).*command\(7, 1\)"):
        kv.command(7, min(kv.rank, 1))
    with pytest.raises(RankMismatch):
        kv.command(7 + kv.rank)
    kv.command(7, "x" * 1000)


@pytest.mark.processes
@pytest.mark.feature("dead-nodes")
def test_ranks_that_have_ended_are_counted(kv):
    assert kv.num_dead_node() == 0
    if kv.size > 1:
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        pids = kv._board._slots["pid"]
        for pid, dead in ((ended.pid, 1), (int(pids[0]), 0)):
            kv.barrier()
            if kv.rank == 0:
                pids[0] = pid
            kv.barrier()
            assert kv.num_dead_node(timeout=1) == dead
    assert kv.num_dead_node() == 0
    kv.close()
    assert kv.num_dead_node() == 0


def test_no_rank_has_ended(kv):
    assert kv.num_dead_node() == 0
    kv.close()
    assert kv.num_dead_node() == 0
