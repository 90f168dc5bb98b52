"""Norms of many arrays on a GPU, with numpy's bits, and their scaling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from ...errors import Unsupported
from ...protocols import Array
from .loading import address_of, allocate_floats, argument_dtype, gpu_pointer, kernel

MOST = 160
CELL, PIECES, SCALED_PART, THREADS = 1 << 16, 4, 1 << 12, 256
"""Elements per cell, numpy's unit of summation; blocks per cell; elements per block that scales; threads per block."""

FLOATS = ("float16", "bfloat16", "float32", "float64")


def measure(arrays: Sequence[Array], dtypes: Sequence[np.dtype[Any]]) -> tuple[Array, list[int]]:
    """Queue sums of squares and counts of not finite numbers; return their GPU memory, and each array's cell count.

    Numbers are rounded to a dtype first, and bad if they are not finite then. One launch for up to 160 arrays of a
    dtype fills the memory, on the current stream.

    Args:
        arrays: CuPy's contiguous arrays of the current GPU, of float16, bfloat16, float32 or float64.
        dtypes: one of these for each array.

    Returns:
        An array on the GPU, for :func:`join_pieces`, and the number of cells of each array. The sum over an array's
        cells, one after the other, is its result.

    Raises:
        Unsupported: an array has another dtype.
        TransportUnavailable: the kernels cannot be compiled here.
    """
    counts = [cells_of(array.size) for array in arrays]
    sums = allocate_floats(2 * PIECES * sum(counts))
    firsts = np.cumsum([0, *counts])
    kinds: defaultdict[str, list[int]] = defaultdict(list)
    for index, (array, dtype) in enumerate(zip(arrays, dtypes, strict=True)):
        if counts[index]:
            kinds[f"measure<{_kind(array.dtype)}, {_kind(dtype)}>"].append(index)
    for expression, members in kinds.items():
        for some in _runs(members):
            # The cells of consecutive arrays are consecutive, too; so one base address serves them all.
            given = _given([arrays[index] for index in some], CELL)
            given["sums"] = gpu_pointer(sums) + 2 * PIECES * sums.itemsize * int(firsts[some[0]])
            kernel("norms.cu", expression)((PIECES * int(given["end"][0, len(some) - 1]),), (THREADS,), (given,))
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

    On the current stream, with one launch for up to 160 arrays of a dtype. Arrays and errors as in :func:`measure`.
    """
    kinds: defaultdict[str, list[Array]] = defaultdict(list)
    for array in arrays:
        if array.size:
            kinds[f"scale<{_kind(array.dtype)}>"].append(array)
    for expression, members in kinds.items():
        for low in range(0, len(members), MOST):
            some = members[low : low + MOST]
            given = _given(some, SCALED_PART)
            given["factor"] = factor
            kernel("norms.cu", expression)((int(given["end"][0, len(some) - 1]),), (THREADS,), (given,))


def cells_of(size: int) -> int:
    """Return the number of cells, of ``CELL`` elements each, of an array of this size. Local."""
    return -(-size // CELL)


def _runs(members: Sequence[int]) -> Iterator[list[int]]:
    """Yield runs of consecutive numbers, each as long as a launch allows. Local."""
    # Consecutive numbers rise as their places do.
    for _, pairs in groupby(enumerate(members), lambda pair: pair[1] - pair[0]):
        run = [member for _, member in pairs]
        yield from (run[low : low + MOST] for low in range(0, len(run), MOST))


def _given(arrays: Sequence[Array], part: int) -> Array:
    """Return the argument of a launch for some arrays, each cut into parts; it keeps no array alive. Local."""
    given, count = np.zeros(1, argument_dtype("norms.cu", "Arrays")), len(arrays)
    given["array"][0, :count] = [address_of("an array", array, array.dtype, array.size) for array in arrays]
    given["size"][0, :count] = [array.size for array in arrays]
    given["end"][0, :count] = np.cumsum([-(-array.size // part) for array in arrays])
    given["count"] = count
    return given


def _kind(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype in norms.cu; Unsupported if it is not one of four floats. Local."""
    if dtype.name not in FLOATS:
        raise Unsupported(
            f"an array of {dtype.name} on a GPU cannot be measured or scaled (known: {', '.join(FLOATS)})"
        )
    return f"{dtype.name}_kind"
