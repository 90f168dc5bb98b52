"""The text of a report: that of ``mpikv bench``, with bounds, least bytes, and GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mpikv.cli.bench import report as common
from mpikv.cli.bench.report import seconds_text, table

from .gpu_report import NOTES, SHARED, gpu_head, of_the_copy, size_rows
from .rules import LAMB_NOTE, RULES

Report = dict[str, Any]


def lines(document: Report) -> Iterator[str]:
    """Yield the lines of the text."""
    jobs = [job for job in document["jobs"] if "error" not in job]
    for job in jobs:
        yield from common.head(document, job)
        yield from gpu_head(job)
    rows = [(*row, bound) for row, bound in zip(common.ratios(jobs), _bounds(jobs), strict=True)]
    shared = next((f", {SHARED}" for job in jobs if job.get("functional_only")), "")
    if rows:
        yield f"\nratios of medians over the rounds (below 1: ours takes less time){shared}"
        yield from table([("goal", "ours", "peer", "ratio", "bound"), *rows])
        if any(row[-1] for row in rows):
            yield "bound: what this project wants the ratio to be at most, on two ranks with a core each; no limit."
        if any("PyTorch gloo" in row[0] for row in rows):
            yield "PyTorch hides its exchange behind the backward pass; this compares exchange and update alone."
    if len(jobs) > 1:
        yield f"\nmedians by the number of ranks (each rank brings as much: more ranks, more work){shared}"
        yield from table(common.scaling(jobs))
    for job in jobs:
        yield from _details(job, _label(job, several=len(jobs) > 1))


def _bounds(jobs: list[Report]) -> Iterator[str]:
    for job in jobs:
        for group in job["groups"]:
            for one in group["comparisons"]:
                yield "" if one["bound"] is None else f"≤ {one['bound']:.2f}"


def _label(job: Report, *, several: bool) -> str:
    """Return the suffix of a table's title."""
    ranks, shared = common.label(job, several=several), job.get("functional_only", "")
    return f"{ranks.removesuffix(')') or ' ('}{', ' * bool(ranks)}{shared})" if shared else ranks


def _details(job: Report, ranks: str) -> Iterator[str]:
    sizes = [group for group in job["groups"] if group["name"].startswith("sizes/")]
    if sizes:
        yield f"\nsums without an updater{ranks}"
        yield from table(list(size_rows(sizes)) if "gpus" in job else common.size_rows(sizes))
    if "gpus" in job:
        yield NOTES
    for group in job["groups"]:
        if group not in sizes:
            yield f"\n{group['title']}{ranks}, {group['rounds']} rounds"
            yield from _cases(group) if group["cases"] else ("  not measured",)
    yield from common.skipped(job, ranks)


def _bandwidth(case: Report, group: Report) -> str:
    return f"{1e-9 * case['floor'] * group['elements'] / case['median']:.3g} GB/s" if case["floor"] else ""


_COLUMNS: Mapping[str, common.Column] = {
    **{name: common.COLUMNS[name] for name in ("case", "median")},
    "returned": lambda case, group: seconds_text(case["returned"]) if "returned" in case else "",
    **{name: common.COLUMNS[name] for name in ("middle half", "a turn")},
    "at least": lambda case, group: f"{case['floor']} B/element" if case["floor"] else "",
    "that is": _bandwidth,
    "of the copy": of_the_copy,
}


def _cases(group: Report) -> Iterator[str]:
    yield from table(common.case_rows(group, _COLUMNS))
    if any(case["floor"] for case in group["cases"]) and group["title"].endswith(RULES["lamb"].title):
        yield f"  least bytes: {LAMB_NOTE}"
