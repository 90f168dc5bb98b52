"""The emulated GPU says what it lacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "support" / "cuda"


def test_a_machine_without_a_compiler() -> None:
    command = [sys.executable, FOLDER, "echo", "it runs"]
    ended = subprocess.run(command, env={"PATH": ""}, capture_output=True, text=True, timeout=18)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "needs the compiler cc, which is not installed" in ended.stderr
