"""Collectives of flat arrays over any transport, checked before data move; they keep no values and know no keys.

``operations`` are the reductions, and which dtypes they take. ``collectives`` moves and reduces arrays of any length,
once ranks have agreed. ``communicator`` makes one call at a time: it stages a small message, lets ranks agree, and runs
the call. The stores that keep no values stand on it. ``mailbox`` sends from one rank to
another. It knows transports by their Protocol alone, and imports no layer above ``engine``.
"""
