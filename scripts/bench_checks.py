"""Time small calls of mpi4py with and without checks, in turns.

    mpikv run -n 2 scripts/bench_checks.py

Printed are medians of the rounds, in µs; a round is 500 calls, and its time that of the slowest rank. Of the difference
within a round, the middle half is printed, too.
"""

from timeit import timeit

import numpy as np
from mpi4py import MPI

import mpikv

WORLD, ROUNDS, CALLS = MPI.COMM_WORLD, 41, 500
SEND, RECEIVE = np.ones(8), np.zeros(8)
CASES = {
    "Allreduce": lambda comm: comm.Allreduce(SEND, RECEIVE),
    "Bcast": lambda comm: comm.Bcast(SEND),
    "Barrier": lambda comm: comm.Barrier(),
    "allreduce": lambda comm: comm.allreduce(1),
    "bcast": lambda comm: comm.bcast(1),
}


def timed(case, comm) -> float:
    """Return the microseconds of a call."""
    WORLD.Barrier()
    return 1e6 * WORLD.allreduce(timeit(lambda: case(comm), number=CALLS), MPI.MAX) / CALLS


plain, checked = WORLD.Dup(), mpikv.checked(WORLD.Dup())
for name, case in CASES.items():
    # The first round warms up.
    before, after = np.array([(timed(case, plain), timed(case, checked)) for _ in range(ROUNDS + 1)][1:]).T
    low, more, high = np.quantile(after - before, [0.25, 0.5, 0.75])
    if WORLD.rank == 0:
        medians = f"{np.median(before):6.2f} plain {np.median(after):6.2f} with checks"
        print(f"{name:10}{medians} {more:6.2f} more ({low:.2f} to {high:.2f})", flush=True)
checked.Free()
