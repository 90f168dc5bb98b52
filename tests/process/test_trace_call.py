"""The way of a call stays short enough to be followed."""

import re

from support.commands import ROOT, mpikv


def test_a_pushpull_passes_few_files() -> None:
    printed = mpikv("run", "-n", 2, "scripts/trace_call", cwd=ROOT, timeout=50).stdout
    files, switches, calls = map(int, re.findall(r"\d+", printed.splitlines()[-1]))
    # One file, and two or three switches, note who is late.
    assert (files <= 9, switches <= 17, calls <= 50) == (True, True, True), printed
