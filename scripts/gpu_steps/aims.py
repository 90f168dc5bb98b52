"""What is aimed at, beside what was found: ratios of the figures of a record."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .kernels import LARGE

Records = Mapping[str, Mapping[str, Any]]
"""Of each step its status and its numbers, where it has any."""


class NotMeasured(Exception):
    """A figure is missing."""


@dataclass(frozen=True)
class Aim:
    """A ratio, or a time, and its bound."""

    what: str
    bound: float
    at_most: bool
    unit: str
    found: Callable[[Records], float]

    def row(self, records: Records) -> tuple[str, str, str, str]:
        """Return what is aimed at, its bound, what was found, and whether that is met."""
        bound = f"{'≤' if self.at_most else '≥'} {self.bound:g}{self.unit}"
        try:
            found = self.found(records)
        except NotMeasured as missing:
            return self.what, bound, f"not measured ({missing})", "not measured"
        met = found <= self.bound if self.at_most else found >= self.bound
        # With as many digits as it takes to see on which side of its bound it lies.
        return self.what, bound, f"{found:.4g}{self.unit}", "met" if met else "missed"


def figure(records: Records, step: str, name: str) -> float:
    """Return a number that a step has found, if it came to its end well.

    Raises:
        NotMeasured: the step was not run, failed, was skipped, or has no such number.
    """
    record = records.get(step, {})
    if record.get("status") != "ok":
        raise NotMeasured(f"{step}: {record.get('reason', 'not run')}")
    value = record["numbers"].get(name)
    if not isinstance(value, int | float):
        raise NotMeasured(f"{step} has no {name}")
    if not 0 < value < math.inf:
        raise NotMeasured(f"{step}: {name} is {value}")
    return float(value)


def of_the_copy(name: str) -> Callable[[Records], float]:
    def found(records: Records) -> float:
        elements = figure(records, "kernels", "elements")
        if elements < LARGE:
            raise NotMeasured(f"the GPU had room for {elements:.0f} elements only")
        return figure(records, "kernels", f"{name}_GB_s") / figure(records, "kernels", "copy_GB_s")

    return found


def ratio(step: str, name: str, of_step: str, of: str) -> Callable[[Records], float]:
    return lambda records: figure(records, step, name) / figure(records, of_step, of)


def push_and_pull(records: Records) -> float:
    """One copy into the store, and one out of it."""
    taken = figure(records, "large", "push_ms") + figure(records, "large", "pull_ms")
    return taken / (2 * figure(records, "large", "one_copy_ms"))


AIMS = (
    *(
        Aim(
            f"{title}, 1 GB of float32: bandwidth, divided by that of a copy on the GPU",
            0.8,
            False,
            "",
            of_the_copy(name),
        )
        for name, title in (
            ("pack", "Packing 160 parts"),
            ("momentum", "SGD with momentum"),
            ("adam", "Adam"),
            ("lars", "LARS"),
            ("lamb", "LAMB"),
        )
    ),
    Aim(
        "Adam, 1,000 keys of 4 KB: time of a captured step on the GPU, divided by that of torch's fused Adam",
        *(1.0, True, ""),
        ratio("compiled_cost", "compiled_gpu_us", "torch_cost", "fused_gpu_us"),
    ),
    Aim(
        "the same: time of a captured step on the host",
        *(30.0, True, " µs"),
        lambda records: figure(records, "compiled_cost", "compiled_us"),
    ),
    Aim(
        "the same, divided by the time of a call for each key",
        *(0.1, True, ""),
        ratio("compiled_cost", "compiled_us", "compiled_cost", "key_by_key_us"),
    ),
    Aim(
        "Push and pull of 256 MB on one rank: time, divided by that of the two copies that they must make",
        1.1,
        True,
        "",
        push_and_pull,
    ),
)


def table(records: Records) -> list[str]:
    """Return the lines of a page."""
    rows = [" | ".join(aim.row(records)) for aim in AIMS]
    return ["| aim | bound | found | result |", "|---|---|---|---|", *(f"| {row} |" for row in rows)]
