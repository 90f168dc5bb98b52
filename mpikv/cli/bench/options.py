"""The command line of ``mpikv bench``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...config import TRANSPORTS
from ...errors import known_names
from ..parser import Parser

Suites = Mapping[str, Sequence[str]]

SUITES: Suites = {"latency": ("sizes",), "sets": ("resnet50", "bert-base", "many")}

DESCRIPTION = """\
Time pushes and pulls beside the same work with mpi4py and numpy alone, and check every result. Cases are timed in turns
within one run, since a machine drifts by more than most differences: compare ratios, and times within one run only."""

EPILOG = """\
what is measured (--suite latency is the first, sets are the others):
  sizes      push, pull, both in turns, and pushpull of 64 B to 64 MB without an updater, beside Comm.Allreduce
  resnet50   the 161 arrays of a ResNet-50 (102 MB) in one pushpull
  bert-base  the 199 arrays of a BERT-base (438 MB)
  many       10,000 arrays of 1 to 100 floats
The sets have SGD with momentum: from private arrays to private arrays, and in place, beside Reduce, update and Bcast
per key, and beside a copy of the same bytes. MPIKV_KERNELS=numba measures the compiled kernels.

examples:
  mpikv bench --only resnet50,sizes --json today.json
  mpikv bench -n 4 --suite sets                   on four ranks of this host
  mpiexec -n 4 mpikv bench --only resnet50        on ranks that a launcher has started
  OMPI_MCA_smsc=^cma mpikv bench --only resnet50  beside Open MPI at its best for large sets

exit status: 0; 1 where a result was wrong; 2 for misuse, or where nothing could be measured.
"""


@dataclass(frozen=True)
class Options:
    """The measurement's choices, and the places of its output."""

    groups: tuple[str, ...]
    ranks: int
    """The number to start; 0 in a job started by a launcher."""
    rounds: int
    """0: the usual number of the group."""
    quick: bool
    pin: bool
    json: Path | None
    report: Path | None
    """Where the ranks started by this command leave their report for it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of :func:`mpikv.create`; without a name it makes ``dist_sync``."""
    optimizers: tuple[str, ...] = ("sgd",)
    """The optimizers for the key sets; each set is measured with each."""


def parse(arguments: Sequence[str], launched: int | None) -> Options:
    """Return the options. Misuse ends the process with status 2 and one line.

    Args:
        arguments: those after ``mpikv bench``.
        launched: the number of ranks under a launcher; None without one.
    """
    parser = new_parser("mpikv bench", "mpikv bench", DESCRIPTION, EPILOG, SUITES)
    return read(parser, parser.parse_args(arguments), launched, SUITES)


def new_parser(name: str, command: str, description: str, epilog: str, suites: Suites) -> argparse.ArgumentParser:
    """Return a parser of the options that every benchmark has."""
    known = dict.fromkeys(group for groups in suites.values() for group in groups)
    parser = Parser(
        prog=name,
        usage=f"{command} [-n N] [options]",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-n", dest="ranks", metavar="N", type=positive, help="number of ranks to start on this host (default 2)")
    add("--suite", choices=(*suites, "all"), help="group of measurements (default all)")
    add("--only", metavar="NAME,NAME", help=f"single measurements: {', '.join(known)}")
    add("--transport", choices=TRANSPORTS, help="of the store (default auto)")
    add("--rounds", metavar="N", type=positive, default=0, help="of each case (default 41; sets: 15)")
    add("--quick", action="store_true", help="few rounds and small sets, to check that it works, not its speed")
    add("--no-pin", dest="pin", action="store_false", help="do not pin ranks to cores")
    add("--json", metavar="FILE", type=Path, help="write everything, with the times of each round")
    add("--report", type=Path, help=argparse.SUPPRESS)
    return parser


def read(parser: argparse.ArgumentParser, given: argparse.Namespace, launched: int | None, suites: Suites) -> Options:
    """Return the options that every benchmark has."""
    if launched and given.report is None and given.ranks:
        parser.error(f"this is one of {launched} ranks already; leave out -n")
    if given.suite is not None and given.only is not None:
        parser.error("--suite and --only exclude each other")
    # Refuse an impossible file now, and not after a long measurement.
    if given.json is not None and (given.json.is_dir() or not given.json.absolute().parent.is_dir()):
        parser.error(f"the file {str(given.json)!r} cannot be written")
    known = tuple(group for groups in suites.values() for group in groups)
    return Options(
        groups=tuple(suites.get(given.suite or "all", known))
        if given.only is None
        else choose(parser, "group", given.only, known),
        ranks=0 if launched else given.ranks or 2,
        rounds=given.rounds,
        quick=given.quick,
        pin=given.pin,
        json=given.json,
        report=given.report,
        settings={} if given.transport is None else {"transport": given.transport},
    )


def positive(text: str) -> int:
    """Return the positive number of an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def choose(parser: argparse.ArgumentParser, kind: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return the known names in a list, in their own order."""
    wanted = text.split(",")
    for name in wanted:
        if name not in known:
            parser.error(known_names(kind, name, known))
    return tuple(name for name in known if name in wanted)
