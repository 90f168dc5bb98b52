"""The text of a report: that of ``mpikv bench``, with bounds, least bytes, and GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mpikv.cli.bench import report as common
from mpikv.cli.bench.report import seconds_text

from .gpu_report import NOTES, gpu_head, size_rows
from .rules import LAMB_NOTE, RULES

Report = dict[str, Any]


def lines(document: Report) -> Iterator[str]:
    """Yield the lines of the text."""
    for job in common.measured(document):
        shared = f" ({text})" if (text := job.get("functional_only")) else ""
        compared = [one for group in job["groups"] for one in group["comparisons"]]
        yield from common.head(document, job)
        yield from gpu_head(job)
        yield from common.ratios(job, shared)
        if any(one["bound"] is not None for one in compared):
            yield "bound: what this project wants the ratio to be at most, on two ranks with a core each; no limit."
        if any("PyTorch gloo" in one["goal"] for one in compared):
            yield "PyTorch hides its exchange behind the backward pass; this compares exchange and update alone."
        yield from common.details(job, size_rows if "gpus" in job else None, _COLUMNS, shared)
        if "gpus" in job:
            yield NOTES
        if any(group["title"].endswith(RULES["lamb"].title) for group in job["groups"]):
            yield f"  least bytes of LAMB: {LAMB_NOTE}"


def _bandwidth(case: Report, group: Report) -> str:
    return f"{1e-9 * case['floor'] * group['elements'] / case['median']:.3g} GB/s" if case["floor"] else ""


_COLUMNS: Mapping[str, common.Column] = {
    **{name: common.COLUMNS[name] for name in ("case", "median")},
    "returned": lambda case, group: seconds_text(case["returned"]) if "returned" in case else "",
    **{name: common.COLUMNS[name] for name in ("middle half", "a turn")},
    "at least": lambda case, group: f"{case['floor']} B/element" if case["floor"] else "",
    "that is": _bandwidth,
}
