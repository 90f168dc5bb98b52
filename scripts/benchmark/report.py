"""The text of a report: that of ``mpikv bench``, with bounds and least bytes."""

from collections.abc import Iterator, Mapping
from typing import Any

from mpikv.cli.bench import report as common

from .rules import LAMB_NOTE, RULES

Report = dict[str, Any]


def lines(document: Report) -> Iterator[str]:
    """Yield the lines of the text."""
    (job,) = document["jobs"]
    compared = [one for group in job["groups"] for one in group["comparisons"]]
    yield from common.head(document, job)
    yield from common.ratios(job)
    if any(one["bound"] is not None for one in compared):
        yield "bound: what this project wants the ratio to be at most, on two ranks with a core each; no limit."
    if any("PyTorch gloo" in one["goal"] for one in compared):
        yield "PyTorch hides its exchange behind the backward pass; this compares exchange and update alone."
    yield from common.details(job, _COLUMNS)
    if any(group["title"].endswith(RULES["lamb"].title) for group in job["groups"]):
        yield f"  least bytes of LAMB: {LAMB_NOTE}"


def _bandwidth(case: Report, group: Report) -> str:
    return f"{1e-9 * case['floor'] * group['elements'] / case['median']:.3g} GB/s" if case["floor"] else ""


_COLUMNS: Mapping[str, common.Column] = {
    **common.COLUMNS,
    "at least": lambda case, group: f"{case['floor']} B/element" if case["floor"] else "",
    "that is": _bandwidth,
}
