"""The text of a report: the machine, the ratios, then all details."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any

Report = dict[str, Any]
Column = Callable[[Report, Report], str]

_IDLE = 0.9


def errors(job: Report) -> list[str]:
    """Return a line for each failure: the job has no results, or a wrong one."""
    if "error" in job:
        return [job["error"]]
    return [
        f"wrong result: {group['name']}, {case}, {text}"
        for group in job["groups"]
        for case, text in group["wrong"].items()
    ]


def lines(document: Report) -> Iterator[str]:
    """Yield the lines of the text."""
    (job,) = document["jobs"]
    yield from head(document, job)
    yield from ratios(job)
    yield from details(job)


def head(document: Report, job: Report) -> Iterator[str]:
    """Yield the circumstances of a job, and warnings of those that spoil its figures."""
    machine, idle = job["machine"], job["idle"]
    pinned = "each rank pinned to a core of its own" if job["pinned"] else "ranks not pinned"
    share = "unknown" if idle is None else f"{idle:.0%} idle"
    yield (
        f"mpikv {document['mpikv']}, {job['ranks']} rank{'s' * (job['ranks'] > 1)}, transport {job['transport']}, "
        f"{job['library']}, numpy {machine['numpy']}, Python {machine['python']}"
    )
    yield f"{machine['cpu']}, cores for the ranks: {job['cores']}, {pinned}; before the measurement {share}"
    if job["settings"]:
        yield "settings: " + " ".join(f"{name}={value}" for name, value in job["settings"].items())
    if job["crowded"]:
        yield "warning: more ranks than cores: this measures how they take turns"
    if idle is not None and idle < _IDLE:
        yield f"warning: the machine was busy with something else ({idle:.0%} idle): do not trust these figures"
    if document["quick"]:
        yield "warning: few rounds and small sets (--quick): this shows that it works, and not how fast"


def ratios(job: Report) -> Iterator[str]:
    """Yield a table with a row for each comparison: the goal, both times, the ratio, and its bound if there is one."""
    rows = []
    for group in job["groups"]:
        for one in group["comparisons"]:
            times = one["ours_median"], one["peer_median"]
            wrong = one["ours"] in group["wrong"] or one["peer"] in group["wrong"]
            ratio = "wrong" if wrong else "noise" if one["ratio"] is None else f"{one['ratio']:.2f}"
            bound = "" if one["bound"] is None else f"≤ {one['bound']:.2f}"
            rows.append((one["goal"], *map(seconds_text, times), ratio, bound))
    if rows:
        yield "\nratios of medians over the rounds (below 1: ours takes less time)"
        yield from table(filled([("goal", "ours", "peer", "ratio", "bound"), *rows]))


def details(job: Report, columns: Mapping[str, Column] | None = None) -> Iterator[str]:
    """Yield a table of the sums of all sizes, one for each other group, and what was left out."""
    sizes = [group for group in job["groups"] if group["name"].startswith("sizes/")]
    if sizes:
        yield "\nsums without an updater"
        yield from table(size_rows(sizes))
    for group in job["groups"]:
        if group not in sizes:
            yield f"\n{group['title']}, {group['rounds']} rounds"
            yield from table(case_rows(group, columns or COLUMNS)) if group["cases"] else ("  not measured",)
    left_out = {f"{case}: {reason}": None for group in job["groups"] for case, reason in group["skipped"].items()}
    if left_out:
        yield "\nleft out"
        yield from (f"  {text}" for text in left_out)


def size_rows(sizes: Iterable[Report]) -> list[tuple[str, ...]]:
    """Return a row for each size: all medians, the ratios to both peers, and the bandwidths."""
    verbs, peers = ("push", "pull", "pushpull"), ("push, pull", "Allreduce")
    cases = *verbs, *peers
    rows = [("size", *cases, *(f"pushpull / {peer}" for peer in peers), *(f"GB/s, {verb}" for verb in verbs))]
    for group in sizes:
        medians = {case["name"]: case["median"] for case in group["cases"]}
        times = [seconds_text(medians[case]) if case in medians else "" for case in cases]
        known = [{"pushpull", peer} <= medians.keys() for peer in peers]
        shares = [
            f"{medians['pushpull'] / medians[peer]:.2f}" if known else ""
            for peer, known in zip(peers, known, strict=True)
        ]
        speeds = [f"{4e-9 * group['elements'] / medians[verb]:.3g}" if verb in medians else "" for verb in verbs]
        rows.append((group["title"].removeprefix("sum of "), *times, *shares, *speeds))
    return rows


COLUMNS: Mapping[str, Column] = {
    "case": lambda case, group: str(case["name"]),
    "median": lambda case, group: seconds_text(case["median"]),
    "middle half": lambda case, group: " to ".join(map(seconds_text, case["quartiles"])),
    "a turn": lambda case, group: f"{case['repeats']} x",
}
"""The columns of a group's table: what a case shows, given its group."""


def case_rows(group: Report, columns: Mapping[str, Column]) -> list[tuple[str, ...]]:
    """Return a row for each case."""
    return filled([tuple(columns), *(tuple(text(case, group) for text in columns.values()) for case in group["cases"])])


def filled(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Leave out columns that are empty below their titles."""
    kept = [any(cells) for cells in zip(*rows[1:], strict=True)]
    return [tuple(compress(row, kept)) for row in rows]


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the rows, with the first column aligned to the left and the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for first, *others in rows:
        cells = [f"{text:>{width}}" for text, width in zip(others, widths[1:], strict=True)]
        yield "  ".join([f"{first:<{widths[0]}}", *cells]).rstrip()


def seconds_text(seconds: float) -> str:
    """Return a time with three digits and its unit.

    >>> seconds_text(0.0000123), seconds_text(0.0456), seconds_text(2.5)
    ('12.3 µs', '45.6 ms', '2.50 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        value = seconds * factor
        if value >= 1 or unit == "µs":
            break
    return f"{value:.{max(0, 2 - (value >= 10) - (value >= 100))}f} {unit}"
