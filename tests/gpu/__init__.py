"""Tests on GPUs."""

import os

MANY = 1 << 14 if "EMULATED_CUDA" in os.environ else 1 << 20
"""Elements that take a GPU a while. The emulated one has no clock: it is as late with few."""
