"""Writes docs/reference/features.md: each row of ``features.py`` with the tests that show it, found by syntax trees."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from support.features import FEATURES, Feature

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "features.md"
CONTRACT = ROOT / "mpikv" / "testing" / "store.py"

HEAD = """\
# Features

This page compares mpikv with MXNet's KVStore and Gluon's Trainer, row by row. `scripts/features` writes it from
`tests/support/features.py` and from the marker `feature` of tests, and a test fails while the page is out of date.

**done**: tests show it. **refused**: mpikv raises, as the row says, and tests show that. A test may need a package
(ml_dtypes for bfloat16, numba, scikit-learn, torch) and is skipped without it; it counts here. `StoreContract` stands
for `mpikv/testing/store.py`; `tests/store/test_store.py` runs it for combinations of transport and placement.
"""
_MOST_SHOWN = 3


def marked(folder: Path) -> dict[str, list[str]]:
    """Return the tests that have each name in a marker, as ``path::name``."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(folder.rglob("test_*.py")):
        for test, node in _tests(ast.parse(path.read_text(encoding="utf-8"))):
            for name in _names(node):
                found[name].append(f"{path.relative_to(folder.parent).as_posix()}::{test}")
    return dict(found)


def _tests(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield each test function, and each class of tests, that can have a marker."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name, node
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield node.name, node
            yield from ((f"{node.name}::{name}", inner) for name, inner in _tests(ast.Module(node.body, [])))


def _names(node: ast.AST) -> Iterator[str]:
    """Yield what ``@pytest.mark.feature`` of a test names."""
    for mark in getattr(node, "decorator_list", []):
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.feature":
            yield from (ast.literal_eval(argument) for argument in mark.args)


def contract_tests(path: Path = CONTRACT) -> set[str]:
    """Return the names of the tests of the store's contract."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (contract,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "StoreContract")
    return {node.name for node in contract.body if isinstance(node, ast.FunctionDef)}


def faults(table: dict[str, tuple[Feature, ...]], found: dict[str, list[str]], contract: set[str]) -> list[str]:
    """Return what is wrong with a table and the tests that were found."""
    rows = [row for rows in table.values() for row in rows]
    names = [row.name for row in rows]
    wrong = [f"{name} is there twice" for name in sorted(set(names)) if names.count(name) > 1]
    wrong += [
        f"{test} names {name!r}, which is no feature" for name in found.keys() - set(names) for test in found[name]
    ]
    for row in rows:
        wrong += [f"{row.name}: the contract has no {test}" for test in row.contract if test not in contract]
        shown = bool(row.contract or found.get(row.name))
        if not shown:
            wrong.append(f"{row.name} is said to be {'refused' if row.refused else 'done'}, and no test shows it")
    return sorted(wrong)


def page(table: dict[str, tuple[Feature, ...]], found: dict[str, list[str]]) -> str:
    """Return the text of the page."""
    rows = [row for rows in table.values() for row in rows]
    counts = {status: sum(_status(row) == status for row in rows) for status in ("done", "refused")}
    parts = [HEAD, f"{len(rows)} rows: " + ", ".join(f"{count} {status}" for status, count in counts.items()) + ".\n"]
    for section, several in table.items():
        parts.append(f"\n## {section}\n\n| feature | does | status | shown by |\n|---|---|---|---|\n")
        parts += [
            f"| {row.name} | {row.does} | {_status(row)} | {_shown(row, found.get(row.name, []))} |\n"
            for row in several
        ]
    return "\n".join(parts[:2]) + "".join(parts[2:])


def _status(row: Feature) -> str:
    return "refused" if row.refused else "done"


def _shown(row: Feature, tests: list[str]) -> str:
    """Return the first of the tests, short."""
    short = [f"`StoreContract.{name}`" for name in row.contract]
    short += [f"`{test.rpartition('/')[2]}`" for test in tests]
    more = f" and {len(short) - _MOST_SHOWN} more" if len(short) > _MOST_SHOWN else ""
    return ", ".join(short[:_MOST_SHOWN]) + more


def main() -> int:
    """Write the page; return 1 and say why where the table and the tests do not fit."""
    found = marked(ROOT / "tests")
    wrong = faults(FEATURES, found, contract_tests())
    print("\n".join(wrong), file=sys.stderr, end="\n" * bool(wrong))
    if not wrong:
        PAGE.write_text(page(FEATURES, found), encoding="utf-8")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
