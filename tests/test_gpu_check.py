"""What ``scripts/gpu_check`` makes of its steps; the steps themselves need a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts/gpu_check"


@pytest.fixture(scope="module")
def check() -> ModuleType:
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        loader = SourceFileLoader("gpu_check", str(SCRIPT))
        module = module_from_spec(spec_from_loader("gpu_check", loader))
        sys.modules["gpu_check"] = module
        loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--out", tmp_path / "out"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=18,
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout == "gpu_check: the driver shows no GPU here; nothing was run, and nothing written\n"
    assert not (tmp_path / "out").exists()


def nothing() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(
    ("dies", "status", "output", "expected"),
    [
        (False, 0, 'noise\n{"ms": 1.5}\n', {"status": "ok", "numbers": {"ms": 1.5}}),
        (False, 0, '{"skip": "no torch"}\n', {"status": "skip", "reason": "no torch"}),
        (True, 137, '{"s": 5.1}\n', {"status": "ok", "numbers": {"s": 5.1}}),
        (False, 137, '{"s": 5.1}\n', {"status": "fail", "reason": "exit status 137", "numbers": {"s": 5.1}}),
        (False, 0, "nothing\n", {"status": "fail", "reason": "exit status 0", "numbers": None}),
        (True, 1, "Traceback\n", {"status": "fail", "reason": "exit status 1", "numbers": None}),
        (False, None, '{"s": 5.1}\n', {"status": "fail", "reason": "did not end in time", "numbers": {"s": 5.1}}),
    ],
)
def test_what_an_outcome_means(check, dies, status, output, expected):
    found = check.judge(check.Step(nothing, 1, dies=dies), status, output, "!")
    if expected["status"] == "fail":
        assert found.pop("output") == output + "!"
    assert found == expected


def test_a_step_that_hangs_is_ended(check, monkeypatch):
    monkeypatch.setattr(check, "GRACE", 0.5)
    begin = time.monotonic()
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, lambda *_: print('{\"s\": 1}', flush=True)); time.sleep(60)"
    )
    assert check.run([sys.executable, "-c", code], dict(os.environ), 0.5)[0] is None
    assert time.monotonic() - begin < 5
    assert check.take("/no/python", "versions", check.STEPS["versions"], 3)["status"] == "skip"


def test_the_page_and_the_numbers(check, tmp_path):
    records = {
        "versions": {"status": "ok", "seconds": 1.0, "numbers": {"gpus": ["NVIDIA H200"], "memory_GB": 150.1}},
        "sums_2": {
            "status": "fail",
            "seconds": 60.0,
            "reason": "exit status 1",
            "numbers": None,
            "output": "E  wrong\n",
        },
        "tests_4": {"status": "skip", "seconds": 0.0, "reason": "no time was left"},
    }
    path = check.write(tmp_path, records)
    assert path.name == "nvidia-h200.md"
    assert check.json.loads((tmp_path / "nvidia-h200.json").read_text()) == records
    text = path.read_text()
    for line in (
        "# mpikv on NVIDIA H200",
        "| sums_2 | fail: exit status 1 | 60.0 |",
        "| tests_4 | skip: no time was left | 0.0 |",
        "| gpus | NVIDIA H200 |",
        "E  wrong",
    ):
        assert line in text.splitlines()


def test_figures_of_the_benchmark(check):
    case = {"name": "copy", "median": 2e-3, "floor": 8}
    sums = {"name": "sizes/64", "elements": 16, "cases": [case | {"floor": None, "algbw": 0.5}], "skipped": {"a": "b"}}
    kernels = {"name": "kernels/sgd", "elements": 10**6, "cases": [case], "skipped": {}}
    numbers = sys.modules["gpu_steps"].bench_numbers
    expected = {
        "sizes/64 copy us": 2000.0,
        "sizes/64 copy algbw_GB_s": 0.5,
        "sizes/64 a skipped": "b",
        "kernels/sgd copy us": 2000.0,
        "kernels/sgd copy GB_s": 4.0,
    }
    job = {"functional_only": "", "groups": [sums, kernels]}
    assert numbers({"jobs": [job]}) == pytest.approx(expected)
    assert numbers({"jobs": [job | {"functional_only": "ranks share"}]})["label"] == "ranks share"


def test_figures_of_the_workload(check):
    numbers = sys.modules["gpu_steps"].synthetic_numbers
    said = "Adam on gpu\nvalues_bytes 10  state_bytes 20\nstep_ms 1.5 (first 3.0), of 5\nupdate_GB_s 4.25 for each\n"
    expected = {"values_bytes": 10.0, "state_bytes": 20.0, "step_ms": 1.5, "update_GB_s": 4.25}
    assert numbers(said + "check passed, both ends") == expected
    with pytest.raises(AssertionError, match="check failed"):
        numbers(said + "check failed, both ends")


def test_a_program_that_fails_fails_its_step(check):
    said_by = sys.modules["gpu_steps"].said_by
    assert said_by([sys.executable, "-c", "print(3)"]) == "3\n"
    with pytest.raises(AssertionError, match=r"exit status 1: \(?oh"):
        said_by([sys.executable, "-c", "import sys; sys.exit('oh')"])


@pytest.mark.skipif(not find_spec("cupy"), reason="CuPy is not installed")
def test_every_name_of_cupy_in_what_needs_a_gpu_is_one():
    import cupy

    used = set()
    for path in (ROOT / "scripts/gpu_steps.py", *(ROOT / "tests/gpu").glob("*.py")):
        used |= set(re.findall(r"\bcupy((?:\.[A-Za-z_]\w*)+)", path.read_text()))
    assert len(used) > 15
    for name in used:
        found: Any = cupy
        for part in name.split(".")[1:]:
            assert hasattr(found, part), name
            found = getattr(found, part)
