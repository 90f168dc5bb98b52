"""Norms of many arrays on a GPU, with numpy's bits, and their scaling."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ...errors import Unsupported
from ...protocols import Array
from .loading import allocate_floats, gpu_pointer
from .parts import launch_parts, new_facts

CELL, PIECES, SCALED_PART = 1 << 16, 4, 1 << 12
"""Elements per cell, numpy's unit of summation; blocks per cell; elements per block that scales."""

FLOATS = ("float16", "bfloat16", "float32", "float64")


def measure(arrays: Sequence[Array], dtypes: Sequence[np.dtype[Any]]) -> tuple[Array, list[int]]:
    """Queue sums of squares and counts of not finite numbers; return their GPU memory, and each array's cell count.

    Numbers are rounded to a dtype first, and bad if they are not finite then. One launch for up to 127 arrays of a
    dtype fills the memory, on the current stream.

    Args:
        arrays: CuPy's contiguous arrays of the current GPU, of float16, bfloat16, float32 or float64.
        dtypes: one of these for each array.

    Returns:
        An array on the GPU, for :func:`join_pieces`, and the number of cells of each array. The sum over an array's
        cells, one after the other, is its result.

    Raises:
        Unsupported: an array with elements has another dtype.
        TransportUnavailable: the kernels cannot be compiled here.
    """
    counts = [cells_of(array.size) for array in arrays]
    sums = allocate_floats(2 * PIECES * sum(counts))
    firsts = accumulate(counts, initial=0)
    facts = new_facts()
    for array, dtype, first in (each for each in zip(arrays, dtypes, firsts, strict=False) if each[0].size):
        there = gpu_pointer(sums) + 2 * PIECES * sums.itemsize * first
        facts[f"measure<{_kind(array.dtype)}, {_kind(dtype)}>"].append((gpu_pointer(array), there, array.size))
    launch_parts("norms.cu", facts, CELL, blocks=PIECES)
    return sums, counts


def join_pieces(sums: Array) -> Array:
    """Return each cell's sum of squares and count of not finite numbers, from a host's copy of its pieces' sums. Local.

    The pieces' sums are those of :func:`measure`; they are added as in numpy's last two halvings.

    >>> join_pieces(np.arange(16.0)).tolist()
    [[12.0, 16.0], [44.0, 48.0]]
    """
    piece = sums.reshape(-1, PIECES, 2)
    with np.errstate(over="ignore"):
        # numpy's pairwise order: another one would differ in the last bit.
        return (piece[:, 0] + piece[:, 1]) + (piece[:, 2] + piece[:, 3])  # type: ignore[no-any-return]


def scale(arrays: Sequence[Array], factor: float) -> None:
    """Queue a multiplication of arrays in place, in float64, rounded once. Local.

    On the current stream, with one launch for up to 127 arrays of a dtype. Arrays and errors as in :func:`measure`.
    """
    facts = new_facts()
    for array in (one for one in arrays if one.size):
        address = gpu_pointer(array)
        facts[f"scale<{_kind(array.dtype)}>"].append((address, address, array.size))
    launch_parts("norms.cu", facts, SCALED_PART, factor)


def cells_of(size: int) -> int:
    """Return the number of cells, of ``CELL`` elements each, of an array of this size. Local."""
    return -(-size // CELL)


def _kind(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype in norms.cu; Unsupported if it is not one of four floats. Local."""
    if dtype.name not in FLOATS:
        raise Unsupported(
            f"an array of {dtype.name} on a GPU cannot be measured or scaled (known: {', '.join(FLOATS)})"
        )
    return f"{dtype.name}_kind"
