"""Updates on arrival with one rank that is ten times slower: is every push counted, how far do ranks part, who waits?

    mpikv run -n 4 scripts/bench_async.py                          100,000 random pushes, which take minutes
    mpikv run -n 4 scripts/bench_async.py --pushes 4000 --rate-seconds 1
    mpikv run -n 2 scripts/bench_async.py --only answers

Three parts, each printed by the first rank; the exit status is 1 if a promise was broken:

*exact*: ranks push random integers to random keys, so that the sums are known exactly. Each push also counts its rank
in a vector of clocks, which is pulled now and then: by how much do they differ at that moment? That is measured
by what was applied, not by what the store says of itself.

*rates*: the pushes per second of a fast rank with the slow one, beside those that it makes when all others do nothing.
A step is a sleep of some milliseconds for work, so that ranks that share cores do not slow each other by that.

*answers*: the time of a push and a pull of 8 KiB from another rank, while the owner sleeps, computes in numpy, or runs
pure Python. All other ranks sleep.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import mpikv

SLOWER = 10
LOOK_EVERY = 20
ELEMENTS, ELEMENTS_OF_ANSWERS = 64, 1024
WORK = 0.01
"""Seconds of sleep in a step of the rates."""


def stream(rank: int, pushes: int, keys: int) -> tuple[Any, Any]:
    """Return the keys that a rank pushes and the numbers; every rank can make those of all."""
    random = np.random.default_rng(rank)
    return random.integers(keys, size=pushes), random.integers(-1000, 1000, size=pushes)


def exact(options: argparse.Namespace) -> tuple[list[str], bool]:
    """Push at random; return what to say, and whether all is right."""
    with mpikv.create("dist_async", staleness=options.staleness) as kv:
        count = options.pushes // kv.size
        names = [f"key {number}" for number in range(options.keys)]
        kv.init(names, [np.zeros(ELEMENTS)] * options.keys)
        kv.init("clocks", np.zeros(kv.size))
        kv.set_optimizer("test", learning_rate=1.0, rescale_grad=-1.0)
        mine = np.zeros(kv.size)
        mine[kv.rank] = 1
        slow, widest, late = kv.rank == kv.size - 1, 0.0, 0.0
        keys, numbers = stream(kv.rank, count, options.keys)
        kv.barrier()
        started = time.perf_counter()
        for step, (key, number) in enumerate(zip(keys.tolist(), numbers.tolist(), strict=True)):
            begun = time.perf_counter()
            kv.push([names[key], "clocks"], [np.full(ELEMENTS, float(number)), mine])
            if step % LOOK_EVERY == 0:
                clocks = kv.pull("clocks")
                widest = max(widest, clocks.max() - clocks.min())
                late = max(late, clocks[kv.rank] - (step + 1))
            if slow:
                time.sleep((SLOWER - 1) * min(time.perf_counter() - begun, 1e-3))
        seconds = time.perf_counter() - started
        kv.barrier()
        right = all((value == value[0]).all() for value in kv.pull(names))
        expected = np.zeros(options.keys)
        for rank in range(kv.size):
            np.add.at(expected, *stream(rank, count, options.keys))
        right &= [value[0] for value in kv.pull(names)] == expected.tolist()
        right &= kv.version("clocks") == count * kv.size == kv.pull("clocks").sum()
        told = kv.group(range(kv.size))
        assert told is not None
        with told:  # rows of what each rank has seen
            told.init("seen", np.zeros((kv.size, 3)))
            told.set_optimizer("test", learning_rate=1.0, rescale_grad=-1.0)
            row = np.zeros((kv.size, 3))
            row[kv.rank] = widest, seconds, right and not late
            told.push("seen", row)
            told.barrier()
            seen = told.pull("seen")
        bound = kv.staleness
        kept, equal = bound is None or seen[:, 0].max() <= bound, bool(seen[:, 2].all())
        sums, rate = "exact" if equal else "WRONG", count * kv.size / seen[:, 1].max()
        said = kv.statistics()["staleness"]["largest"]
        text = [
            f"exact   {count * kv.size} pushes to {options.keys} keys: sums {sums}, {rate:.0f} pushes/s",
            f"        largest lead observed {seen[:, 0].max():.0f}, by the clocks {said}, bound {bound}"
            f"{'' if kept else ': BROKEN'}",
        ]
        return text, equal and kept


def steps(kv: mpikv.KVStore, work: float, seconds: float) -> float:
    """Work and push for some seconds; return steps per second."""
    gradient, number, started = np.ones(64), 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        time.sleep(work)
        kv.push("w", gradient)
        number += 1
    return number / (time.perf_counter() - started)


def rates(options: argparse.Namespace) -> list[str]:
    """Compare the first rank that is no owner alone, and with all, without a bound."""
    with mpikv.create("dist_async") as kv:
        kv.init(["w", "rates"], [np.zeros(64), np.zeros((2, 2))])
        kv.set_optimizer("test", learning_rate=1.0, rescale_grad=-1.0)
        fast = min(1, kv.size - 1)  # the owner of w is rank 0
        found = np.zeros((2, 2))
        for turn in range(2):  # interleaved
            for alone in (0, 1):
                kv.barrier()
                if kv.rank == fast:
                    found[alone, turn] = steps(kv, WORK, options.rate_seconds / 2)
                elif not alone:
                    slow = kv.rank == kv.size - 1
                    steps(kv, WORK * (SLOWER if slow else 1), options.rate_seconds / 2)
                else:
                    time.sleep(options.rate_seconds / 2)
        if kv.rank == fast:
            kv.push("rates", found)
        kv.barrier()
        together, alone_rate = kv.pull("rates").mean(axis=1)
        share = 100 * together / alone_rate
        text = f"{alone_rate:.1f} steps/s alone, {together:.1f} with all, {share:.1f} %"
        return [f"rates   a fast rank, {1000 * WORK:.0f} ms of work per step, no bound: {text}"]


def run_python() -> None:
    """Take some milliseconds in Python alone."""
    for number in range(100_000):
        number * number


OWNERS: dict[str, Callable[[], object]] = {
    "sleeps": partial(time.sleep, 0.01),
    "computes in numpy": partial(np.sqrt, np.ones(200_000)),
    "runs pure Python": run_python,
}


def answers(options: argparse.Namespace) -> list[str]:
    """Time what the last rank asks of the first, which does something else."""
    with mpikv.create("dist_async") as kv:
        kv.init("w", np.zeros(ELEMENTS_OF_ANSWERS))
        kv.init(list(OWNERS), [np.zeros(4)] * len(OWNERS))
        kv.set_optimizer("test", learning_rate=1.0, rescale_grad=-1.0)
        gradient, out = np.ones(ELEMENTS_OF_ANSWERS), np.empty(ELEMENTS_OF_ANSWERS)
        for name, work in OWNERS.items():
            took = []
            kv.barrier()
            started = time.perf_counter()
            while (now := time.perf_counter()) < started + options.rate_seconds:
                if kv.is_root:
                    work()
                elif kv.rank < kv.size - 1:
                    time.sleep(0.01)
                elif now < started + 0.9 * options.rate_seconds:  # the owner still works when the last is answered
                    kv.pushpull("w", gradient, out=out)
                    took.append(time.perf_counter() - now)
            if took:
                kv.push(name, np.percentile(took, [50, 90, 99, 100]))
        kv.barrier()
        rows = [f"{name:18}" + "".join(f"{1e3 * each:9.2f}" for each in kv.pull(name)) for name in OWNERS]
        return [
            f"answers ms, the owner        {'p50':>9}{'p90':>9}{'p99':>9}{'most':>9}",
            *(f"        {row}" for row in rows),
        ]


def main() -> int:
    """Run all parts, or one."""
    parser = argparse.ArgumentParser(description="Measure asynchronous mode with one slow rank.")
    add = parser.add_argument
    add("--pushes", type=int, default=100_000, help="pushes of all ranks together; default: 100000")
    add("--staleness", type=int, default=8, help="the bound; default: 8")
    add("--keys", type=int, default=16)
    add("--rate-seconds", type=float, default=8.0, help="how long each rate is measured; default: 8")
    add("--only", choices=("exact", "rates", "answers"), help="one part; default: all")
    options = parser.parse_args()
    lines, right = exact(options) if options.only in (None, "exact") else ([], True)
    for name, part in (("rates", partial(rates, options)), ("answers", partial(answers, options))):
        if options.only in (None, name):
            lines += part()
    with mpikv.create() as kv:
        if kv.is_root:
            print("\n".join(lines), flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
