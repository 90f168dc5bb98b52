"""Simulated ranks: results, failures, time, faults, and what is answered to bad use."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import mpikv
from mpikv.cluster import runtime
from mpikv.testing import Deadlock, Hung, Kill, SimulatedError, cluster
from mpikv.testing.explore import explore, load, main
from mpikv.testing.simulation.scheduler import Scheduler


def order_of_events(seed: int) -> list[int]:
    events: list[int] = []

    def program(comm: Any) -> None:
        for _ in range(5):
            events.append(comm.rank)
            runtime.present().give_way()

    cluster(4, seed=seed).run(program)
    return events


def test_a_seed_decides_the_order() -> None:
    assert order_of_events(1) == order_of_events(1)
    assert len({tuple(order_of_events(seed)) for seed in range(10)}) == 10


def test_the_first_failure_is_raised_with_the_others_noted() -> None:
    def program(comm: Any) -> None:
        if comm.rank == 2:
            raise KeyError("of rank 2")
        comm.Barrier()

    with pytest.raises(KeyError, match="of rank 2") as failure:
        cluster(3, seed=5).run(program)
    notes = "\n".join(failure.value.__notes__)
    assert "cluster(3, hosts=1, seed=5)" in notes
    assert "all tasks wait for each other" in notes
    assert "test_cluster.py" in notes
    assert "in program" in notes


def test_messages_of_one_rank_do_not_overtake_each_other() -> None:
    def program(comm: Any) -> list[int]:
        if comm.rank:
            for number in range(20):
                comm.Isend(bytes([number]), 0, 3)
            return []
        received = []
        for _ in range(20):
            buffer = bytearray(1)
            comm.Recv(buffer, 1, 3)
            received.append(buffer[0])
        return received

    assert all(cluster(2, seed=seed).run(program)[0] == list(range(20)) for seed in range(5))


def test_what_was_sent_first_by_another_rank_may_come_last() -> None:
    def program(comm: Any) -> list[int]:
        buffer, received = bytearray(1), []
        if comm.rank == 2:
            comm.Isend(b"\2", 0, 3)
            comm.Isend(b"\2", 3, 3)  # of the same host, which is then told that the first was sent
        elif comm.rank == 3:
            comm.Recv(buffer, 2, 3)
            comm.Isend(b"\3", 0, 3)
        elif comm.rank == 0:
            for _ in range(2):
                comm.Recv(buffer, comm.library.ANY_SOURCE, 3)
                received.append(buffer[0])
        return received

    orders = [tuple(cluster(4, hosts=2, seed=seed).run(program)[0]) for seed in range(40)]
    assert set(orders) == {(2, 3), (3, 2)}


def leaves(comm: Any) -> None:
    if comm.rank:
        comm.Barrier()


def differs(comm: Any) -> None:
    comm.Barrier() if comm.rank else comm.Dup()


def sums(comm: Any) -> None:
    length = 1 + (comm.rank > 0)
    comm.Allreduce(np.ones(length), np.ones(length))


@pytest.mark.parametrize(
    ("program", "error", "text"),
    [
        (leaves, Deadlock, "all tasks wait for each other, without a deadline: rank 1, rank 2"),
        (differs, SimulatedError, "ranks call different operations: "),
        (sums, SimulatedError, "different operations: .*Iallreduce SUM of 1 .*of 2"),
    ],
)
def test_what_would_hang_is_named(program: Callable[..., None], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        cluster(3).run(program)


def test_a_rank_without_a_scheduling_point_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "patience", 1.0)
    ended = False

    def spins(comm: Any) -> None:
        while not ended:
            pass

    with pytest.raises(Hung, match=r"(?s)without a scheduling point.*in spins"):
        cluster(2).run(spins)
    ended = True


def test_a_communicator_of_another_rank_is_refused() -> None:
    seen = []

    def program(comm: Any) -> None:
        seen.append(comm)
        comm.Barrier()
        mpikv.create(comm=seen[1 - seen.index(comm)])

    with pytest.raises(mpikv.ConfigError, match=r"is not of this rank: this thread is <simulated communicator, rank"):
        cluster(2).run(program)
    with pytest.raises(mpikv.ConfigError, match="this thread is no simulated rank"):
        mpikv.create(comm=seen[0])


@pytest.mark.ranks(2)
def test_a_program_that_takes_the_world_of_mpi_is_refused(comm: Any) -> None:
    from mpi4py import MPI

    with pytest.raises(SimulatedError, match="COMM_WORLD: a simulated rank has no MPI: use the communicator"):
        cluster(2).run(lambda simulated: MPI.COMM_WORLD.Get_rank())
    assert MPI.COMM_WORLD is comm
    assert type(MPI) is type(sys)


def test_a_program_that_would_start_mpi_is_refused() -> None:
    code = "from mpikv.testing import cluster\ndef program(comm): from mpi4py import MPI\ncluster(2).run(program)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "ImportError: import mpi4py.MPI: a simulated rank has no MPI: use the communicator" in ran.stderr


def test_a_simulated_rank_runs_no_cluster() -> None:
    with pytest.raises(SimulatedError, match=r"cluster\(2, hosts=1, seed=0\)\.run: .*rank 0/1> is simulated"):
        cluster(1).run(lambda comm: cluster(2).run(lambda inner: None))


def test_pytest_is_not_needed() -> None:
    code = "import sys; sys.modules['pytest'] = None; from mpikv.testing import cluster; print(cluster(2).run(id) != 0)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "True\n", ran.stderr


@pytest.mark.parametrize(("size", "hosts"), [(0, 1), (2, 3), (2, 0)])
def test_a_host_has_a_rank(size: int, hosts: int) -> None:
    with pytest.raises(ValueError, match="every host has at least one rank"):
        cluster(size, hosts=hosts)


SCRIPT = """
import mpikv, numpy as np
with mpikv.create() as kv:
    kv.init("w", np.zeros(2))
    kv.push("w", np.ones(2))
    assert kv.pull("w").sum() == 2 * kv.size

def fails(comm, seed):
    assert seed < 7 or comm.rank < comm.size - 1, "planted"

def leaves(comm):
    raise SystemExit("left by plan" if comm.rank else 0)
"""


def test_explore_runs_scripts_and_finds_the_first_seed(tmp_path: Any, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert main([str(script), "--ranks", "3", "--seeds", "0:3"]) == 0
    assert "3 seeds passed" in capfd.readouterr().out
    for jobs in "1", "2":
        ended = main([f"{script}:fails", "--ranks", "2:5", "--hosts", "1:2", "--seeds", "0:40", "--jobs", jobs])
        told = capfd.readouterr().err
        assert (ended, "seed 7 fails on" in told, "AssertionError: planted" in told) == (1, True, True)
    assert main([f"{script}:leaves", "--ranks", "2"]) == 1
    assert "SystemExit: left by plan" in capfd.readouterr().err
    found = explore(load(f"{script}:fails"), range(20), ranks=(2, 5), hosts=(1, 2))
    assert found is not None
    assert found[0].seed == 7


def test_what_cannot_be_combined_is_told_to_every_rank() -> None:
    def program(comm: Any) -> None:
        bytes_out, bytes_in = np.zeros(4, np.uint8), np.zeros(4, np.uint8)
        taken = [1, 2] if comm.rank else [1, 1]
        request = comm.Ialltoallv((bytes_out, ([1, 1], [0, 1]), None), (bytes_in, (taken, [0, 2]), None))
        with pytest.raises(SimulatedError, match="rank 1 sends 1 and rank 1 takes 2 bytes"):
            request.Wait()

    cluster(2).run(program)


LOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "Test": lambda comm, started: started.Test(),
    "Testsome": lambda comm, started: comm.library.Request.Testsome([started]),
    "Testall": lambda comm, started: comm.library.Request.Testall([started, started]),
    "Iprobe": lambda comm, _: comm.Iprobe(0, 6),
    "Improbe": lambda comm, _: comm.Improbe(0, 6, comm.library.Status()),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_rank_that_polls_without_a_sleep_gives_up_its_turn(look: str) -> None:
    def looks(comm: Any) -> None:
        started = comm.Irecv(bytearray(1), 0, 5)
        while not LOOKS[look](comm, started):
            pass

    def program(comm: Any) -> float:
        if comm.rank == 0:
            time.sleep(30)
            for tag in (5, 6):
                comm.Isend(b"x", 1, tag)
        else:
            looks(comm)
        return time.monotonic()

    assert cluster(2).run(program) == pytest.approx([30, 30], abs=0.001)
    with pytest.raises(Deadlock, match="look and sleep in turn, for ever: rank 0"):
        cluster(1).run(looks)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"size": "3"}, "size is '3'; pass an integer"),
        ({"size": 2.5}, "size is 2.5"),
        ({"size": 2, "hosts": None}, "hosts is None"),
        ({"size": 2, "seed": "a"}, "seed is 'a'"),
        ({"size": 2, "faults": Kill(0, 1)}, r"pass a list, \[Kill\(rank=0, at=1\)\]"),
        ({"size": 2, "faults": ["kill"]}, "'kill' is no fault"),
    ],
)
def test_an_argument_of_another_type_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        cluster(**arguments)


def test_a_parameter_named_seed_is_given_the_seed() -> None:
    def draws(comm: Any, seed: int, rate: float = 0.5) -> tuple[int, float]:
        assert seed < 5
        return seed, rate

    assert cluster(2, seed=3).run(draws) == [(3, 0.5)] * 2
    assert cluster(1, seed=3).run(partial(draws, seed=4, rate=1.0)) == [(4, 1.0)]
    found = explore(draws, range(4, 8), ranks=(2, 2))
    assert found is not None
    assert found[0].seed == 5
    with pytest.raises(AssertionError):
        found[0].run(draws)


async def waits(comm: Any) -> None:
    raise AssertionError


def yields(comm: Any) -> Iterator[None]:
    yield comm.Barrier()


@pytest.mark.parametrize(("program", "text"), [(waits, "is async"), (yields, "is async"), (5, "cannot be called")])
def test_a_program_of_which_no_code_would_run_is_refused(program: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        cluster(2).run(program)
    with pytest.raises(TypeError, match=text):
        explore(program, range(2))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--seeds", "5:3"], "there is no seed from 5 to before 3"),
        (["--seeds", "5:5"], "there is no seed from 5 to before 5"),
        (["--ranks", "4:2"], "from the smallest to the largest"),
        (["--ranks", "4", "--hosts", "8"], "every host has at least one rank"),
    ],
)
def test_explore_refuses_what_runs_nothing(options: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([__file__, *options])
    assert text in capsys.readouterr().err
    with pytest.raises(ValueError, match="there are no seeds"):
        explore(id, [])


@pytest.mark.parametrize(
    ("name", "text"), [("gone.py", "gone.py cannot be read: No such file"), ("{}:gone", "has no function gone")]
)
def test_explore_names_a_program_that_is_missing(
    name: str, text: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text("")
    with pytest.raises(SystemExit, match="2"):
        main([name.format(tmp_path / "script.py")])
    assert text in capsys.readouterr().err


def test_a_script_imports_modules_of_its_folder(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_the_script.py").write_text("")
    (tmp_path / "script.py").write_text("import beside_the_script\ndef fails(comm): raise OSError")
    assert main([str(tmp_path / "script.py"), "--seeds", "3"]) == 0
    assert "1 seed passed" in capsys.readouterr().out
    program = f"{tmp_path / 'script.py'}:fails"
    assert main([program, "--seeds", "3:4", "--ranks", "2:5"]) == 1
    command = f"again:  python -m mpikv.testing.explore {program} --ranks 2:5 --hosts 1:1 --seeds 3\n"
    assert command in capsys.readouterr().err


def test_a_communicator_is_used_by_its_own_rank_alone() -> None:
    kept: list[Any] = []

    def calls(comm: Any) -> list[Callable[[], Any]]:
        buffer = bytearray(1)
        messages = [lambda: comm.Isend(b"x", 0), lambda: comm.Irecv(buffer, 0, 0), lambda: comm.Recv(buffer, 0, 0)]
        return [comm.Barrier, comm.Ibarrier, comm.Dup, comm.Iprobe, lambda: comm.allgather(1), *messages]

    def refused(comm: Any) -> int:
        texts = []
        for call in calls(comm):
            with pytest.raises(SimulatedError) as failure:
                call()
            texts.append(str(failure.value))
        return sum("on <simulated communicator, rank 0/2>: this thread is " in text for text in texts)

    def program(comm: Any) -> int:
        kept.extend([comm, comm.Irecv(bytearray(1), 0, 0)] if comm.rank == 0 else [])
        comm.Barrier()
        if comm.rank == 1:
            return refused(kept[0])
        told: list[int] = []
        thread = threading.Thread(target=lambda: told.append(refused(comm)))
        thread.start()
        thread.join()
        return told[0]

    assert cluster(2).run(program) == [8, 8]
    assert refused(kept[0]) == 8
    with pytest.raises(SimulatedError, match="Wait: this thread is no simulated rank, or its run has ended"):
        kept[1].Wait()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda comm: comm.Isend(b"x", 5), "Isend to: rank 5 is none of this communicator's 2 ranks"),
        (lambda comm: comm.Isend(b"x", -1), "Isend to: rank -1 is none"),
        (lambda comm: comm.Recv(bytearray(1), 5, 0), "Irecv from: rank 5 is none"),
        (lambda comm: comm.Iprobe(2), "Iprobe from: rank 2 is none"),
        (lambda comm: comm.bcast(1, root=5), "bcast from: rank 5 is none"),
        (lambda comm: comm.Ibcast(np.zeros(1), 5), "Ibcast from: rank 5 is none"),
        (lambda comm: comm.bcast(1, root=comm.rank), "ranks call different operations: .*rank 0 bcast from 0"),
    ],
)
def test_a_rank_that_does_not_exist_or_is_not_agreed_on_is_named(call: Callable[[Any], Any], text: str) -> None:
    with pytest.raises(SimulatedError, match=text):
        cluster(2).run(call)
