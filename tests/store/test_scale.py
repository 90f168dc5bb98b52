"""Many keys, large values, many stores, and nothing left behind."""

import gc
import os
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import mpikv
from mpikv.cluster.runtime import present

ALL = pytest.mark.ranks(1, 2)


def memory_in_use():
    """Return this process's resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def lasting_growth(work, times):
    """Return by how many bytes memory grows when the work is done so often, in each of three rounds at least.

    An allocator may keep memory, or give back some, at any moment; only a leak goes on.
    """
    used = []
    for _ in range(4):
        for _ in range(times):
            work()
        gc.collect()
        used.append(memory_in_use())
    return min(after - before for before, after in pairwise(used))


def memory_available():
    text = Path("/proc/meminfo").read_text()
    return int(text.partition("MemAvailable:")[2].split()[0]) * 1024


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@ALL
@pytest.mark.deadline(120)
def test_ten_thousand_keys(transport):
    random = np.random.default_rng(0)
    keys = [f"layer{number}" for number in range(10_000)]
    values = [
        np.full(int(size), number % 100, np.float32) for number, size in enumerate(random.integers(0, 40, 10_000))
    ]
    started = time.monotonic()
    with mpikv.create(transport=transport) as kv:
        kv.init(keys, values)
        for _ in range(2):
            kv.push(keys, values)
            results = kv.pull(keys)
        for value, result in zip(values, results, strict=True):
            np.testing.assert_array_equal(result, value * kv.size)
        chosen = keys[::-7]
        kv.pushpull(chosen, outs := [value.copy() for value in values[::-7]])
        for value, result in zip(values[::-7], outs, strict=True):
            np.testing.assert_array_equal(result, value * kv.size)
        untouched = kv.pull(keys[0])
        np.testing.assert_array_equal(untouched, values[0] * kv.size)
        with pytest.raises(mpikv.KeyNotInitialized, match="'layer9998'"):
            kv.pull("layer99988")
        kv.delete(keys)
        assert len(kv) == 0
    assert time.monotonic() - started < 30


@pytest.mark.processes
@pytest.mark.ranks(2)
@pytest.mark.deadline(120)
def test_more_elements_than_fit_into_32_bits(ranks):
    size = 2**31 + 5
    needed = (ranks + 2) * size
    if memory_available() < 1.5 * needed:
        pytest.skip(f"needs {1.5 * needed / 2**30:.0f} GiB of memory, {memory_available() / 2**30:.0f} are there")
    if ranks > 1 and os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize < 1.2 * size:
        pytest.skip("/dev/shm is too small")
    places = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, size - 1]
    with mpikv.create() as kv:
        array = np.zeros(size, np.int8)
        kv.init("w", array)
        array[places] = np.arange(1, 7)
        kv.push("w", array)
        assert kv.pull("w", out=array) is array
        np.testing.assert_array_equal(array[places], kv.size * np.arange(1, 7))
        assert np.count_nonzero(array) == len(places)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.feature("several-stores")
def test_a_store_per_group_of_ranks(comm, transport):
    parity = comm.rank % 2
    group = comm.Split(parity, comm.rank)
    members = list(range(parity, comm.size, 2))
    with mpikv.create(transport=transport, comm=comm) as everyone, mpikv.create(comm=group) as half:
        assert (half.rank, half.size) == (group.rank, len(members))
        everyone.init("w", np.zeros(3))
        half.init("w", np.full(3, 7.0 + parity))
        np.testing.assert_array_equal(half.pull("w"), np.full(3, 7.0 + parity))
        half.push("w", np.full(3, float(comm.rank)))
        everyone.push("w", np.full(3, float(comm.rank)))
        np.testing.assert_array_equal(half.pull("w"), np.full(3, float(sum(members))))
        np.testing.assert_array_equal(everyone.pull("w"), np.full(3, float(sum(range(comm.size)))))
    group.Free()


@pytest.mark.processes
@ALL
def test_optimizers_that_come_and_go_need_no_more_memory(transport):
    values = np.ones(1 << 20, np.float32)
    with mpikv.create(transport=transport) as kv:
        kv.init("w", values)

        def use():
            kv.set_optimizer("adam", learning_rate=0.1)
            kv.push("w", values)
            kv.pull("w")

        # A leak would be 8 MiB each time.
        assert lasting_growth(use, 8) < 16 << 20


@pytest.mark.processes
@ALL
@pytest.mark.deadline(120)
def test_stores_that_come_and_go_leave_nothing_behind(transport, comm):
    def files():
        """The files of this MPI library: the tests may run with another one at the same time."""
        if comm:
            comm.Barrier()
        names = "mpich_*" if "MPICH" in MPI.Get_library_version() else "[!m]*"
        return {path.name for path in Path("/dev/shm").glob(names) if path.stat().st_uid == os.getuid()}

    def use():
        with mpikv.create(transport=transport) as kv:
            kv.init("w", np.ones(1 << 18))
            kv.push("w", np.ones(1 << 18))
            kv.pull("w")

    from mpi4py import MPI

    use()
    before = descriptors()
    assert lasting_growth(use, 8) < 8 << 20, "memory of closed stores is kept"
    assert descriptors() <= before + 2
    if comm:
        # Jobs beside this one have files there too; what this one makes has no name once all ranks have it.
        new = []
        for _ in range(3):
            opened = files()
            use()
            new.append(len(files() - opened))
        assert min(new) <= 2, new


@pytest.mark.ranks(1, 2)
def test_a_closed_store_can_be_collected():
    import weakref

    kv = mpikv.create()
    kv.init("w", np.ones(10))
    seen = weakref.ref(kv)
    kv.close()
    del kv
    gc.collect()
    assert seen() is None


@pytest.mark.ranks(2, 4)
def test_a_host_without_shared_memory_says_so_on_all_ranks(comm, monkeypatch):
    monkeypatch.setattr("mpikv.cluster.shared_memory.SHARED", "/missing")
    with pytest.raises(MemoryError, match="of shared memory are needed and /missing has 0 free"):
        mpikv.create(comm=comm, transport="shm", timeout=5)


@pytest.mark.ranks(2, 4)
def test_shared_memory_is_not_promised_twice(comm, monkeypatch):
    """The system makes the pages of staging memory, and takes them from what is free, when they are first used."""
    staging = 2 * comm.size * (1 << 20)
    free = staging + (4 << 20)
    monkeypatch.setattr("mpikv.cluster.shared_memory._free_bytes", lambda: free)
    monkeypatch.setitem(present().owned, "promised memory", [])  # stores that were abandoned keep theirs
    with mpikv.create(comm=comm, transport="shm") as kv:
        with pytest.raises(MemoryError, match="of shared memory are needed and /dev/shm has"):
            kv.init("large", np.zeros(5 << 20, np.int8))
        kv.init("small", np.zeros(1 << 20, np.int8))
        kv.push("small", np.ones(1 << 20, np.int8))
        assert kv.pull("small").sum() == kv.size << 20
    with mpikv.create(comm=comm, transport="shm"):
        pass  # what was promised to a store that was closed is free again
