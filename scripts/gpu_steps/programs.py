"""Programs of the project, run on GPUs: its tests, its benchmark, and its workload."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from .step import ROOT, Numbers, count_gpus, said_by


def tests(ranks: int) -> Callable[[], Numbers]:
    def run() -> Numbers:
        """Run the tests of tests/gpu/real; some must pass, and none may be skipped for want of a GPU."""
        from mpikv.cli.gpus import survey

        if problems := survey().problems:
            raise AssertionError("; ".join(problems))
        # What runs on one rank only is part of the first of these steps.
        marked = "gpu and ranks" if ranks > 1 else "gpu"
        arguments = ["-m", "pytest", "tests/gpu/real", "-m", marked, f"--ranks={ranks}", "-q", "--no-header"]
        arguments += ["-p", "no:cacheprovider", "--color=no", "--tb=short"]
        status, lines = streamed([sys.executable, *arguments])
        if status or " passed" not in lines[-1]:
            why = [line for line in lines if line.startswith(("FAILED", "ERROR", "E  "))] or lines[-10:]
            raise AssertionError("\n".join(why)[-3000:])
        return {"pytest": lines[-1].strip("= "), "skipped": [line for line in lines if line.startswith("SKIPPED")]}

    return run


def streamed(command: list[str]) -> tuple[int, list[str]]:
    """Return the exit status of a program and the lines that it prints. Each is passed on at once, as the limit of the
    step may end both.
    """
    lines = [""]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            print(line, end="", file=sys.stderr, flush=True)
    return process.returncode, lines


def environment(ranks: int) -> dict[str, str]:
    """Return the environment of a job of several ranks, which may have to share a GPU."""
    return {**os.environ, **({"MPIKV_GPU_SHARING": "1"} if count_gpus() < ranks else {})}


def bench(ranks: int, *arguments: str) -> Callable[[], Numbers]:
    def run() -> Numbers:
        """Run a short scripts/bench --device gpu, which checks its results."""
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
            path = Path(folder) / "bench.json"
            line = ["--device", "gpu", "-n", str(ranks), *arguments, "--json", str(path)]
            said = said_by([sys.executable, str(ROOT / "scripts/benchmark"), *line], environment(ranks))
            if not path.exists():
                raise AssertionError(said)
            return bench_numbers(json.loads(path.read_text()))

    return run


# The cases of a group that are the store's, by their first word.
OURS = ("store", "push", "pull", "pushpull", "update", "pack")


def bench_numbers(document: Numbers) -> Numbers:
    """Return of each case of ``scripts/bench`` its time on the GPU, and its bandwidth where that is known."""
    (job,) = document["jobs"]
    found: Numbers = {"label": job["functional_only"]} if job["functional_only"] else {}
    for group in job["groups"]:
        for case in group["cases"]:
            name = f"{group['name']} {case['name']}"
            found[f"{name} us"] = case["median"] * 1e6
            if case.get("algbw") is not None:
                found[f"{name} algbw_GB_s"] = case["algbw"]
            if case.get("floor"):
                found[f"{name} GB_s"] = 1e-9 * case["floor"] * group["elements"] / case["median"]
        # Any error of a store leaves out its cases; only where peers may be missing is that well.
        lost = {case: why for case, why in group["skipped"].items() if case.split()[0] in OURS and "LAMB" not in why}
        if lost:
            raise AssertionError(f"{group['name']}: {lost}")
        found |= {f"{group['name']} {case} skipped": why for case, why in group["skipped"].items()}
    return found


def synthetic(gigabytes: float) -> Callable[[], Numbers]:
    def run() -> Numbers:
        """Train layers whose optimizer state fills gigabytes, and check the values."""
        options = ["--device", "gpu", "--gigabytes", str(gigabytes), "--steps", "5"]
        return synthetic_numbers(said_by([sys.executable, str(ROOT / "scripts/train_synthetic.py"), *options]))

    return run


def synthetic_numbers(said: str) -> Numbers:
    """Return the figures that ``train_synthetic.py`` has printed: a name and a number each."""
    if "check passed" not in said:
        raise AssertionError(said[-3000:])
    words = said.split()
    names = ("values_bytes", "state_bytes", "step_ms", "update_GB_s")
    return {name: float(words[words.index(name) + 1]) for name in names}
