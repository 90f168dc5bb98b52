"""The store p3: the values of dist_sync, in messages as large as MXNet's slices; urgent calls come first."""

import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import mpikv
from mpikv import ConfigError, RankMismatch, creation
from mpikv.testing import Recording

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from chaos_program import Program

# They hold messages of real threads back.
pytestmark = [pytest.mark.ranks(1, 2, 3, 4), pytest.mark.processes]

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "mpi", "hierarchical"])
# Elements of float64 in a message of 4096 bytes.
MESSAGE = 512
LARGE = 4 * MESSAGE
LATE = 300


class Held(Recording):
    """Writes down how large the messages of sums are, and holds some of them until the test goes on."""

    holds = ()
    """Which messages it holds, counted from 1."""

    def __init__(self, transport):
        super().__init__(transport)
        self.sums = []
        self.reached, self.released = threading.Semaphore(0), threading.Semaphore(0)

    def noted(self, send):
        self.sums.append(send.size)
        if len(self.sums) in self.holds:
            self.reached.release()
            assert self.released.acquire(timeout=20)

    def reduce(self, send, recv, root):
        self.noted(send)
        return super().reduce(send, recv, root)

    def allreduce(self, send, recv):
        self.noted(send)
        return super().allreduce(send, recv)

    def reduce_scatter(self, send, recv, counts):
        self.noted(send)
        return super().reduce_scatter(send, recv, counts)

    def all_to_all(self, send, counts):
        self.noted(send)
        return super().all_to_all(send, counts)


@pytest.fixture
def make(comm, monkeypatch):
    """Return what makes a store with messages of 4096 bytes, and the transport that holds them."""
    opened = creation.open_transport

    def made(name="p3", **options):
        held = []

        def wrapped(*arguments):
            held.append(Held(opened(*arguments)))
            return held[0]

        with monkeypatch.context() as patch:
            patch.setattr(creation, "open_transport", wrapped)
            kv = mpikv.create(name, **{"comm": comm, "timeout": 20, "bucket_bytes": 4096, **options})
        return kv, held[0]

    return made


@pytest.fixture
def meet(comm):
    return comm.Barrier if comm else lambda: None


def held_in(kv, held, meet, call):
    """Make a call with wait=False and hold its second message, once the store has begun nothing else."""
    kv.barrier()
    held.sums.clear()
    held.holds = (2,)
    made = call()
    assert held.reached.acquire(timeout=20)
    meet()
    return made


def let_go(held, meet):
    meet()  # all ranks have issued all
    held.released.release()


# --- The order


@TRANSPORTS
@pytest.mark.feature("p3-order")
def test_an_urgent_call_comes_before_those_that_have_not_begun(make, meet, transport):
    kv, held = make(transport=transport)
    with kv:
        kv.init(["large", "late", "later"], [np.zeros(LARGE), np.zeros(LATE), np.zeros(7)])
        large = held_in(kv, held, meet, lambda: kv.push("large", np.ones(LARGE), priority=-1, wait=False))
        kv.push("late", np.ones(LATE), priority=1, wait=False)
        last = kv.push("large", np.ones(LARGE), wait=False)
        kv.push("later", np.ones(7), priority=2, wait=False)
        let_go(held, meet)
        large.wait(20)
        last.wait(20)
        assert held.sums == [MESSAGE] * 4 + [7, LATE] + [MESSAGE] * 4
        np.testing.assert_array_equal(kv.pull("late"), np.full(LATE, kv.size))


@pytest.mark.feature("p3-values")
@pytest.mark.parametrize("seed", range(4))
@TRANSPORTS
def test_random_programs(comm, transport, seed):
    options = {"transport": transport, "placement": "auto", "bucket_bytes": 4096, "timeout": 20.0}
    Program(comm, f"p3 {seed}", partial(mpikv.create, "p3"), **options).run(40)


# --- The values


@pytest.mark.feature("p3-values")
@pytest.mark.parametrize("updater", [None, "adam", "lamb", lambda key, total, stored: stored - 0.25 * total])
@pytest.mark.parametrize("transport", ["shm", "mpi"])
def test_the_bits_of_dist_sync(comm, transport, updater):
    sizes, results = {"large": 80_000, "late": 150}, []
    for name in ("p3", "dist_sync"):
        with mpikv.create(name, comm=comm, transport=transport, timeout=20, deterministic=True) as kv:
            kv.init({key: np.ones(size, np.float32) for key, size in sizes.items()})
            if callable(updater):
                kv.set_updater(updater)
            elif updater:
                kv.set_optimizer(updater)
            for step in range(3):
                numbers = np.random.default_rng([kv.rank, step])
                for priority, (key, size) in enumerate(sizes.items()):
                    kv.pushpull(key, numbers.normal(size=size).astype(np.float32), priority=priority, wait=False)
            results.append([kv.pull(key).tobytes() for key in sizes])
    assert results[0] == results[1]


@pytest.mark.feature("p3-trainer")
def test_a_trainer(comm):
    results = []
    for name in ("p3", "dist_sync"):
        params = {"w": np.ones((60, 70)), "b": np.zeros(3)}
        with mpikv.create(name, comm=comm, deterministic=True) as kv:
            trainer = mpikv.Trainer(params, "adam", {"learning_rate": 0.1}, kvstore=kv)
            for step in range(3):
                numbers = np.random.default_rng([kv.rank, step])
                trainer.set_grads({key: numbers.normal(size=value.shape) for key, value in params.items()})
                trainer.step(kv.size)
            assert trainer.update_on_kvstore
        results.append({key: value.tobytes() for key, value in params.items()})
    assert results[0] == results[1]


# --- How it is asked for


@pytest.mark.parametrize("name", ["p3", "P3", "dist", "DIST_SYNC", "local"])
@pytest.mark.feature("p3-name", "p3-variable")
def test_names_and_the_variable(make, meet, monkeypatch, name):
    if name.lower() != "p3":
        monkeypatch.setenv("DMLC_PS_VAN_TYPE", "P3")
    monkeypatch.setenv("MXNET_KVSTORE_SLICE_THRESHOLD", "2000")
    kv, held = make(name, bucket_bytes=None)
    with kv:
        assert kv.type == name.lower()
        kv.init("w", np.zeros(5000, np.float32))
        held.sums.clear()
        kv.push("w", np.ones(5000, np.float32))
        assert held.sums == ([5000] if name == "local" else [2000, 2000, 1000])


def test_threads_leave_a_size_that_was_asked_for(make, meet, monkeypatch):
    monkeypatch.setenv("MPIKV_THREADS", "2")
    monkeypatch.setenv("MXNET_KVSTORE_SLICE_THRESHOLD", str(1 << 18))
    kv, held = make("p3", bucket_bytes=None)
    with kv:
        kv.init("w", np.zeros(600_000, np.float32))
        held.sums.clear()
        kv.push("w", np.ones(600_000, np.float32))
        assert held.sums == [1 << 18, 1 << 18, 600_000 - (1 << 19)]


@pytest.mark.feature("p3-variable")
def test_the_number_of_elements(comm, monkeypatch):
    for text in ("many", "0", "-1", "1.5", "", "²", str(2**40)):
        monkeypatch.setenv("MXNET_KVSTORE_SLICE_THRESHOLD", text)
        with pytest.raises(ConfigError, match="is not a number of elements from 1 to"):
            mpikv.create("p3", comm=comm)
        mpikv.create("p3", comm=comm, bucket_bytes=4096).close()
        mpikv.create("dist_sync", comm=comm).close()


@pytest.mark.ranks(2, 3)
@pytest.mark.feature("p3-variable")
def test_ranks_with_other_variables(comm, monkeypatch):
    if comm.rank:
        monkeypatch.setenv("DMLC_PS_VAN_TYPE", "p3")
    with pytest.raises(RankMismatch, match="bucket_bytes 1048576 on rank 0, 160000 on rank 1"):
        mpikv.create("dist_sync", comm=comm)
