"""A loop of steps whose ranks are killed at any point, again and again, ends with the bits of one that is not.

``python -m pytest tests/simulation/test_restarts.py`` runs the seeds of the tests; more by hand, from ``tests``:
``python -c "from simulation.test_restarts import trial; print(sum(trial(seed).deaths for seed in range(1000)))"``
"""

import errno
import fcntl
import hashlib
import os
import random
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np
import pytest

import mpikv
from mpikv.keep.commits import Restored
from mpikv.keep.folder import Briefing, read_header, write_briefing
from mpikv.keep.slots import Slots
from mpikv.testing import Deadlock, FullDisk, Kill, Missed, cluster
from mpikv.testing.simulation import Cluster, Fault

STEPS = 6
Program = Callable[[Any], Any]
# A large value has a block of its own.
SHAPES = {"a": (17_000,), "b": (3, 7), "half": (9,), "rows": (6, 2)}


@dataclass
class Record:
    """What the ranks of one attempt saw."""

    begins: set[int] = field(default_factory=set)
    committed: int = 0
    """The first step after the newest commit that returned on any rank."""


@dataclass
class Job:
    """A training, and how often its ranks died. A seed draws its kind."""

    seed: int
    deaths: int = 0
    restores: int = 0
    latest: int = 120
    """The latest turn of a death, in most attempts."""

    def __post_init__(self) -> None:
        draw = random.Random(f"{self.seed} job")
        self.size = draw.randint(2, 4)
        self.hosts = draw.randint(1, 2)
        self.updater = draw.choice(["none", "sgd", "adam", "lamb", "function"])
        # By 0, 1, 3 and 5 steps between commits.
        self.cost = draw.choice([0.0, 0.0, 0.05, 0.1])
        self.codec = draw.choice([None, "2bit", "lowrank"]) if self.updater in ("sgd", "adam") else None
        self.draw, self.options = draw, dict[str, Any]()

    def set_updater(self, kv: Any) -> dict[str, Any]:
        """Set the updater and the codec; return what the program keeps of them."""
        if self.updater == "function":
            total = {"pushed": np.zeros(1)}

            def add(key: Any, pushed: Any, stored: Any) -> None:
                total["pushed"] += float(pushed.sum(dtype=np.float64))
                stored -= pushed * np.cos(total["pushed"]).astype(pushed.dtype) / 16

            kv.set_updater(add)
            return {"total": total}
        if self.updater != "none":
            options = {"momentum": 0.5} if self.updater == "sgd" else {}
            kv.set_optimizer(self.updater, learning_rate=0.1, multi_precision=True, **options)
        if self.codec:
            kv.set_gradient_compression(self.codec)
        return {}

    def train(self, comm: Any, record: Record) -> Any:
        """Train on one rank; return all that a step depends on, or None if the rank could not end."""
        try:
            with mpikv.create(comm=comm, timeout=10.0, **self.options) as kv:
                return self._train(kv, record)
        except (mpikv.Stalled, mpikv.PeerFailed, MemoryError, OSError):
            return None

    def _train(self, kv: Any, record: Record) -> Any:
        dtypes = {"half": np.float16}
        params = {key: np.ones(shape, dtypes.get(key, np.float32)) for key, shape in SHAPES.items()}
        rows = params.pop("rows")
        kv.init(params)
        if self.codec is None and self.updater not in ("function", "lamb"):
            kv.init("rows", mpikv.RowSparse([*range(6)], rows, rows.shape))
        rng, others, seen = np.random.default_rng(kv.rank), random.Random(kv.rank), [0, {"sum": np.zeros(3)}]
        slow = (lambda: time.sleep(self.cost), lambda state: None)
        kv.keep(rng=rng, others=others, seen=seen, slow=slow, **self.set_updater(kv))
        for step in noted(record, kv, kv.steps(STEPS, fill=params)):
            time.sleep(1)
            if step == 3 and self.updater in ("sgd", "adam"):
                kv.set_learning_rate(0.05)
            grads = {key: value - rng.standard_normal(value.shape).astype(value.dtype) for key, value in params.items()}
            for keys in (("a",), ("b", "half")):
                kv.pushpull({key: grads[key] for key in keys}, out={key: params[key] for key in keys})
            if "rows" in kv:
                chosen = sorted(others.sample(range(6), 2))
                kv.push("rows", mpikv.RowSparse(chosen, np.ones((2, 2), np.float32), (6, 2)))
            seen[0] += 1
            seen[1]["sum"] += step
        values = [hashlib.sha256(value).hexdigest() for value in kv.pull(list(kv))]
        versions = [kv.version(key) for key in kv]
        return values, versions, rng.bit_generator.state, others.getstate(), seen[0], seen[1]["sum"].tolist()

    def faults(self) -> list[Fault]:
        """Draw the end of an attempt: the death of a rank, or of all soon after each other, as by a launcher."""
        at = self.draw.randint(1, self.draw.choice([self.latest, 660]))
        if self.draw.random() < 0.1:
            return [FullDisk(self.draw.randrange(self.size), at)]
        ranks = range(self.size) if self.draw.random() < 0.7 else [self.draw.randrange(self.size)]
        return [Kill(rank, at + self.draw.randint(0, 25)) for rank in ranks]

    def run(self, folder: Path | None, attempt: int, faults: list[Fault]) -> tuple[Any, Record]:
        record = Record()
        made = cluster(self.size, hosts=self.hosts, seed=97 * self.seed + attempt, faults=faults)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Missed)
            try:
                results = run_ranks(made, lambda comm: self.train(comm, record), folder)
            except Deadlock:  # in the start of MPI, which has no deadline: a launcher ends the others
                results = [None] * self.size
        return results, record


class AsyncJob(Job):
    """Pushes to ``dist_async``, each of a number at its own place: one that is lost or made twice changes the sum."""

    latest: int = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        self.options = {"name": "dist_async", "staleness": self.seed % 3 or None}

    def _train(self, kv: Any, record: Record) -> Any:
        keys, shape, rng = ["a", "b", "c"], (STEPS, kv.size), np.random.default_rng(kv.rank)
        kv.init({key: np.zeros(shape) for key in keys})
        kv.set_optimizer("sgd", learning_rate=1.0)
        kv.keep(rng=rng, slow=(lambda: time.sleep(self.cost), lambda state: None))
        for step in noted(record, kv, kv.steps(STEPS)):
            time.sleep(1 + 0.1 * kv.rank)
            if step == 3:
                kv.set_learning_rate(0.5)
            # Not after the pushes: it would wait for them, and none were in flight where ranks commit.
            assert (kv.pull(keys[step % 3])[:step, kv.rank] < 0).all()
            for key in keys:
                pushed = np.zeros(shape)
                pushed[step, kv.rank] = rng.integers(1, 1000)
                kv.push(key, pushed)
        kv.barrier()
        return [value.tolist() for value in kv.pull(keys)], [kv.version(key) for key in keys], rng.random()


def noted(record: Record, kv: Any, steps: Iterator[int]) -> Iterator[int]:
    """Yield steps, and note those that begin and are committed."""
    made = 0
    for step in steps:
        record.begins.add(step)
        if "commits" in kv.statistics() and kv.statistics()["commits"]["made"] > made:
            made = kv.statistics()["commits"]["made"]
            record.committed = max(record.committed, step)
        yield step
    record.committed = STEPS


def run_ranks(made: Cluster, program: Program, folder: Path | None) -> list[Any]:
    """Run a program on ranks that have a folder for commits, or none."""
    opened = list[Slots]()

    def open_slots(*arguments: Any) -> Slots:
        opened.append(Slots(*arguments))
        return opened[-1]

    variables = {"MPIKV_KEEP": str(folder)} if folder else {}
    with mock.patch("mpikv.keep.commits.Slots", open_slots), mock.patch.dict(os.environ, variables):
        try:
            return made.run(program)
        finally:
            # As the system does with the files of a process that has ended.
            for slots in opened:
                slots.close()


def trial(seed: int, kind: type[Job] = Job) -> Job:
    """Train without and with deaths, and compare."""
    job, committed = kind(seed), 0
    wanted, _ = job.run(None, 0, [])
    with tempfile.TemporaryDirectory(prefix="mpikv-test-") as folder:
        for attempt in range(4):
            results, record = job.run(Path(folder), attempt, job.faults() if attempt < 3 else [])
            if record.begins:
                job.restores += min(record.begins) > 0
                assert min(record.begins) >= committed, f"a committed step is made again: {record}"
            committed = max(committed, record.committed)
            if None not in results:
                break
            job.deaths += 1
    assert results == wanted
    return job


@pytest.mark.deadline(120)
@pytest.mark.parametrize(("kind", "first"), [*((Job, first) for first in range(0, 40, 10)), (AsyncJob, 0)])
@pytest.mark.feature("restarts")
@pytest.mark.feature("restarts-async")
def test_killed_ranks_go_on_from_the_newest_commit(kind: type[Job], first: int) -> None:
    jobs = [trial(seed, kind=kind) for seed in range(first, first + 10)]
    assert sum(job.deaths for job in jobs) >= 5
    assert sum(job.restores for job in jobs) >= 2


# --- What is refused, and what is left then


def start(
    folder: Path, program: Program, ranks: int = 2, faults: Any = (), hosts: int = 1, store: str = "dist_sync"
) -> list[Any]:
    """Run a program on ranks that are started with a folder for commits; return their results, or texts of errors."""

    def caught(comm: Any) -> Any:
        with mpikv.create(store, comm=comm, timeout=10.0) as kv:
            try:
                return program(kv)
            except (mpikv.MPIKVError, MemoryError, TypeError, ArithmeticError, AssertionError) as error:
                return f"{type(error).__name__}: {error}"

    return run_ranks(cluster(ranks, hosts=hosts, faults=faults), caught, folder)


def loops(
    kv: Any,
    steps: int = 3,
    shape: int = 4,
    updater: Any = "sgd",
    codec: Any = None,
    kept: Mapping[str, Any] = MappingProxyType({}),
    at: Callable[[Any, int], object] = lambda kv, step: None,
    path: Any = None,
) -> tuple[Any, float]:
    kv.init("w", np.zeros(shape, np.float32))
    kv.set_optimizer(updater, learning_rate=1.0)
    if codec is not None:
        kv.set_gradient_compression(codec)
    kv.keep(**kept)
    for step in kv.steps(steps, path=path):
        at(kv, step)
        kv.push("w", np.ones(shape, np.float32))
    return kv.restored, float(kv.pull("w")[0])


def test_a_finished_loop_is_not_made_again(tmp_path: Path) -> None:
    assert start(tmp_path, loops) == [(None, -6.0)] * 2
    # As after a death in the last save: it is made again.
    assert start(tmp_path, lambda kv: loops(kv, path=tmp_path / "run")) == [((3, 0, 0, ""), -6.0)] * 2
    assert (tmp_path / "run").exists()
    assert start(tmp_path, lambda kv: loops(kv, steps=5)) == [((3, 0, 0, ""), -10.0)] * 2


def test_ranks_learn_why_they_were_restarted(tmp_path: Path) -> None:
    def dies(kv: Any, step: int) -> None:
        assert step < 2

    start(tmp_path, lambda kv: loops(kv, at=dies))
    write_briefing(tmp_path, Briefing(1, "rank 1 was killed by SIGKILL"))
    assert start(tmp_path, loops) == [(Restored(2, 1, 1, "rank 1 was killed by SIGKILL"), -6.0)] * 2


def test_a_store_that_has_ended_leaves_its_files(tmp_path: Path) -> None:
    """In a notebook, the error that was shown last keeps its frames."""
    kept = list[Any]()

    def fails(kv: Any) -> None:
        kept.append(kv.steps(3))
        assert next(kept[-1]) == 1

    start(tmp_path, fails)
    assert start(tmp_path, loops) == [(None, -6.0)] * 2


@pytest.mark.parametrize("hosts", [1, 2])
def test_commits_of_several_hosts_are_flushed(tmp_path: Path, hosts: int) -> None:
    """Before and after their header."""
    flushed = list[int]()
    with mock.patch("os.fsync", lambda file: flushed.append(read_header(file).epoch)):
        assert start(tmp_path, loops, hosts=hosts) == [(None, -6.0)] * 2
    commits = [epoch for epoch in flushed if epoch]
    assert (len(commits) >= 4, flushed.count(0)) == (hosts == 2, 2 * len(commits))


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"shape": 5}, "key 'w': float32[4], at 0 of block 1, row 0, and this program has key 'w': float32[5], at 0"),
        ({"updater": "adam"}, "updater SGD, and this program has updater Adam"),
        ({"codec": "fp16"}, "compression None, and this program has compression fp16"),
        ({"kept": {"rng": random.Random(0)}}, "nothing, and this program has the kept object 'rng'"),
        ({"ranks": 3}, "2 ranks, and this program has 3 ranks"),
    ],
)
def test_a_commit_of_another_program_is_refused(tmp_path: Path, change: dict[str, Any], difference: str) -> None:
    start(tmp_path, loops)
    ranks = change.pop("ranks", 2)
    for error in start(tmp_path, lambda kv: loops(kv, **change), ranks):
        assert f"ConfigError: steps: the commit in {tmp_path} has {difference}" in error or ranks == 3
    assert start(tmp_path, loops) == [((3, 0, 0, ""), -6.0)] * 2


@pytest.mark.parametrize(("name", "text"), [("contents.VERSION", "has version 6 of"), ("slots.FORM", "is damaged")])
def test_a_commit_of_another_version_is_refused(tmp_path: Path, name: str, text: str) -> None:
    with mock.patch(f"mpikv.keep.{name}", 6):
        start(tmp_path, loops)
    for error in start(tmp_path, loops):
        assert re.search(f"the commit in {tmp_path}.* {text}", error)


@pytest.mark.parametrize(
    "damage",
    [lambda content: content[:-1] + b"\7", lambda content: content[:-8], lambda content: b"\7" + content[1:]],
    ids=["array", "end", "header"],
)
def test_damaged_and_missing_commits_of_a_rank_are_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    start(tmp_path, loops)
    newest = tmp_path / "1.0.1"
    newest.write_bytes(damage(newest.read_bytes()))
    for error in start(tmp_path, loops):
        assert re.search(rf"CheckpointError: (steps: )?the commit in {newest} is damaged, or of another rank", error)
    newest.unlink()
    assert start(tmp_path, loops) == [((2, 0, 1, ""), -6.0)] * 2
    for file in tmp_path.glob("1.1.*"):
        file.unlink()
    for error in start(tmp_path, loops):
        assert f"ConfigError: steps: the commits of ranks [1] are missing in {tmp_path}; empty the folder" in error


def test_newer_commits_of_another_number_of_ranks_are_named(tmp_path: Path) -> None:
    start(tmp_path, loops)
    write_briefing(tmp_path, Briefing(other_step=4, other_folder="/there"))
    for error in start(tmp_path, loops):
        assert "the newest commit, of step 4, is in /there, and fits only as many ranks" in error
        assert "remove that folder to go on from step 3 [rank" in error
    write_briefing(tmp_path, Briefing(other_step=3, other_folder="/there"))
    assert start(tmp_path, loops) == [((3, 0, 0, ""), -6.0)] * 2


def test_files_of_a_living_process_are_not_taken(tmp_path: Path) -> None:
    start(tmp_path, loops)
    with open(tmp_path / "1.0.0") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        error, other = start(tmp_path, loops)
    assert re.search(r"ConfigError: .*1\.0\.0 are still locked after 5 s: process -1 of an earlier start", error)
    assert other.startswith("PeerFailed: steps(total 3): rank 0 raised")
    assert start(tmp_path, loops) == [((3, 0, 0, ""), -6.0)] * 2


def test_a_file_system_without_locks_is_named(tmp_path: Path) -> None:
    with mock.patch("fcntl.flock", side_effect=OSError(errno.ENOLCK, "No locks available")):
        for error in start(tmp_path, loops):
            assert re.match(rf"ConfigError: .* of {tmp_path} on the host node\d has no locks .*let --keep name", error)


def test_a_failing_getter_leaves_the_commit_before(tmp_path: Path) -> None:
    def keeps(kv: Any, most: int) -> tuple[Any, float]:
        called = [0]

        def get() -> int:
            called[0] += 1
            return 1 // int(kv.rank == 0 or called[0] <= most)

        return loops(kv, kept={"own": (get, lambda state: None)})

    # The first call is that at the begin of the loop.
    first, second = start(tmp_path, lambda kv: keeps(kv, 3))
    assert first.startswith("PeerFailed: steps(commit before step 3): rank 1 raised ZeroDivisionError")
    assert second.startswith("ZeroDivisionError")
    assert start(tmp_path, lambda kv: keeps(kv, 9)) == [((2, 0, 1, ""), -6.0)] * 2


def test_without_room_the_loop_does_not_begin(tmp_path: Path) -> None:
    for error in start(tmp_path, loops, faults=[FullDisk(0, 1), FullDisk(1, 1)]):
        assert re.match(r"MemoryError: .* commits of this rank take \d+ bytes in .* has \d+ left; start with", error)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda kv, step: kv.init("v", np.zeros(2)), "from nothing to key 'v': float64[2]"),
        (lambda kv, step: kv.set_optimizer("adam"), "from updater SGD to updater Adam"),
        (lambda kv, step: kv.set_gradient_compression("fp16"), "from compression None to compression fp16"),
    ],
)
def test_the_store_of_a_loop_stays(tmp_path: Path, change: Callable[[Any, int], object], complaint: str) -> None:
    for error in start(tmp_path, lambda kv: loops(kv, at=change)):
        assert error.startswith(f"Unsupported: steps: the store changed in the loop, {complaint}")


def test_what_a_loop_cannot_keep_or_fill_is_named(tmp_path: Path) -> None:
    def sums(kv: Any) -> Any:
        trainer = mpikv.Trainer({"w": np.zeros(2)}, "sgd", kvstore=kv, update_on_kvstore=False)
        trainer.set_grads({"w": np.ones(2)})
        trainer.step(1)
        return kv.steps(1)

    expected = {sums: "Unsupported: steps: 'w' is a key of", lambda kv: kv.steps(1, fill={"W": 0}): "KeyNotInitialized"}
    assert all(error.startswith(text) for program, text in expected.items() for error in start(tmp_path, program))


SHARES = [(1, 0.05, 0.05 / 0.0125, "dist_sync"), (0.01, 1e-5, 0.1, "dist_sync"), (0.01, 1e-5, 1.0, "dist_async")]


@pytest.mark.parametrize(("step", "cost", "apart", "store"), SHARES)
def test_commits_take_their_share(tmp_path: Path, step: float, cost: float, apart: float, store: str) -> None:
    def program(kv: Any) -> Any:
        slow = (lambda: time.sleep(cost), lambda state: None)
        loops(kv, 200, kept={"slow": slow}, at=lambda *_: time.sleep(step))
        return kv.statistics()["commits"]

    for found in start(tmp_path, program, store=store):
        # One after the first step, one after the last, and in between one each so many seconds.
        assert found["made"] == pytest.approx(200 * step / apart, abs=2)
        assert found["seconds"] == pytest.approx(cost * found["made"], rel=1e-3)


# --- Without mpikv run


def test_a_loop_without_restarts_is_a_range() -> None:
    with mpikv.create() as kv:
        kv.keep(one=[1])
        with pytest.raises(mpikv.ConfigError, match="'one' is kept already"):
            kv.keep(one=[2])
        with pytest.raises(TypeError, match="keep: two is an int, whose state cannot be put back into it"):
            kv.keep(two=2)
        with pytest.raises(mpikv.ConfigError, match="steps: total=-1 is not a whole number"):
            kv.steps(-1)
        assert list(kv.steps(3)) == [0, 1, 2]
        assert kv.restored is None
        with pytest.raises(mpikv.Unsupported, match="a store has one loop; for epochs"):
            kv.steps(3)
        with pytest.raises(mpikv.Unsupported, match="the loop has begun"):
            kv.keep(three=[3])
