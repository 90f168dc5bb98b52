"""``mpikv trace``: joins the ranks' records of calls into one file for a browser, or shows the last calls of a job."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..store.tracing import SUFFIX
from .boards import roll_call, table
from .parser import Parser

Event = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Join the files of a directory; return 1 if there is none."""
    parser: argparse.ArgumentParser = Parser(
        prog="mpikv trace",
        description=(
            "Merge the traces that the ranks of a job wrote with MPIKV_TRACE=DIR into one file, and print how long each"
            " rank waited. The file shows when each call began and ended, its keys and bytes, and how long it waited "
            "for the other ranks. Open it in https://ui.perfetto.dev or chrome://tracing. With a file that mpikv run "
            "wrote when a job ended badly, print where each rank was."
        ),
    )
    parser.add_argument(
        "directory",
        metavar="DIR",
        type=Path,
        help="directory that MPIKV_TRACE named, with the traces of one job; or the file with its last calls",
    )
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="the file to write (default: DIR/trace.json)")
    options = parser.parse_args(arguments)
    if options.directory.is_file():
        return _show_calls(options.directory)
    output: Path = options.output or options.directory / "trace.json"
    try:
        events = merged(options.directory)
        output.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    except (ConfigError, OSError) as error:
        print(f"mpikv trace: {error}", file=sys.stderr)
        return 1
    ranks = {event["pid"] for event in events}
    print(f"{output}: {sum(event['ph'] == 'B' for event in events)} events of {len(ranks)} ranks")
    print("\n".join(table(_waits(events))))
    return 0


def _show_calls(file: Path) -> int:
    """Print the last calls that ``mpikv run`` has kept; return 1 if the file has none."""
    try:
        dump = json.loads(file.read_text())
        if dump["mpikv"] != "calls":
            raise KeyError
        print("\n".join(roll_call(dump)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"mpikv trace: {file} has no last calls of a job ({type(error).__name__})", file=sys.stderr)
        return 1
    return 0


def _waits(events: Sequence[Event]) -> list[tuple[object, ...]]:
    """Return the rows of a table: how long each rank was in calls, and waited in them, and in which most."""
    waited: dict[int, Counter[str]] = {}
    for event in events:
        if microseconds := event.get("args", {}).get("waited_us"):  # at the end of a wait, or of the call around it
            waited.setdefault(event["pid"], Counter())[event["name"]] += microseconds
    rows: list[tuple[object, ...]] = [("rank", "waited", "most of it in")]
    for rank, of_verbs in sorted(waited.items()):
        verb, most = of_verbs.most_common(1)[0]
        rows.append((rank, f"{of_verbs.total() / 1e6:.2f} s", f"{verb}, {most / 1e6:.2f} s"))
    return rows


def merged(directory: Path) -> list[Event]:
    """Return the events of all ranks in order of time, on one clock that begins at 0.

    Raises:
        ConfigError: there are no events.
    """
    files = sorted(directory.glob(f"*{SUFFIX}"))
    if not files:
        raise ConfigError(f"{str(directory)!r} has no file *{SUFFIX}; run the job with MPIKV_TRACE={directory}")
    ahead: dict[str, int] = {}  # per host, from its first process: processes of a host share a clock
    events: list[Event] = []
    titles: dict[int, str] = {}
    for file in files:
        lines = list(_lines(file))
        if not lines:  # a process that never had a store
            continue
        head, *rest = lines
        rank, host = head["rank"], head["host"]
        if rank in titles:
            raise ConfigError(
                f"{str(directory)!r} has two files of rank {rank}, so they are of several jobs; use an empty "
                "directory for each job"
            )
        titles[rank] = f"rank {rank} of {head['size']} on {host}"
        events += [{**event, "pid": rank, "ts": event["ts"] + ahead.setdefault(host, head["ahead"])} for event in rest]
    if not titles:
        raise ConfigError(f"{str(directory)!r} has no calls: the processes that wrote there created no store")
    first = min((event["ts"] for event in events), default=0)
    for event in events:
        event["ts"] = (event["ts"] - first) / 1000  # from nanoseconds
    events.sort(key=lambda event: event["ts"])  # stable: events of one thread at one time keep their order
    names = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": titles[rank]}} for rank in sorted(titles)
    ]
    return [*names, *events]


def _lines(file: Path) -> Iterator[Event]:
    """Yield the events of a file up to the first incomplete line, e.g. the last one of a killed process."""
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return
