"""The command ``scripts/bench``, and the program of its ranks."""

import sys
from collections.abc import Sequence
from pathlib import Path

from mpikv.cli import bench

from . import hosts
from .measuring import measure
from .options import parse
from .report import lines

_SCRIPTS = str(Path(__file__).resolve().parents[1])
_RANK = f"import sys; sys.path.insert(1, {_SCRIPTS!r}); from benchmark.program import main; sys.exit(main())"

PROGRAM = bench.Program("scripts/bench", _RANK, parse, measure, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, as ``mpikv bench`` does."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if any(argument.partition("=")[0] == "--hosts" for argument in arguments):
        return hosts.main(arguments)
    return bench.main(arguments, PROGRAM)
