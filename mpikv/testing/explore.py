"""Runs a program on simulated ranks under many seeds, and reports the first failing seed.

    python -m mpikv.testing.explore train.py --ranks 4 --seeds 0:100
    python -m mpikv.testing.explore check.py:program --ranks 2:16 --hosts 1:4 --seeds 0:1000 --faults

PROGRAM is a script, run by every rank, or a function in one: ``program(comm)``, or ``program(comm, seed)`` with a
parameter of that name. For a range of ranks or hosts, each seed draws a number. Several processes search, one per core.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shlex
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from .simulation import Cluster, Missed, cluster, draw_faults
from .simulation.cluster import check_program

__all__ = ["explore", "load", "main"]

Program = Callable[..., Any]
Range = tuple[int, int]
# Seeds per task of a process.
_SHARE = 10


def explore(
    program: Program, seeds: Sequence[int], ranks: Range = (4, 4), hosts: Range = (1, 1), faults: bool = False
) -> tuple[Cluster, BaseException] | None:
    """Run a program under each seed; return the first failing cluster and its error, or None.

    Args:
        program: called with each rank's communicator, and with the seed if it has a parameter named ``seed``.
        seeds: one run for each.
        ranks: the smallest and the largest number of ranks.
        hosts: the smallest and the largest number of hosts.
        faults: whether each seed also draws a fault; the program must then bear it.
    """
    check_program(program)
    if not seeds:
        raise ValueError("explore: there are no seeds; pass at least one, as range(100)")
    for seed in seeds:
        made = _cluster_of(seed, ranks, hosts, faults)
        try:
            with warnings.catch_warnings():
                # Drawn faults may come after the end of a program.
                warnings.simplefilter("ignore", Missed)
                made.run(program)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also a rank's sys.exit(1), and the exception of pytest.fail()
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
    parser.add_argument(
        "--seeds", type=_seeds, default=range(100), metavar="A[:B]", help="from A to before B, or A alone (0:100)"
    )
    parser.add_argument("--ranks", type=_range, default=(4, 4), metavar="N[:M]", help="ranks, or a range of them (4)")
    parser.add_argument("--hosts", type=_range, default=(1, 1), metavar="N[:M]", help="hosts, or a range of them (1)")
    parser.add_argument("--faults", action="store_true", help="plan a fault for each seed")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=cores, metavar="N", help=f"processes ({cores})")
    given = parser.parse_args(arguments)
    if given.hosts[0] > given.ranks[0]:
        parser.error(f"--hosts from {given.hosts[0]}, --ranks from {given.ranks[0]}: every host has at least one rank")
    try:
        load(given.program)
    except NoProgram as error:
        parser.error(str(error))
    started, seeds = time.monotonic(), given.seeds
    search = partial(_search, given.program, given.ranks, given.hosts, given.faults)
    failed = next(filter(None, _results(search, seeds, given.jobs)), None)
    if failed is None:
        print(f"{len(seeds)} seed{'s' * (len(seeds) > 1)} passed in {time.monotonic() - started:.1f} s")
        return 0
    print(failed.trace, end="", file=sys.stderr)
    print(f"seed {failed.seed} fails on {failed.size} ranks; again:  {_command(given, failed.seed)}", file=sys.stderr)
    return 1


def _command(given: argparse.Namespace, seed: int) -> str:
    """Return the command to repeat the run of one seed."""
    ranks, hosts = (f"{low}:{high}" for low, high in (given.ranks, given.hosts))
    words = ["python", "-m", "mpikv.testing.explore", given.program, "--ranks", ranks, "--hosts", hosts]
    return shlex.join([*words, "--seeds", str(seed), *["--faults"] * given.faults])


class _Failed(NamedTuple):
    """A process's report of a failing seed."""

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
    """Yield the result of each share of the seeds, in order."""
    shares = [seeds[start : start + _SHARE] for start in range(0, len(seeds), _SHARE)]
    if min(jobs, len(shares)) < 2:
        yield from map(search, shares)
        return
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
    try:
        yield from pool.map(search, shares)
    finally:
        pool.shutdown(cancel_futures=True)


class NoProgram(ValueError):
    """A name without a program."""


def load(name: str) -> Program:
    """Return the program named by ``SCRIPT`` or ``SCRIPT:FUNCTION``. It may import modules of the script's folder.

    Raises:
        NoProgram: there is no such file, or no such function in it.
    """
    path, _, function = name.partition(":")
    try:
        code = compile(Path(path).read_text(), path, "exec")
    except OSError as error:
        raise NoProgram(f"{path} cannot be read: {error.strerror}") from error
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if not function:
        return lambda comm: exec(code, {"__name__": "__main__", "__file__": path})
    module: dict[str, Any] = {"__name__": Path(path).stem, "__file__": path}
    exec(code, module)
    program: Program | None = module.get(function)
    if not callable(program):
        raise NoProgram(f"{path} has no function {function}")
    return program


def _range(text: str) -> Range:
    low, _, high = text.partition(":")
    least, most = int(low), int(high or low)
    if not 1 <= least <= most:
        raise argparse.ArgumentTypeError(f"{text}: give N of at least 1, or N:M from the smallest to the largest")
    return least, most


def _seeds(text: str) -> range:
    first, _, end = text.partition(":")
    seeds = range(int(first), int(end) if end else int(first) + 1)
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text}: there is no seed from {first} to before {end}")
    return seeds


if __name__ == "__main__":
    sys.exit(main())
