"""The command line of ``mpikv bench``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...config import TRANSPORTS
from ...errors import known_names
from ..parser import Parser
from .rules import RULES

__all__ = ["Options", "parse"]

SUITES = {"latency": ("push-pull", "allreduce", "sizes"), "sets": ("resnet50", "bert-base", "many")}
GROUPS = (*SUITES["latency"], *SUITES["sets"])

DESCRIPTION = """\
Time pushes and pulls beside the same work with mpi4py and numpy alone and, where it is installed, with PyTorch; check
every result; print the ratios first. All cases are timed in turns within one run, since a machine drifts by more than
most differences: compare ratios, and times within one run only."""

EPILOG = """\
what is measured (--suite latency is the first three, sets the others):
  push-pull  a single key of 64 B and a list of 100, SGD-momentum, beside Comm.Allreduce and an update per key
  allreduce  the sum of one array of 64 MB, beside one Comm.Allreduce
  sizes      push, pull and pushpull of 64 B to 64 MB without an updater, beside Comm.Allreduce
  resnet50   the 161 arrays of a ResNet-50 (102 MB) in one pushpull
  bert-base  the 199 arrays of a BERT-base (438 MB)
  many       10,000 arrays of 1 to 100 floats
The last three, with an optimizer: from private arrays to private arrays, and in place, beside Reduce, update and Bcast
per key, beside PyTorch's gloo with DDP's buckets and a fused update, and beside a copy of the same bytes; and the
memory of each rank.

A "bound" in the report is the ratio that this project wants to stay below on two ranks with a core each: an aim, and
no limit of the machine. Where it says "at least", so many bytes per element must move, over all ranks.

examples:
  mpikv bench                                     everything, on two ranks
  mpikv bench -n 4 --suite latency --plot sums.png
  mpikv bench --only resnet50,push-pull --json today.json
  mpikv bench --only resnet50 --optimizer sgd,adam,lamb
  mpikv bench --ranks-scaling 1,2,4               the sets on several numbers of ranks
  mpiexec -n 4 mpikv bench --only resnet50        on ranks that a launcher has started
  OMPI_MCA_smsc=^cma mpikv bench --only resnet50  beside Open MPI at its best for large sets

exit status: 0; 1 where a result was wrong; 2 for misuse, or where nothing could be measured.
"""


@dataclass(frozen=True)
class Options:
    """What to measure, and where to write it."""

    groups: tuple[str, ...]
    sizes: tuple[int, ...]
    """The numbers of ranks, of which each is a job of its own; empty for those that a launcher has started."""
    rounds: int
    """0: as many as the group usually has."""
    optimizers: tuple[str, ...]
    """Those of the sets, each of which is measured with every one."""
    settings: Mapping[str, Any]
    """Arguments of :func:`mpikv.create`."""
    quick: bool
    pin: bool
    json: Path | None
    plot: Path | None
    report: Path | None
    """Where ranks that this command has started leave their report for it."""
    live: int
    """The columns of the terminal on which rank 0 shows a live table; 0: it prints lines."""


def parse(arguments: Sequence[str], *, launched: int | None) -> Options:
    """Return the options. Misuse ends the process with status 2 and one line.

    Args:
        arguments: those after ``mpikv bench``.
        launched: the number of ranks that a launcher has started; None outside of one.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    own_job = given.report is not None
    if launched and not own_job and (given.ranks or given.scaling):
        parser.error(f"this is one of {launched} ranks already; leave out -n and --ranks-scaling")
    if given.ranks and given.scaling:
        parser.error("-n and --ranks-scaling exclude each other")
    groups = _groups(parser, given)
    if not own_job:
        _check_files(parser, given, groups)
    return Options(
        groups=groups,
        sizes=() if launched else tuple(given.scaling or (given.ranks or 2,)),
        rounds=given.rounds,
        optimizers=_chosen(parser, "optimizer", given.optimizer, tuple(RULES)),
        settings={} if given.transport is None else {"transport": given.transport},
        quick=given.quick,
        pin=given.pin,
        json=given.json,
        plot=given.plot,
        report=given.report,
        live=given.live,
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mpikv bench",
        usage="mpikv bench [-n N] [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-n", dest="ranks", metavar="N", type=_positive, help="number of ranks to start on this host (default 2)")
    add(
        "--ranks-scaling",
        dest="scaling",
        metavar="N,N",
        type=lambda text: [_positive(part) for part in text.split(",")],
        help="one job for each of these numbers of ranks; the sets, unless --suite or --only says otherwise",
    )
    add("--suite", choices=(*SUITES, "all"), help="what to measure, in general (default all)")
    add("--only", metavar="NAME,NAME", help=f"what to measure, in particular: {', '.join(GROUPS)}")
    add(
        "--optimizer",
        metavar="NAME,NAME",
        default="sgd",
        help=f"of the sets: {', '.join(RULES)} (default sgd, with momentum)",
    )
    add("--transport", choices=TRANSPORTS, help="of the store (default auto)")
    add("--rounds", metavar="N", type=_positive, default=0, help="of each case (default 41; sets: 15)")
    add("--quick", action="store_true", help="few rounds and small sets: to see that it works, not how fast")
    add("--no-pin", dest="pin", action="store_false", help="leave it to the system which core runs which rank")
    add("--json", metavar="FILE", type=Path, help="write everything, with the times of each round")
    add("--plot", metavar="FILE.png", type=Path, help="draw the times of all sizes (needs matplotlib)")
    add("--report", type=Path, help=argparse.SUPPRESS)
    add("--live", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _groups(parser: argparse.ArgumentParser, given: argparse.Namespace) -> tuple[str, ...]:
    if given.suite and given.only:
        parser.error("--suite and --only exclude each other")
    if given.only:
        return _chosen(parser, "group", given.only, GROUPS)
    suite = given.suite or ("sets" if given.scaling else "all")
    return SUITES.get(suite, GROUPS)


def _chosen(parser: argparse.ArgumentParser, kind: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return the known names that a list names, in their own order."""
    wanted = text.split(",")
    for name in wanted:
        if name not in known:
            parser.error(known_names(kind, name, known))
    return tuple(name for name in known if name in wanted)


def _check_files(parser: argparse.ArgumentParser, given: argparse.Namespace, groups: Sequence[str]) -> None:
    """Refuse before a long measurement what would fail after it."""
    for path in (given.json, given.plot):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            parser.error(f"the file {str(path)!r} cannot be written")
    if given.plot is None:
        return
    if "sizes" not in groups or len(given.scaling or ()) > 1:
        parser.error("--plot draws the group 'sizes' of one job, which is not measured here")
    if find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib, which is not installed:  pip install 'mpikv[plot]'")
