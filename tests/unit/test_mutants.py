"""The faults that scripts/mutants draws and lists can be planted, and it tells what became of them."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mpikv"

pytestmark = pytest.mark.deadline(120)  # the package is parsed many times


@pytest.fixture
def mutation(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import mutation.drawing
    import mutation.gpu

    yield mutation
    for name in [name for name in sys.modules if name.partition(".")[0] == "mutation"]:
        del sys.modules[name]


def test_a_seed_draws_different_programs_from_all_areas(mutation):
    drawing = mutation.drawing
    mutants = drawing.draw(PACKAGE, 0, 180)
    assert mutants == drawing.draw(PACKAGE, 0, 180) != drawing.draw(PACKAGE, 1, 180)
    assert len({mutant.key for mutant in mutants}) == 180
    assert [mutant.area for mutant in mutants] == [area for area in drawing.AREAS for _ in range(20)]
    for mutant in mutants:
        source = (PACKAGE / mutant.path).read_bytes()
        assert ast.dump(ast.parse(mutant.applied(source))) != ast.dump(ast.parse(source)), mutant
    patterns = [*sum(drawing.AREAS.values(), ()), *drawing.ON_GPUS]
    assert [pattern for pattern in patterns if not list(PACKAGE.glob(pattern))] == []


def test_a_listed_fault_changes_its_file_and_names_a_test_that_is_there(mutation):
    for fault in mutation.gpu.FAULTS:
        source = (PACKAGE / fault.path).read_bytes()
        assert fault.applied(source) != source
        file, first, *names = fault.test.split()[0].partition("[")[0].split("::")
        text = (ROOT / fault.folder / file).read_text()
        # The promises of a seam are tested by a class of mpikv.testing.
        assert f"def {[first, *names][-1]}(" in text or f"class {first}(" in text, fault.test
