"""Where a store's arrays lie, and in what order work on them happens.

Here, whatever key it is for: memory of the host or of a GPU, the order of streams and of threads that use them,
workspaces, row-sparse arrays. How a GPU copies, and all of CuPy, is in ``compute/cuda``, which this package reaches by
protocols. It imports ``cluster``.
"""
