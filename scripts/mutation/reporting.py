"""Writes the page that says how many mutants the tests notice, and why the others are left."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .drawing import AREAS, Mutant

REASONS = Path(__file__).with_name("reasons.json")


def write(mutants: Sequence[Mutant], records: Iterable[Mapping[str, Any]], page: Path) -> None:
    """Write the page's tables for the mutants that were run."""
    found = {record["mutant"]: record for record in records}
    run, reasons = [mutant for mutant in mutants if mutant.key in found], json.loads(REASONS.read_text())
    head, title = page.read_text().partition("<!-- results -->")[0], "| area | mutants | noticed |\n|---|---:|---:|\n"
    missed = [mutant for mutant in run if not found[mutant.key]["noticed"]]
    equal = sum(reasons.get(mutant.key, "").startswith("equivalent") for mutant in missed)
    text = f"{head}<!-- results -->\n{len(run)} of {len(mutants)} drawn were run. {len(missed)} were missed; {equal} of"
    text += f" these are equivalent.\n\n{title}"
    for area in [*AREAS, ""]:
        those, others = ([each for each in every if area in ("", each.area)] for every in (run, missed))
        text += f"| {area or 'together'} | {len(those)} | {len(those) - len(others)} |\n"
    text += "\n## Mutants that the tests miss\n\n"
    text += "| number | place | before | after | reason |\n|---:|---|---|---|---|\n"
    for mutant in missed:
        place = f"{mutant.path}:{mutant.line} {mutant.function}"
        changed = " | ".join(f"`{short(cell)}`" for cell in (place, mutant.before, mutant.after))
        text += f"| {mutant.number} | {changed} | {reasons.get(mutant.key, 'not looked at yet')} |\n"
    page.write_text(text)


def short(text: str) -> str:
    """Return a text that fits into a cell of a table."""
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= 80 else text[:77] + "..."
