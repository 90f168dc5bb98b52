"""Arrays of any library seen as numpy's, and sums of them.

Here: the common ground of numpy, PyTorch, JAX and DLPack arrays, conversion without copies where possible, storable
dtypes, sums on one rank, values of float16 and bfloat16. It imports ``protocols``. It knows nothing of keys, and never
imports the library of an array; the errors about unreadable arrays are here, too. Compressed gradients, with the
rounding and the NaN of ``bf16``, are in ``codecs``.
"""
