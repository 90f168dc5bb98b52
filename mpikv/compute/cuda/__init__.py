"""CUDA kernels: the rules of the optimizers, codecs, and copies of many arrays.

The sources are both CUDA C++ and plain C++. So tests compare them with numpy, bit for bit, on machines without a GPU.
CuPy compiles and launches them on the thread's current stream; a disk cache keeps the compiled kernels. Loading the
first kernel imports CuPy.
"""
