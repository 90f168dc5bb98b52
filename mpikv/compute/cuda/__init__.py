"""What runs on a GPU: the rules of the optimizers, and copies of many arrays, as CUDA kernels.

The sources are CUDA C++ and plain C++ at once, so that tests hold them to numpy, bit for bit, on machines without a
GPU. CuPy compiles and launches them, on the thread's present stream; its disk cache keeps what was compiled. It is
imported when the first kernel is loaded.
"""
