"""Writes the page that says which mutants the tests notice, and why the others are left."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .drawing import AREAS, Mutant

REASONS = Path(__file__).with_name("reasons.json")

HEAD = """# Mutants

This page shows how many planted faults the tests notice, and why they miss the others. A mutant is mpikv with one such
fault: a comparison turned round, a call left out, a bound moved by one.

`scripts/mutants` draws mutants by a seed, the same number in each area, and runs the tests that execute the changed
lines. The fast tier runs first (`scripts/test`). If none of its tests fails, the tests on real ranks and on more
stand-ins for GPUs follow (`scripts/test --all`). Files that run on GPUs only are not mutated, and neither are messages
and types. The column *all* counts the mutants that either tier notices. No test can notice an *equivalent* one.

"""


def write(mutants: Sequence[Mutant], records: Iterable[Mapping[str, Any]], page: Path) -> None:
    """Write the page for the mutants that were run."""
    found = {(record["mutant"], record["tier"]): record for record in records}
    run = [mutant for mutant in mutants if (mutant.key, "fast") in found]
    reasons = json.loads(REASONS.read_text())
    text = HEAD + f"{len(run)} of {len(mutants)} drawn were run.\n\n" + table(run, found)
    left = [mutant for mutant in run if not by_tier(mutant, "fast", found)]
    tried = sum((mutant.key, "all") in found for mutant in left)
    text += f"\nThe rest of all tests was run on {tried} of the {len(left)} that the fast tier does not notice.\n"
    text += "\n## Mutants that the fast tier misses\n\nOf the tests that execute the lines, so many were run.\n\n"
    text += "| number | place | before | after | tests | all | reason |\n|---:|---|---|---|---:|---|---|\n"
    for mutant in left:
        fast, noticed = found[mutant.key, "fast"], found.get((mutant.key, "all"))
        place = f"{mutant.path}:{mutant.line} {mutant.function}"
        changed = " | ".join(f"`{short(cell)}`" for cell in (place, mutant.before, mutant.after))
        outcome = (
            "not run" if noticed is None else f"`{short(noticed['noticed'])}`" if noticed["noticed"] else "survives"
        )
        reason = reasons.get(mutant.key, "not looked at yet")
        text += f"| {mutant.number} | {changed} | {fast['run']} of {fast['of']} | {outcome} | {reason} |\n"
    page.write_text(text)


def table(run: Sequence[Mutant], found: Mapping[tuple[str, str], Mapping[str, Any]]) -> str:
    """Return the numbers of each area, and of all of them."""
    text = "| area | mutants | fast | all |\n|---|---:|---:|---:|\n"
    for area in [*AREAS, ""]:
        those = [mutant for mutant in run if area in ("", mutant.area)]
        fast = [mutant for mutant in those if by_tier(mutant, "fast", found)]
        slow = [mutant for mutant in those if mutant in fast or by_tier(mutant, "all", found)]
        text += f"| {area or 'together'} | {len(those)} | {len(fast)} | {len(slow)} |\n"
    return text


def by_tier(mutant: Mutant, tier: str, found: Mapping[tuple[str, str], Mapping[str, Any]]) -> bool:
    return bool(found.get((mutant.key, tier), {}).get("noticed"))


def short(text: str) -> str:
    """Return a text that fits into a cell of a table."""
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= 80 else text[:77] + "..."
