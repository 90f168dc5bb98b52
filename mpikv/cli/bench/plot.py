"""A picture of the times of all sizes. Needs matplotlib, the extra ``plot``."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["draw"]

_STYLES = {"pushpull": "o-", "push": "^--", "pull": "v--", "Allreduce": "s-"}


def draw(job: dict[str, Any], path: Path) -> None:
    """Draw the median time of each case over the size of the array, both logarithmic, with the quartiles.

    Raises:
        OSError: the file cannot be written.
        ValueError: matplotlib does not know the ending of its name.
    """
    figure = import_module("matplotlib.figure").Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    sizes = [group for group in job["groups"] if group["name"].startswith("sizes/")]
    for case, style in _STYLES.items():
        points = [
            (4 * group["elements"], 1e6 * found["median"], *(1e6 * quartile for quartile in found["quartiles"]))
            for group in sizes
            for found in group["cases"]
            if found["name"] == case
        ]
        nbytes, middle, low, high = np.array(points).reshape(-1, 4).T
        (line,) = axes.plot(nbytes, middle, style, label="Comm.Allreduce" if case == "Allreduce" else case)
        axes.fill_between(nbytes, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel="bytes of the array", ylabel="µs of the slowest rank, median")
    axes.set_title(f"ranks: {job['ranks']}, transport {job['transport']}, {job['library']}\n{job['machine']['cpu']}")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
