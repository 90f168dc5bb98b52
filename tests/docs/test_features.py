"""The page of features is what the tests show, and a row that nothing shows is not called done."""

from __future__ import annotations

import ast

import pytest
from support.feature_page import PAGE, ROOT, contract_tests, faults, marked, page
from support.features import FEATURES, Feature


def test_every_row_is_shown_and_every_marker_known() -> None:
    assert faults(FEATURES, marked(ROOT / "tests"), contract_tests()) == []


def test_the_page_is_not_stale() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(FEATURES, marked(ROOT / "tests")), "run scripts/features"


@pytest.mark.parametrize(
    ("rows", "found", "fault"),
    [
        ([Feature("a", "")], {}, "a is said to be done, and no test shows it"),
        ([Feature("a", "", refused=True)], {}, "a is said to be refused, and no test shows it"),
        ([Feature("a", "", ("test_gone",))], {}, "a: the contract has no test_gone"),
        ([Feature("a", "")], {"a": ["test"], "b": ["t"]}, "t names 'b', which is no feature"),
        ([Feature("a", ""), Feature("a", "")], {"a": ["test"]}, "a is there twice"),
    ],
)
def test_faults_are_found(rows: list[Feature], found: dict[str, list[str]], fault: str) -> None:
    assert fault in faults({"section": tuple(rows)}, found, {"test_there"})


def test_contract_tests_are_run_by_a_class_of_every_placement() -> None:
    """A row that names a test of the contract stands on the classes that inherit it."""
    tree = ast.parse((ROOT / "tests" / "store" / "test_store.py").read_text(encoding="utf-8"))
    calls = (node.value for node in tree.body if isinstance(node, ast.Assign))
    made = [ast.unparse(call.func) for call in calls if isinstance(call, ast.Call)]
    assert made.count("contract") >= 8
    assert contract_tests() > {"test_init_twice", "test_pushpull"}
