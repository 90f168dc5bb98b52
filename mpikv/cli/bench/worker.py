"""The program of each rank in a measurement, and rank 0's report.

A report consists of dicts, lists, texts and numbers, as in JSON; times are in seconds and sizes in bytes.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from ...cluster.environment import visible_gpus
from ...creation import create
from ...errors import MPIKVError
from ..gpus import survey
from ..launchers import clean, environment
from . import machine
from .cases import Factory, Group, Skipped
from .gpu_report import SHARED, on_gpu
from .gpu_suites import gpu_groups
from .gpus import GpuClock, RankGpu, open_gpu
from .memory import Memory, forget_peak, free_bytes, release_freed
from .options import Options
from .oracle import mismatches
from .progress import Progress, open_progress
from .rounds import Case, Clock, HostClock, measure
from .suites import groups

__all__ = ["Report", "run"]

Report = dict[str, Any]
Result = TypeVar("Result")

_LOOK = 0.5
_SETTINGS = ("MPIKV_", "MPIR_CVAR_", "OMPI_MCA_")
# Variables always set by Open MPI's launcher.
_FACTS = ("OMPI_MCA_PREFIXES", "OMPI_MCA_cpu_type")


def run(options: Options) -> Report | None:
    """Measure on the ranks of a launch; return the report on rank 0 and None on the others.

    Collective over all ranks of the launch. If this command started the ranks, the report goes to a file instead.
    """
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    report = _measure(comm, MPI, options)
    if comm.rank:
        return None
    if options.report is None:
        return report
    options.report.write_text(json.dumps(report))
    return None


def _measure(comm: Any, mpi: Any, options: Options) -> Report:
    own: RankGpu | None = None
    try:
        kv = create(**{"name": "dist_sync", **options.settings})
        if options.device == "gpu":
            own = open_gpu(comm, mpi)
    except MPIKVError as error:
        return {"ranks": comm.size, "error": str(error)}
    transport, pinned = kv.transport, _pin(comm, mpi, options)
    kv.close()
    report = {
        "ranks": comm.size,
        "library": _library(mpi),
        "transport": transport,
        **pinned,
        "idle": _idle(comm),
        "settings": _settings(),
        "machine": machine.describe(),
    }
    with open_progress(comm.rank, options.live) as progress:
        if own is None:
            chosen = groups(comm, options)
            report["groups"] = [_measure_group(comm, group, progress, HostClock()) for group in chosen]
        else:
            report |= _on_gpus(comm, options, own, progress)
    return report


def _on_gpus(comm: Any, options: Options, own: RankGpu, progress: Progress) -> Report:
    found = survey(visible_gpus())
    report: Report = {"gpus": found.devices or [own.gpu.name], "cupy": found.cupy, "nccl": found.nccl}
    report["functional_only"] = SHARED if own.shared else ""
    clock = GpuClock(own, time.perf_counter)
    with own:
        chosen = gpu_groups(comm, options, own)
        report["groups"] = [_measure_group(comm, group, progress, clock) for group in chosen]
        for group in report["groups"]:
            group["functional_only"] = report["functional_only"]
        own.close()
    return report


def _library(mpi: Any) -> str:
    first = mpi.Get_library_version().splitlines()[0].strip("\x00 ").partition(",")[0]
    return " ".join(first.replace(" Version:", "").split())


def _pin(comm: Any, mpi: Any, options: Options) -> Report:
    """Give each rank a core of its own, if there are enough on every host."""
    host = comm.Split_type(mpi.COMM_TYPE_SHARED, key=comm.rank)
    # The union: a launcher may have bound each rank to cores of its own.
    cores = machine.one_per_core(set().union(*host.allgather(os.sched_getaffinity(0))))
    crowded = any(comm.allgather(host.size > len(cores)))
    # A rank with a GPU needs more cores: NCCL and CUDA have threads of their own.
    pinned = options.pin and not crowded and options.device == "host"
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


def _measure_group(comm: Any, group: Group, progress: Progress, clock: Clock) -> Report:
    """Make the cases of a group, time them, check their results, and free all. Collective."""
    elements = group.keys.elements * group.tiles
    report: Report = {"name": group.name, "title": group.title, "elements": elements, "rounds": group.rounds}
    release_freed()
    comm.Barrier()
    free = comm.bcast(free_bytes())
    if group.needed_bytes > free:
        why = f"about {group.needed_bytes / 1e9:.1f} GB of memory are needed and {free / 1e9:.1f} GB are free"
        return report | {"cases": [], "skipped": dict.fromkeys(group.factories, why), "comparisons": [], "wrong": {}}
    progress.begin(group)
    cases, skipped, memory = _make(comm, group)
    if cases:
        measure(comm, cases, group.rounds, lambda done: progress.after_round(done, cases), clock)
    wrong = _check(comm, cases, group)
    progress.end()
    for case in cases:
        case.contender.close()
    report["cases"] = [_case_report(case, group) for case in cases]
    if not isinstance(clock, HostClock):
        for case, shown in zip(cases, report["cases"], strict=True):
            shown |= on_gpu(case, group, comm.size)
    report |= {"skipped": skipped, "wrong": wrong, "comparisons": _compare(report["cases"], group)}
    return report | ({"memory": memory, "nbytes": group.keys.nbytes} if memory else {})


def _make(comm: Any, group: Group) -> tuple[list[Case], dict[str, str], dict[str, list[Report]]]:
    """Make and warm the cases; return them, the reasons of missing ones, and each case's growth of every rank's memory.
    Collective.
    """
    cases: list[Case] = []
    skipped: dict[str, str] = {}
    memory: dict[str, list[Report]] = {}
    if group.inputs:
        before = _before()
        group.inputs.make()
        memory = {"python": comm.allgather(vars(before)), "inputs": comm.allgather(_growth(before))}
    for name, factory in group.factories.items():
        before = _before()
        try:
            cases.append(_made(comm, name, factory))
        except Skipped as why:
            skipped[name] = str(why)
            continue
        if group.inputs:
            memory[name] = comm.allgather(_growth(before))
    return cases, skipped, memory


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


def _before() -> Memory:
    # Memory of other cases must not be freed, nor reused, during the next case.
    gc.collect()
    forget_peak()
    return Memory.now()


def _growth(before: Memory) -> Report:
    """Return the growth of memory since ``before``, and the peak of all resident memory."""
    now = Memory.now()
    return {name: value - vars(before)[name] for name, value in vars(now).items()} | {"peak": now.peak}


def _check(comm: Any, cases: list[Case], group: Group) -> dict[str, str]:
    """Return the error of each case with a wrong result on any rank. Collective."""
    for case in cases:
        # An unchecked case may write to a checked case's arrays; so the checked case steps once more.
        if case.contender.exact is not None:
            case.run_once()
    found: dict[str, str] = {}
    found_here = mismatches(cases, group.keys, group.summed or comm.size, group.rule)
    for rank, wrong in enumerate(comm.allgather(found_here)):
        for name, text in wrong.items():
            found.setdefault(name, f"rank {rank}: {text}")
    return found


def _compare(cases: list[Report], group: Group) -> list[Report]:
    """Return the wanted ratios, if both sides were measured."""
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


def _case_report(case: Case, group: Group) -> Report:
    low, middle, high = map(float, np.quantile(case.seconds, [0.25, 0.5, 0.75]))
    return {
        "name": case.name,
        "median": middle,
        "quartiles": [low, high],
        "seconds": case.seconds,
        "repeats": case.repeats,
        "steps": case.steps,
        "floor": group.floors.get(case.name),
    }
