"""Runs the tests on mutants, and writes down what notices each."""

import json
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .drawing import Mutant
from .trees import Outcome, Tree, in_trees

LIMIT = 3600.0
"""Seconds for a session, on a busy machine. Each test has a deadline of its own."""
LATE = re.compile("did not finish in|did not start")
"""What is said of a test that takes too long, or a job."""
FIRST = {
    "transports": "contract/test_transports unit/test_mailbox unit/test_routes store/test_hosts store/test_store",
    "agreement": "unit/test_status_board unit/test_waiting unit/test_meeting store/test_errors store/test_async",
    "engine": "unit/test_arena unit/test_plan unit/test_background store/test_differential store/test_join",
    "placement": "contract/test_placements store/test_trainer",
    "keys": "unit/test_keys store/test_store store/test_groups",
    "rows": "unit/test_row_sparse store/test_rows",
    "checkpoint": "unit/test_checkpoint_files unit/test_checkpoint_drafts store/test_checkpoint",
    "compression": "contract/test_codecs store/test_compression",
    "asynchronous": "unit/test_client store/test_async",
}
"""The tests of an area, which notice most of its mutants."""
LONG = ("store/test_training", "store/test_scale")
"""What scripts/test leaves to ``--all``."""


def sessions(area: str) -> list[list[str]]:
    """Return the arguments of pytest in five sessions: the tests of an area, of stores on two ranks, all that
    scripts/test runs, those for GPUs, and those with torch.
    """
    # A copy has no history, which the test of sizes reads.
    left_out = ["--simulate", *(f"--ignore=tests/{name}.py" for name in ("docs/test_size", *LONG))]
    first = [f"tests/{file}.py" for file in FIRST[area].split()]
    stores, others = ["tests/contract", "tests/store"], ["tests/simulation", "tests/unit", "tests/docs"]
    on_gpus, with_torch = ["--ranks=2", "tests/gpu/real", "tests/gpu/emulated"], ["--ranks=2", "tests/with_torch"]
    on_some, on_all = ["--ranks=2", *left_out], ["--ranks=1,2,3", *left_out]
    return [[*on_all, *first], [*on_some, *stores], [*on_all, *others, *stores], on_gpus, with_torch]


def examine(tree: Tree, mutant: Mutant) -> str:
    """Return a test that fails with the mutant, and passes without, or nothing."""
    for arguments in sessions(mutant.area):
        with tree.planted(mutant):
            by = noticed(tree, arguments)
        if by and "::" in by and session(tree, alone(arguments, by)).failed:
            raise RuntimeError(f"{by} fails without a fault, too")
        if by:
            return by
    return ""


def alone(arguments: Sequence[str], test: str) -> list[str]:
    """Return the arguments for one test of a session."""
    return [*(word for word in arguments if word.startswith("--")), test]


def noticed(tree: Tree, arguments: Sequence[str]) -> str:
    """Return a test that fails, or nothing. On a busy machine one may be late once, but not twice."""
    while (outcome := session(tree, arguments)).failed:
        again = alone(arguments, outcome.failed)
        if "::" not in outcome.failed or not LATE.search(outcome.text) or session(tree, again).failed:
            break
        arguments = [*arguments, f"--deselect={outcome.failed}"]
    return outcome.failed


def session(tree: Tree, arguments: Sequence[str]) -> Outcome:
    """Return how a session of pytest ends."""
    library = {"gpu": "emulated", "with_torch": "torch"}.get(arguments[-1].split("/")[1], "mpich")
    return tree.run_on(library, ["-x", "--tb=no", *arguments], LIMIT)


def run(mutants: Iterable[Mutant], results: Path, jobs: int) -> None:
    """Append a line to the results for each mutant that was not noticed yet, those first that were not run; later lines
    hold.
    """
    found = {record["mutant"]: record["noticed"] for record in read(results)}
    left = sorted((each for each in mutants if not found.get(each.key)), key=lambda mutant: mutant.key in found)
    results.parent.mkdir(parents=True, exist_ok=True)

    def note(tree: Tree, mutant: Mutant) -> None:
        start = time.monotonic()
        by = examine(tree, mutant)
        record = {"mutant": mutant.key, "noticed": by, "seconds": time.monotonic() - start}
        with results.open("a") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        print(f"{mutant.number} {mutant.key}\n    {by or 'SURVIVED'}", flush=True)

    in_trees(left, note, jobs)


def read(results: Path) -> list[dict[str, Any]]:
    """Return what was written down so far."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
