"""The text of a report: the machine, the ratios, then all details."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .gpu_report import NOTES, SHARED, gpu_head, of_the_copy, size_rows
from .progress import seconds_text
from .rules import RULES

__all__ = ["errors", "lines"]

Report = dict[str, Any]

_IDLE = 0.9

_MEMORY = """
What each line of memory adds when it is made and has stepped once. Private is what the process alone has (RssAnon).
Shared are pages that the ranks of a host have in common, each of which counts those that it has touched (RssShmem):
values, buffers and staging of the store, and MPI's own. 'Python' is the interpreter, numpy, MPI and what earlier groups
left; 'inputs' are the private gradients and outputs, of which zero copy needs none. The peak (VmHWM) is that of the
whole process until the store had stepped once. Pss counts a page that k ranks share 1/k in each: its sum over the ranks
is what the job really held."""


def errors(document: Report) -> list[str]:
    """Return a line for each failure: a job without results, or a wrong result."""
    found = []
    for job in document["jobs"]:
        if "error" in job:
            found.append(job["error"])
        found += [
            f"wrong result: {group['name']}, {case}, {text} ({_ranks(job)})"
            for group in job.get("groups", ())
            for case, text in group["wrong"].items()
        ]
    return found


def lines(document: Report) -> Iterator[str]:
    """Yield the lines of the text."""
    jobs = [job for job in document["jobs"] if "error" not in job]
    for job in jobs:
        yield from _head(document, job)
    rows = [row for job in jobs for row in _ratios(job, several=len(jobs) > 1)]
    shared = next((f", {SHARED}" for job in jobs if job.get("functional_only")), "")
    if rows:
        yield f"\nratios of medians over the rounds (below 1: ours takes less time){shared}"
        yield from _table([("goal", "ours", "peer", "ratio", "bound"), *rows])
        if any(row[-1] for row in rows):
            yield "bound: what this project wants the ratio to be at most, on two ranks with a core each; no limit."
        if any("PyTorch gloo" in row[0] for row in rows):
            yield "PyTorch hides its exchange behind the backward pass; this compares exchange and update alone."
    if len(jobs) > 1:
        yield f"\nmedians by the number of ranks (each rank brings as much: more ranks, more work){shared}"
        yield from _table(list(_scaling(jobs)))
    for job in jobs:
        yield from _details(job, _label(job, several=len(jobs) > 1))
    if any("memory" in group for job in jobs for group in job["groups"]):
        yield _MEMORY


def _head(document: Report, job: Report) -> Iterator[str]:
    machine, idle = job["machine"], job["idle"]
    pinned = "each rank pinned to a core of its own" if job["pinned"] else "ranks not pinned"
    share = "unknown" if idle is None else f"{idle:.0%} idle"
    yield (
        f"mpikv {document['mpikv']}, {_ranks(job)}, transport {job['transport']}, {job['library']}, "
        f"numpy {machine['numpy']}, Python {machine['python']}"
    )
    yield f"{machine['cpu']}, cores for the ranks: {job['cores']}, {pinned}; before the measurement {share}"
    if job["settings"]:
        yield "settings: " + " ".join(f"{name}={value}" for name, value in job["settings"].items())
    if job["crowded"]:
        yield "warning: more ranks than cores: this measures how they take turns"
    if idle is not None and idle < _IDLE:
        yield f"warning: the machine was busy with something else ({idle:.0%} idle): do not trust these figures"
    yield from gpu_head(job)
    if document["quick"]:
        yield "warning: few rounds and small sets (--quick): this shows that it works, and not how fast"


def _label(job: Report, *, several: bool) -> str:
    """Return the suffix of a table's title."""
    shared = job.get("functional_only", "")
    labels = [_ranks(job)] * several + [shared] * bool(shared)
    return f" ({', '.join(labels)})" if labels else ""


def _ranks(job: Report) -> str:
    return f"{job['ranks']} rank{'s' * (job['ranks'] > 1)}"


def _ratios(job: Report, *, several: bool) -> Iterator[tuple[str, ...]]:
    ranks = f", {_ranks(job)}" if several else ""
    for group in job["groups"]:
        for one in group["comparisons"]:
            times = one["ours_median"], one["peer_median"]
            wrong = one["ours"] in group["wrong"] or one["peer"] in group["wrong"]
            ratio = "wrong" if wrong else "noise" if one["ratio"] is None else f"{one['ratio']:.2f}"
            bound = "" if one["bound"] is None else f"≤ {one['bound']:.2f}"
            yield one["goal"] + ranks, *map(seconds_text, times), ratio, bound


def _scaling(jobs: Sequence[Report]) -> Iterator[tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for column, job in enumerate(jobs):
        for group in job["groups"]:
            for case in group["cases"]:
                row = found.setdefault(f"{group['title']}: {case['name']}", [""] * len(jobs))
                row[column] = "wrong" if case["name"] in group["wrong"] else seconds_text(case["median"])
    yield "case", *map(_ranks, jobs)
    yield from ((name, *row) for name, row in found.items())


def _details(job: Report, ranks: str) -> Iterator[str]:
    sizes = [group for group in job["groups"] if group["name"].startswith("sizes/")]
    if sizes:
        yield f"\nsums without an updater{ranks}"
        yield from _table(list(size_rows(sizes) if "gpus" in job else _size_rows(sizes)))
    if "gpus" in job:
        yield NOTES
    for group in job["groups"]:
        if group not in sizes:
            yield f"\n{group['title']}{ranks}, {group['rounds']} rounds"
            yield from _cases(group) if group["cases"] else ("  not measured",)
    left_out = {f"{case}: {reason}": None for group in job["groups"] for case, reason in group["skipped"].items()}
    if left_out:
        yield f"\nleft out{ranks}"
        yield from (f"  {text}" for text in left_out)
    for group in job["groups"]:
        if "memory" in group:
            yield f"\nmemory, {group['title']}{ranks}"
            yield from _memory(group)


def _size_rows(sizes: Iterable[Report]) -> Iterator[tuple[str, ...]]:
    verbs, peers = ("push", "pull", "pushpull"), ("push, pull", "Allreduce")
    cases = *verbs, *peers
    yield "size", *cases, *(f"pushpull / {peer}" for peer in peers), *(f"GB/s, {verb}" for verb in verbs)
    for group in sizes:
        medians = {case["name"]: case["median"] for case in group["cases"]}
        yield (
            group["title"].removeprefix("sum of "),
            *(seconds_text(medians[case]) if case in medians else "" for case in cases),
            *(
                f"{medians['pushpull'] / medians[peer]:.2f}" if {"pushpull", peer} <= medians.keys() else ""
                for peer in peers
            ),
            *(f"{4e-9 * group['elements'] / medians[verb]:.3g}" if verb in medians else "" for verb in verbs),
        )


def _cases(group: Report) -> Iterator[str]:
    rows = [("case", "median", "returned", "middle half", "a turn", "at least", "that is", "of the copy")]
    for case in group["cases"]:
        floor, median = case["floor"], case["median"]
        moved = f"{1e-9 * floor * group['elements'] / median:.3g} GB/s" if floor else ""
        spread = " to ".join(map(seconds_text, case["quartiles"]))
        least = f"{floor} B/element" if floor else ""
        returned = seconds_text(case["returned"]) if "returned" in case else ""
        times = seconds_text(median), returned, spread, f"{case['repeats']} x"
        rows.append((case["name"], *times, least, moved, of_the_copy(case, group)))
    empty = [column for column in range(len(rows[0])) if not any(row[column] for row in rows[1:])]
    yield from _table([tuple(text for column, text in enumerate(row) if column not in empty) for row in rows])
    notes = [rule.note for rule in RULES.values() if rule.note and group["title"].endswith(rule.title)]
    if any(case["floor"] for case in group["cases"]):
        yield from (f"  least bytes: {note}" for note in notes)


def _memory(group: Report) -> Iterator[str]:
    memory = dict(group["memory"])
    names = {"python": "Python", "inputs": f"inputs, 2 x {group['nbytes'] / 1e6:.4g} MB"}
    rows = [("MB, private + shared", *(f"rank {rank}" for rank in range(len(memory["python"]))))]
    for name, of_ranks in memory.items():
        cells = [f"{one['private'] / 1e6:.0f} + {one['shared'] / 1e6:.0f}" for one in of_ranks]
        rows.append((names.get(name, name), *cells))
    if "store" in memory:
        rows.append(("peak with the store", *(f"{one['peak'] / 1e6:.0f}" for one in memory["store"])))
        parts = zip(memory["python"], memory["inputs"], memory["store"], strict=True)
        held = [sum(part["proportional"] for part in of_rank) for of_rank in parts]
        rows.append(("Pss with the store", *(f"{one / 1e6:.0f}" for one in held)))
    yield from _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the rows, with the first column aligned to the left and the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for first, *others in rows:
        cells = [f"{text:>{width}}" for text, width in zip(others, widths[1:], strict=True)]
        yield "  ".join([f"{first:<{widths[0]}}", *cells]).rstrip()
