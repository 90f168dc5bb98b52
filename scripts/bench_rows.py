"""Compare a push of some rows with a push of whole arrays of the same gradient, by turns.

    mpikv run -n 2 scripts/bench_rows.py                                a million rows of 64 float32, 0.1 % of them
    mpikv run -n 2 scripts/bench_rows.py --share 0.1 --assign           a tenth of them, without an optimizer
    mpikv run -n 2 scripts/bench_rows.py --shares 0.01,0.1,0.25,0.5,1 --rows 100000 --assign

The time of a push of rows begins with the numbers and the gradients of the rows, in no order, and has the making of the
RowSparse in it; that of the other begins with the whole array, so that filling it is left out. A turn is some pushes of
the one kind, each of other rows, and some of the other; the ratio is the median of those of the turns. A push takes as
long as on its slowest rank.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

import mpikv

Array: TypeAlias = np.ndarray[Any, Any]

# Pushes of a kind in a turn, of whose times the median counts. The first finds nothing in the cache.
_IN_TURN = 5


def seconds(kv: mpikv.KVStore, push: Callable[[], object]) -> float:
    """Return how long a call took on the slowest rank."""
    kv.barrier()
    started = time.perf_counter()
    push()
    mine = time.perf_counter() - started
    times = np.zeros(kv.size)
    times[kv.rank] = mine
    return float(kv.pushpull("times", times).max()) if kv.size > 1 else mine


def measure(options: argparse.Namespace, share: float) -> str:
    """Return one line of figures."""
    shape = (options.rows, options.width)
    rng = np.random.default_rng([0, int(share * 1e6)])
    with mpikv.create(transport=options.transport, placement=options.placement) as kv, mpikv.create() as timer:
        timer.init("times", np.zeros(timer.size))
        kv.init("rows", mpikv.RowSparse([], np.zeros((0, options.width), np.float32), shape))
        kv.init("whole", np.ones(shape, np.float32))
        kv.set("rows", np.ones(shape, np.float32))  # memory that was never written to takes longer the first time
        if not options.assign:
            kv.set_optimizer("sgd", learning_rate=0.1)
        count = max(1, int(share * options.rows))
        whole = np.zeros(shape, np.float32)
        ratios, quick, slow = [], [], []

        def push_rows(ids: Array, values: Array) -> float:
            return seconds(timer, lambda: kv.push("rows", mpikv.RowSparse(ids, values, shape)))

        before = kv.statistics()["rows"]["bytes_sent"]
        for number in range(-1, options.turns):
            rows_took = []
            for _ in range(_IN_TURN):
                ids = rng.choice(options.rows, count, replace=False) if share < 1 else rng.permutation(options.rows)
                values = rng.standard_normal((count, options.width), dtype=np.float32)
                rows_took.append(push_rows(ids, values))
            whole.fill(0)
            whole[ids] = values
            whole_took = [seconds(timer, lambda: kv.push("whole", whole)) for _ in range(_IN_TURN)]
            if number >= 0:
                quick.append(statistics.median(rows_took))
                slow.append(statistics.median(whole_took))
                ratios.append(slow[-1] / quick[-1])
        sent = (kv.statistics()["rows"]["bytes_sent"] - before) / (_IN_TURN * (options.turns + 1))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return (
            f"{share:8.3%} of {options.rows} x {options.width}, {kv.size} ranks, {kv.transport}, {kv.placement}: "
            f"rows {statistics.median(quick) * 1e3:8.2f} ms, whole {statistics.median(slow) * 1e3:8.2f} ms, "
            f"whole/rows {statistics.median(ratios):6.1f}; {sent / 1e6:.2f} MB sent per rank and push, "
            f"whole {whole.nbytes / 1e6:.0f}; peak {peak:.0f} MiB"
        )


def main() -> None:
    """Print a line for each share of rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--rows", type=int, default=1_000_000, help="default: 1000000")
    add("--width", type=int, default=64, help="elements of a row; default: 64")
    add("--share", "--shares", default="0.001", help="shares of the rows that a push brings; default: 0.001")
    add("--turns", type=int, default=7, help="default: 7")
    add("--assign", action="store_true", help="without an optimizer: the sum replaces the value")
    add("--transport", help="default: the store's")
    add("--placement", help="default: the store's")
    options = parser.parse_args()
    for share in map(float, options.share.split(",")):
        line = measure(options, share)
        if int(mpikv.create().rank) == 0:
            print(line, flush=True)


if __name__ == "__main__":
    main()
