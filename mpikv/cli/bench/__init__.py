"""``mpikv bench``: the store's speed on this machine, beside mpi4py, memcpy and PyTorch; every result is checked.

It starts the ranks by ``mpikv run``, unless a launcher has already started this process as a rank.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ... import __version__
from ...cluster.environment import launch_of
from .. import run
from .options import Options, parse
from .plot import draw
from .report import errors, lines

__all__ = ["main"]

_SCRIPT = "import sys; from mpikv.cli.bench import main; sys.exit(main())"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 1 if a result was wrong, 2 if nothing could be measured."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    launch = launch_of()
    options = parse(arguments, launched=max(1, launch.size) if launch else None)
    if launch is None:
        jobs, status = _start(arguments, options)
        delivered = _deliver(jobs, options) if jobs else 0
        if status:
            size = options.sizes[len(jobs)]
            left = "; the later jobs were not started" if len(jobs) + 1 < len(options.sizes) else ""
            _complain(
                f"the job of {size} rank{'s' * (size > 1)} failed with status {status} and was not measured{left}"
            )
        return status or delivered
    from .worker import run as measure

    report = measure(options)
    return 0 if report is None else _deliver([report], options)


def _start(arguments: Sequence[str], options: Options) -> tuple[list[dict[str, Any]], int]:
    """Run a job for each number of ranks; return the reports, and the status of the first job without a report."""
    jobs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mpikv-bench-") as folder:
        # Not -m: it would let the ranks import modules of the current directory.
        script = Path(folder) / "bench.py"
        script.write_text(_SCRIPT)
        for size in options.sizes:
            path = Path(folder) / f"{size}.json"
            own = ["--report", str(path), "--live", str(_columns())]
            status = run.main(["-n", str(size), str(script), *arguments, *own])
            if status or not path.exists():
                return jobs, status or 1
            jobs.append(json.loads(path.read_text()))
    return jobs, 0


def _columns() -> int:
    """Return the width of the terminal; 0 if it cannot show a live table."""
    return shutil.get_terminal_size().columns if sys.stderr.isatty() and find_spec("rich") else 0


def _deliver(jobs: list[dict[str, Any]], options: Options) -> int:
    """Write the files, print the report, and return the exit status."""
    document = {"mpikv": __version__, "quick": options.quick, "optimizers": options.optimizers, "jobs": jobs}
    complaints = errors(document)
    status = 2 if any("error" in job for job in jobs) else 1 if complaints else 0
    try:
        if options.json:
            options.json.write_text(json.dumps(document, indent=1) + "\n")
        if options.plot and status != 2:
            draw(jobs[0], options.plot)
    except (OSError, ValueError) as error:
        complaints.append(f"a file could not be written: {error}")
        status = status or 2
    if any("groups" in job for job in jobs):
        print("\n".join(lines(document)), flush=True)
    for complaint in complaints:
        _complain(complaint)
    return status


def _complain(text: str) -> None:
    print(f"mpikv bench: {text}", file=sys.stderr, flush=True)
