"""Runs a program on simulated ranks under many seeds, and tells the first that fails.

    python -m mpikv.testing.explore train.py --ranks 4 --seeds 0:100
    python -m mpikv.testing.explore check.py:program --ranks 2:16 --hosts 1:4 --seeds 0:1000 --faults

PROGRAM is a script, of which every rank runs a copy, or a function in one: ``program(comm)``, or ``program(comm,
seed)``. Of a range of ranks or hosts each seed draws a number.
"""

from __future__ import annotations

import argparse
import inspect
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .simulation import Cluster, cluster, draw_faults

__all__ = ["explore", "main"]

Program = Callable[..., Any]
Range = tuple[int, int]


def explore(
    program: Program, seeds: Sequence[int], ranks: Range = (4, 4), hosts: Range = (1, 1), faults: bool = False
) -> tuple[Cluster, Exception] | None:
    """Run a program under each seed; return the first cluster on which it failed and the error, or None.

    Args:
        program: is called with each rank's communicator and, where it takes two arguments, the seed.
        seeds: one run for each.
        ranks: the smallest and the largest number of ranks.
        hosts: the same of hosts.
        faults: whether each seed also draws something that goes wrong. The program then has to bear it.
    """
    takes_seed = len(inspect.signature(program).parameters) > 1
    for seed in seeds:
        made = _cluster_of(seed, ranks, hosts, faults)
        try:
            made.run(lambda comm, seed=seed: program(comm, seed) if takes_seed else program(comm))  # type: ignore[misc]
        except Exception as error:
            return made, error
    return None


def _cluster_of(seed: int, ranks: Range, hosts: Range, faults: bool) -> Cluster:
    draw = random.Random(f"{seed} cluster")
    size = draw.randint(*ranks)
    count = min(size, draw.randint(*hosts))
    return cluster(size, hosts=count, seed=seed, faults=draw_faults(seed, size, count) if faults else ())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m mpikv.testing.explore", description="run a program on simulated ranks under many seeds"
    )
    parser.add_argument("program", metavar="PROGRAM", help="a script, or SCRIPT:FUNCTION")
    parser.add_argument("--seeds", type=_range, default=(0, 100), metavar="A:B", help="from A to before B (0:100)")
    parser.add_argument("--ranks", type=_range, default=(4, 4), metavar="N[:M]", help="ranks, or a range of them (4)")
    parser.add_argument("--hosts", type=_range, default=(1, 1), metavar="N[:M]", help="hosts, or a range of them (1)")
    parser.add_argument("--faults", action="store_true", help="draw something that goes wrong for each seed")
    given = parser.parse_args(arguments)
    started, (first, end) = time.monotonic(), given.seeds
    seeds = range(first, end if end > first else first + 1)
    found = explore(load(given.program), seeds, given.ranks, given.hosts, given.faults)
    if found is None:
        print(f"{len(seeds)} seeds passed in {time.monotonic() - started:.1f} s")
        return 0
    failed, error = found
    traceback.print_exception(error)
    again = f"{failed.seed}:{failed.seed + 1}"
    print(f"seed {failed.seed} fails on {failed.size} ranks; again:  --seeds {again}", file=sys.stderr)
    return 1


def load(name: str) -> Program:
    """Return the program that ``SCRIPT`` or ``SCRIPT:FUNCTION`` names."""
    path, _, function = name.partition(":")
    code = compile(Path(path).read_text(), path, "exec")
    if not function:
        return lambda comm: exec(code, {"__name__": "__main__", "__file__": path})
    module: dict[str, Any] = {"__name__": Path(path).stem, "__file__": path}
    exec(code, module)
    program: Program = module[function]
    return program


def _range(text: str) -> Range:
    low, _, high = text.partition(":")
    return int(low), int(high or low)


if __name__ == "__main__":
    sys.exit(main())
