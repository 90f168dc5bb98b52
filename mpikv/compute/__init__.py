"""Array code by numpy, by loops compiled with numba, or by CUDA kernels.

The package chooses the code by the option ``kernels``. It holds the rules of optimizers and the codecs as numba loops
and as CUDA kernels, with numpy's bits, and everything about CuPy: copy kernels, devices and streams. It imports
``optimizers``, ``codecs`` and ``memory``, and knows no keys and ranks. Neither library is imported before its first
use.
"""
