"""``mpikv bench`` and ``scripts/bench``: parts without ranks, and small jobs with the MPI library that is here."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.launching import cleaned, mpi, why_no_mpi

import mpikv
from mpikv.cli.bench import main, options, oracle, report, rounds, worker
from mpikv.cli.bench.cases import Group
from mpikv.cli.bench.keysets import KeySet, bert_base, gradients, key_set, many_small, resnet50
from mpikv.cli.bench.rounds import Case, measure
from mpikv.cli.bench.rules import BLOCK
from mpikv.cli.launchers import clean
from mpikv.protocols import Array

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))  # before what follows: the benchmark is in no package
from benchmark.options import GPU_SUITES, SUITES  # noqa: E402
from benchmark.options import parse as parse_all  # noqa: E402
from benchmark.report import lines as all_lines  # noqa: E402
from benchmark.rules import RULES  # noqa: E402

# Two jobs take a dozen seconds where nothing else runs.
DEADLINE = 110.0
pytestmark = [pytest.mark.deadline(120), pytest.mark.one_library]
FEW = KeySet("a few", ((3,), (2, 2), (5,)))
BENCH, SCRIPT = ("-m", "mpikv", "bench"), (str(ROOT / "scripts/benchmark"),)
Lines = Callable[[dict[str, Any]], Iterator[str]]
Parse = Callable[[Sequence[str], "int | None"], Any]
Run = Callable[..., subprocess.CompletedProcess[str]]


class Alone:
    """A communicator of one rank."""

    rank, size = 0, 1

    def Barrier(self) -> None:  # noqa: N802
        pass

    def allgather(self, one: Any) -> list[Any]:
        return [one]

    def bcast(self, one: Any) -> Any:
        return one


class Plain:
    """A contender that makes SGD-momentum steps of its own on the sums of so many ranks."""

    def __init__(self, size: int, exact: bool | None = True, rate: float = 0.01) -> None:
        self.exact, self.rate = exact, rate
        self.sums = [
            sum(parts[1:], parts[0]) for parts in zip(*(gradients(r, FEW.shapes) for r in range(size)), strict=True)
        ]
        self.weights = [np.ones(shape, np.float32) for shape in FEW.shapes]
        self.momentum = [np.zeros(shape, np.float32) for shape in FEW.shapes]

    def step(self) -> None:
        for total, weight, momentum in zip(self.sums, self.weights, self.momentum, strict=True):
            momentum *= np.float32(0.9)
            momentum -= np.float32(self.rate) * total
            weight += momentum

    def results(self) -> list[Array]:
        return self.weights

    def close(self) -> None:
        pass


# --- Keys, gradients and rules


def test_the_sets_are_those_of_the_networks() -> None:
    for shapes, keys, elements, small in ((resnet50(), 161, 25_557_032, 107), (bert_base(), 199, 109_482_240, 112)):
        assert (len(shapes), sum(map(math.prod, shapes))) == (keys, elements)
        assert sum(4 * math.prod(shape) <= 8192 for shape in shapes) == small
    many = many_small()
    assert len(many) == 10_000
    assert {1, 100} <= {shape[0] for shape in many} <= set(range(1, 101))
    assert key_set("resnet50", quick=False).nbytes == 4 * 25_557_032


@pytest.mark.parametrize("name", RULES)
def test_a_rule_by_hand_is_that_of_the_store(name: str) -> None:
    rule, size = RULES[name], BLOCK + 7
    optimizer = mpikv.optimizers.create(name, **rule.options)
    gradient = np.random.default_rng(0).random(size, np.float32) + np.float32(0.5)
    ours = theirs = np.ones(size, np.float32)
    ours, states = theirs.copy(), [np.zeros(size, np.float32) for _ in range(rule.states)]
    state = {slot: np.zeros(size, dtype) for slot, dtype in optimizer.slots(theirs.dtype).items()}
    assert len(state) == rule.states
    for count in (1, 2, 3):
        rule.apply(count, gradient.copy(), ours, states)
        optimizer.update(optimizer.step(0, count), gradient.copy(), theirs, state)
    assert np.max(np.abs(ours - theirs)) <= rule.tolerance(3, 1.5, 1.0)
    # A missing step is far beyond the tolerance.
    optimizer.update(optimizer.step(0, 4), gradient.copy(), theirs, state)
    assert np.max(np.abs(ours - theirs)) > 100 * rule.tolerance(3, 1.5, 1.0)
    if name == "sgd":
        rule.apply(4, gradient.copy(), ours, states)
        assert np.array_equal(ours, theirs)


# --- The oracle


def cases_of(*contenders: Plain, steps: int = 3) -> list[Case]:
    cases = [Case(f"case {number}", contender) for number, contender in enumerate(contenders)]
    for number, case in enumerate(cases):
        for _ in range(steps + number):
            case.run_once()
    return cases


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("value", [np.nan, np.inf, 7.0])
def test_a_wrong_element_is_named(exact: bool, value: float) -> None:
    cases = cases_of(Plain(2), Plain(2, exact))
    cases[1].contender.results()[1][1, 0] = value  # type: ignore[index]
    found = oracle.mismatches(cases, FEW, 2, RULES["sgd"])
    assert list(found) == ["case 1"]
    assert found["case 1"].startswith(f"key 1 after 4 steps: element 2 is {np.float32(value)!s} and not ")
    assert found["case 1"].endswith("and 1 are wrong in all")


def test_a_bit_is_wrong_only_where_bits_are_promised() -> None:
    cases = cases_of(Plain(2), Plain(2, exact=False), Plain(2, exact=None))
    for case in cases:
        weight = next(iter(case.contender.results()))
        weight[0] = np.nextafter(weight[0], np.float32(9))
    assert list(oracle.mismatches(cases, FEW, 2, RULES["sgd"])) == ["case 0"]


@pytest.mark.parametrize("change", ["a step too few", "another rate", "a rank too few"])
def test_a_wrong_way_is_beyond_rounding(change: str) -> None:
    contender = Plain(1 if change == "a rank too few" else 2, False, 0.011 if change == "another rate" else 0.01)
    (case,) = cases_of(contender)
    case.steps += change == "a step too few"
    assert oracle.mismatches([case], FEW, 2, RULES["sgd"])


# --- Rounds


class Clock:
    """A clock that only the work moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def perf_counter(self) -> float:
        return self.now

    def contender(self, name: str, seconds: float) -> Any:
        clock = self

        class Work(Plain):
            def step(self) -> None:
                clock.now += seconds
                clock.log.append(name)

        return Work(1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rounds, "time", clock)
    return clock


def test_short_cases_fill_a_turn_and_long_ones_do_not_repeat(clock: Clock) -> None:
    lengths = [1e-6, 0.99 * rounds.SHORT, 1.01 * rounds.SHORT, 0.1]
    cases = [Case(str(seconds), clock.contender(str(seconds), seconds)) for seconds in lengths]
    measure(Alone(), cases, 3)
    assert [case.repeats for case in cases[2:]] == [1, 1]
    assert all(case.repeats * seconds >= rounds.TURN for case, seconds in zip(cases[:2], lengths, strict=False))
    for case, seconds in zip(cases, lengths, strict=True):
        assert case.seconds == pytest.approx([seconds] * 3)
        assert case.steps == clock.log.count(case.name)
    # One look is enough for the longest.
    assert cases[3].steps == 4


def test_each_round_begins_with_another_case(clock: Clock) -> None:
    cases = [Case(name, clock.contender(name, 1.0)) for name in "abc"]
    measure(Alone(), cases, 4)
    assert "".join(clock.log[3:]) == "abcbcacababc"


def test_a_group_too_large_for_the_host_is_left_out() -> None:
    def never() -> Plain:
        raise AssertionError("it was made")

    group = Group("large", "a large set", FEW, None, 3, {"store": never}, needed_bytes=1 << 80)
    found = worker.measure_group(Alone(), group)
    assert "GB of memory are needed" in found["skipped"]["store"]
    text = text_of(job(groups=[found]))
    assert "a large set, 3 rounds\n  not measured" in text
    assert f"store: {found['skipped']['store']}" in text


# --- The command line


MISUSE = {
    "-n 0": "'0' is not a positive number",
    "-n 2 --ranks-scaling 1,2": "exclude each other",
    "--only resnet5": "did you mean 'resnet50'?",
    "--only=": "unknown group ''",
    "--suite sets --only many": "--suite and --only exclude each other",
    "--json /no/such/folder/file": "'/no/such/folder/file' cannot be written",
    "train.py": "unrecognized arguments: train.py",
}
MISUSE_OF_SCRIPT = {
    "--optimizer sgd,momentum": "unknown optimizer 'momentum'",
    "--optimizer=": "unknown optimizer ''",
    "--device gpu --only push-pull": "resnet50, sizes, small)",
    "--device gpu --suite torch": "invalid choice: 'torch'",
    "--device tpu": "invalid choice: 'tpu'",
}


@pytest.mark.parametrize(
    ("parse", "name", "arguments", "complaint"),
    [
        *((options.parse, "mpikv bench", *each) for each in MISUSE.items()),
        *((parse_all, "scripts/bench", *each) for each in (MISUSE | MISUSE_OF_SCRIPT).items()),
    ],
)
def test_misuse_is_one_line_and_status_2(
    parse: Parse, name: str, arguments: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(arguments.split(), None)
    said = capsys.readouterr()
    assert (caught.value.code, said.out) == (2, "")
    assert said.err.startswith(f"{name}: ")
    assert said.err.count("\n") == 1
    assert complaint in said.err


@pytest.mark.parametrize("suites", [SUITES, GPU_SUITES])
def test_the_script_explains_what_it_measures(suites: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_all(["--help", *["--device", "gpu"] * (suites is GPU_SUITES)], None)
    text = capsys.readouterr().out.partition("what is measured")[2]
    assert all(name in text for groups in suites.values() for name in groups)


# --- The report


def job(**changes: Any) -> dict[str, Any]:
    def case(name: str, median: float, floor: int | None) -> dict[str, Any]:
        return {
            "name": name,
            "median": median,
            "quartiles": [median, 2 * median],
            "seconds": [median],
            "repeats": 3,
            "steps": 9,
            "floor": floor,
        }

    group = {
        "name": "resnet50",
        "title": "a set, LAMB",
        "elements": 10**6,
        "nbytes": 4 * 10**6,
        "rounds": 5,
        "cases": [case("store", 1e-3, 32), case("memcpy", 4e-3, None)],
        "comparisons": [
            {"goal": "store / memcpy", "ours": "store", "peer": "memcpy", "bound": 0.3, "ratio": 0.25}
            | {"ours_median": 1e-3, "peer_median": 4e-3}
        ],
        "skipped": {"torch DDP": "PyTorch is not installed"},
        "wrong": {},
    }
    return {"ranks": 2, "library": "MPI 5", "transport": "shm", "pinned": True, "crowded": False, "cores": 2,
            "idle": 0.99, "settings": {}, "groups": [group],
            "machine": {"cpu": "a CPU", "numpy": "2", "python": "3"}} | changes  # fmt: skip


def text_of(*jobs: dict[str, Any], lines: Lines = report.lines) -> str:
    return "\n".join(lines({"mpikv": "1", "quick": False, "jobs": list(jobs)}))


@pytest.mark.parametrize(("write", "bound"), [(report.lines, []), (all_lines, ["bound"])])
def test_ratios_come_first(write: Lines, bound: list[str]) -> None:
    lines = text_of(job(), lines=write).splitlines()
    assert lines[0] == "mpikv 1, 2 ranks, transport shm, MPI 5, numpy 2, Python 3"
    assert "warning" not in lines[1] + lines[2]
    assert lines[3].startswith("ratios of medians")
    assert lines[4].split() == ["goal", "ours", "peer", "ratio", *bound]
    assert lines[5].split() == ["store", "/", "memcpy", "1.00", "ms", "4.00", "ms", "0.25", *["≤", "0.30"] * len(bound)]
    assert lines[6].startswith("bound: ") == bool(bound)


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"idle": 0.5}, "warning: the machine was busy with something else (50% idle)"),
        ({"crowded": True, "pinned": False}, "warning: more ranks than cores"),
        ({"settings": {"OMPI_MCA_smsc": "^cma"}}, "settings: OMPI_MCA_smsc=^cma"),
        ({"idle": None}, "before the measurement unknown"),
    ],
)
def test_what_spoils_figures_is_told(changes: dict[str, Any], warning: str) -> None:
    assert warning in text_of(job(**changes))
    assert warning not in text_of(job())


def test_a_wrong_result_has_no_ratio() -> None:
    spoilt = job()
    spoilt["groups"][0]["wrong"] = {"store": "rank 1: key 3 after 9 steps: and so on"}
    assert "0.25" not in text_of(spoilt)
    complaints = report.errors({"jobs": [spoilt, {"ranks": 4, "error": "no"}]})
    assert complaints == ["wrong result: resnet50, store, rank 1: key 3 after 9 steps: and so on (2 ranks)", "no"]


def test_jobs_before_a_failed_one(monkeypatch: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def start(arguments: Sequence[str]) -> int:
        if arguments[1] == "2":
            return 9
        Path(arguments[arguments.index("--report") + 1]).write_text(json.dumps(job(ranks=1)))
        return 0

    monkeypatch.setattr("mpikv.cli.run.main", start)
    assert main(["--ranks-scaling", "1,2,4", "--json", str(tmp_path / "all.json")]) == 9
    said = capsys.readouterr()
    assert [job["ranks"] for job in json.loads((tmp_path / "all.json").read_text())["jobs"]] == [1]
    assert "mpikv 1, 1 rank" in said.out.replace(mpikv.__version__, "1")
    problem, rest = "failed with status 9 and was not measured", "the later jobs were not started"
    assert said.err == f"mpikv bench: the job of 2 ranks {problem}; {rest}\n"


# --- Jobs


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Run]:
    """Return a function that runs a command in a folder of its own, and cleans up after it."""
    if why_no_mpi():
        pytest.skip(why_no_mpi())
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "scripts")))
    environ = {**clean(os.environ), "PYTHONPATH": paths, "TMPDIR": str(tmp_path)}

    def run(*arguments: str, command: Sequence[str] = BENCH) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, *command, *arguments]
        return subprocess.run(
            line, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE, check=False
        )

    with cleaned(tmp_path):
        yield run


SIZES = ["sizes/64", "sizes/4096", "sizes/262144"]


@pytest.mark.parametrize(
    ("command", "names"), [(BENCH, SIZES), (SCRIPT, ["push-pull/1 key", "push-pull/100 keys", "allreduce", *SIZES])]
)
def test_latency_is_measured_on_two_ranks(bench: Run, tmp_path: Path, command: Sequence[str], names: list[str]) -> None:
    done = bench("--quick", "--suite", "latency", "--json", "all.json", command=command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith(f"mpikv {mpikv.__version__}, 2 ranks, transport shm, ")
    assert done.stdout.count("1 key of 64 B, SGD-momentum: push, pull /") == (command is SCRIPT)
    assert "measured: " in done.stderr
    assert "measured: " not in done.stdout
    document = json.loads((tmp_path / "all.json").read_text())
    (only,) = document["jobs"]
    assert only["library"].split()[-1].lstrip("v") in mpi()[0].version
    assert only["machine"]["numpy"] == np.__version__
    groups = {group["name"]: group for group in only["groups"]}
    assert list(groups) == names
    for group in groups.values():
        assert group["wrong"] == group["skipped"] == {}
        for case in group["cases"]:
            assert len(case["seconds"]) == group["rounds"] == 3
            assert case["median"] == np.median(case["seconds"]) > 0
            assert case["steps"] >= 4 * case["repeats"]
    calls = ["push", "pull", "push, pull", "pushpull", "Allreduce"]
    assert [case["name"] for case in groups["sizes/64"]["cases"]] == calls


@pytest.mark.parametrize(("command", "sets"), [(BENCH, ["resnet50", "many"]), (SCRIPT, ["many"])])
def test_sets_on_several_numbers_of_ranks(
    bench: Run, tmp_path: Path, command: Sequence[str], sets: Sequence[str]
) -> None:
    chosen = "--quick", "--ranks-scaling", "1,3", "--only", ",".join(sets), "--json", "all.json", "--rounds", "2"
    done = bench(*chosen, command=command)
    assert done.returncode == 0, done.stderr
    jobs = json.loads((tmp_path / "all.json").read_text())["jobs"]
    assert [job["ranks"] for job in jobs] == [1, 3]
    assert [job["transport"] for job in jobs] == ["local", "shm"]
    for job in jobs:
        assert [group["name"] for group in job["groups"]] == [f"{name}/sgd" for name in sets]
        for group in job["groups"]:
            assert group["wrong"] == {}
            names = {case["name"] for case in group["cases"]}
            assert {"store", "zero copy", "memcpy", "Reduce per key"} <= names
            if command is SCRIPT:
                assert {"torch DDP", "store numba"} <= names | set(group["skipped"])
    assert "more ranks than cores" in done.stdout or jobs[1]["cores"] >= 3
    assert "private arrays / memcpy, 3 ranks" in done.stdout


def test_files_are_measured_and_read_again(bench: Run, tmp_path: Path) -> None:
    done = bench("--quick", "--suite", "files", "--json", "all.json", command=SCRIPT)
    assert done.returncode == 0, done.stderr
    (job,) = json.loads((tmp_path / "all.json").read_text())["jobs"]
    assert [group["name"] for group in job["groups"]] == list(SUITES["files"])
    for group in job["groups"]:
        assert group["wrong"] == group["skipped"] == {}
        assert len(group["cases"]) == 2 * len(group["comparisons"]) == 8
        assert all(case["median"] > 0 for case in group["cases"])
    assert "4 keys of 64 KB: load over the same keys / plain reads" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["all.json"]


def test_other_optimizers_and_transports_are_right(bench: Run) -> None:
    done = bench(
        *("--quick", "--only", "many", "--optimizer", "sgd,adam,lamb", "--transport", "mpi"),
        *("--no-pin", "--rounds", "1"),
        command=SCRIPT,
    )
    assert done.returncode == 0, done.stderr
    assert "transport mpi" in done.stdout
    assert "ranks not pinned" in done.stdout
    assert all(f"{rule.title}, 1 rounds" in done.stdout for rule in RULES.values())
    assert all(f"  {floor} B/element" in done.stdout for floor in (24, 32, 40))


WRONG = """
import sys
import numpy as np
from mpikv import KVStore
from mpikv.cli.bench import main

right = KVStore.pushpull

def wrong(self, key, value=None, out=None, priority=0):
    result = right(self, key, value, out, priority)
    if self.rank == 1 and isinstance(out, list):
        out[7][-1] = np.nextafter(out[7][-1], np.float32(9))
    return result

KVStore.pushpull = wrong
sys.exit(main(sys.argv[1:]))
"""


def test_a_wrong_result_is_an_error(bench: Run, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    done = bench("--quick", "--only", "many", command=("-m", "mpikv", "run", "-n", "2", "wrong.py"))
    assert done.returncode == 1, done.stderr
    assert "mpikv bench: wrong result: many/sgd, store, rank 1: key 7 after " in done.stderr
    row = next(line for line in done.stdout.splitlines() if "SGD-momentum: private arrays / memcpy" in line)
    assert row.endswith("wrong")


FAILING = """
import sys
from benchmark import sets as more
from benchmark.program import main
from mpikv import MPIKVError
from mpikv.cli.bench import sets, stores
from mpikv.cluster import environment

def fail(*arguments):
    raise MemoryError("no room")

def step(self):
    self._kv.pushpull(self._keys)
    raise MPIKVError("no step")

if environment.launch_of().rank == 1:
    more.kernels_problem = lambda kernels: "no kernels"
    sets.ReducePerKey = fail
    stores.ZeroCopy.step = step
sys.exit(main(sys.argv[1:]))
"""


def test_what_one_rank_cannot_have_all_leave_out(bench: Run, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    done = bench(
        *("--quick", "--only", "many", "--json", "all.json"), command=("-m", "mpikv", "run", "-n", "2", "failing.py")
    )
    assert done.returncode == 0, done.stderr
    (group,) = json.loads((tmp_path / "all.json").read_text())["jobs"][0]["groups"]
    assert {case["name"] for case in group["cases"]} - {"torch DDP"} == {"store", "memcpy"}
    skipped = {name: text for name, text in group["skipped"].items() if name != "torch DDP"}
    assert skipped.pop("store numba") in ("rank 1: no kernels", "numba is not installed")
    assert skipped == {
        "zero copy": "rank 1: no step",
        "zero copy numba": group["skipped"]["store numba"],
        "Reduce per key": "rank 1: no room",
    }
