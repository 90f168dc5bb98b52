"""Communicators of mpi4py whose ranks compare their calls: what they find, name and leave alone."""

import gc
import pickle
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import commands
from support.commands import Done
from support.pages import blocks

import mpikv
from mpikv import RankMismatch, Stalled, TransportUnavailable, Unsupported

pytestmark = pytest.mark.deadline(120)
SOME = pytest.mark.ranks(2, 3, 4)


@pytest.fixture
def world(comm: Any) -> Any:
    """Return a checked communicator of all ranks."""
    checked = mpikv.checked(comm.Dup(), timeout=30)
    yield checked
    checked.Free()


def mpi() -> Any:
    from mpi4py import MPI

    return MPI


VALUES, TOTAL = np.ones(8), np.zeros(8)

# What the last rank does, what the others do, and a text of the error.
MISTAKES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "root": (lambda comm: comm.Bcast(VALUES, comm.size - 1), lambda comm: comm.Bcast(VALUES),
             r"calls? Bcast\(root 0, float64\[8\]\); .*Bcast\(root \d, float64\[8\]\)"),
    "count": (lambda comm: comm.Allreduce(VALUES[:4], TOTAL[:4]), lambda comm: comm.Allreduce(VALUES, TOTAL),
              r"float64\[8\]\); .*float64\[4\]"),
    "dtype": (lambda c: c.Bcast(np.zeros(8, np.int64)), lambda c: c.Bcast(VALUES), r"float64\[8\]\); .*int64\[8\]"),
    "op": (lambda c: c.Allreduce(VALUES, TOTAL, mpi().MAX), lambda c: c.Allreduce(VALUES, TOTAL), r"\(sum, .*\(max, "),
    "order": (lambda comm: comm.Barrier(), lambda comm: comm.Bcast(VALUES), r"Bcast\(.*Barrier\(\)"),
    "verb": (lambda c: c.Allreduce(VALUES, TOTAL), lambda c: c.Reduce(VALUES, TOTAL), r"\(sum, root 0, .*Allreduce\("),
    "root of objects": (lambda comm: comm.bcast(1, root=comm.size - 1), lambda comm: comm.bcast(1), r"bcast\(root 0\)"),
    "op of objects": (lambda comm: comm.allreduce(1, mpi().PROD), lambda comm: comm.allreduce(1), r"\(sum\).*\(prod\)"),
    "counts of all": (lambda comm: comm.Allgatherv(np.ones(1), [np.zeros(2 * comm.size), [2] * comm.size]),
                      lambda comm: comm.Allgatherv(np.ones(1), [np.zeros(2 * comm.size), [1] * comm.size]),
                      r"\[1, 1.*\[2, 2"),
    "dtype of parts": (lambda comm: comm.Gatherv(np.ones(1, bool), None),
                       lambda comm: comm.Gatherv(np.ones(1), np.zeros(comm.size) if comm.rank == 0 else None),
                       r"Gatherv\(root 0, float64\); .*Gatherv\(root 0, bool\)"),
    "split": (lambda comm: comm.Dup(), lambda comm: comm.Split(0), r"Split\(\).*Dup\(\)"),
}  # fmt: skip


@SOME
@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_difference_is_named_on_every_rank(world: Any, mistake: str) -> None:
    last, others, text = MISTAKES[mistake]
    others(world)  # the ranks know the call
    with pytest.raises(RankMismatch, match=text) as raised:
        (last if world.rank == world.size - 1 else others)(world)
    assert str(raised.value).count(f" at {__file__}:") == 2
    assert world.allgather(world.rank) == list(range(world.size)), "the communicator can be used again"


@SOME
def test_a_difference_tells_whose_ranks_it_names(world: Any) -> None:
    part = world.Split(0, -world.rank)
    with pytest.raises(
        RankMismatch, match=r"on the communicator of Split at .*, whose ranks are \[.*1, 0\] of COMM_WORLD"
    ):
        part.Bcast(VALUES, part.rank)
    part.Free()


@SOME
def test_a_nonblocking_difference_is_named_where_it_is_waited_for(comm: Any) -> None:
    world = mpikv.checked(comm.Dup(), timeout=30)
    line = sys._getframe().f_lineno + 1
    request = world.Ibcast(VALUES, world.size - 1) if world.rank == 0 else world.Ibcast(VALUES.copy(), 0)
    with pytest.raises(RankMismatch, match=r"Ibcast\(root 0.*") as raised:
        request.Wait()
    assert str(raised.value).count(f":{line} in ") == 2
    with pytest.raises(RankMismatch):  # MPI has begun calls that do not fit
        world.Barrier()


@SOME
def test_a_nonblocking_call_meets_a_blocking_one(comm: Any) -> None:
    world = mpikv.checked(comm.Dup(), timeout=30)
    with pytest.raises(RankMismatch, match=r"Bcast\(root 0, float64\[8\]\).*Ibarrier\(\)|Ibarrier.*Bcast"):
        world.Ibarrier().Wait() if world.rank == 0 else world.Bcast(VALUES)


@SOME
def test_a_nonblocking_call_waits_for_no_rank(world: Any) -> None:
    # Legal: rank 0 starts its call, and the others start theirs once they have its message.
    if world.rank == 0:
        request = world.Ibarrier()
        for rank in range(1, world.size):
            world.send("go on", rank)
    else:
        assert world.recv(source=0) == "go on"
        request = world.Ibarrier()
    request.Wait()


@SOME
def test_a_message_moves_while_its_sender_is_in_a_collective(world: Any) -> None:
    large, peer = np.full(1 << 20, world.rank, np.float64), world.size - 1
    if world.rank == 0:
        request = world.Isend(large, peer)
        world.Barrier()
        request.Wait()
    else:
        if world.rank == peer:
            world.Recv(large, 0)
            assert not large.any()
        world.Barrier()


@SOME
def test_a_call_is_the_same_however_its_buffer_is_written(world: Any) -> None:
    ours = [VALUES, [VALUES, mpi().DOUBLE], [VALUES, 8, "d"], [VALUES, (8, 0), mpi().DOUBLE], memoryview(VALUES)]
    pairs = mpi().DOUBLE.Create_contiguous(2).Commit()
    for form in (*ours, [VALUES, 4, pairs]):
        world.Bcast(form if world.rank else VALUES)
    pairs.Free()
    gathered = np.zeros(world.size)
    world.Gather(np.ones(1), gathered if world.rank == 0 else None)
    world.Allgatherv(np.ones(1), gathered if world.rank else [gathered, [1] * world.size])
    root = np.int64(0) if world.rank else 0
    assert world.bcast(world.rank, root=root) == 0
    assert gathered.sum() == world.size


def derived() -> Any:
    return mpi().DOUBLE.Create_vector(1, 8, 1).Commit()


# Right programs, whose ranks write one call in different ways: what rank 0 does, and the others.
ALIKE: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "a derived datatype": (lambda comm: comm.Bcast([VALUES.copy(), 1, derived()]),
        lambda comm: comm.Bcast(VALUES.copy())),
    "nothing to gather": (
        lambda comm: comm.Gatherv(np.array([]), [np.zeros(comm.size, "i4"), [0] + [1] * (comm.size - 1)]),
        lambda comm: comm.Gatherv(np.ones(1, "i4"), None)),
    "nothing to scatter": (
        lambda comm: comm.Scatterv([np.ones(1, "i4"), [1] + [0] * (comm.size - 1)], np.zeros(1, "i4")),
        lambda comm: comm.Scatterv(None, np.array([]))),
    "nothing from one to all": (
        lambda comm: comm.Allgatherv(np.array([]), [np.zeros(comm.size, "i4"), [0] + [1] * (comm.size - 1)]),
        lambda comm: comm.Allgatherv(np.ones(1, "i4"), [np.zeros(comm.size, "i4"), [0] + [1] * (comm.size - 1)])),
    "nothing at all": (lambda comm: comm.Bcast(np.array([])), lambda comm: comm.Bcast(np.zeros(0, "i4"))),
    "keywords": (lambda comm: comm.scatter(sendobj=[1] * comm.size, root=0) and comm.gather(sendobj=1),
        lambda comm: comm.scatter(None) and comm.gather(1)),
    "a call that mpi4py refuses": (
        lambda comm: refused(lambda: comm.scatter([1] * (comm.size + 1))) or comm.scatter([1] * comm.size),
        lambda comm: comm.scatter(None)),
    "an object without a pickle": (lambda comm: refused(lambda: comm.bcast(lambda: 1)) or comm.bcast(1),
        lambda comm: comm.bcast(None)),
    "a bad buffer": (lambda comm: refused(lambda: comm.Bcast(object())) or comm.Bcast(VALUES.copy()),
        lambda comm: comm.Bcast(VALUES.copy())),
}  # fmt: skip


def refused(call: Callable[[], Any]) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError)):
        call()


@SOME
@pytest.mark.parametrize("way", ALIKE)
def test_a_right_program_behaves_as_without_checks(world: Any, way: str) -> None:
    first, others = ALIKE[way]
    (others if world.rank else first)(world)
    assert world.allgather(world.rank) == list(range(world.size))


@SOME
def test_a_call_that_meets_any_waits_for_no_rank(world: Any) -> None:
    other, requests = world.Dup(), []
    if world.rank == 0:
        requests.append(world.Ibcast([VALUES.copy(), 1, derived()]))
        requests.pop().Wait()
    else:
        requests.append(world.Ibcast(VALUES.copy()))
    other.Barrier()
    for request in requests:
        request.Wait()
    other.Free()


@pytest.mark.ranks(1, 2, 3)
def test_many_calls(comm: Any) -> None:
    world = mpikv.checked((comm or mpi().COMM_WORLD).Dup(), timeout=60)
    for _ in range(1100):
        world.Barrier()
    for request in reversed([world.Ibarrier() for _ in range(1100)]):
        request.Wait()
    for count in range(5000):
        world.Bcast(np.empty(count, np.int8))
    assert world.allgather(sendobj="mine") == ["mine"] * world.size
    assert len(world.check.calls) < 5000
    assert "mine" not in str(world.check.calls), "an object is kept"
    world.Free()


@pytest.mark.ranks(1)
def test_a_call_takes_few_of_python() -> None:
    world, called = mpikv.checked(mpi().COMM_WORLD.Dup()), list[str]()
    world.Allreduce(VALUES, TOTAL)
    gc.collect()  # none inside, whose functions would be counted
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    world.Allreduce(VALUES, TOTAL)
    sys.setprofile(None)
    world.Free()
    assert "key_of" in called
    assert len(called) <= 10, called


@pytest.mark.ranks(1, 2, 3)
def test_what_it_makes_is_checked_and_one_of_mpi(comm: Any) -> None:
    comm = comm or mpi().COMM_WORLD
    world = mpikv.checked(comm.Dup(), timeout=30)
    made = [world.Dup(), world.Split(0), world.Create(world.group), world.Clone(), world.Create_cart([world.size])]
    made.append(world.Create_group(world.group))
    for one in made:
        assert isinstance(one, mpi().Intracomm)
        assert one.check is not None
        assert one.allreduce(1) == world.size
        one.Free()
    assert world.Split(mpi().UNDEFINED) == mpi().COMM_NULL
    assert mpikv.checked(mpi().COMM_SELF) == mpi().COMM_SELF
    with pytest.raises(ValueError, match="serialize"):
        pickle.dumps(world)
    world.Free()
    with pytest.raises(TypeError, match="is not an mpi4py"):
        mpikv.checked(3)


@SOME
def test_hosts_tell_each_other_who_is_late(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the eighth call and later."""
    monkeypatch.setenv("MPIKV_SIMULATE_RANKS_PER_HOST", "1")
    world = mpikv.checked(comm.Dup(), timeout=30)
    assert [world.allreduce(step) for step in range(20)] == [world.size * step for step in range(20)]
    world.Free()


@SOME
@pytest.mark.parametrize(("verb", "hosts"), [("Recv", 1), ("recv", 2)])
def test_a_receive_has_a_deadline(comm: Any, verb: str, hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if hosts == 2:
        monkeypatch.setenv("MPIKV_SIMULATE_RANKS_PER_HOST", "1")
    # It is left open: at the end of the job, the others must not wait for the rank that has given up.
    world = mpikv.checked(comm.Dup(), timeout=4)
    comm.Barrier()
    if world.rank == 0:
        with pytest.raises(Stalled, match=verb + r"\(from rank 1, tag 7\): waited .* for ranks \[1\]"):
            world.Recv(np.ones(1), 1, 7) if verb == "Recv" else world.recv(source=1, tag=7)
        comm.Ibarrier().Wait()
    else:
        request = comm.Ibarrier()
        while not request.Test():
            time.sleep(0.01)


@SOME
def test_any_of_several_requests_may_be_waited_for(world: Any) -> None:
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    requests = [world.irecv(source=before, tag=tag) for tag in (1, 2, 3)]
    requests.append(world.Irecv(buf=(received := np.zeros(1)), source=before, tag=4))
    world.Send(np.full(1, 4.0), dest=after, tag=4)
    every = type(requests[0])
    assert every.Waitany(requests) == 3
    assert received[0] == 4
    world.Barrier()  # a rank that is ahead sends the next message
    world.isend(obj="two", dest=after, tag=2).wait()
    assert every.waitany(requests) == (1, "two")
    world.Barrier()
    for tag in (1, 3):
        world.send(tag, after, tag)
    assert every.waitall([requests[0], requests[2]]) == [1, 3]
    assert not any(requests)
    last = world.Irecv(received, before, 6)
    world.Send(np.full(1, 6.0), after, 6)
    assert every.Waitsome([last]) == [0]
    assert received[0] == 6


@SOME
def test_a_second_thread_may_receive_while_the_first_is_in_collectives(world: Any) -> None:
    received = list[str]()
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    thread = threading.Thread(target=lambda: received.append(world.recv(source=before, tag=9)))
    thread.start()
    for _ in range(50):
        world.Ibarrier().Wait()
    world.send("late", after, 9)
    thread.join()
    assert received == ["late"]


@SOME
def test_a_request_outlives_its_communicator(comm: Any) -> None:
    world = mpikv.checked(comm.Dup(), timeout=30)
    received, others = np.zeros(1), ((world.rank - 1) % world.size, (world.rank + 1) % world.size)
    requests = [world.Irecv(received, others[0], 5), world.Isend(np.ones(1), others[1], 5)]
    world.Free()
    for request in requests:
        request.Wait()
    assert received[0] == 1


@SOME
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_late_rank_learns_that_the_others_have_given_up(
    comm: Any, hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hosts == 2:
        monkeypatch.setenv("MPIKV_SIMULATE_RANKS_PER_HOST", "1")
    comm.Barrier()
    world = mpikv.checked(comm.Dup(), timeout=4)
    comm.Barrier()
    if world.rank:
        with pytest.raises(Stalled, match=r"Barrier: .*rank 0 "):
            world.Barrier()
    comm.Barrier()
    with pytest.raises(Stalled, match=r"given up waiting|waited"):
        world.Barrier()


# --- Under mpikv run --check

PLANTED = """
import sys
import time
import numpy as np
from mpi4py import MPI

comm, values = MPI.COMM_WORLD, np.ones(8)
last = comm.rank == comm.size - 1
if sys.argv[1] == "missing rank" and last:
    time.sleep(600)
if sys.argv[1] == "missing receive" and comm.rank == 0:
    comm.Ssend(values, dest=comm.size - 1, tag=3)
if sys.argv[1] == "early exit" and last:
    sys.exit()
if sys.argv[1] == "exception" and last:
    raise ValueError("no data for this rank")
if sys.argv[1] == "abort" and last:
    comm.Abort(7)
if sys.argv[1] == "refused" and comm.rank == 0:
    try:
        comm.scatter([])
    except ValueError:
        pass
elif sys.argv[1] == "refused":
    comm.scatter(None)
comm.Barrier()
"""
SAYS = {
    "missing rank": ("Stalled: Barrier: ", r"began call #1 Init() last and is now at", "planted.py:10"),
    "missing receive": ("Stalled: Ssend(to rank {last}, tag 3): ", "rank {last} began call #2 Barrier() last"),
    "early exit": (
        "RankMismatch: Barrier: ",
        "rank {last} has reached the end of its program, after call #1 Init()",
        "rank {last} left at ",
        "planted.py:14 in <module>",
    ),
    "abort": ("rank {last} calls Abort(7) at ", "planted.py:18 in <module>"),
    "refused": ("mpi4py refused scatter(root 0) on this rank; others may be in it, and cannot meet Barrier()",),
    "exception": ("[rank {last}/{size}] ValueError: no data for this rank", 'planted.py", line 16'),
}


def run(
    folder: Path, program: str, size: int, *words: str, options: Sequence[str] = ("--check",), **variables: str
) -> Done:
    (folder / "planted.py").write_text(program)
    return commands.mpikv("run", *options, "-n", size, "planted.py", *words, cwd=folder, **variables)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("mistake", SAYS)
def test_a_planted_mistake_ends_the_job_by_name(tmp_path: Path, mistake: str, size: int) -> None:
    # Longer than ranks of a busy machine differ in their starts.
    done = run(tmp_path, PLANTED, size, mistake, MPIKV_TIMEOUT="12")
    assert done.returncode == 1 or (mistake == "abort" and done.returncode), done.stderr
    for text in SAYS[mistake]:
        assert text.format(last=size - 1, size=size) in done.stderr, done.stderr


def test_what_is_left_is_told_at_the_end(tmp_path: Path) -> None:
    program = """
import pickle
import numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD
assert pickle.loads(pickle.dumps(comm)) is comm
assert pickle.loads(pickle.dumps(MPI.Intracomm(comm))) == comm
part = comm.Split(0)
comm.Irecv(np.ones(1), 0, 5)
print(type(comm) == MPI.Intracomm, isinstance(comm.isend(1, comm.rank), MPI.Request))
comm.recv(source=comm.rank)
"""
    done = run(tmp_path, program, 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True True"] * 2
    assert "the communicator of Split at" in done.stderr
    assert "rank 1 never waited for Irecv(from rank 0, tag 5) at" in done.stderr


def test_a_library_may_lack_a_datatype(tmp_path: Path) -> None:
    """As Open MPI 4 without Fortran: MPI has an error for what one asks of it."""
    program = """
import numpy as np
from mpi4py import MPI
class Lacking(MPI.Datatype):
    @property
    def is_predefined(self):
        raise MPI.Exception(MPI.ERR_TYPE)
MPI.LACKING = Lacking(MPI.INT)
MPI.COMM_WORLD.Bcast([np.ones(1), MPI.DOUBLE])
"""
    done = run(tmp_path, program, 2)
    assert done.returncode == 0, done.stderr


def test_an_exit_from_none_names_no_cause(tmp_path: Path) -> None:
    done = run(tmp_path, "try:\n    raise OSError\nexcept OSError:\n    raise SystemExit(3) from None\n", 2)
    assert done.returncode == 3
    assert "OSError" not in done.stderr


def test_a_program_may_start_and_end_mpi_itself(tmp_path: Path) -> None:
    program = """
import mpi4py; mpi4py.rc.initialize = False
from mpi4py import MPI
assert not MPI.Is_initialized()
MPI.Init()
print(MPI.COMM_WORLD.allreduce(1), MPI.COMM_WORLD.check is not None); MPI.Finalize()
"""
    done = run(tmp_path, program, 2)
    assert (done.returncode, done.stdout) == (0, "2 True\n" * 2), done.stderr


def test_a_rank_may_compute_alone_after_the_others_have_ended(tmp_path: Path) -> None:
    program = """
import time
from mpi4py import MPI
import mpikv
MPI.COMM_WORLD.Barrier()
mpikv.checked(MPI.COMM_WORLD, timeout=5, warn_after=4)
if MPI.COMM_WORLD.rank == 0:
    time.sleep(7)
    print("done")
"""
    done = run(tmp_path, program, 2)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


# --- Reports from the public, as the page shows them

PAGE = (Path(__file__).parents[2] / "docs" / "explanation" / "mpi4py-checks.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("at", "checked", "texts"),
    [
        (1, [], ["[rank 2/4] exits with status 1 after OSError: status.pickle is cut short at ", "rank 2 ended"]),
        (2, ["--check"], ["Barrier(); ranks 2, 3 call allreduce(sum)", "planted.py:7 in ", "planted.py:8 in "]),
    ],
)
def test_a_public_report_is_explained(tmp_path: Path, at: int, checked: list[str], texts: list[str]) -> None:
    done = run(tmp_path, blocks(PAGE, "python")[at], 4, options=checked)
    assert done.returncode == 1, done.stderr
    assert all(text in done.stderr for text in texts), done.stderr


def test_a_failed_test_of_a_parallel_suite_ends_it(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(blocks(PAGE, "python")[0])
    program = "import sys, pytest\nsys.exit(pytest.main(['-p', 'no:cacheprovider', 'test_mine.py']))"
    done = run(tmp_path, program, 2, options=["--check"])
    assert done.returncode == 1, done.stderr
    assert "ValueError: Test" in done.stdout
    assert "rank 0 ended with status 1" in done.stderr or "has reached the end of its program" in done.stderr


class OnGpu:
    """An array that says it lies on a GPU, in DLPack's words."""

    dtype, nbytes = np.dtype(float), 8
    __cuda_array_interface__ = {"shape": (1,), "typestr": "<f8", "data": (256, False), "version": 3}  # noqa: RUF012

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


@SOME
def test_mpi_reads_memory_of_the_host_whatever_its_interface(world: Any) -> None:
    """As mpi4py's own tests have it: CUDA's interface, in a process without CUDA's driver."""

    class Host:
        dtype, nbytes = np.dtype(float), 8
        __cuda_array_interface__ = VALUES[:1].__array_interface__

    total = np.zeros(1)
    world.Allreduce([Host(), mpi().DOUBLE], total)
    assert total == world.size


@SOME
def test_mpi_does_not_read_a_gpu(world: Any) -> None:
    """Its address would be one of the host, and the job would end by a segmentation fault."""
    buffer, last = OnGpu(), world.size - 1
    for call in (
        lambda: world.Send(buffer, last),
        lambda: world.Irecv([buffer, mpi().DOUBLE], source=last),
        lambda: world.Sendrecv(VALUES, last, recvbuf=buffer),
        lambda: world.Ibcast(buffer),
        lambda: world.Scan(buffer, buffer),
        lambda: world.Allgather_init(buffer, buffer),
    ):
        with pytest.raises(Unsupported, match=r"lies on a GPU.*cupy\.asnumpy"):
            call()
    assert world.allreduce(1) == world.size


@SOME
@pytest.mark.skipif(find_spec("cupy") is not None, reason="tests/gpu/real has CuPy")
def test_a_call_on_gpus_needs_cupy(world: Any) -> None:
    with pytest.raises(TransportUnavailable, match=r"Allreduce: .*pip install 'mpikv\[cuda13\]'"):
        world.Allreduce(OnGpu(), OnGpu())
    assert world.allreduce(1) == world.size


@SOME
def test_a_call_on_the_host_looks_for_no_gpu(world: Any) -> None:
    called = set[str]()
    sys.setprofile(lambda frame, event, _: called.add(frame.f_code.co_name) if event == "call" else None)
    try:
        world.Allreduce(VALUES, TOTAL, op=mpi().MAX)
        world.Bcast(bytearray(8))
        world.Sendrecv(VALUES, world.rank, recvbuf=TOTAL, source=world.rank)
        world.Iallreduce(VALUES, TOTAL).Wait()
    finally:
        sys.setprofile(None)
    assert "begin" in called
    assert not called & {"_lies_on_gpu", "reads_gpus", "_run_on_gpus"}
