"""``mpikv bench`` and ``scripts/bench``: parts without ranks, and small jobs with the MPI library that is here."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.commands import Done, python
from support.launching import cleaned, mpi, why_no_mpi

import mpikv
from mpikv.cli.bench import main, oracle, report
from mpikv.cli.bench.keysets import KeySet, gradients
from mpikv.cli.bench.rounds import Case
from mpikv.cli.bench.rules import SGD
from mpikv.protocols import Array

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))  # before what follows: the benchmark is in no package
from benchmark.options import parse  # noqa: E402
from benchmark.report import lines as all_lines  # noqa: E402
from benchmark.rules import RULES  # noqa: E402

# Two jobs take a dozen seconds where nothing else runs.
DEADLINE = 110.0
pytestmark = [pytest.mark.deadline(120), pytest.mark.one_library]
FEW = KeySet("a few", ((3,), (2, 2), (5,)))
BENCH, SCRIPT = ("-m", "mpikv", "bench"), (str(ROOT / "scripts/benchmark"),)
Run = Callable[..., "tuple[Done, Any]"]
ALONE: Any = SimpleNamespace(rank=0, size=1, Barrier=lambda: None, allgather=lambda one: [one], bcast=lambda one: one)


class Plain:
    """A contender that makes SGD-momentum steps of its own on the sums of so many ranks."""

    def __init__(self, size: int, exact: bool | None = True, rate: float = 0.01) -> None:
        self.exact, self.rate = exact, rate
        parts = zip(*(gradients(rank, FEW.shapes) for rank in range(size)), strict=True)
        self.sums = [sum(others, first) for first, *others in parts]
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


# --- The oracle


def cases_of(*contenders: Plain) -> list[Case]:
    cases = [Case(f"case {number}", contender) for number, contender in enumerate(contenders)]
    for number, case in enumerate(cases):
        for _ in range(3 + number):
            case.run_once()
    return cases


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("value", [np.nan, 7.0])
def test_a_wrong_element_is_named(exact: bool, value: float) -> None:
    cases = cases_of(Plain(2), Plain(2, exact))
    cases[1].contender.results()[1][1, 0] = value  # type: ignore[index]
    (found,) = oracle.mismatches(cases, FEW, 2, SGD).items()
    assert found[0] == "case 1"
    assert found[1].startswith(f"key 1 after 4 steps: element 2 is {np.float32(value)!s} and not ")


@pytest.mark.parametrize("change", ["a step too few", "another rate", "a rank too few"])
def test_a_wrong_way_is_beyond_rounding(change: str) -> None:
    contender = Plain(1 if change == "a rank too few" else 2, False, 0.011 if change == "another rate" else 0.01)
    (case,) = cases_of(contender)
    case.steps += change == "a step too few"
    assert oracle.mismatches([case], FEW, 2, SGD)


# --- The command line, of the script, which is that of the command and more


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("-n 0", "'0' is not a positive number"),
        ("--only resnet5", "did you mean 'resnet50'?"),
        ("--only=", "unknown group ''"),
        ("--suite sets --only many", "--suite and --only exclude each other"),
        ("--json /no/such/folder/file", "'/no/such/folder/file' cannot be written"),
        ("train.py", "unrecognized arguments: train.py"),
        ("--optimizer sgd,momentum", "unknown optimizer 'momentum'"),
    ],
)
def test_misuse_is_one_line_and_status_2(arguments: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(arguments.split(), None)
    said = capsys.readouterr()
    assert (caught.value.code, said.out) == (2, "")
    assert said.err.startswith("scripts/bench: ")
    assert said.err.count("\n") == 1
    assert complaint in said.err


# --- The report


def job(**changes: Any) -> dict[str, Any]:
    def case(name: str, median: float, floor: int | None) -> dict[str, Any]:
        return {"name": name, "median": median, "quartiles": [median, 2 * median], "repeats": 3, "floor": floor}

    compared = {"goal": "store / memcpy", "ours": "store", "peer": "memcpy", "bound": 0.3, "ratio": 0.25}
    group = {
        "name": "resnet50",
        "title": "a set, LAMB",
        "elements": 10**6,
        "rounds": 5,
        "cases": [case("store", 1e-3, 32), case("memcpy", 4e-3, None)],
        "comparisons": [compared | {"ours_median": 1e-3, "peer_median": 4e-3}],
        "skipped": {"torch DDP": "PyTorch is not installed"},
        "wrong": {},
    }
    return {"ranks": 2, "library": "MPI 5", "transport": "shm", "pinned": True, "crowded": False, "cores": 2,
            "idle": 0.99, "settings": {}, "groups": [group],
            "machine": {"cpu": "a CPU", "numpy": "2", "python": "3"}} | changes  # fmt: skip


def text_of(job: dict[str, Any], lines: Callable[[dict[str, Any]], Iterator[str]] = report.lines) -> str:
    return "\n".join(lines({"mpikv": "1", "quick": False, "jobs": [job]}))


def test_ratios_come_first_and_wrong_results_have_none() -> None:
    lines = text_of(job(), all_lines).splitlines()
    assert lines[0] == "mpikv 1, 2 ranks, transport shm, MPI 5, numpy 2, Python 3"
    assert "warning" not in lines[1] + lines[2]
    assert lines[3].startswith("ratios of medians")
    assert lines[4].split() == ["goal", "ours", "peer", "ratio", "bound"]
    assert lines[5].split() == ["store", "/", "memcpy", "1.00", "ms", "4.00", "ms", "0.25", "≤", "0.30"]
    spoilt = job()
    spoilt["groups"][0]["wrong"] = {"store": "rank 1: key 3 after 9 steps: and so on"}
    assert "0.25" not in text_of(spoilt)
    assert report.errors(spoilt) == ["wrong result: resnet50, store, rank 1: key 3 after 9 steps: and so on"]
    assert report.errors({"ranks": 4, "error": "no"}) == ["no"]


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"idle": 0.5}, "warning: the machine was busy with something else (50% idle)"),
        ({"crowded": True, "pinned": False}, "warning: more ranks than cores"),
        ({"settings": {"OMPI_MCA_smsc": "^cma"}}, "settings: OMPI_MCA_smsc=^cma"),
    ],
)
def test_what_spoils_figures_is_told(changes: dict[str, Any], warning: str) -> None:
    assert warning in text_of(job(**changes))
    assert warning not in text_of(job())


def test_a_failed_job_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("mpikv.cli.run.main", lambda arguments: 9)
    assert main(["-n", "2"]) == 9
    assert capsys.readouterr().err == "mpikv bench: the job failed with status 9 and was not measured\n"


# --- Jobs


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Run]:
    """Return a function that runs a quick command in a folder of its own, and returns what its file has."""
    if why_no_mpi():
        pytest.skip(why_no_mpi())
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "scripts")))
    environ = {"PYTHONPATH": paths, "TMPDIR": str(tmp_path)}

    def run(command: Sequence[str], arguments: str) -> tuple[Done, Any]:
        line = [*command, "--quick", "--json", "all.json", *arguments.split()]
        done = python(*line, cwd=tmp_path, timeout=DEADLINE, **environ)
        return done, json.loads((tmp_path / "all.json").read_text())["jobs"][0]

    with cleaned(tmp_path):
        yield run


def test_the_command_measures_on_two_ranks(bench: Run) -> None:
    done, job = bench(BENCH, "--only sizes,resnet50,many")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith(f"mpikv {mpikv.__version__}, 2 ranks, transport shm, ")
    assert "measured: " in done.stderr
    assert "measured: " not in done.stdout
    assert job["library"].split()[-1].lstrip("v") in mpi()[0].version
    groups = {group["name"]: group for group in job["groups"]}
    assert list(groups) == ["sizes/64", "sizes/4096", "sizes/262144", "resnet50/sgd", "many/sgd"]
    for group in groups.values():
        assert group["wrong"] == group["skipped"] == {}
        for case in group["cases"]:
            assert len(case["seconds"]) == group["rounds"] == 3
            assert case["median"] == np.median(case["seconds"]) > 0
            assert case["steps"] >= 4 * case["repeats"]
    calls = ["push", "pull", "push, pull", "pushpull", "Allreduce"]
    assert [case["name"] for case in groups["sizes/64"]["cases"]] == calls


def test_the_script_measures_more_on_three_ranks(bench: Run, tmp_path: Path) -> None:
    names = "push-pull,allreduce,many,large-file,many-file"
    done, job = bench(SCRIPT, f"-n 3 --only {names} --optimizer sgd,adam,lamb --transport mpi --no-pin --rounds 1")
    assert done.returncode == 0, done.stderr
    expected = ["push-pull/1 key", "push-pull/100 keys", "allreduce", *(f"many/{rule}" for rule in RULES)]
    assert [group["name"] for group in job["groups"]] == [*expected, "large-file", "many-file"]
    for group in job["groups"]:
        assert group["wrong"] == {}
        if "file" in group["name"]:
            assert len(group["cases"]) == 2 * len(group["comparisons"]) == 8
        if "many/" in group["name"]:
            known = {case["name"] for case in group["cases"]} | set(group["skipped"])
            assert known == {
                "store",
                "zero copy",
                "memcpy",
                "Reduce per key",
                "torch DDP",
                "store numba",
                "zero copy numba",
            }
    for text in ("transport mpi", "ranks not pinned", *(f"  {floor} B/element" for floor in (28, 36, 40, 48))):
        assert text in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["all.json"]


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
    done, _ = bench(("-m", "mpikv", "run", "-n", "2", "wrong.py"), "--only many")
    assert done.returncode == 1, done.stderr
    assert "mpikv bench: wrong result: many/sgd, store, rank 1: key 7 after " in done.stderr
    row = next(line for line in done.stdout.splitlines() if "SGD-momentum: private arrays / memcpy" in line)
    assert row.endswith("wrong")
