"""Host and GPU memory of a store, and the order of work on it.

The package holds the memory of the host and of a GPU, the order of streams and threads, workspaces and row-sparse
arrays. It knows no keys. It reaches CuPy, in ``compute/cuda``, by protocols only. It imports ``cluster``.
"""
