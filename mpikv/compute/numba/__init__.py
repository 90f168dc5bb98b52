"""Rules and codecs as loops that numba compiles and keeps on disk. Only ``kernels="numba"`` imports it."""
