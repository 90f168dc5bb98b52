"""Keeps docs/reference/features.md: the page has the rows, and each gets the tests that show it, by syntax trees."""

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "features.md"
CONTRACT = ROOT / "mpikv" / "testing" / "store.py"
_MOST_SHOWN = 3


class Row(NamedTuple):
    """One feature."""

    name: str
    does: str
    status: str
    """``done``, or ``refused``: it raises instead, as ``does`` says."""
    shown: str = ""

    @property
    def contract(self) -> list[str]:
        """Return the tests of the store's contract that show it, which the row itself names."""
        return re.findall(r"`StoreContract\.(\w+)`", self.shown)


def rows(text: str) -> list[Row]:
    """Return the rows of the page."""
    lines = (line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| feature |"))
    return [Row(*(cell.strip() for cell in line[1:-1].split("|"))) for line in lines]


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


def faults(table: Sequence[Row], found: dict[str, list[str]], contract: set[str]) -> list[str]:
    """Return what is wrong with the rows and the tests that were found."""
    names = [row.name for row in table]
    wrong = [f"{name} is there twice" for name in sorted(set(names)) if names.count(name) > 1]
    wrong += [
        f"{test} names {name!r}, which is no feature" for name in found.keys() - set(names) for test in found[name]
    ]
    for row in table:
        wrong += [f"{row.name}: the contract has no {test}" for test in row.contract if test not in contract]
        if row.status not in ("done", "refused") or not (row.contract or found.get(row.name)):
            wrong.append(f"{row.name} is said to be {row.status}, and no test shows it")
    return sorted(wrong)


def page(text: str, found: dict[str, list[str]]) -> str:
    """Return the text of the page with the counts, and with the tests of each row."""
    table = rows(text)
    for row in table:
        old = re.escape(f"| {row.name} | {row.does} | {row.status} |")
        text = re.sub(f"^({old}).*", rf"\1 {_shown(row, found.get(row.name, []))} |", text, flags=re.MULTILINE)
    counts = Counter(row.status for row in table)
    return re.sub(r"(?m)^\d+ rows: .*", f"{len(table)} rows: {counts['done']} done, {counts['refused']} refused.", text)


def _shown(row: Row, tests: list[str]) -> str:
    """Return the first of the tests, short."""
    short = [f"`StoreContract.{name}`" for name in row.contract]
    short += [f"`{test.rpartition('/')[2]}`" for test in tests]
    more = f" and {len(short) - _MOST_SHOWN} more" if len(short) > _MOST_SHOWN else ""
    return ", ".join(short[:_MOST_SHOWN]) + more


def main() -> int:
    """Write the page; return 1 and say why where the rows and the tests do not fit."""
    text, found = PAGE.read_text(encoding="utf-8"), marked(ROOT / "tests")
    wrong = faults(rows(text), found, contract_tests())
    print("\n".join(wrong), file=sys.stderr, end="\n" * bool(wrong))
    if not wrong:
        PAGE.write_text(page(text, found), encoding="utf-8")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
