"""The random programs of ``scripts/chaos_program.py`` on simulated ranks, for :mod:`mpikv.testing.explore`."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from chaos_program import Program

CALLS = 20


def program(comm: Any, seed: int) -> None:
    """Make the calls that a seed draws, and compare what they give with what one process would have."""
    Program(comm, str(seed), mistakes=False, transport="auto").run(CALLS)
