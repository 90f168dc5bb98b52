"""Arrays of any library seen as numpy's, sums of them, and half precision as the dtype of a value.

Here: what numpy, PyTorch, JAX and DLPack arrays have in common, conversion without copies where that is possible,
dtypes that can be stored, sums on one rank, values of float16 and bfloat16. It imports ``protocols``. It knows nothing
of keys, and never imports the library of an array; why one library's array cannot be read is said here, too.
Compressed gradients, ``bf16`` with its rounding and its NaN among them, are in ``codecs``.
"""
