"""A save that training does not wait for has what the store held at the call, and loses neither file nor error."""

import errno
import fcntl
import os

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import mpikv
from mpikv import Closed, PeerFailed, RankMismatch
from mpikv.checkpoint import chunks
from mpikv.checkpoint.header import CHUNK

pytestmark = pytest.mark.ranks(1, 2, 3)

VALUES = {"w": np.arange(70_001.0), "b": np.ones((3, 5), np.float32), "none": np.zeros((0, 2))}
STORES = [{}, {"placement": "root"}, {"placement": "replicated"}, {"transport": "mpi", "placement": "sharded"}]
EXAMPLES = {1: 40, 2: 20, 3: 10}


def push(kv, number=1):
    kv.push(list(VALUES), [np.full(value.shape, number + kv.rank, value.dtype) for value in VALUES.values()])


def contents(kv):
    """Return all that a pull and the facts tell of a store."""
    values = kv.pull(list(kv.keys()))
    return kv.keys(), [value.tobytes() for value in values], [kv.version(key) for key in kv]


def check_error(error, kind, *texts):
    assert isinstance(error, kind), error
    assert all(text in str(error) for text in texts), error


def outcome(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except Exception as error:
        return error
    return None


def filled(comm, **arguments):
    """Return a store of values and state."""
    kv = mpikv.create(comm=comm, **arguments)
    kv.init(VALUES)
    kv.set_optimizer("adam")
    push(kv)
    return kv


@pytest.fixture
def kv(comm, folder):
    """Return a store that is closed, and has ended its saves, before the folder is removed."""
    with filled(comm) as store:
        yield store


# --- What is in the file


@pytest.mark.feature("save-without-waiting")
@pytest.mark.parametrize("arguments", STORES)
def test_the_file_is_that_of_a_save_that_waits(comm, folder, arguments, monkeypatch):
    """Over several windows, whatever the ranks push while it is written."""
    monkeypatch.setattr(chunks, "_WINDOW", CHUNK)
    with filled(comm, **({} if comm is None else arguments)) as kv:
        kv.save(folder / "waits")
        work = kv.save(folder / "goes on", wait=False)
        for number in range(3):
            push(kv, number)
        kv.init("later", np.ones(3))
        kv.delete("b")
        assert not (folder / "goes on").exists()
        work.wait()
        assert work.done
        assert work.error is None
        assert (folder / "goes on").read_bytes() == (folder / "waits").read_bytes()
        assert sorted(os.listdir(folder)) == ["goes on", "waits"]


@pytest.mark.parametrize("codec", [{"type": "2bit", "threshold": 0.5}, {"type": "lowrank", "rank": 1}])
def test_what_pushes_have_left_out_is_that_of_the_call(comm, folder, codec):
    value = np.linspace(-1, 1, 600, dtype=np.float32).reshape(30, 20)
    with mpikv.create(comm=comm, compression=codec) as kv:
        kv.init("w", value)
        kv.push("w", value)
        kv.save(folder / "waits")
        work = kv.save(folder / "goes on", wait=False)
        kv.push("w", value.T.reshape(30, 20).copy())
        work.wait()
        assert (folder / "goes on").read_bytes() == (folder / "waits").read_bytes()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 5)),
        st.tuples(st.just("issue"), st.integers(0, 5)),
        st.tuples(st.just("save"), st.integers(0, 2), st.booleans()),
        st.tuples(st.just("wait"), st.integers(0, 9)),
        st.tuples(st.just("load"), st.integers(0, 2)),
    ),
    max_size=12,
)


@pytest.mark.deadline(120)
def test_saves_between_pushes(comm, folder, ranks):
    """Every file holds what its last save that is over has seen; a load waits for the save before it."""

    @hypothesis.settings(max_examples=EXAMPLES[ranks])
    @hypothesis.given(STEPS)
    def holds(steps):
        saved, works = {}, []
        with filled(comm) as kv:
            for what, number, *more in steps:
                if what == "push":
                    push(kv, number)
                elif what == "issue":
                    kv.push("w", np.full(70_001, float(number)), wait=False)
                elif what == "save":
                    work = kv.save(folder / f"{number}", wait=more[0])
                    assert (work is None) is more[0]
                    saved[number] = contents(kv)
                    works += [] if work is None else [work]
                    assert all(work.done for work in works[:-1])
                elif what == "wait" and works:
                    works[number % len(works)].wait()
                elif what == "load" and number in saved:
                    kv.load(folder / f"{number}")
                    assert contents(kv) == saved[number]
        assert all(work.done and work.error is None for work in works)
        for number, expected in saved.items():
            with mpikv.create(comm=comm) as kv:
                kv.load(folder / f"{number}")
                assert contents(kv) == expected
        if comm is not None:
            comm.Barrier()
        if comm is None or comm.rank == 0:
            for path in folder.iterdir():
                path.unlink()
        if comm is not None:
            comm.Barrier()

    holds()


def test_the_optimizers_state_alone_comes_after(kv, folder):
    work = kv.save(folder / "all", wait=False)
    kv.save_optimizer_states(folder / "states")
    assert work.done
    work = kv.save(folder / "all", wait=False)
    kv.load_optimizer_states(folder / "states")
    assert work.done
    assert sorted(os.listdir(folder)) == ["all", "states"]


def test_an_asynchronous_store(comm, folder):
    with mpikv.create("dist_async", comm=comm) as kv:
        kv.init("w", np.zeros(1000))
        kv.set_optimizer("sgd", learning_rate=1.0)
        kv.push("w", np.ones(1000))
        work = kv.save(folder / "w", wait=False)
        kv.push("w", np.ones(1000))
        work.wait()
        kv.load(folder / "w")
        np.testing.assert_array_equal(kv.pull("w"), np.full(1000, -1.0 * kv.size))


# --- The end of a save


def test_close_waits_for_it(comm, folder):
    with filled(comm) as kv:
        work = kv.save(folder / "w", wait=False)
        assert repr(work).startswith("<mpikv.SaveWork save(")
        assert not work.done
    assert work.done
    assert work.written
    assert repr(work).endswith(" done>")
    work.wait()
    assert os.listdir(folder) == ["w"]


@pytest.mark.processes
def test_it_is_known_that_a_rank_has_written(kv, folder, ranks, monkeypatch):
    """While the others may not have, and before the file is there."""
    held, release = os.pipe()
    write = os.pwritev

    def late(*arguments):
        os.read(held, 1)
        return write(*arguments)

    if kv.rank == ranks - 1:
        monkeypatch.setattr(os, "pwritev", late)
    work = kv.save(folder / "w", wait=False)
    push(kv)
    if kv.rank == ranks - 1:
        assert not work.written
        assert repr(work).endswith(" pending>")
    kv.barrier()
    assert not (folder / "w").exists()
    os.close(release)
    work.wait()
    os.close(held)
    assert (folder / "w").exists()


def test_an_error_that_ends_the_store(comm, folder):
    with pytest.raises(ZeroDivisionError), filled(comm) as kv:  # noqa: PT012
        work = kv.save(folder / "w", wait=False)
        raise ZeroDivisionError
    if kv.is_root:
        assert os.listdir(folder) == []
    assert not work.done
    assert isinstance(outcome(work.wait), Closed)
    error = outcome(kv.save, folder / "w", wait=False)
    assert isinstance(error, Closed)
    assert str(error).startswith("save: the store ended with ZeroDivisionError")


@pytest.mark.processes
@pytest.mark.ranks(1)
def test_a_forked_child_leaves_the_file_alone(folder):
    with filled(None) as kv:
        work = kv.save(folder / "w", wait=False)
        child = os.fork()
        if child == 0:
            try:
                kv.abandon("as at the end of the child")
                del kv, work
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        work.wait()
        assert os.listdir(folder) == ["w"]


# --- What goes wrong


def fill_disk(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)


ENDS = {
    "wait": lambda kv, work, path: work.wait(),
    "save": lambda kv, work, path: kv.save(path),
    "save again": lambda kv, work, path: kv.save(path, wait=False),
    "load": lambda kv, work, path: kv.load(path),
    "states": lambda kv, work, path: kv.save_optimizer_states(path),
    "close": lambda kv, work, path: kv.close(),
}


@pytest.mark.processes
@pytest.mark.feature("save-without-waiting")
@pytest.mark.parametrize("end", ENDS)
def test_a_full_disk_on_one_rank(comm, folder, ranks, monkeypatch, end):
    """The error of a save that waits, wherever the save is waited for; once, but for the handle."""
    path, culprit = folder / "w", ranks - 1
    kv = filled(comm)
    kv.save(path)
    before = path.read_bytes()
    if kv.rank == culprit:
        fill_disk(monkeypatch)
    blocking = outcome(kv.save, path)
    work = kv.save(path, wait=False)
    push(kv)
    error = outcome(ENDS[end], kv, work, path)
    monkeypatch.undo()
    assert type(error) is type(blocking)
    assert str(error) == str(blocking)
    assert work.error is error
    assert outcome(work.wait) is error
    assert "failed: " in repr(work)
    assert "No space left on device" in repr(work)
    if comm is not None:
        comm.Barrier()
    assert os.listdir(folder) == ["w"]
    assert path.read_bytes() == before
    if end == "close":
        assert isinstance(outcome(kv.barrier), Closed)
        return
    assert isinstance(error, OSError if kv.rank == culprit else PeerFailed)
    kv.barrier()
    with kv:
        kv.save(path, wait=False)
    assert path.read_bytes() != before


@pytest.mark.processes
@pytest.mark.parametrize(
    ("patched", "missing"),
    [
        ("mpikv.checkpoint.saving.zeros", MemoryError("none left for the copy")),
        ("threading.Thread.start", RuntimeError("can't start new thread")),
    ],
)
def test_a_rank_without_memory_or_thread(kv, folder, ranks, monkeypatch, patched, missing):
    """The call finds the first, and the wait the second."""

    def fail(*_, **__):
        raise missing

    if kv.rank == ranks - 1:
        monkeypatch.setattr(patched, fail)
    finds = type(missing) is MemoryError
    work = None if finds else kv.save(folder / "w", wait=False)
    error = outcome(kv.save, folder / "w", wait=False) if finds else outcome(work.wait)
    monkeypatch.undo()
    assert isinstance(error, type(missing) if kv.rank == ranks - 1 else PeerFailed)
    assert str(missing) in str(error)
    kv.barrier()
    assert os.listdir(folder) == []
    kv.save(folder / "w", wait=False)


def test_what_can_be_known_is_raised_by_the_call(kv, folder):
    error = outcome(kv.save, folder / "no" / "w", wait=False)
    assert isinstance(error, FileNotFoundError if kv.is_root else PeerFailed)
    check_error(outcome(kv.save, folder / "w", wait="no"), TypeError, "wait='no' is neither True nor False")
    assert os.listdir(folder) == []


def test_another_store_that_saves_to_the_path(comm, folder):
    with filled(comm) as kv, filled(comm) as other:
        work = kv.save(folder / "w", wait=False)
        if kv.is_root:
            (draft,) = folder.iterdir()
            with draft.open("rb") as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kv.barrier()
        error = outcome(other.save, folder / "w", wait=False)
        assert "another store is being saved" in str(error)
        work.wait()
        other.save(folder / "w", wait=False)


@pytest.mark.ranks(2, 3)
def test_ranks_that_differ(kv, folder):
    check_error(outcome(kv.save, folder / "w", wait=kv.rank == 0), RankMismatch, "only in the", "wait=False")
    work = kv.save(folder / "w", wait=False)
    check_error(outcome(work.wait if kv.rank == 0 else kv.barrier), RankMismatch, "rank 0 calls wait(save(")
    assert not work.done
    error = outcome(kv.close if kv.rank == 0 else kv.barrier)
    assert isinstance(error, RankMismatch)
    work.wait()
    assert os.listdir(folder) == ["w"]
