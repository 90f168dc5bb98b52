"""Slurm's allocation of a job; ``mpikv run`` and ``mpikv info`` derive the number of ranks from it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from ..cluster.environment import tasks_set_aside
from ..errors import ConfigError


@dataclass(frozen=True)
class Allocation:
    """Slurm's allocation of a job."""

    tasks: tuple[int, ...]
    """The number of tasks on each node."""
    cpus: tuple[int, ...]
    """The job's number of CPUs on each node."""
    size: int
    """The tasks of the job."""
    here: bool
    """Whether this process runs on a node of the job. Under ``salloc`` it may run elsewhere."""
    first: str = ""
    """The name of the first node."""

    @property
    def cores(self) -> int:
        """The CPUs of a node's tasks; each task counts as many as the task with the fewest."""
        each = (cpus // max(1, tasks) for cpus, tasks in zip(self.cpus, self.tasks, strict=False))
        return max(self.tasks) * min(each, default=1)


def parse_counts(variable: str, text: str) -> tuple[int, ...]:
    """Return the numbers in Slurm's short form, one for each node.

    >>> parse_counts("SLURM_TASKS_PER_NODE", "2(x3),1")
    (2, 2, 2, 1)

    Raises:
        ConfigError: the text does not have this form.
    """
    runs = [re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part) for part in text.split(",")]
    if not all(runs):
        raise ConfigError(f"{variable}={text!r} is not in Slurm's form, such as '2(x3),1' for nodes of 2, 2, 2 and 1")
    return tuple(int(run[1]) for run in runs if run for _ in range(int(run[2] or "1")))


def _first_node(text: str) -> str:
    """Return the first of the nodes in Slurm's short form.

    >>> _first_node("gpu[03-05,9]-a,login"), _first_node("a,b")
    ('gpu03-a', 'a')
    """
    found = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\])?([^\[,]*)", text)
    return "".join(part or "" for part in found.groups()) if found else ""


def find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation of this process's job, or None outside of a job.

    >>> find_allocation({"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "2,1"}).size
    3

    Raises:
        ConfigError: the job is a heterogeneous one, or a variable does not have Slurm's form.
    """
    if "SLURM_JOB_ID" not in environ:
        return None
    if (components := environ.get("SLURM_HET_SIZE", "1")) != "1":
        raise ConfigError(
            f"this Slurm job is heterogeneous (SLURM_HET_SIZE={components}), and MPI's launchers see its first "
            "component only; submit it as one component"
        )
    tasks, cpus = (
        parse_counts(name, environ[name]) if name in environ else (1,)
        for name in ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE")
    )
    size = tasks_set_aside(environ) if "SLURM_NTASKS" in environ else sum(tasks)
    return Allocation(
        tasks, cpus, size, "SLURMD_NODENAME" in environ, _first_node(environ.get("SLURM_JOB_NODELIST", ""))
    )


def find_kill_wait(environ: Mapping[str, str]) -> float | None:
    """Return the seconds between Slurm's SIGTERM and SIGKILL; None if Slurm does not say."""
    if "SLURM_JOB_ID" not in environ:
        return None
    try:
        answer = subprocess.run(
            ["scontrol", "show", "config"], env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(rb"^KillWait\s*=\s*(\d+) sec", answer.stdout, re.MULTILINE)
    return float(found[1]) if found else None
