"""Runs a program on simulated ranks under many seeds, and tells the first that fails.

    python -m mpikv.testing.explore train.py --ranks 4 --seeds 0:100
    python -m mpikv.testing.explore check.py:program --ranks 2:16 --hosts 1:4 --seeds 0:1000 --faults

PROGRAM is a script, of which every rank runs a copy, or a function in one: ``program(comm)``, or ``program(comm,
seed)`` with a parameter of that name. Of a range of ranks or hosts each seed draws a number. Several processes search,
one on each core.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from .simulation import Cluster, cluster, draw_faults
from .simulation.cluster import check_program

__all__ = ["explore", "load", "main"]

Program = Callable[..., Any]
Range = tuple[int, int]
# Seeds that a process searches before it is given others.
_SHARE = 10


def explore(
    program: Program, seeds: Sequence[int], ranks: Range = (4, 4), hosts: Range = (1, 1), faults: bool = False
) -> tuple[Cluster, BaseException] | None:
    """Run a program under each seed; return the first cluster on which it failed and the error, or None.

    Args:
        program: is called with each rank's communicator and, where it has a parameter named ``seed``, the seed.
        seeds: one run for each.
        ranks: the smallest and the largest number of ranks.
        hosts: the same of hosts.
        faults: whether each seed also draws something that goes wrong. The program then has to bear it.
    """
    check_program(program)
    for seed in seeds:
        made = _cluster_of(seed, ranks, hosts, faults)
        try:
            made.run(program)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also a rank's sys.exit(1), and what pytest's fail() raises
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
    parser.add_argument("--faults", action="store_true", help="plan a fault for each seed")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=cores, metavar="N", help=f"processes ({cores})")
    given = parser.parse_args(arguments)
    started, (first, end) = time.monotonic(), given.seeds
    seeds = range(first, end if end > first else first + 1)
    search = partial(_search, given.program, given.ranks, given.hosts, given.faults)
    failed = next(filter(None, _results(search, seeds, given.jobs)), None)
    if failed is None:
        print(f"{len(seeds)} seeds passed in {time.monotonic() - started:.1f} s")
        return 0
    print(failed.trace, end="", file=sys.stderr)
    again = f"{failed.seed}:{failed.seed + 1}"
    print(f"seed {failed.seed} fails on {failed.size} ranks; again:  --seeds {again}", file=sys.stderr)
    return 1


class _Failed(NamedTuple):
    """What a process tells of a seed that has failed."""

    seed: int
    size: int
    trace: str


_Search = Callable[[range], "_Failed | None"]


def _search(name: str, ranks: Range, hosts: Range, faults: bool, seeds: range) -> _Failed | None:
    found = explore(load(name), seeds, ranks, hosts, faults)
    if found is None:
        return None
    failed, error = found
    return _Failed(failed.seed, failed.size, "".join(traceback.format_exception(error)))


def _results(search: _Search, seeds: range, jobs: int) -> Iterator[_Failed | None]:
    """Yield what is found in each share of the seeds, in their order."""
    shares = [seeds[start : start + _SHARE] for start in range(0, len(seeds), _SHARE)]
    if min(jobs, len(shares)) < 2:
        yield from map(search, shares)
        return
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
    try:
        yield from pool.map(search, shares)
    finally:
        pool.shutdown(cancel_futures=True)


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
