"""Measures once which tests execute which lines, and chooses the tests that may notice a mutant."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import subprocess
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .drawing import COMPILED, Mutant
from .trees import Tree, python_of

FAST = ("--simulate", "--ranks=1,2,3")
FOLDERS = ("tests/unit", "tests/docs", "tests/simulation", "tests/store", "tests/contract")


def _listed(name: str) -> list[str]:
    """Return the files in a list of scripts/test."""
    (assignment,) = re.findall(
        rf"^{name}=\([^)]*\)", Path(__file__).parents[1].joinpath("test").read_text(), re.MULTILINE
    )
    command = ["bash", "-c", f'{assignment}; echo "${{{name}[@]}}"']
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


SESSIONS = ((*FAST, *(f"--ignore={file}" for file in _listed("long")), *FOLDERS), ("--ranks=1", *_listed("stand_ins")))
"""What the fast tier runs on one MPI library."""
HOURS = 3600.0
"""The limit of the measurement, in seconds."""
SECONDS = (3.0, 60.0)
"""How long the tests of a mutant's first session take, and those of its first two."""


@dataclass(frozen=True)
class Test:
    """A test that passes without a mutant, and how long it takes."""

    name: str
    seconds: float

    @property
    def function(self) -> str:
        return self.name.partition("[")[0]

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]

    @property
    def ranks(self) -> int:
        found = re.search(r"ranks=(\d+)", self.name)
        return int(found[1]) if found else 1


def measure(folder: Path, tests: Sequence[str]) -> None:
    """Run tests of the fast tier under coverage, and add to a folder what they execute, and how they end."""
    data = folder / "coverage"
    data.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "measured", ignore_errors=True)
    tree = Tree(folder / "measured")
    settings = folder / "coveragerc"
    settings.write_text(
        f"[run]\nsource = {tree.folder}/mpikv\ndata_file = {data}/data\nparallel = true\ncore = ctrace\n"
    )
    more = {
        "COVERAGE_PROCESS_START": str(settings),
        "PYTHONPATH": str(Path(__file__).with_name("measuring")),
        "PYTEST_ADDOPTS": "-p lines_of_tests",
        "MUTANTS_OUTCOMES": str(folder / "outcomes"),
    }
    for arguments in [(*FAST, *tests)] if tests else SESSIONS:
        outcome = tree.run(python_of("mpich"), ["--tb=line", *arguments], HOURS, more)
        print(outcome.text.strip().splitlines()[-1])
    gather(folder)


def gather(folder: Path) -> None:
    """Write the tests of each line to one file."""
    from coverage.numbits import numbits_to_nums

    tests: dict[str, int] = {}
    lines: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for path in (folder / "coverage").iterdir():
        for name, test, bits in read(path):
            number = tests.setdefault(test, len(tests))
            for line in numbits_to_nums(bits):
                lines[name.rpartition("/mpikv/")[2]][line].add(number)
    content = {
        "tests": list(tests),
        "lines": {name: {line: sorted(found) for line, found in each.items()} for name, each in lines.items()},
    }
    (folder / "lines.json").write_text(json.dumps(content))


_LINES = """
select file.path, context.context, line_bits.numbits from line_bits
join file on file.id = line_bits.file_id join context on context.id = line_bits.context_id
where context.context != ''
"""


def read(path: Path) -> Iterable[tuple[str, str, bytes]]:
    """Return file, test and lines, as coverage packs them, of one process."""
    with sqlite3.connect(path) as database:
        tables = {name for (name,) in database.execute("select name from sqlite_master")}
        # Some processes of tests are killed before they have executed anything.
        return database.execute(_LINES).fetchall() if "line_bits" in tables else []


class Measured:
    """What was measured."""

    def __init__(self, folder: Path) -> None:
        content = json.loads((folder / "lines.json").read_text())
        self._lines = content["lines"]
        self._names = content["tests"]
        self._seconds: dict[str, float] = {}
        failed: set[str] = set()
        for line in (folder / "outcomes").read_text().splitlines():
            record = json.loads(line)
            if record["outcome"] == "passed":
                self._seconds[record["test"]] = record["seconds"]
            failed.update([record["test"]] if record["outcome"] == "failed" else [])
        for test in failed:
            self._seconds.pop(test, None)

    def tests(self, mutant: Mutant) -> list[Test]:
        """Return the tests that execute a mutant's lines and pass without it, one case of each function first."""
        lines = self._lines.get(mutant.path, {})
        numbers = {number for line in range(mutant.line, mutant.last + 1) for number in lines.get(str(line), ())}
        if mutant.path in COMPILED:
            numbers = {number for each in lines.values() for number in each}
        names = [self._names[number] for number in numbers]
        functions: dict[str, list[Test]] = defaultdict(list)
        for name in names:
            if name in self._seconds:
                test = Test(name, self._seconds[name])
                functions[test.function].append(test)
        turns = []
        for cases in functions.values():
            # Cases of two ranks, in the same process where they are simulated, notice most.
            turns += enumerate(sorted(cases, key=lambda test: (abs(test.ranks - 2), test.seconds, test.name)))
        return [test for _, test in sorted(turns, key=lambda turn: (turn[0], turn[1].seconds, turn[1].name))]


def batches(tests: Sequence[Test], most: float) -> list[list[Test]]:
    """Cut tests of so many seconds into sessions: most mutants are noticed by the first one."""
    cut: list[list[Test]] = [[] for _ in range(len(SECONDS) + 1)]
    total = 0.0
    for test in tests:
        if total < most:
            cut[bisect(SECONDS, total)].append(test)
        total += test.seconds
    return [batch for batch in cut if batch]


def by_function(tests: Sequence[Test]) -> list[Test]:
    """Return one test for all cases of each function."""
    seconds: dict[str, float] = defaultdict(float)
    for test in tests:
        seconds[test.function] += test.seconds
    return [Test(name, took) for name, took in sorted(seconds.items())]
