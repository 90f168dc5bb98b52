"""``mpikv top``: a running job of this user on this host, and who is late in it."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ..cluster.lateness import LABELS, PHASES
from ..cluster.status_board import call_of, is_gone, whereabouts
from .boards import Boards, Slots, by_name, find_ranks, late_of, sums_since, table
from .parser import Parser

Key = tuple[int, int]
_SHOWN = 48


def main(arguments: Sequence[str] | None = None) -> int:
    """Show the jobs again and again until Ctrl-C, or once; return 1 if there is none."""
    parser: argparse.ArgumentParser = Parser(
        prog="mpikv top",
        description=(
            "Show the running jobs of this user on this host: what each rank does, how fast the steps are, and which "
            "rank makes the others wait. Percentages are of the time between two looks."
        ),
    )
    parser.add_argument("--once", action="store_true", help="show the jobs once, and end")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument(
        "-d", "--delay", metavar="SECONDS", type=float, default=2.0, help="time between looks (default 2)"
    )
    options = parser.parse_args(arguments)
    if not 0.05 <= options.delay <= 3600:
        parser.error(f"--delay {options.delay:g} is not from 0.05 to 3600")
    boards = Boards()
    before = _look(boards)
    clears = sys.stdout.isatty() and not (options.once or options.json)
    try:
        while True:
            if not before:
                print(
                    "mpikv top: no running job of this user on this host has a store of several ranks", file=sys.stderr
                )
                return 1
            time.sleep(options.delay)
            after = _look(boards)
            report = _describe(before, after, options.delay)
            text = json.dumps(report) if options.json else "\n".join(_lines(report))
            # Home, then clear to the end: less flicker than to clear the whole screen first.
            print(f"\x1b[H\x1b[J{text}" if clears else text, flush=True)
            if options.once:
                return 0
            before = after
    except KeyboardInterrupt:
        return 0
    finally:
        boards.close()


def _look(boards: Boards) -> dict[Key, Slots]:
    """Return the boards with a rank that runs."""
    for pid in find_ranks():
        boards.look(pid)
    return {key: slots for key, slots in boards.read().items() if not all(map(is_gone, slots))}


def _describe(before: dict[Key, Slots], after: dict[Key, Slots], seconds: float) -> dict[str, Any]:
    stores = [_describe_store(before.get(key, slots), slots, seconds) for key, slots in after.items()]
    # The store with the most calls first: a program may have others that it seldom uses.
    stores.sort(key=lambda store: -float(store["calls_per_second"]))
    return {"host": platform.node(), "seconds": seconds, "stores": stores}


def _describe_store(before: Slots, slots: Slots, seconds: float) -> dict[str, Any]:
    begun = int(before["call"].min())
    sums, spanned = sums_since(slots, begun, before["signs"])
    late, newest = late_of(slots, sums, spanned), int(slots["call"].max())
    rate, period = (int(slots["call"].min()) - begun) / seconds, _period(slots[0])
    away = [int(slot["rank"]) for slot in slots if slot["call"] < newest]
    asked = away if rate == 0 else [late.rank] if late else []
    return {
        "size": int(slots[0]["size"]),
        "calls_per_second": rate,
        "calls_per_step": period,
        "steps_per_second": rate / period,
        "late": late and late._asdict(),
        "ranks": [
            {
                "rank": int(slot["rank"]),
                "pid": int(slot["pid"]),
                "runs": not is_gone(slot),
                **{name: one[name] / 1e9 / (spanned or 1) for name in PHASES},
                "last": one["last"],
                "call": call_of(slot),
                # A question interrupts the rank: only those that the others wait for are asked.
                "place": whereabouts(slot) if slot["rank"] in asked else "",
            }
            for slot, one in zip(slots, map(by_name, sums), strict=True)
        ],
    }


def _period(slot: Any) -> int:
    """Return how many calls a step has: after how many the same texts come again."""
    number = int(slot["call"])
    count = min(number, LABELS)
    texts = [bytes(slot["labels"][(number - back) % LABELS]) for back in range(count)]
    repeats = (period for period in range(1, count // 2 + 1) if texts[period:] == texts[:-period])
    return next(repeats, 1)


def _lines(report: dict[str, Any]) -> Iterator[str]:
    yield f"mpikv top on {report['host']}, {time.strftime('%H:%M:%S')}"
    if not report["stores"]:
        yield "the job has ended"
    for store in report["stores"]:
        yield ""
        yield (
            f"{len(store['ranks'])} of {store['size']} ranks: {store['steps_per_second']:.1f} steps/s of "
            f"{store['calls_per_step']} calls"
        )
        yield _verdict(store, report["seconds"])
        rows = [("rank", "pid", *PHASES, "last", "call")]
        for rank in store["ranks"]:
            shares = (f"{rank[name]:.0%}" for name in PHASES)
            call = rank["call"] if len(rank["call"]) <= _SHOWN else f"{rank['call'][:_SHOWN]}…"
            place = "" if rank["runs"] else ", gone"
            rows.append((rank["rank"], rank["pid"], *shares, rank["last"], f"{call}{place}"))
        yield from table(rows)
        yield from (f"rank {rank['rank']} {rank['place']}" for rank in store["ranks"] if rank["place"])


def _verdict(store: dict[str, Any], seconds: float) -> str:
    if store["late"]:
        return str(store["late"]["text"])
    if store["calls_per_second"] == 0:
        return f"no call has ended in the last {seconds:g} s"
    return "no rank makes the others wait"
