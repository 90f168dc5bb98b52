"""``mpikv bench``: the store's speed on this machine, beside mpi4py and memcpy; every result is checked.

It starts the ranks by ``mpikv run``, unless a launcher has already started this process as a rank.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import __version__
from ...cluster.environment import launch_of
from .. import run
from . import options, report


@dataclass(frozen=True)
class Program:
    """A benchmark: its command line, what its ranks run, and its report."""

    name: str
    script: str
    """The Python program of a rank, which calls :func:`main`."""
    parse: Callable[[Sequence[str], int | None], Any]
    """Given the arguments, and the number of ranks under a launcher, it returns an :class:`~.options.Options`."""
    measure: Callable[[Any, Any, Any], report.Report]
    """Collective. Given ``COMM_WORLD``, the module MPI and the options, it returns the job's report."""
    lines: Callable[[report.Report], Iterator[str]]


def measure(comm: Any, mpi: Any, chosen: options.Options) -> report.Report:
    """Measure the chosen groups. Collective."""
    from . import worker

    return worker.measure_job(comm, mpi, chosen)


BENCH = Program(
    "mpikv bench",
    "import sys; from mpikv.cli.bench import main; sys.exit(main())",
    options.parse,
    measure,
    report.lines,
)


def main(arguments: Sequence[str] | None = None, program: Program = BENCH) -> int:
    """Run the command and return its exit status: 1 if a result was wrong, 2 if nothing could be measured."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    launch = launch_of()
    chosen = program.parse(arguments, max(1, launch.size) if launch else None)
    if launch is None:
        return _start(program, arguments, chosen)
    from .worker import run as work

    job = work(program.measure, chosen)
    return 0 if job is None else _deliver(program, job, chosen)


def _start(program: Program, arguments: Sequence[str], chosen: options.Options) -> int:
    """Run a job of ranks, and deliver its report."""
    with tempfile.TemporaryDirectory(prefix="mpikv-bench-") as folder:
        # Not -m: it would let the ranks import modules of the current directory.
        script, path = Path(folder) / "bench.py", Path(folder) / "report.json"
        script.write_text(program.script)
        failed = run.main(["-n", str(chosen.ranks), str(script), *arguments, "--report", str(path)])
        if failed or not path.exists():
            _complain(program, f"the job failed with status {failed} and was not measured")
            return failed or 1
        return _deliver(program, json.loads(path.read_text()), chosen)


def _deliver(program: Program, job: report.Report, chosen: options.Options) -> int:
    """Write the file, print the report, and return the exit status."""
    document = {"mpikv": __version__, "quick": chosen.quick, "optimizers": chosen.optimizers, "jobs": [job]}
    complaints = report.errors(job)
    status = 2 if "error" in job else 1 if complaints else 0
    try:
        if chosen.json:
            chosen.json.write_text(json.dumps(document, indent=1) + "\n")
    except OSError as error:
        complaints.append(f"a file could not be written: {error}")
        status = status or 2
    if "groups" in job:
        print("\n".join(program.lines(document)), flush=True)
    for complaint in complaints:
        _complain(program, complaint)
    return status


def _complain(program: Program, text: str) -> None:
    print(f"{program.name}: {text}", file=sys.stderr, flush=True)
