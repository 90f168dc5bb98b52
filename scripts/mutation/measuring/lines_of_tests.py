"""A plug-in of pytest that tells coverage which test runs, on every rank, and keeps the outcomes of a session.

It reads the variable MUTANTS_OUTCOMES, the file for the outcomes: one line of JSON per test.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import coverage
import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    measured = coverage.Coverage.current()
    measured.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        measured.switch_context("")


class Outcomes:
    """Writes what became of each test of the session that was started by hand."""

    def __init__(self, path: str) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            record: dict[str, Any] = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
            with open(self.path, "a") as file:
                file.write(json.dumps(record) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get("MUTANTS_OUTCOMES")
    if path and not config.option.rank_records:
        config.pluginmanager.register(Outcomes(path))
