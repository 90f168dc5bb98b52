"""``mpikv info``: the facts for a bug report, on one screen. It starts MPI only if a launcher started several ranks.

``mpikv info PATH``: the content of a checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .. import __version__
from ..checkpoint.files import Source, inspect
from ..checkpoint.header import RESIDUALS, Kind
from ..cluster.connecting import connect
from ..cluster.environment import Launch, advise_start, launch_of, visible_gpus
from ..cluster.process_group import ProcessGroup
from ..compute.kernels import find_kernels
from ..config import TRANSPORTS, Config, unknown_variables
from ..errors import MPIKVError
from ..protocols import Key
from ..transports import choose
from .allocation import find_allocation
from .gpus import survey
from .launchers import core_count, environment, find_launcher, find_library, name_rivals

OPTIONAL = ("ml_dtypes", "numba", "scikit-learn")

Report = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report, on rank 0 only, and return 0: a missing part is a finding and no failure.

    If a checkpoint cannot be read, it prints the reason, and returns 1.
    """
    parser = argparse.ArgumentParser(
        prog="mpikv info",
        description="Show versions, the MPI library, its launcher, GPUs, the transports and the settings. "
        "Under 'mpikv run -n 2 -m mpikv info' it also shows where the ranks are. With PATH, show what is in a "
        "checkpoint.",
    )
    parser.add_argument("path", nargs="?", metavar="PATH", help="a file that kv.save or kv.save_optimizer_states wrote")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    launch = launch_of()
    if options.path is not None:
        return _show_checkpoint(options.path, options.json) if launch is None or launch.rank == 0 else 0
    # Before MPI starts in this process: some MPI libraries fail with child processes afterwards.
    report = _describe_process(launch) if launch is None or launch.rank == 0 else {}
    ranks = _describe_ranks(launch)
    if report:
        report |= ranks
        print(json.dumps(report, indent=2) if options.json else "\n".join(_lines(report)), flush=True)
    return 0


def _show_checkpoint(path: str, as_json: bool) -> int:
    try:
        source = inspect(path)
    except (MPIKVError, OSError) as error:
        print(_printable(f"mpikv info: {error}"), file=sys.stderr)
        return 1
    report = _describe_checkpoint(source)
    print(json.dumps(report, indent=2) if as_json else "\n".join(_checkpoint_lines(report)))
    return 0


def _describe_checkpoint(source: Source) -> Report:
    header = source.header
    return {
        "path": source.path,
        "bytes": source.start + header.nbytes,
        "values": header.values,
        "updater": header.updater,
        "residuals": {"ranks": len(header.program.get(RESIDUALS, ()))},
        "program": [name for name in header.program if name != RESIDUALS],
        "keys": [_describe_key(key, kind) for key, kind in header.pairs],
    }


def _describe_key(key: Key, kind: Kind) -> Report:
    return {
        "key": key,
        "dtype": kind.dtype,
        "shape": list(kind.shape),
        "version": kind.updates + kind.earlier,
        "updates": kind.updates,
        "state": dict(kind.state),
    }


def _checkpoint_lines(report: Report) -> Iterator[str]:
    keys = report["keys"]
    rows = [("checkpoint", report["path"]), ("size", f"{report['bytes']} bytes")]
    rows.append(("holds", "values and all that updates them" if report["values"] else "the optimizer's state alone"))
    rows.append(("updater", report["updater"].get("settings", "none: a push assigns")))
    if report["updater"].get("options", report) is None:
        rows.append(("", "its settings are not in the file"))
    elif report["updater"]["kind"] == "function":
        rows.append(("", "the function itself is not in the file"))
    if (ranks := report["residuals"]["ranks"]) > 0:
        rows.append(("residuals", f"of {ranks} ranks"))
    if report["program"]:
        rows.append(("state", ", ".join(map(repr, report["program"]))))
    rows.append(("keys", str(len(keys))))
    yield from _table([(title, _printable(text)) for title, text in rows])
    described = [
        (
            repr(one["key"]),
            f"{one['dtype']}{one['shape']}  version {one['version']}, {one['updates']} updates"
            + _printable("".join(f", {name} {dtype}" for name, dtype in one["state"].items())),
        )
        for one in keys
    ]
    yield from _table(described, "  ") if described else ()


def _printable(text: str) -> str:
    r"""Escape control characters for a terminal: a checkpoint may come from anywhere.

    >>> print(_printable("\x1b[2Jmöre"))
    \x1b[2Jmöre
    """
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _describe_process(launch: Launch | None) -> Report:
    environ = environment()
    mpi = _describe_mpi(environ)
    return {
        "versions": {
            "mpikv": __version__,
            "python": f"{platform.python_version()} ({sys.executable})",
            "numpy": _version_of("numpy"),
            "mpi4py": _version_of("mpi4py"),
        },
        "mpi": mpi,
        "launch": launch and launch._asdict(),
        "host": {"name": platform.node(), "system": platform.platform(), "cores": core_count()},
        "gpu": survey(visible_gpus(environ))._asdict(),
        "optional": {name: _version_of(name) for name in OPTIONAL},
        "settings": _describe_settings(environ),
        "transports": {name: _describe_transport(name, mpi) for name in TRANSPORTS if name != "auto"},
    }


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _describe_mpi(environ: Mapping[str, str]) -> Report:
    found: Report = {"library": None, "path": None, "launcher": None, "slurm": None, "problem": None}
    try:
        library = find_library(environ)
        found |= {"library": library.version, "path": str(library.path)}
        if job := find_allocation(environ):
            found["slurm"] = (
                f"{job.size} tasks on {len(job.tasks)} nodes; use  {advise_start(job.size, library.version)}"
            )
        found["problem"] = name_rivals(library.version) or None
        found["launcher"] = str(find_launcher(library, environ).path)
    except MPIKVError as error:
        found["problem"] = str(error)
    return found


def _describe_settings(environ: Mapping[str, str]) -> Report:
    config, problems, usable = find_settings()
    values = {}
    for field in dataclasses.fields(config):
        variable = f"MPIKV_{field.name.upper()}"
        origin = variable if usable and variable in environ else "default"
        values[field.name] = {"value": getattr(config, field.name), "origin": origin}
    try:
        find_kernels(config.kernels)
    except MPIKVError as error:
        problems = [*problems, str(error)]
    return {"values": values, "problems": problems}


def find_settings() -> tuple[Config, list[str], bool]:
    """Return the settings, the faults of their variables, and whether the variables were usable."""
    try:
        return Config.read(), unknown_variables(), True
    except MPIKVError as error:
        return Config(), [str(error)], False


def _describe_transport(name: str, mpi: Report) -> Report:
    available = name == "local" or mpi["library"] is not None
    return {"available": available, "reason": None if available else "it needs an MPI library"}


def _describe_ranks(launch: Launch | None) -> Report:
    """Return the chosen transport and the places of the ranks. Collective over the ranks of the launch."""
    config, _, _ = find_settings()
    try:
        group = connect(None, config) if launch is not None and launch.size > 1 else ProcessGroup()
    except MPIKVError as error:
        return {"chosen": {"transport": None, "reason": str(error)}, "ranks": None}
    try:
        # As a store finds them. Two may have one name, as containers of one machine.
        hosts = zip(group.hosts, group.ranks_of_hosts, strict=True)
        ranks = {"size": group.size, "hosts": [{"name": name, "ranks": numbers} for name, numbers in hosts]}
        return {"chosen": _describe_choice(group, config), "ranks": ranks}
    finally:
        group.close()


def _describe_choice(group: ProcessGroup, config: Config) -> Report:
    try:
        name, reason = choose(group, config)
    except MPIKVError as error:
        return {"transport": None, "reason": str(error)}
    return {"transport": name, "reason": reason}


def _lines(report: Report) -> Iterator[str]:
    mpi, host, launch, chosen = (report[part] for part in ("mpi", "host", "launch", "chosen"))
    rows = [(name, text or "not installed") for name, text in report["versions"].items()]
    rows.append(("MPI library", f"{mpi['library']} ({mpi['path']})" if mpi["library"] else "none"))
    rows.append(("launcher", mpi["launcher"] or "none"))
    rows += [(name, text) for name, text in (("Slurm", mpi["slurm"]), ("problem", mpi["problem"])) if text]
    rows.append(("host", f"{host['name']}, {host['system']}"))
    rows.append(("cores", f"{host['cores']}, as this process may use them"))
    rows += _gpu_rows(report["gpu"])
    rows.append(("launched", f"by {launch['launcher']}" if launch else "by no MPI launcher"))
    if ranks := report["ranks"]:
        rows += [("ranks", f"{len(it['ranks'])} on {it['name']}: {_ranges(it['ranks'])}") for it in ranks["hosts"]]
    yield from _table(rows)
    yield "\noptional packages"
    yield from _table([(name, text or "not installed") for name, text in report["optional"].items()], "  ")
    yield "\nsettings"
    values = report["settings"]["values"]
    yield from _table(
        [(name, f"{setting['value']!s:<12} {setting['origin']}") for name, setting in values.items()], "  "
    )
    yield from (f"  problem: {text}" for text in report["settings"]["problems"])
    yield "\ntransports"
    transports = report["transports"].items()
    yield from _table(
        [(name, "available" if it["available"] else f"no: {it['reason']}") for name, it in transports], "  "
    )
    yield f"  chosen: {chosen['transport'] or 'none'} ({chosen['reason']})"


def _gpu_rows(gpu: Report) -> list[tuple[str, str]]:
    libraries = [f"{name} {gpu[name.lower()]}" for name in ("CuPy", "NCCL") if gpu[name.lower()]]
    parts = [", ".join(gpu["devices"]) or "none", *libraries]
    notes = [*(("lacking", text) for text in gpu["problems"]), *(("warning", text) for text in gpu["warnings"])]
    return [("GPU", "; ".join(parts)), *notes]


def _table(rows: Sequence[tuple[str, str]], indent: str = "") -> Iterator[str]:
    width = max(len(name) for name, _ in rows)
    margin = "\n" + " " * (len(indent) + width + 2)
    return (f"{indent}{name:<{width}}  {text.replace(chr(10), margin)}" for name, text in rows)


def _ranges(ranks: Sequence[int]) -> str:
    """Return ascending numbers in short.

    >>> _ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
