"""The faults that scripts/gpu_faults plants."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def faults(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from gpu_faults_table import FAULTS

    yield FAULTS
    del sys.modules["gpu_faults_table"]


def test_each_can_be_planted(faults):
    for fault in faults:
        source = (ROOT / "mpikv" / fault.path).read_bytes()
        assert fault.applied(source) != source


def test_a_line_that_has_changed_is_named(faults):
    with pytest.raises(LookupError, match=r"flushed to zero: mpikv/compute/cuda/loading.py has not once '\"--ftz"):
        faults[0].applied(b"another text")


def test_the_tests_that_are_to_find_them_are_there(faults):
    for fault in faults:
        file, *names = fault.test.split()[0].partition("[")[0].split("::")
        text = (ROOT / "tests" / "gpu" / "stand_ins" / file).read_text()
        assert names
        # The promises of a seam are tested by a class of mpikv.testing.
        assert f"def {names[-1]}(" in text or f"class {names[0]}(" in text, fault.test


def test_the_page_has_all_of_them(faults):
    page = (ROOT / "docs" / "reference" / "gpu-faults.md").read_text()
    rows = [line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if line.startswith("| ")]
    names = [f"{fault.kind}: {fault.name}" for fault in faults]
    assert [row for row in rows if row.startswith(tuple(f"{fault.kind}: " for fault in faults))] == names
    assert len(set(names)) == len(names)
