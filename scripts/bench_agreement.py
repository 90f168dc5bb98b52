"""Time what the comparison of calls costs: stores with and without it, interleaved in one run.

    mpikv run -n 2 scripts/bench_agreement.py

In shared memory a store without it waits for the other ranks as well, since values must not be read too early, but
compares nothing. Over MPI it does neither, and the difference is one small Allreduce.

There are two stores of each kind, made in the order with, without, without, with: how fast large arrays move depends on
where their memory lies. All run each case in turns, the first in one round being the second in the next; a turn is many
calls, its time that of the slowest rank. Printed are medians over the rounds, and for the difference the middle half of
those within a round: on a quiet machine the two agree.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import mpikv

BOUNDS = {"64 B push, pull": 1.5, "64 B pushpull": 1.5, "100 keys of 64 B": 5.0}
"""Wanted in shared memory: at most so many µs more per call; from 1 MB on, 1 % more."""
PERCENT = 1.0


class Unchecked:
    """A transport that waits where data need it, and compares nothing."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def agree(self, token: int, send_ready: bool = False) -> bool:
        self._transport.fence()
        # As a comparison leaves it in shared memory, which between hosts is that of an inner transport.
        getattr(self._transport, "_inner", self._transport)._send_ready = send_ready
        return True


def made(check: bool, **options: Any) -> mpikv.KVStore:
    """Return a store with the comparison of calls, or one without, as no user can have it."""
    kv = mpikv.create(**options)
    if not check:
        kv._agreement._transport = Unchecked(kv._agreement._transport)
    return kv


@dataclass
class Case:
    """One use of a store."""

    name: str
    keys: list[int]
    values: list[np.ndarray]
    calls: int
    """How often it is done in a turn."""
    exchanges: int = 1
    """How many calls of the store one use is."""

    def run(self, kv: mpikv.KVStore) -> None:
        if self.exchanges == 2:
            key, value = self.keys[0], self.values[0]
            for _ in range(self.calls):
                kv.push(key, value)
                kv.pull(key, out=value)
        else:
            single = len(self.keys) == 1
            key, value = (self.keys[0], self.values[0]) if single else (self.keys, self.values)
            for _ in range(self.calls):
                kv.pushpull(key, value, out=value)


def cases() -> list[Case]:
    """Return the cases; no two share a key."""

    def zeros(count: int, nbytes: int) -> list[np.ndarray]:
        return [np.zeros(nbytes // 8) for _ in range(count)]

    return [
        Case("64 B push, pull", [0], zeros(1, 64), 500, exchanges=2),
        Case("64 B pushpull", [1], zeros(1, 64), 500),
        Case("100 keys of 64 B", list(range(2, 102)), zeros(100, 64), 60),
        Case("1 MB pushpull", [102], zeros(1, 1 << 20), 20),
        Case("16 MB pushpull", [103], zeros(1, 16 << 20), 2),
    ]


def measure(pairs: list[dict[bool, mpikv.KVStore]], case: Case, rounds: int) -> dict[bool, np.ndarray]:
    """Return the seconds per use of each round and pair, of the store with and of the one without the comparison."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(rounds + 1):
        for stores in pairs:
            for check in (True, False) if turn % 2 else (False, True):
                took = timed(lambda kv=stores[check]: case.run(kv))
                if turn:  # the first round warms up
                    seconds[check].append(took / case.calls)
    return {check: np.array(values) for check, values in seconds.items()}


def timed(work: Callable[[], None]) -> float:
    """Return the seconds that the slowest rank takes."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    comm.Barrier()
    started = time.perf_counter()
    work()
    return comm.allreduce(time.perf_counter() - started, MPI.MAX)


def evaluate(case: Case, seconds: dict[bool, np.ndarray]) -> dict[str, float | str | bool]:
    """Return the row of a case."""
    with_check, without = (1e6 * float(np.median(seconds[check])) for check in (True, False))
    low, high = 1e6 * np.quantile(seconds[True] - seconds[False], [0.25, 0.75]) / case.exchanges
    extra = (with_check - without) / case.exchanges
    wanted = BOUNDS.get(case.name, PERCENT / 100 * without)
    return {
        "case": case.name,
        "check_us": with_check,
        "no_check_us": without,
        "ratio": with_check / without,
        "extra_us_per_call": extra,
        "extra_us_low": float(low),
        "extra_us_high": float(high),
        "wanted_us": wanted,
        "met": extra <= wanted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21, help="rounds of each case (default 21)")
    parser.add_argument("--transport", default="auto", help="transport of the stores (default auto)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    from mpi4py import MPI  # not before, as scripts/gpu_steps uses this module where there may be no MPI library

    comm = MPI.COMM_WORLD
    library = " ".join(MPI.Get_library_version().splitlines()[0].strip("\x00 ").split()).partition(",")[0]
    pairs = [
        {check: made(check, transport=options.transport) for check in order} for order in ((True, False), (False, True))
    ]
    stores = [kv for pair in pairs for kv in pair.values()]
    rows = []
    for case in cases():
        for kv in stores:
            kv.init(case.keys, case.values)
        rows.append(evaluate(case, measure(pairs, case, options.rounds)))
    about = f"{comm.size} ranks, {library}, transport {stores[0].transport}"
    for kv in stores:
        kv.close()
    if comm.rank:
        return
    if options.json:
        print(json.dumps({"ranks": comm.size, "library": library, "rounds": options.rounds, "cases": rows}))
        return
    print(f"{about}; medians of {options.rounds} rounds; µs")
    print(f"{'':18}{'check':>10}{'no check':>10}{'ratio':>8}{'more per call (middle half)':>32}{'wanted':>10}")
    for row in rows:
        spread = f"{row['extra_us_per_call']:.2f} ({row['extra_us_low']:.2f} to {row['extra_us_high']:.2f})"
        bound = f"≤ {row['wanted_us']:.1f}"
        verdict = "" if row["met"] else "  above"
        times = f"{row['check_us']:>10.2f}{row['no_check_us']:>10.2f}{row['ratio']:>8.3f}"
        print(f"{row['case']:18}{times}{spread:>32}{bound:>10}{verdict}")


if __name__ == "__main__":
    main()
