"""The public store: its methods, and the entry that every call passes.

The entry refuses a closed store and a call inside of another one, has the ranks agree, and runs the call. Here too:
scopes, the store that only sums, graph capture, tracing, and the surface that plugins share. It imports all lower
layers but transports: it knows these by their Protocol. It never imports MPI or CuPy.
"""
