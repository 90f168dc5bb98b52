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
    text = f"{head}<!-- results -->\n{len(run)} of {len(mutants)} drawn were run.\n\n{title}"
    for area in [*AREAS, ""]:
        those = [mutant for mutant in run if area in ("", mutant.area)]
        noticed = sum(bool(found[mutant.key]["noticed"]) for mutant in those)
        text += f"| {area or 'together'} | {len(those)} | {noticed} |\n"
    text += "\n## Mutants that the tests miss\n\n"
    text += "| number | place | before | after | reason |\n|---:|---|---|---|---|\n"
    for mutant in run:
        if not found[mutant.key]["noticed"]:
            place = f"{mutant.path}:{mutant.line} {mutant.function}"
            changed = " | ".join(f"`{short(cell)}`" for cell in (place, mutant.before, mutant.after))
            reason = reasons.get(mutant.key, "not looked at yet")
            text += f"| {mutant.number} | {changed} | {reason} |\n"
    page.write_text(text)


def short(text: str) -> str:
    """Return a text that fits into a cell of a table."""
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= 80 else text[:77] + "..."
