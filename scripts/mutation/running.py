"""Runs the tests of a tier on mutants, and writes down what notices each."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .drawing import Mutant
from .measured import FAST, Measured, Test, batches, by_function
from .trees import Outcome, Tree, in_trees

START = 90.0
"""Seconds that a session gets beside ten times what its tests take without a mutant."""

LATE = re.compile("did not finish in|did not start")
"""What is said of a test that takes too long, or a job."""
MINUTES = 60.0
"""What the tests of a file that need processes take, in seconds, at most."""
PROCESSES = {
    "transports": (
        "tests/process/test_single_copy.py",
        "tests/process/test_memory.py",
        "tests/process/test_two_hosts.py",
    ),
    "agreement": ("tests/process/test_processes.py",),
    "engine": ("tests/process/test_single_copy.py", "tests/process/test_memory.py"),
    "keys": ("tests/process/test_processes.py", "tests/process/test_memory.py"),
    "rows": ("tests/process/test_memory.py",),
    "checkpoint": ("tests/process/test_checkpoint_jobs.py",),
    "compression": ("tests/process/test_memory.py", "tests/process/test_single_copy.py"),
}
"""The tests of processes that use an area."""
STAND_INS = {
    "transports": ("tests/gpu/stand_ins/test_nccl.py", "tests/gpu/stand_ins/test_nccl_store.py"),
    "engine": ("tests/gpu/stand_ins/test_gpu_memory.py", "tests/gpu/stand_ins/test_device.py"),
    "keys": ("tests/gpu/stand_ins/test_device.py",),
    "rows": ("tests/gpu/stand_ins/test_device_rows.py", "tests/gpu/stand_ins/test_gpu_memory.py"),
    "checkpoint": ("tests/gpu/stand_ins/test_gpu_memory.py",),
    "compression": ("tests/gpu/stand_ins/test_gpu_compression.py",),
    "asynchronous": ("tests/gpu/stand_ins/test_gpu_compression.py",),
}
"""The tests on stand-ins for GPUs that use an area."""
EMULATED = {
    "transports": ("tests/gpu/real/test_stores.py", "tests/gpu/real/test_sums.py"),
    "engine": ("tests/gpu/real/test_order.py", "tests/gpu/real/test_replay.py"),
    "rows": ("tests/gpu/real/test_rows.py",),
}
"""The tests on the emulated GPU that use an area."""

Notice = Callable[[Tree, Mutant], dict[str, Any]]


def by_fast(measured: Measured, most: float) -> Notice:
    """Return what runs the tests of the fast tier that execute a mutant's lines, until one fails.

    At most tests of so many seconds are run.
    """

    def notice(tree: Tree, mutant: Mutant) -> dict[str, Any]:
        tests, run, failed = measured.tests(mutant), 0, ""
        for batch in batches(tests, most):
            failed = confirmed(tree, batch)
            run += len(batch)
            if failed:
                break
        return {"noticed": failed, "run": run, "of": len(tests)}

    return notice


def by_all(measured: Measured) -> Notice:
    """Return what runs tests for GPUs, on stand-ins and on the emulated one, the same functions on real ranks, and
    tests that need processes, until one fails.
    """

    def notice(tree: Tree, mutant: Mutant) -> dict[str, Any]:
        stand_ins, emulated = (
            [Test(name, MINUTES) for name in tests.get(mutant.area, ())] for tests in (STAND_INS, EMULATED)
        )
        functions = by_function(measured.tests(mutant))
        files = [Test(name, MINUTES) for name in sorted({test.file for test in functions if "/store/" in test.file})]
        processes = [Test(name, MINUTES) for name in PROCESSES.get(mutant.area, ())]
        failed = session(tree, "mpich", ["--ranks=1,2,4"], stand_ins).failed
        failed = failed or session(tree, "emulated", ["--ranks=2,3"], emulated).failed
        for library, ranks in (("mpich", "--ranks=1,2,4"), ("openmpi", "--ranks=3")):
            failed = failed or session(tree, library, ["-m", "processes", ranks], files).failed
            failed = failed or session(tree, library, [ranks], [*processes, *functions]).failed
        return {"noticed": failed, "run": len(functions), "of": len(functions)}

    return notice


def confirmed(tree: Tree, tests: Sequence[Test]) -> str:
    """Return a test of the fast tier that fails, or nothing. On a busy machine one may be late once, but not twice."""
    while (outcome := session(tree, "mpich", FAST, tests)).failed:
        alone = [test for test in tests if test.name == outcome.failed] or tests
        if not LATE.search(outcome.text) or session(tree, "mpich", FAST, alone).failed:
            break
        tests = [test for test in tests if test not in alone]
    return outcome.failed


def session(tree: Tree, library: str, options: Sequence[str], tests: Sequence[Test]) -> Outcome:
    """Return how a session with these tests ends."""
    if not tests:
        return Outcome("", "")
    chosen = tree.folder.with_name("chosen")
    chosen.write_text("\n".join(test.name for test in tests))
    limit = START + 10 * sum(test.seconds for test in tests)
    return tree.run_on(library, ["-x", "--tb=no", *options, f"@{chosen}"], limit)


def run(mutants: Iterable[Mutant], tier: str, notice: Notice, results: Path, jobs: int) -> None:
    """Append a line to the results for each mutant that no tier has noticed, those first that were not run; later lines
    hold.
    """
    records = read(results)
    noticed = {record["mutant"] for record in records if record["noticed"]}
    tried = {record["mutant"] for record in records if record["tier"] == tier}
    left = sorted((mutant for mutant in mutants if mutant.key not in noticed), key=lambda mutant: mutant.key in tried)

    def examine(tree: Tree, mutant: Mutant) -> None:
        start = time.monotonic()
        with tree.planted(mutant):
            found = notice(tree, mutant)
        record = {"mutant": mutant.key, "tier": tier, **found, "seconds": time.monotonic() - start}
        with results.open("a") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        print(f"{mutant.number} {mutant.key}\n    {record['noticed'] or 'SURVIVED'}", flush=True)

    in_trees(left, examine, jobs)


def read(results: Path) -> list[dict[str, Any]]:
    """Return what was written down so far."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
