"""The part of a report about GPUs: bandwidths as nccl-tests defines them, the host's part of a call, and a copy's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpikv.cli.bench.report import seconds_text
from mpikv.cli.bench.rounds import Case

from .gpu_cases import bus_factor
from .work import Work

Report = dict[str, Any]

SHARED = "functional only: ranks share a GPU"
"""The label of figures that say nothing about speed."""

NOTES = """
Times are those of the GPU's clock, of the slowest rank; "returned" is the host's time until the work was queued.
algbw is bytes / time; busbw that by the share of the bytes that a link must carry, as nccl-tests define them: for n
ranks 2 (n - 1) / n of an allReduce, (n - 1) / n of a reduceScatter or an allGather, 1 of a reduce or a broadcast."""


def bandwidths(nbytes: int, seconds: float, collectives: str, size: int) -> tuple[float, float | None]:
    """Return algbw and busbw in GB/s; busbw is None without a collective.

    >>> bandwidths(8_000_000, 0.001, "allReduce", 4)
    (8.0, 12.0)
    """
    algorithm = 1e-9 * nbytes / seconds
    return algorithm, algorithm * bus_factor(collectives, size) if collectives else None


def on_gpu(work: Work, size: int, case: Case) -> Report:
    """Return the further fields of a case timed on GPUs."""
    collectives = work.collectives.get(case.name, "")
    median = float(np.median(case.seconds))
    found: Report = {"returned": float(np.median(case.returned)), "returned_seconds": case.returned}
    if case.name in work.collectives or (work.collectives and case.name == "copy"):
        algbw, busbw = bandwidths(work.group.keys.nbytes, median, collectives, size)
        found |= {"collectives": collectives, "algbw": algbw, "busbw": busbw}
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


def of_the_copy(case: Report, group: Report) -> str:
    """Return the case's share of a copy's bandwidth; empty if it is unknown."""
    copies = [one for one in group["cases"] if one["name"] == "copy" and one["floor"]]
    if not copies or not case["floor"] or "returned" not in case:
        return ""
    return f"{case['floor'] * copies[0]['median'] / (copies[0]['floor'] * case['median']):.0%}"
