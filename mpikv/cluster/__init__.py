"""The ranks: who takes part, how one waits for another, and whether all make the same call.

Here: the start and end of MPI, forked processes and workers of a rank, process groups, shared windows, the one way to
wait with its deadline and its warning of late ranks, the comparison of calls, the status board, worker threads,
tracebacks. It imports ``arrays``. It knows nothing of keys and values, nor how gradients travel.
"""
