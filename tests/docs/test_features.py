"""The page of features is what the tests show, and a row that nothing shows is not called done."""

import ast

from support.feature_page import PAGE, ROOT, contract_tests, faults, marked, page, rows

TEXT = PAGE.read_text(encoding="utf-8")


def test_every_row_is_shown_and_every_marker_known() -> None:
    assert faults(rows(TEXT), marked(ROOT / "tests"), contract_tests()) == []
    assert len(rows(TEXT)) == TEXT.count(" | done | ") + TEXT.count(" | refused | ") > 100


def test_the_page_is_not_stale() -> None:
    assert page(TEXT, marked(ROOT / "tests")) == TEXT, "run scripts/features"


def test_contract_tests_are_run_by_a_class_of_every_placement() -> None:
    """A row that names a test of the contract stands on the classes that inherit it."""
    tree = ast.parse((ROOT / "tests" / "store" / "test_store.py").read_text(encoding="utf-8"))
    calls = (node.value for node in tree.body if isinstance(node, ast.Assign))
    made = [ast.unparse(call.func) for call in calls if isinstance(call, ast.Call)]
    assert made.count("contract") >= 8
    assert contract_tests() > {"test_init_twice", "test_pushpull"}
