"""The command line of ``mpikv bench``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...cluster.environment import visible_gpus
from ...config import TRANSPORTS
from ...errors import known_names
from ..gpus import survey
from ..parser import Parser
from .rules import RULES

__all__ = ["Options", "parse"]

SUITES = {
    "latency": ("push-pull", "allreduce", "sizes"),
    "sets": ("resnet50", "bert-base", "many"),
    "files": ("large-file", "many-file"),
    "torch": ("resnet18", "bert-small", "muon"),
    "c10d": ("all-reduce", "all-gather", "reduce-scatter", "broadcast"),
}
GROUPS = tuple(name for suite in SUITES.values() for name in suite)
GPU_SUITES = {"latency": ("sizes", "kernels"), "sets": ("resnet50", "bert-base", "small", "many")}
GPU_GROUPS = (*GPU_SUITES["latency"], *GPU_SUITES["sets"])
_KNOWN = dict.fromkeys((*GROUPS, *GPU_GROUPS))

DESCRIPTION = """\
Time pushes and pulls beside the same work with mpi4py and numpy alone and, where it is installed, with PyTorch; check
every result; print the ratios first. All cases are timed in turns within one run, since a machine drifts by more than
most differences: compare ratios, and times within one run only."""

EPILOG = """\
what is measured (--suite latency is the first three, sets the next three, files the next two, torch the next three,
c10d the last four):
  push-pull  a single key of 64 B and a list of 100, SGD-momentum, beside Comm.Allreduce and an update per key
  allreduce  the sum of one array of 64 MB, beside one Comm.Allreduce
  sizes      push, pull, both in turns, and pushpull of 64 B to 64 MB without an updater, beside Comm.Allreduce
  resnet50   the 161 arrays of a ResNet-50 (102 MB) in one pushpull
  bert-base  the 199 arrays of a BERT-base (438 MB)
  many       10,000 arrays of 1 to 100 floats
These three, with an optimizer: from private arrays to private arrays, and in place, beside Reduce, update and Bcast
per key, beside PyTorch's gloo with DDP's buckets and a fused update, and beside a copy of the same bytes; and the
memory of each rank.
  large-file a checkpoint of 4 keys of 64 MB: save, beside plain writes of the same bytes; save with wait=False until it
             returns, beside a copy in memory of what a rank owns; load, beside plain reads
  many-file  the same of 10,000 arrays of 1 to 100 floats
Files are in the folder for temporary files (TMPDIR), and are read from the page cache.
  resnet18   a training step of a ResNet-18 in PyTorch (45 MB): alone, with mpikv.torch, and with DDP over mpikv's
             backend and over gloo
  bert-small the same of a transformer with six layers (90 MB)
  muon       an update by PyTorch's Muon: of all matrices, and shared out among ranks
  all-reduce, all-gather, reduce-scatter, broadcast
             calls of torch.distributed on 64 B to 64 MB of float32 and bfloat16, over mpikv's backend and over gloo
One thread computes on each rank. What mpikv.torch adds to a step is compared with what DDP adds.

On GPUs (--device gpu), one rank for each, arrays stay there, and times are those of the GPU's clock, with the host's
time until a call returns beside them:
  sizes      push, pull and pushpull of 64 B to 256 MB without an updater, beside NCCL by itself, with the bandwidths
             that nccl-tests define, and beside a copy on the GPU
  kernels    what packs arrays and what updates weights, beside a copy
  resnet50, bert-base, many, and small, which are 1,000 arrays of 4 KB
             one pushpull with an optimizer, beside one allReduce and one kernel, beside PyTorch's NCCL, and a copy
Ranks that are more than the GPUs can share them with MPIKV_GPU_SHARING=1: that shows what works, and not how fast.

A "bound" in the report is the ratio that this project wants to stay below on two ranks with a core each: an aim, and
no limit of the machine. Where it says "at least", so many bytes per element must move, over all ranks.

examples:
  mpikv bench                                     everything, on two ranks
  mpikv bench -n 4 --suite latency --plot sums.png
  mpikv bench --only resnet50,push-pull --json today.json
  mpikv bench --only resnet50 --optimizer sgd,adam,lamb
  mpikv bench --ranks-scaling 1,2,4               the sets on several numbers of ranks
  mpiexec -n 4 mpikv bench --only resnet50        on ranks that a launcher has started
  mpikv bench --device gpu --optimizer adam       a rank for each GPU of this host
  OMPI_MCA_smsc=^cma mpikv bench --only resnet50  beside Open MPI at its best for large sets

exit status: 0; 1 where a result was wrong; 2 for misuse, or where nothing could be measured.
"""


@dataclass(frozen=True)
class Options:
    """The measurement's choices, and the places of its output."""

    device: str
    """``host``, or ``gpu``."""
    groups: tuple[str, ...]
    sizes: tuple[int, ...]
    """The numbers of ranks, one job for each; empty in a job started by a launcher."""
    rounds: int
    """0: the usual number of the group."""
    optimizers: tuple[str, ...]
    """The optimizers for the key sets; each set is measured with each."""
    settings: Mapping[str, Any]
    """Arguments of :func:`mpikv.create`; without a name it makes ``dist_sync``."""
    quick: bool
    pin: bool
    json: Path | None
    plot: Path | None
    report: Path | None
    """Where the ranks started by this command leave their report for it."""
    live: int
    """Columns of the terminal for rank 0's live table; 0: it prints lines."""


def parse(arguments: Sequence[str], *, launched: int | None) -> Options:
    """Return the options. Misuse ends the process with status 2 and one line.

    Args:
        arguments: those after ``mpikv bench``.
        launched: the number of ranks under a launcher; None without one.
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
        device=given.device,
        groups=groups,
        sizes=() if launched else tuple(given.scaling or (given.ranks or _usual_ranks(given.device),)),
        rounds=given.rounds,
        optimizers=_chosen(parser, "optimizer", given.optimizer or _OPTIMIZERS[given.device], tuple(RULES)),
        settings=_STORES[given.device] | ({} if given.transport is None else {"transport": given.transport}),
        quick=given.quick,
        pin=given.pin,
        json=given.json,
        plot=given.plot,
        report=given.report,
        live=given.live,
    )


_STORES: Mapping[str, dict[str, Any]] = {"host": {}, "gpu": {"name": "nccl"}}
_OPTIMIZERS = {"host": "sgd", "gpu": "sgd,adam"}


def _usual_ranks(device: str) -> int:
    """Return two for hosts; for GPUs the number of GPUs here, at least one."""
    return 2 if device == "host" else max(1, len(survey(visible_gpus()).devices))


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
    add("--device", choices=tuple(_STORES), default="host", help="where the arrays are (default host)")
    add(
        "-n",
        dest="ranks",
        metavar="N",
        type=_positive,
        help="number of ranks to start on this host (default 2; on GPUs one for each)",
    )
    add(
        "--ranks-scaling",
        dest="scaling",
        metavar="N,N",
        type=lambda text: [_positive(part) for part in text.split(",")],
        help="run one job for each number of ranks; measures the sets unless --suite or --only is given",
    )
    add("--suite", choices=(*SUITES, "all"), help="group of measurements (default all)")
    add("--only", metavar="NAME,NAME", help=f"single measurements: {', '.join(_KNOWN)}")
    add(
        "--optimizer",
        metavar="NAME,NAME",
        help=f"of the sets: {', '.join(RULES)} (default sgd, with momentum; on GPUs sgd and adam)",
    )
    add("--transport", choices=TRANSPORTS, help="of the store (default auto); on GPUs by which ranks agree")
    add("--rounds", metavar="N", type=_positive, default=0, help="of each case (default 41; sets: 15)")
    add("--quick", action="store_true", help="few rounds and small sets, to check that it works, not its speed")
    add("--no-pin", dest="pin", action="store_false", help="do not pin ranks to cores")
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
    suites, groups = (SUITES, GROUPS) if given.device == "host" else (GPU_SUITES, GPU_GROUPS)
    if given.only:
        other = "gpu" if given.device == "host" else "host"
        return _chosen(parser, "group", given.only, groups, dict.fromkeys(_KNOWN, f"--device {other} measures it"))
    suite = given.suite or ("sets" if given.scaling else "all")
    if suite not in (*suites, "all"):
        parser.error(f"--suite {suite} measures nothing with --device {given.device}")
    return suites.get(suite, groups)


def _chosen(
    parser: argparse.ArgumentParser,
    kind: str,
    text: str,
    known: Sequence[str],
    hints: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Return the known names in a list, in their own order. The error for an unknown name has its hint."""
    wanted = text.split(",")
    for name in wanted:
        if name not in known:
            parser.error(known_names(kind, name, known, (hints or {}).get(name, "")))
    return tuple(name for name in known if name in wanted)


def _check_files(parser: argparse.ArgumentParser, given: argparse.Namespace, groups: Sequence[str]) -> None:
    """Refuse impossible output files now, and not after a long measurement."""
    for path in (given.json, given.plot):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            parser.error(f"the file {str(path)!r} cannot be written")
    if given.plot is None:
        return
    if given.device != "host" or "sizes" not in groups or len(given.scaling or ()) > 1:
        parser.error("--plot draws the group 'sizes' of one job on the host, which is not measured here")
    if find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib, which is not installed:  pip install 'mpikv[plot]'")
