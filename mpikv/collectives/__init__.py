"""Collectives of flat arrays over any transport, checked before data move; they keep no values and know no keys.

``operations`` are the reductions, and which dtypes they take. ``collectives`` moves and reduces arrays of any length,
once ranks have agreed. ``communicator`` makes one call at a time: it stages a small message, lets ranks agree, and runs
the call. The stores that keep no values, and the process group of ``mpikv.torch``, stand on it. Verbs have the names of
torch and NCCL, as ``all_reduce``; those of a transport that adds have MPI's, as ``allreduce``. It knows transports by
their Protocol alone, and imports no layer above ``engine``.
"""
