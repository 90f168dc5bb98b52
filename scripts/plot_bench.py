"""Draws the pictures of docs/bench from its records:  $(scripts/venv .venv-plot plot)/bin/python scripts/plot_bench.py

They are black on nothing, with a line style and a marker for each case; in a dark theme they turn white.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BENCH = Path(__file__).resolve().parents[1] / "docs" / "bench"
STYLES = ("o-", "s--", "^:", "D-.", "v-")
INVERTED = "<style>@media (prefers-color-scheme:dark){svg{filter:invert(1)}}</style>"


def read(name: str) -> dict[str, Any]:
    job: dict[str, Any] = json.loads((BENCH / f"{name}.json").read_text(encoding="utf-8"))["jobs"][0]
    return job


def medians(job: dict[str, Any], group: str) -> dict[str, float]:
    """Return the median seconds of each case."""
    (cases,) = (each["cases"] for each in job["groups"] if each["name"] == group)
    return {case["name"]: case["median"] for case in cases}


def draw_steps(figure: Figure) -> None:
    """Step time against ranks: ResNet-50 with SGD."""
    cases = {"torch DDP": "PyTorch DDP", "Reduce per key": "mpi4py per key", "store": "mpikv", "zero copy": "zero-copy"}
    both = figure.subplots(1, 2, sharey=True)
    for axes, library in zip(both, ("mpich", "openmpi"), strict=True):
        jobs = [read(f"{library}-sets"), read(f"{library}-4-ranks")]
        for style, (case, label) in zip(STYLES, [*cases.items(), ("memcpy", "memcpy")], strict=True):
            times = [1e3 * medians(job, "resnet50/sgd")[case] for job in jobs]
            axes.plot([job["ranks"] for job in jobs], times, f"k{style}", label=label)
        axes.set(title=jobs[0]["library"], xlabel="ranks, on two cores", xticks=[2, 4], yscale="log")
        axes.set_yticks([10, 20, 50, 100, 200], labels=["10", "20", "50", "100", "200"])
        finish(axes)
    both[0].set_ylabel("ms of a step, median")
    figure.legend(*both[0].get_legend_handles_labels(), loc="outside right upper")


def draw_ratio(figure: Figure) -> None:
    """Time of a call divided by that of Comm.Allreduce, against the size of the array."""
    job = read("mpich-sizes")
    groups = [group for group in job["groups"] if group["name"].startswith("sizes/")]
    axes = figure.subplots()
    for style, case in zip(STYLES, ("pushpull", "push", "pull"), strict=False):
        found = [medians(job, group["name"]) for group in groups]
        sizes = [4 * group["elements"] for group in groups]
        axes.plot(sizes, [times[case] / times["Allreduce"] for times in found], f"k{style}", label=case)
    axes.axhline(1, color="0.5", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="bytes of the array", ylabel="time divided by Comm.Allreduce's")
    axes.set_yticks([0.1, 0.2, 0.5, 1, 2], labels=["0.1", "0.2", "0.5", "1", "2"])
    axes.set_title(f"{job['ranks']} ranks, {job['library']}")
    finish(axes)
    axes.legend()


def draw_waits(figure: Figure) -> None:
    """Who waited, from a trace: the late rank is the one that does not wait."""
    events = json.loads((BENCH / "late-rank.json").read_text(encoding="utf-8"))["traceEvents"]
    waits: dict[int, float] = defaultdict(float)
    for event in events:
        if event["ph"] == "E" and event["name"] == "pushpull":
            waits[event["pid"]] += event["args"]["waited_us"] / 1e3
    axes = figure.subplots()
    ranks = sorted(waits)
    axes.bar(ranks, [waits[rank] for rank in ranks], color="white", edgecolor="black", hatch="//", width=0.6)
    axes.set(xlabel="rank", xticks=ranks, ylabel="ms waited for others, in 12 calls", title="rank 2 is late")
    finish(axes)


def finish(axes: Axes) -> None:
    axes.grid(visible=True, which="major", color="0.8", linewidth=0.5)
    axes.set_axisbelow(True)


def main() -> None:
    # The same bytes at each run; texts stay texts.
    mpl.rcParams.update({"svg.hashsalt": "mpikv", "svg.fonttype": "none", "font.family": "sans-serif"})
    for name, draw in (("steps", draw_steps), ("ratio", draw_ratio), ("waits", draw_waits)):
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        draw(figure)
        path = BENCH / f"{name}.svg"
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
        text = path.read_text(encoding="utf-8").replace(" <defs>", f" {INVERTED}\n <defs>", 1)
        path.write_text("".join(f"{line.rstrip()}\n" for line in text.splitlines()), encoding="utf-8")


if __name__ == "__main__":
    main()
