"""The command line of ``scripts/bench``: that of ``mpikv bench``, with more to measure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mpikv.cli.bench import options as common
from mpikv.cli.bench.options import Options

from .rules import RULES

SUITES: Mapping[str, Sequence[str]] = {
    "latency": ("push-pull", "allreduce", "sizes"),
    "sets": ("resnet50", "bert-base", "many"),
    "files": ("large-file", "many-file"),
    "torch": ("resnet18", "bert-small"),
    "c10d": ("all-reduce", "all-gather", "reduce-scatter", "broadcast"),
}

DESCRIPTION = """\
Measure all that the record of docs/bench has: what mpikv bench does, and more beside PyTorch and files. The cases
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
"""


def parse(arguments: Sequence[str], launched: int | None) -> Options:
    """Return the options. Misuse ends the process with status 2 and one line."""
    parser = common.new_parser("scripts/bench", "scripts/bench", DESCRIPTION, EPILOG, SUITES)
    parser.add_argument(
        "--optimizer", metavar="NAME,NAME", default="sgd", help=f"of the sets: {', '.join(RULES)} (default sgd)"
    )
    given = parser.parse_args(arguments)
    chosen = common.read(parser, given, launched, SUITES)
    optimizers = common.choose(parser, "optimizer", given.optimizer, tuple(RULES))
    return replace(chosen, optimizers=optimizers, settings={"kernels": "numpy", **chosen.settings})
