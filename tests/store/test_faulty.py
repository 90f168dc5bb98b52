"""A transport that fails or dies in the middle of a push leaves nobody waiting."""

import time
from pathlib import Path

import numpy as np
import pytest
from support import commands

import mpikv
from mpikv import Closed, Stalled, TransportError
from mpikv.testing.faulty import Failing, store_over

TIMEOUT = 0.3


def train(kv, calls):
    """Push until something is raised; append when each call began."""
    calls.append(time.monotonic())
    kv.init("w", np.zeros(1000))
    while True:
        for verb in (lambda: kv.push("w", np.ones(1000)), lambda: kv.pull("w")):
            calls.append(time.monotonic())
            verb()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("placement", "seed"), [("root", 1), ("sharded", 2), ("replicated", 3), ("replicated", 4)])
def test_a_transport_that_fails_on_one_rank(comm, transport, over, placement, seed):
    wrapped: list[Failing] = []

    def failing(inner):
        wrapped.append(Failing(inner, seed, most=6))
        return wrapped[0]

    kv = store_over(failing, comm=comm, placement=placement, timeout=TIMEOUT, warn_after=100, **over)
    victim, calls = wrapped[0].victim, list[float]()
    with pytest.raises(TransportError) as caught:
        train(kv, calls)
    waited, error = time.monotonic() - calls[-1], caught.value
    assert f"[rank {kv.rank}/{kv.size}]" in str(error)
    if kv.rank == victim:
        assert "planned failure" in str(error)
        assert not isinstance(error, Stalled)
    else:
        assert isinstance(error, Stalled)
        # Who is late is seen by a rank of its host; an MPI collective may be over on some ranks and not on others.
        if transport == "shm":
            assert victim in error.missing
            assert f"rank {victim} began call" in str(error)
        assert waited < TIMEOUT + 3
    with pytest.raises(Closed, match="the store ended in an earlier call"):
        kv.pull("w")
    comm.Barrier()
    with mpikv.create(comm=comm, transport=transport) as again:
        again.init("w", np.ones(2))
        again.push("w", np.ones(2))
        np.testing.assert_array_equal(again.pull("w"), np.full(2, kv.size))


DYING = """
import sys
from pathlib import Path
import numpy as np
from mpikv.testing.faulty import Dying, store_over

class Announced(Dying):
    def strike(self, call):
        Path(sys.argv[1]).touch()
        super().strike(call)

over = {"transport": sys.argv[3], "simulate_ranks_per_host": 2 if sys.argv[3] == "hierarchical" else 0}
kv = store_over(lambda inner: Announced(inner, int(sys.argv[2]), most=60), **over)
kv.init("w", np.zeros(5000))
kv.set_optimizer("sgd")
for step in range(1_000_000):
    kv.push("w", np.ones(5000))
    kv.pull("w")
"""


@pytest.mark.processes
@pytest.mark.parametrize(("name", "seed"), [("shm", 1), ("mpi", 2), ("hierarchical", 3), ("hierarchical", 4)])
@pytest.mark.feature("dead-rank-ends-job")
def test_a_rank_that_dies_ends_the_job(tmp_path: Path, name: str, seed: int) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    died = tmp_path / "died"
    ran = commands.mpikv("run", "-n", 3, tmp_path / "dying.py", died, seed, name, timeout=30)
    assert died.exists(), ran.stderr
    assert time.time() - died.stat().st_mtime < 5
    assert ran.returncode != 0
