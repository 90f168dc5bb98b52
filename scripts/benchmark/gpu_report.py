"""The part of a report about GPUs: bandwidths as nccl-tests defines them, the host's part of a call, and a copy's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpikv.cli.bench.report import seconds_text
from mpikv.cli.bench.rounds import Case

from .work import Work

Report = dict[str, Any]

SHARED = "functional only: ranks share a GPU"
"""The label of figures that say nothing about speed."""

NOTES = """
Times are those of the GPU's clock, of the slowest rank; "returned" is the host's time until the work was queued.
algbw is bytes / time; busbw that by 2 (n - 1) / n, the share of the bytes that a link must carry in a sum of n ranks,
as nccl-tests define them."""


def on_gpu(work: Work, size: int, case: Case) -> Report:
    """Return the further fields of a case timed on GPUs."""
    found: Report = {"returned": float(np.median(case.returned)), "returned_seconds": case.returned}
    if work.sums:
        algbw = 1e-9 * work.group.keys.nbytes / float(np.median(case.seconds))
        found |= {"algbw": algbw, "busbw": algbw * 2 * (size - 1) / size if case.name in work.sums else None}
    return found


def gpu_head(job: Report) -> Iterator[str]:
    """Yield lines for the head of a report."""
    if "gpus" not in job:
        return
    names = ", ".join(f"{job['gpus'].count(name)} x {name}" for name in dict.fromkeys(job["gpus"]))
    yield f"GPUs: {names}; CuPy {job['cupy']}, NCCL {job['nccl']}"
    if job["functional_only"]:
        yield f"warning: {job['functional_only']}: this shows that it works, and not how fast"


def size_rows(sizes: Sequence[Report]) -> Iterator[tuple[str, ...]]:
    """Yield a table of sums of all sizes, with a line for each case."""
    yield "size", "case", "on the GPU", "returned", "algbw GB/s", "busbw GB/s"
    for group in sizes:
        for case in group["cases"]:
            times = seconds_text(case["median"]), seconds_text(case["returned"])
            busbw = "" if case["busbw"] is None else f"{case['busbw']:.3g}"
            result = "wrong" if case["name"] in group["wrong"] else f"{case['algbw']:.3g}"
            yield group["title"].removeprefix("sum of "), case["name"], *times, result, busbw
