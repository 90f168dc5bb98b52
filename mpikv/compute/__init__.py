"""Who runs array code: numpy, loops compiled by numba, or CUDA.

Here: the choice that the option ``kernels`` names; the rules of optimizers and the codecs as numba's loops and as CUDA
kernels, with the bits of numpy's; and all that mpikv knows of CuPy: kernels that copy, devices and streams. It imports
``optimizers`` and ``codecs``. It knows nothing of keys and ranks. Neither library is loaded before it is asked for.
"""
