"""Training with JAX: sums and means of gradients over ranks, which change nothing in place and work under ``jit``."""
