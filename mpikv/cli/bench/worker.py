"""The program of each rank in a measurement, and rank 0's report.

A report consists of dicts, lists, texts and numbers, as in JSON; times are in seconds and sizes in bytes.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from ...creation import create
from ...errors import MPIKVError
from ..launchers import clean, environment
from . import machine
from .cases import Factory, Group, Skipped
from .options import Options
from .oracle import mismatches
from .report import Report
from .rounds import Case, measure
from .rules import SGD
from .sets import whole_set
from .single import sizes

Result = TypeVar("Result")

_LOOK = 0.5
_SETTINGS = ("MPIKV_", "MPIR_CVAR_", "OMPI_MCA_")
# Variables always set by Open MPI's launcher.
_FACTS = ("OMPI_MCA_PREFIXES", "OMPI_MCA_cpu_type")


def run(measure: Callable[[Any, Any, Options], Report], options: Options) -> Report | None:
    """Measure on the ranks of a launch; return the report on rank 0 and None on the others.

    Collective over all ranks of the launch. If this command started the ranks, the report goes to a file instead.
    """
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    report = measure(comm, MPI, options)
    if comm.rank:
        return None
    if options.report is None:
        return report
    options.report.write_text(json.dumps(report))
    return None


def groups(comm: Any, options: Options) -> Iterator[Group]:
    """Yield the chosen groups; each makes its arrays with its cases. Local."""
    for name in options.groups:
        if name == "sizes":
            yield from sizes(comm, options)
        else:
            yield whole_set(comm, options, name, SGD)[0]


def measure_job(
    comm: Any, mpi: Any, options: Options, groups: Callable[[Any, Options], Iterable[Group]] = groups
) -> Report:
    """Measure the chosen groups, and return the job's report. Collective."""
    report = describe_job(comm, mpi, options)
    if "error" not in report:
        report["groups"] = [measure_group(comm, group) for group in groups(comm, options)]
    return report


def describe_job(comm: Any, mpi: Any, options: Options) -> Report:
    """Return the circumstances of a job, each rank pinned to a core; or an error without a store. Collective."""
    try:
        kv = create(**{"name": "dist_sync", **options.settings})
    except MPIKVError as error:
        return {"ranks": comm.size, "error": str(error)}
    transport = kv.transport
    kv.close()
    return {
        "ranks": comm.size,
        "library": _library(mpi),
        "transport": transport,
        **_pin(comm, mpi, options),
        "idle": _idle(comm),
        "settings": _settings(),
        "machine": machine.describe(),
    }


def _library(mpi: Any) -> str:
    first = mpi.Get_library_version().splitlines()[0].strip("\x00 ").partition(",")[0]
    return " ".join(first.replace(" Version:", "").split())


def _pin(comm: Any, mpi: Any, options: Options) -> Report:
    """Give each rank a core of its own, if there are enough on every host."""
    host = comm.Split_type(mpi.COMM_TYPE_SHARED, key=comm.rank)
    # The union: a launcher may have bound each rank to cores of its own.
    cores = machine.one_per_core(set().union(*host.allgather(os.sched_getaffinity(0))))
    crowded = any(comm.allgather(host.size > len(cores)))
    pinned = options.pin and not crowded
    if pinned:
        os.sched_setaffinity(0, {cores[host.rank]})
    host.Free()
    return {"cores": len(cores), "pinned": pinned, "crowded": crowded}


def _settings() -> dict[str, str]:
    """Return the variables that change the speed of a store or an MPI library."""
    environ = sorted(clean(environment()).items())
    return {name: value for name, value in environ if name.startswith(_SETTINGS) and name not in _FACTS}


def _idle(comm: Any) -> float | None:
    """Return the share of idle time on the host of rank 0, while all ranks sleep."""
    comm.Barrier()
    if comm.rank:
        time.sleep(_LOOK)
        return None
    return machine.idle_share(_LOOK)


def measure_group(comm: Any, group: Group) -> Report:
    """Make the cases of a group, time them, check their results, and free all. Collective."""
    began, elements = time.monotonic(), group.keys.elements
    report: Report = {"name": group.name, "title": group.title, "elements": elements, "rounds": group.rounds}
    release_freed()
    comm.Barrier()
    free = comm.bcast(machine.free_bytes())
    if group.needed_bytes > free:
        why = f"about {group.needed_bytes / 1e9:.1f} GB of memory are needed and {free / 1e9:.1f} GB are free"
        return report | {"cases": [], "skipped": dict.fromkeys(group.factories, why), "comparisons": [], "wrong": {}}
    cases, skipped = _make(comm, group)
    if cases:
        measure(comm, cases, group.rounds)
    wrong = _check(comm, cases, group)
    if comm.rank == 0:
        print(f"measured: {group.title} ({time.monotonic() - began:.1f} s)", file=sys.stderr, flush=True)
    for case in cases:
        case.contender.close()
    report["cases"] = [_case_report(case) | {"floor": group.floors.get(case.name)} for case in cases]
    return report | {"skipped": skipped, "wrong": wrong, "comparisons": _compare(report["cases"], group)}


def release_freed() -> None:
    """Return freed memory to the system: arrays of earlier cases, and the allocator's reserve (glibc). Otherwise new
    arrays would reuse it.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _make(comm: Any, group: Group) -> tuple[list[Case], dict[str, str]]:
    """Make and warm the cases; return them, and the reasons of missing ones. Collective."""
    cases: list[Case] = []
    skipped: dict[str, str] = {}
    for name, factory in group.factories.items():
        try:
            cases.append(_made(comm, name, factory))
        except Skipped as why:
            skipped[name] = str(why)
    return cases, skipped


def _made(comm: Any, name: str, factory: Factory) -> Case:
    """Make a case and run it once on every rank; or raise :class:`Skipped` on every rank. Collective."""
    case = Case(name, _together(comm, _together(comm, factory)))
    try:
        _together(comm, case.run_once)
    except Skipped:
        with suppress(MPIKVError):  # a store that ended on some rank cannot be closed together
            case.contender.close()
        raise
    return case


def _together(comm: Any, work: Callable[[], Result]) -> Result:
    """Return the result of ``work``; raise :class:`Skipped` on every rank if it failed on one. Otherwise the others
    would wait for that rank in the next collective call. Collective.
    """
    problem = ""
    try:
        result = work()
    except (Skipped, MPIKVError, MemoryError, OSError) as error:
        problem = str(error) or type(error).__name__
    problems = comm.allgather(problem)
    if any(problems):
        rank, text = next((rank, text) for rank, text in enumerate(problems) if text)
        raise Skipped(text if all(problems) else f"rank {rank}: {text}")
    return result


def _check(comm: Any, cases: list[Case], group: Group) -> dict[str, str]:
    """Return the error of each case with a wrong result on any rank. Collective."""
    for case in cases:
        # An unchecked case may write to a checked case's arrays; so the checked case steps once more.
        if case.contender.exact is not None:
            case.run_once()
    found: dict[str, str] = {}
    found_here = mismatches(cases, group.keys, comm.size, group.rule)
    for rank, wrong in enumerate(comm.allgather(found_here)):
        for name, text in wrong.items():
            found.setdefault(name, f"rank {rank}: {text}")
    return found


def _compare(cases: list[Report], group: Group) -> list[Report]:
    """Return the ratios of medians, if both sides were measured."""
    seconds = {case["name"]: np.array(case["seconds"]) for case in cases}

    def median(case: str, beyond: str | None) -> float:
        return float(np.median(seconds[case] if beyond is None else seconds[case] - seconds[beyond]))

    compared = []
    for one in group.comparisons:
        if one.ours in seconds and one.peer in seconds:
            ours, peer = (median(case, one.beyond) for case in (one.ours, one.peer))
            # A difference of two times may be noise, and negative.
            ratio = ours / peer if min(ours, peer) > 0 else None
            compared.append(vars(one) | {"ratio": ratio, "ours_median": ours, "peer_median": peer})
    return compared


def _case_report(case: Case) -> Report:
    low, middle, high = map(float, np.quantile(case.seconds, [0.25, 0.5, 0.75]))
    return {
        "name": case.name,
        "median": middle,
        "quartiles": [low, high],
        "seconds": case.seconds,
        "repeats": case.repeats,
        "steps": case.steps,
    }
