"""The command line of ``scripts/bench``: that of ``mpikv bench``, with more to measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mpikv.cli.bench import options as common
from mpikv.cli.gpus import survey
from mpikv.cluster.environment import visible_gpus

from .rules import RULES

SUITES: Mapping[str, Sequence[str]] = {
    "latency": ("push-pull", "allreduce", "sizes"),
    "sets": ("resnet50", "bert-base", "many"),
    "files": ("large-file", "many-file"),
    "torch": ("resnet18", "bert-small"),
    "c10d": ("all-reduce", "all-gather", "reduce-scatter", "broadcast"),
}
GPU_SUITES: Mapping[str, Sequence[str]] = {
    "latency": ("sizes",),
    "sets": ("resnet50", "bert-base", "small", "many"),
}

DESCRIPTION = """\
Measure all that the record of docs/bench has: what mpikv bench does, and more beside PyTorch, files and NCCL. The cases
of a group are timed in turns, and each result is checked."""

EPILOG = """\
what is measured (--suite latency is the first three, sets the next three, files the next two, torch the next two, c10d
the last four):
  push-pull  a single key of 64 B and a list of 100, SGD-momentum, beside Comm.Allreduce and an update per key
  allreduce  the sum of one array of 64 MB, beside one Comm.Allreduce
  sizes, resnet50, bert-base, many
             as mpikv bench; the sets also with compiled kernels, and beside PyTorch's gloo with DDP's buckets and a
             fused update
  large-file a checkpoint of 4 keys of 64 MB: save, beside plain writes of the same bytes; save with wait=False until it
             returns, beside a copy in memory of what a rank owns; load, beside plain reads
  many-file  the same of 10,000 arrays of 1 to 100 floats
  resnet18   a training step of a ResNet-18 in PyTorch: alone, with mpikv.torch, with DDP over mpikv and over gloo
  bert-small the same of a transformer with six layers (90 MB)
  all-reduce, all-gather, reduce-scatter, broadcast
             calls of torch.distributed on 64 B to 64 MB of float32 and bfloat16, over mpikv's backend and over gloo

On GPUs (--device gpu), with one rank for each:
  sizes      push, pull and pushpull of 64 B to 256 MB without an updater, beside NCCL's allReduce and a copy
  resnet50, bert-base, many, and small, which are 1,000 arrays of 4 KB
             one pushpull with an optimizer, beside one allReduce and one kernel, beside PyTorch's NCCL, and a copy
"""

_OPTIMIZERS = {"host": "sgd", "gpu": "sgd,adam"}


@dataclass(frozen=True)
class Options(common.Options):
    """The choices of ``mpikv bench``, and where the arrays are."""

    device: str = "host"
    """``host``, or ``gpu``."""


def parse(arguments: Sequence[str], launched: int | None) -> Options:
    """Return the options. Misuse ends the process with status 2 and one line."""
    on_gpus = "gpu" in arguments or "--device=gpu" in arguments
    suites = GPU_SUITES if on_gpus else SUITES
    parser = common.new_parser("scripts/bench", "scripts/bench", DESCRIPTION, EPILOG, suites)
    parser.add_argument("--device", choices=tuple(_OPTIMIZERS), default="host", help="where the arrays are")
    parser.add_argument(
        "--optimizer",
        metavar="NAME,NAME",
        help=f"of the sets: {', '.join(RULES)} (default sgd, with momentum; on GPUs sgd and adam)",
    )
    given = parser.parse_args(arguments)
    if on_gpus and not given.ranks:
        given.ranks = None if launched else max(1, len(survey(visible_gpus()).devices))
    plain = common.read(parser, given, launched, suites)
    chosen = Options(**vars(plain), device=given.device)
    wanted = _OPTIMIZERS[given.device] if given.optimizer is None else given.optimizer
    optimizers = common.choose(parser, "optimizer", wanted, tuple(RULES))
    settings: dict[str, Any] = {"name": "nccl"} if on_gpus else {"kernels": "numpy"}
    # A rank with a GPU needs more cores: NCCL and CUDA have threads of their own.
    pin = plain.pin and not on_gpus
    return replace(chosen, optimizers=optimizers, settings={**settings, **plain.settings}, pin=pin)
