"""``scripts/bench --device gpu``: its clocks, tables and options. ``tests/gpu/emulated`` has jobs of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.launching import why_no_mpi

import mpikv
from mpikv.cli.bench.rounds import Case, measure
from mpikv.cli.launchers import clean

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "scripts"))  # before what follows: the benchmark is in no package
from benchmark import report  # noqa: E402
from benchmark.gpu_report import SHARED, on_gpu  # noqa: E402
from benchmark.gpus import time_gpu  # noqa: E402
from benchmark.options import GPU_SUITES, parse  # noqa: E402

# --- Clocks


class Times:
    """A host and a GPU, whose clocks only work moves."""

    def __init__(self) -> None:
        self.host, self.device = 0.0, 0.0
        self.gpu = SimpleNamespace(cuda=SimpleNamespace(get_elapsed_time=lambda a, b: 1e3 * (b.time - a.time)))

    def mark(self) -> Any:
        return SimpleNamespace(time=self.device, synchronize=bool)

    def work(self, queueing: float, takes: float) -> Callable[[], None]:
        def run() -> None:
            self.host += queueing
            self.device += takes

        return run


class Slower:
    """Two ranks, the other of which takes twice as long, and returns in half the time."""

    rank, size = 0, 2

    def Barrier(self) -> None:  # noqa: N802
        pass

    def allgather(self, one: tuple[float, float]) -> list[tuple[float, float]]:
        return [one, (2 * one[0], one[1] / 2)]


def test_each_time_is_that_of_the_slowest_rank() -> None:
    times = Times()
    contender: Any = SimpleNamespace(step=times.work(1e-5, 1e-3))
    case = Case("a", contender)
    measure(Slower(), [case], 3, partial(time_gpu, times, lambda: times.host))  # type: ignore[arg-type]  # no real one
    assert case.repeats == 1
    assert case.seconds == pytest.approx([2e-3] * 3)
    assert case.returned == pytest.approx([1e-5] * 3)


def test_bandwidths_are_those_of_nccl_tests() -> None:
    # 1 GB in 10 ms are 100 GB/s; of 4 ranks in a sum each link carries 1.5 times as much.
    work: Any = SimpleNamespace(group=SimpleNamespace(keys=SimpleNamespace(nbytes=10**9)), sums={"push"})
    for name, busbw in (("push", pytest.approx(150.0)), ("copy", None)):
        found = on_gpu(work, 4, Case(name, work, seconds=[0.01], returned=[0.001]))
        assert (found["algbw"], found["busbw"]) == (pytest.approx(100.0), busbw)


# --- Tables


def case(name: str, median: float, **others: Any) -> dict[str, Any]:
    found = {"name": name, "median": median, "returned": median / 10, "floor": None, "repeats": 1}
    return found | {"quartiles": [median, median], "seconds": [median], "steps": 3} | others


def job(**changes: Any) -> dict[str, Any]:
    sums = {
        "name": "sizes/1048576",
        "title": "sum of 1 MB",
        "elements": 1 << 18,
        "rounds": 2,
        "cases": [
            case("pushpull", 2e-3, algbw=0.5, busbw=0.75),
            case("copy", 1e-4, algbw=10.0, busbw=None),
        ],
        "comparisons": [],
        "skipped": {"allReduce": "no NCCL"},
        "wrong": {},
    }
    small = sums | {"name": "small/sgd", "title": "20 keys, SGD-momentum", "cases": [case("store", 4e-3)]}
    machine = {"cpu": "a CPU", "numpy": "2", "python": "3"}
    return {"ranks": 4, "library": "MPI 5", "transport": "nccl", "pinned": False, "crowded": False, "cores": 2,
            "idle": 0.99, "settings": {}, "groups": [sums, small], "gpus": ["H200", "H200"], "cupy": "14.2.0",
            "nccl": "2.32.3", "functional_only": "", "machine": machine} | changes  # fmt: skip


def text_of(job: dict[str, Any]) -> str:
    return "\n".join(report.lines({"mpikv": "1", "quick": False, "jobs": [job]}))


def test_a_table_has_both_bandwidths_and_both_times() -> None:
    lines = [line.split() for line in text_of(job()).splitlines()]
    assert ["GPUs:", "2", "x", "H200;", "CuPy", "14.2.0,", "NCCL", "2.32.3"] in lines
    assert ["1", "MB", "pushpull", "2.00", "ms", "200", "µs", "0.5", "0.75"] in lines
    assert ["1", "MB", "copy", "100", "µs", "10.0", "µs", "10"] in lines
    (store,) = (line for line in lines if line[:1] == ["store"])
    assert store[1:5] == ["4.00", "ms", "400", "µs"]
    assert "allReduce: no NCCL" in text_of(job())


def test_what_ranks_shared_is_labelled_at_every_table() -> None:
    assert SHARED not in text_of(job())
    text = text_of(job(functional_only=SHARED))
    assert text.count(f"warning: {SHARED}") == 1
    for title in ("sums without an updater", "20 keys, SGD-momentum", "left out"):
        assert f"{title} ({SHARED})" in text


# --- The command line


@pytest.mark.parametrize(
    ("arguments", "groups", "optimizers"),
    [
        ("", (*GPU_SUITES["latency"], *GPU_SUITES["sets"]), ("sgd", "adam")),
        ("--suite latency", GPU_SUITES["latency"], ("sgd", "adam")),
        ("--only many,small --optimizer adam", ("small", "many"), ("adam",)),
    ],
)
def test_what_is_chosen(arguments: str, groups: tuple[str, ...], optimizers: tuple[str, ...]) -> None:
    options = parse(["--device", "gpu", *arguments.split()], None)
    assert (options.groups, options.optimizers) == (groups, optimizers)
    assert options.settings == {"name": "nccl"}


def test_there_is_a_rank_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, ranks in ((0, 1), (3, 3)):
        monkeypatch.setattr(
            "benchmark.options.survey", lambda visible, count=count: SimpleNamespace(devices=["a"] * count)
        )
        assert parse(["--device", "gpu"], None).ranks == ranks
    assert parse(["--device", "gpu", "-n", "2"], None).ranks == 2


@pytest.mark.parametrize("size", [1, 2])
def test_without_a_gpu_it_is_one_line(tmp_path: Path, size: int) -> None:
    if why_no_mpi():
        pytest.skip(why_no_mpi())
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/benchmark"), "--device", "gpu", "-n", str(size), "--json", "all.json"],
        env={**clean(os.environ), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=18,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("mpikv run: running as root")]
    assert line.startswith(("scripts/bench: create: sums on GPUs need the package CuPy", "scripts/bench: create: CuPy"))
    assert json.loads((tmp_path / "all.json").read_text())["mpikv"] == mpikv.__version__
