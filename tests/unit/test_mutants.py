"""The mutants that scripts/mutants draws."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mpikv"

pytestmark = pytest.mark.deadline(60)  # the package is parsed many times


@pytest.fixture
def drawing(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from mutation import drawing

    yield drawing
    del sys.modules["mutation"], sys.modules["mutation.drawing"]


def test_a_seed_draws_the_same_ones_again_and_another_seed_others(drawing):
    assert drawing.draw(PACKAGE, 0, 45) == drawing.draw(PACKAGE, 0, 45)
    assert drawing.draw(PACKAGE, 0, 45) != drawing.draw(PACKAGE, 1, 45)


def test_they_differ_and_are_programs(drawing):
    mutants = drawing.draw(PACKAGE, 0, 180)
    assert len({mutant.key for mutant in mutants}) == 180
    assert [mutant.area for mutant in mutants] == [area for area in drawing.AREAS for _ in range(20)]
    for mutant in mutants:
        source = (PACKAGE / mutant.path).read_bytes()
        assert ast.dump(ast.parse(mutant.applied(source))) != ast.dump(ast.parse(source)), mutant


def test_each_pattern_names_a_file(drawing):
    for pattern in [
        *(pattern for patterns in drawing.AREAS.values() for pattern in patterns),
        *drawing.ON_GPUS,
        *drawing.COMPILED,
    ]:
        assert list(PACKAGE.glob(pattern)), pattern


SOURCE = '''"""A module of 3 words."""

SIZE = 1 + 2


def text(count: int = 4) -> str:
    """Return 5 words."""
    if not count:
        raise ValueError(f"{count + 6} words, not {7}")
    return cast("list[8]", count)


def found(array: list[int], low: int) -> int:
    kept: tuple[9, int] = array[low:]
    return min(kept) - low
'''


def test_texts_and_types_stay_as_they_are(drawing):
    changed = [(function, before, after) for _, _, function, _, _, before, after, _ in drawing.changes(SOURCE.encode())]
    assert changed == [
        ("text", "not count", "(count)"),
        ("text", "raise ValueError(f'{count + 6} words, not {7}')", "pass"),
        ("found", "low:", "low + 1:"),
        ("found", "min(kept) - low", "(min(kept) + low)"),
        ("found", "min(kept)", "(max(kept))"),
    ]
