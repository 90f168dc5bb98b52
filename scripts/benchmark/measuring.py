"""The program of each rank: the chosen groups."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from mpikv.cli.bench import worker
from mpikv.cli.bench.cases import Group
from mpikv.cli.bench.single import sizes

from .c10d import collectives
from .files import one_file
from .options import SUITES, Options
from .rules import RULES
from .sets import whole_set
from .single import hundred_keys, one_key, one_large_array
from .torch_steps import training_steps


def groups(comm: Any, options: Options) -> Iterator[Group]:
    """Yield the chosen groups; each makes its arrays with its cases. Local."""
    for name in options.groups:
        if name == "push-pull":
            yield one_key(comm, options)
            yield hundred_keys(comm, options)
        elif name == "allreduce":
            yield one_large_array(comm, options)
        elif name == "sizes":
            yield from sizes(comm, options)
        elif name in SUITES["files"]:
            yield one_file(comm, options, name)
        elif name in SUITES["torch"]:
            yield training_steps(comm, options, name)
        elif name in SUITES["c10d"]:
            yield from collectives(comm, options, name)
        else:
            for optimizer in options.optimizers:
                yield whole_set(comm, options, name, RULES[optimizer])


measure = partial(worker.measure_job, groups=groups)
"""Measure the chosen groups, and return the job's report. Collective."""
