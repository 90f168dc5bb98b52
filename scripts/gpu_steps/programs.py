"""The tests of the project, run on GPUs."""

import subprocess
import sys
from collections.abc import Callable

from .step import ROOT, Numbers


def tests(ranks: int) -> Callable[[], Numbers]:
    def run() -> Numbers:
        """Run the tests of tests/gpu/real; some must pass, and none may be skipped for want of a GPU."""
        from mpikv.cli.gpus import survey

        if problems := survey().problems:
            raise AssertionError("; ".join(problems))
        # What runs on one rank only is part of the first of these steps.
        marked = "gpu and ranks" if ranks > 1 else "gpu"
        arguments = ["-m", "pytest", "tests/gpu/real", "-m", marked, f"--ranks={ranks}", "-q", "--no-header"]
        arguments += ["-p", "no:cacheprovider", "--color=no", "--tb=short"]
        status, lines = streamed([sys.executable, *arguments])
        if status or " passed" not in lines[-1]:
            why = [line for line in lines if line.startswith(("FAILED", "ERROR", "E  "))] or lines[-10:]
            raise AssertionError("\n".join(why)[-3000:])
        return {"pytest": lines[-1].strip("= "), "skipped": [line for line in lines if line.startswith("SKIPPED")]}

    return run


def streamed(command: list[str]) -> tuple[int, list[str]]:
    """Return the exit status of a program and the lines that it prints. Each is passed on at once, as the limit of the
    step may end both.
    """
    lines = [""]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            print(line, end="", file=sys.stderr, flush=True)
    return process.returncode, lines
