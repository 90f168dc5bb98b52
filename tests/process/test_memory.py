"""Memory of values that come and go: how much there is, what new values find in it, and who still looks at it."""

import gc
import os
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import mpikv
from mpikv.cli.bench.worker import release_freed
from mpikv.transports.cma import Attached

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from benchmark.memory import Memory
from chaos_program import Program

from .test_single_copy import reads_in_place

MIB = 1 << 20
FEW = pytest.mark.ranks(1, 3)
SEEDS = range(int(os.environ.get("MPIKV_MEMORY_SEEDS", "2")))
PROGRAMS = max(4, int(os.environ.get("MPIKV_MEMORY_PROGRAMS", "16")))


class Growth:
    """By how many bytes this rank's memory has grown."""

    def __init__(self):
        self._before = self._now()

    def _now(self):
        release_freed()
        return Memory.now()

    @property
    def private(self):
        return self._now().private - self._before.private

    @property
    def shared(self):
        return self._now().shared - self._before.shared

    @property
    def all(self):
        return self.private + self.shared


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("transport", ["shm", "hierarchical"])
def test_optimizer_state_is_divided(comm, transport):
    with mpikv.create(comm=comm, transport=transport, timeout=15) as kv:
        gradient = np.ones(8 * MIB, np.float32)
        kv.init("w", gradient)
        kv.set_optimizer("adam")
        kv.push(["w"], [gradient])
        kv.set_optimizer("sgd")  # which has no state, and the memory of messages has been touched
        kv.push("w", gradient)
        growth = Growth()
        kv.set_optimizer("adam")
        kv.push("w", gradient)
        assert growth.private < 1.1 * 64 * MIB / kv.size + 2 * MIB


@pytest.mark.ranks(3, 4)
def test_what_is_read_of_other_ranks_is_divided(comm):
    """A rank reads its share of their large arrays, into memory of which it needs no more pages than that."""
    with mpikv.create(comm=comm, transport="shm", bucket_bytes=2 * MIB, timeout=15) as kv:
        if not reads_in_place(kv):
            pytest.skip("the system lets no rank read another's memory")
        values = np.ones(4 * MIB, np.float32)
        kv.init(["w", "small"], [values, values[:99]])
        kv.push("small", values[:99])
        growth = Growth()
        for _ in range(2):
            kv.push("w", values)
        assert growth.private < 2 * MIB * (kv.size - 1) / kv.size + MIB


def lengths(count):
    return [int(length) for length in np.random.default_rng(0).integers(MIB // 4, MIB // 2, count)]


@FEW
@pytest.mark.deadline(120)
def test_sums_of_many_names_and_lengths(comm, transport):
    """Memory is for messages, and none for a name."""
    with mpikv.create("horovod", comm=comm, transport=transport, timeout=15) as store:
        store.pushpull("g", np.ones(2 * MIB, np.float32))  # touches each slot of messages
        growth = Growth()
        for number, length in enumerate(lengths(12)):
            gradient = np.ones(length, np.float32)
            store.pushpull(f"g{number}", gradient)
            assert gradient.min() == gradient.max() == store.size
        del gradient
        assert growth.all < 3 * MIB < sum(lengths(12))


@pytest.mark.ranks(2)
def test_the_first_messages_touch_the_memory_of_messages(comm, monkeypatch):
    """Even if reading what others lend takes no time at first, and long later. What lengths that vary take then is
    for values, and for messages of other lengths: half of each send buffer at most.
    """
    bucket = 256 << 10
    with mpikv.create("horovod", comm=comm, transport="shm", bucket_bytes=bucket, timeout=15) as store:
        seconds = 0.0
        monkeypatch.setattr(Attached, "read", lambda *_: time.sleep(seconds))
        for _ in range(32):
            store.pushpull("g", np.ones(MIB // 4, np.float32))
        seconds = 1e-3
        growth = Growth()
        for length in lengths(100):
            store.pushpull("g", np.ones(length, np.float32))
        assert growth.shared < 4 * max(lengths(100)) * 17 / 16 + bucket + MIB // 8


@FEW
@pytest.mark.deadline(120)
def test_values_that_grow(comm, transport):
    """Whether they are deleted before they come again, or overwritten."""
    with mpikv.create(comm=comm, transport=transport, timeout=15) as kv:
        kv.init("w", np.ones(MIB, np.float32))
        growth = Growth()
        for number, length in enumerate(sorted(lengths(12))):
            if number % 3:
                kv.delete("w")
            kv.init("w", np.full(length, number, np.float32), overwrite=True)
            assert (kv.pull("w") == number).all()
        assert (held := growth.all) < 1.2 * 4 * length + 4 * MIB
        kv.delete("w")
        assert growth.all < held - 0.75 * 4 * length


@FEW
def test_what_a_view_looks_at_stays(comm, transport):
    """Also where one rank alone looks at it; it goes when nobody does."""
    with mpikv.create(comm=comm, transport=transport, timeout=15) as kv:
        kv.init("w", np.arange(MIB, dtype=np.float32))
        kv.init("small", np.ones(3))
        growth = Growth()
        view = kv.view("w") if kv.rank == kv.size - 1 else None
        kv.delete("w")
        for number in range(3):
            kv.init("other", np.full(MIB + number, -1, np.float32), overwrite=True)
            if view is not None:
                np.testing.assert_array_equal(view, np.arange(MIB, dtype=np.float32))
        del view
        kv.delete("other")
        assert growth.all < 2 * MIB
        np.testing.assert_array_equal(kv.pull("small"), np.ones(3))


@FEW
@pytest.mark.parametrize("compression", [None, "topk", "2bit"])
def test_new_values_begin_anew(comm, transport, compression):
    """They find no state, no residuals and no buffers of those whose memory they have."""

    def trained(kv, length):
        kv.init("w", np.ones(length, np.float32), overwrite=True)
        for number in range(3):
            kv.push("w", np.linspace(-1, 1 + number, length, dtype=np.float32))
        return kv.pull("w")

    def made():
        kv = mpikv.create(comm=comm, transport=transport, timeout=15, bucket_bytes=1 << 16)
        kv.set_optimizer("adam", learning_rate=0.25)
        kv.set_gradient_compression(compression)
        kv.init(["before", "after"], [np.ones(5, np.float32)] * 2)
        return kv

    with made() as kv:
        for length in (40, 30, 40, 30000, 20000, 50):
            found = trained(kv, length)
            with made() as other:
                np.testing.assert_array_equal(found, trained(other, length))
            if compression is None:
                buffer = kv.buffer("w")
                assert not buffer.any()
                buffer.fill(7)
            if length == 20000:
                kv.delete("w")


@FEW
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.deadline(60)
def test_values_that_come_and_go(comm, transport, seed):
    """Against a model: each value is what was made of it, and nothing of a deleted one is found in another."""
    draw, model = np.random.default_rng(seed), {}
    with mpikv.create(comm=comm, transport=transport, timeout=15, bucket_bytes=1 << 15) as kv:
        kv.set_optimizer("sgd", learning_rate=0.5, momentum=0.5)
        for step in range(40):
            keys = [f"k{number}" for number in draw.choice(12, draw.integers(1, 5), replace=False)]
            known = [key for key in keys if key in model]
            match draw.choice(["init", "delete", "push", "pushpull"]):
                case "init":
                    sizes = [int(2 ** draw.uniform(0, 16)) for _ in keys]
                    dtype = draw.choice([np.float32, np.float64])
                    values = [np.full(size, step, dtype) for size in sizes]
                    kv.init(keys, values, overwrite=True)
                    model |= {key: [value.astype(float), value * 0.0] for key, value in zip(keys, values, strict=True)}
                case "delete":
                    kv.delete(known)
                    for key in known:
                        del model[key]
                case verb if known:
                    getattr(kv, verb)(known, [np.full(model[key][0].size, 2.0) for key in known])
                    for key in known:
                        value, momentum = model[key]
                        momentum[:] = 0.5 * momentum - 0.5 * 2 * kv.size
                        value += momentum
            for key, value in zip(model, kv.pull(list(model)) if model else (), strict=True):
                np.testing.assert_allclose(value, model[key][0], 1e-6, err_msg=f"seed {seed}, step {step}")


@pytest.mark.ranks(1, 2)
@pytest.mark.deadline(60)
def test_lists_of_keys_that_grow(comm, monkeypatch):
    """What is kept of them is bounded by their keys."""
    monkeypatch.setattr("mpikv.engine.plan._MOST_KEYS", 2000)
    arrays = [np.ones(1, np.float32)] * 250
    with mpikv.create(comm=comm, timeout=15) as kv:
        kv.init(list(range(250)), arrays)
        growth = Growth()
        for length in range(2, 251):
            kv.push(list(range(length)), arrays[:length])
        assert growth.private < 12 * MIB


# --- What random programs leave


def highest_handles(comm):
    """Return the highest of many numbers that MPI gives to new communicators and windows: older ones raise it.

    Not the next number: MPICH gives the one that was freed last, and programs free them in any order.
    """
    from mpi4py import MPI

    comms = [comm.Dup() for _ in range(100)]  # more than a program has at once
    # With memory: MPICH 5.0 keeps 300 bytes of every shared window that is freed, until one of this kind is made.
    windows = [MPI.Win.Allocate(8, comm=comm) for _ in range(16)]
    found = {"communicator": max(each.py2f() for each in comms), "window": max(each.py2f() for each in windows)}
    for each in (*windows, *comms):
        each.Free()
    return found


def held(comm):
    """Return what this process holds."""
    gc.collect()
    # Memory over which the program kept an array goes with the next close of a store.
    mpikv.create("dist_sync", comm=comm).close()
    maps = Path("/proc/self/maps").read_text().splitlines()
    found = {
        "open files": len(os.listdir("/proc/self/fd")),
        "shared mappings": sum(line.split()[1].endswith("s") for line in maps),
    }
    if PROGRAMS >= 400:  # the first hundred warm up
        release_freed()
        found["private bytes"] = Memory.now().private
    return found | (highest_handles(comm) if comm else {})


@pytest.mark.ranks(1, 2)
@pytest.mark.deadline(120 + 2 * PROGRAMS)
def test_random_programs_leave_nothing(comm):
    """Of random calls and mistakes. ``MPIKV_MEMORY_PROGRAMS=1000`` runs more, and compares memory, too."""
    samples, counts = [], Counter()
    for number in range(PROGRAMS):
        counts += Program(comm, f"growth {number}").run(30)
        samples.append(held(comm))
    quarter = PROGRAMS // 4
    for name in samples[0]:
        before = max(sample[name] for sample in samples[quarter : 2 * quarter])
        after = min(sample[name] for sample in samples[-quarter:])
        assert after <= before + (4 * MIB if name == "private bytes" else 0), f"{name} rose from {before} to {after}"
    assert any(name.startswith("fault ") for name in counts), counts
