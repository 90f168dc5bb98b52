"""What ``scripts/gpu_check`` makes of its steps; the steps themselves need a GPU."""

import doctest
import json
import math
import re
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.commands import Done, python

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts/gpu_check"
MODULES = sorted(path.stem for path in (ROOT / "scripts/gpu_steps").glob("[!_]*.py"))
USES = [*(ROOT / "scripts/gpu_steps").glob("*.py"), *(ROOT / "tests/gpu/real").glob("*.py")]
has_cupy = pytest.mark.skipif(not find_spec("cupy"), reason="CuPy is not installed")


@pytest.fixture(scope="module", autouse=True)
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


def module(name: str) -> ModuleType:
    return import_module(f"gpu_steps.{name}")


def test_it_starts_without_any_package():
    code = "import sys; sys.path.insert(0, 'scripts'); import gpu_steps.table, gpu_steps.aims; print(*sys.modules)"
    done = python("-S", "-c", code, cwd=ROOT, timeout=40)
    assert done.returncode == 0
    assert not {"numpy", "cupy", "mpi4py", "mpikv"} & set(done.stdout.split())


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert doctest.testmod(module(name)).failed == 0


def without_gpu(*options: object) -> Done:
    return python(SCRIPT, *options, timeout=40, CUDA_VISIBLE_DEVICES="")


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    done = without_gpu("--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (2, "")
    said, advice = done.stdout.splitlines()
    assert said == (
        "gpu_check: the driver shows no GPU here with CUDA_VISIBLE_DEVICES=''; nothing was run, and nothing written"
    )
    assert advice.startswith("nvidia-smi lists")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def main(check, monkeypatch, tmp_path):
    """Return what runs the script with options on a machine that has all packages, or lacks some."""

    def run(*options: object, needed: Sequence[str] = ()) -> int:
        monkeypatch.setattr(check, "NEEDED", needed)
        return int(check.main(["--no-gpu", "--out", str(tmp_path), *map(str, options)]))

    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)


def test_missing_packages_are_named_with_the_command_that_installs_them(main, tmp_path, capsys):
    assert main("--out", tmp_path / "out", needed=["absent_one", "pytest", "absent_two"]) == 2
    said = capsys.readouterr().err
    assert f"gpu_check: {sys.executable} lacks absent_one, absent_two; nothing was run" in said
    assert re.search(r'pip install --group (\S+) "\.\[(.+)\]"', said).groups() == ("test", "mpich,cuda13")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_interrupts_loses_one_step(check, main, monkeypatch, tmp_path, capsys, number):
    def take(name: str, *others: object) -> dict[str, Any]:
        if name == "kernels":
            signal.raise_signal(number)
        return {"status": "ok", "seconds": 1.0, "numbers": {}}

    monkeypatch.setattr(check, "take", take)
    assert main() == 130
    assert "stopped in the step kernels" in capsys.readouterr().out
    numbers, page = sorted(tmp_path.iterdir())
    assert list(json.loads(numbers.read_text())) == ["versions", "sums_2"]
    assert "| sums_2 |" in page.read_text()


@pytest.fixture
def book(check, tmp_path):
    return lambda code="12345678": check.Book(tmp_path, "NVIDIA H200", code)


def test_which_steps_a_later_command_runs(book):
    done, unreached = {"status": "ok", "seconds": 1.0, "numbers": {"ms": 1}}, {"status": "skip", "unreached": True}
    unreached |= {"seconds": 0.0, "reason": "it takes about 6 s, and 3 s were left"}
    assert book().lacks("kernels")
    book().add("kernels", unreached)
    assert book().lacks("kernels")
    book().add("kernels", done)
    assert not book().lacks("kernels")
    assert book("of other code").lacks("kernels")
    book("of other code").add("kernels", unreached)
    assert book().records["kernels"]["numbers"] == {"ms": 1}


@has_cupy
def test_steps_fail_for_want_of_a_gpu_alone(check, tmp_path):
    names = ["versions", "sums_2", "large"]
    done = without_gpu("--no-gpu", "--steps", ",".join(names), "--out", tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    records = json.loads((tmp_path / "no-gpu.json").read_text())
    assert sorted(records) == sorted(names)
    page = (tmp_path / "no-gpu.md").read_text()
    for name, found in records.items():
        assert f"| {name} | {check.STEPS[name].what} | fail: exit status 1" in page
        assert re.search("no GPU can be used here|CUDA driver", found["output"]), (name, found)


# --- The aims


def test_aims_that_are_met_missed_and_not_measured():
    numbers = {"one_copy_ms": 1.0, "push_ms": 1.05, "pull_ms": 1.05}

    def verdict(**record: Any) -> tuple[str, str]:
        return module("aims").AIMS[-1].row({"large": record})[2:]

    assert verdict(status="ok", numbers=numbers) == ("1.05", "met")
    assert verdict(status="ok", numbers=numbers | {"push_ms": 1.2}) == ("1.125", "missed")
    # What a step has printed before it failed counts for nothing.
    failed = verdict(status="fail", reason="exit status 1", numbers=numbers)
    assert failed == ("not measured (large: exit status 1)", "not measured")
    broken = verdict(status="ok", numbers=numbers | {"one_copy_ms": math.nan})
    assert broken == ("not measured (large: one_copy_ms is nan)", "not measured")
    assert {aim.row({})[3] for aim in module("aims").AIMS} == {"not measured"}


# --- Names of others


@has_cupy
def test_every_name_of_cupy_in_what_needs_a_gpu_is_one():
    import cupy

    used = set()
    for path in USES:
        used |= set(re.findall(r"\bcupy((?:\.[A-Za-z_]\w*)+)", path.read_text()))
    assert len(used) > 15
    for name in used:
        found: Any = cupy
        for part in name.split(".")[1:]:
            assert hasattr(found, part), name
            found = getattr(found, part)
