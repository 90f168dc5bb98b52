"""``dist_async``: updates on arrival instead of in rounds.

Here: the client that asks, the owner that answers, and the clocks that bound how far ranks may drift apart (stale
synchronous parallel). It imports ``store``.
"""
