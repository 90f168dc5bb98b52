"""The program of each rank: the chosen groups on the host or on GPUs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from mpikv.cli.bench import worker
from mpikv.cli.bench.report import Report
from mpikv.cli.bench.rounds import Case
from mpikv.cli.bench.single import sizes
from mpikv.cli.gpus import survey
from mpikv.cluster.environment import visible_gpus
from mpikv.errors import MPIKVError

from .c10d import collectives
from .files import one_file
from .gpu_report import SHARED, on_gpu
from .gpu_suites import gpu_works
from .gpus import RankGpu, open_gpu, time_gpu
from .options import SUITES, Options
from .rules import RULES
from .sets import floors, whole_set
from .single import hundred_keys, one_key, one_large_array
from .torch_steps import training_steps
from .work import Work


def measure(comm: Any, mpi: Any, options: Options) -> Report:
    """Measure the chosen groups, and return the job's report. Collective."""
    report = worker.describe_job(comm, mpi, options)
    if "error" in report:
        return report
    if options.device == "host":
        works = _works(comm, options)
        groups = [worker.measure_group(comm, work.group, describe=partial(_describe, work)) for work in works]
        return report | {"groups": groups}
    try:
        own = open_gpu(comm, mpi)
    except MPIKVError as error:
        return {"ranks": comm.size, "error": str(error)}
    return report | _measure_on_gpus(comm, options, own)


def _works(comm: Any, options: Options) -> Iterator[Work]:
    """Yield the chosen groups; each makes its arrays with its cases. Local."""
    for name in options.groups:
        if name == "push-pull":
            yield Work(one_key(comm, options))
            yield Work(hundred_keys(comm, options))
        elif name == "allreduce":
            yield Work(one_large_array(comm, options))
        elif name == "sizes":
            yield from map(Work, sizes(comm, options))
        elif name in SUITES["files"]:
            yield one_file(comm, options, name)
        elif name in SUITES["torch"]:
            yield Work(training_steps(comm, options, name))
        elif name in SUITES["c10d"]:
            yield from map(Work, collectives(comm, options, name))
        else:
            for optimizer in options.optimizers:
                rule = RULES[optimizer]
                yield Work(whole_set(comm, options, name, rule), floors(rule, comm.size))


def _describe(work: Work, case: Case) -> Report:
    return {"floor": work.floors.get(case.name)}


def _measure_on_gpus(comm: Any, options: Options, own: RankGpu) -> Report:
    found = survey(visible_gpus())
    report: Report = {"gpus": found.devices or [own.gpu.name], "cupy": found.cupy, "nccl": found.nccl}
    report["functional_only"] = SHARED if own.shared else ""
    clock = partial(time_gpu, own, time.perf_counter)
    with own:
        report["groups"] = []
        for work in gpu_works(comm, options, own):
            group = worker.measure_group(comm, work.group, clock, partial(_describe_on_gpu, work, comm.size))
            report["groups"].append(group | {"functional_only": report["functional_only"]})
        own.close()
    return report


def _describe_on_gpu(work: Work, size: int, case: Case) -> Report:
    return _describe(work, case) | on_gpu(work, size, case)
