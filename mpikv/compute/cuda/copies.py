"""Copies of many arrays of a GPU by one launch, with casts; and a look at many arrays by one launch."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from ...protocols import Array
from .loading import kernel

__all__ = ["PAIRS", "copy", "exceeding", "prepare"]

MOST = 127
PAIRS = np.dtype(
    [
        ("source", np.uintp, MOST),
        ("target", np.uintp, MOST),
        ("size", np.int64, MOST),
        ("end", np.int64, MOST),
        ("count", np.int64),
        ("bound", np.float64),
    ],
    align=True,
)
"""What one launch is given: ``Pairs`` of copies.cu. CUDA takes 4096 bytes at most on every GPU."""

PART, CAST_PART = 1 << 15, 1 << 12
"""How much of a pair one block copies: bytes, and elements that are cast."""
THREADS = 256

Facts: TypeAlias = "list[tuple[int, int, int]]"
"""Of each pair where its source and its target lie, and its size: in bytes, or in elements to be cast."""

_CAST = frozenset(
    [
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    ]
)
"""The dtypes that are cast to each other."""


def copy(targets: Sequence[Array], sources: Sequence[Array]) -> None:
    """Copy each source to its target, on the present stream: contiguous ones by one launch for all of one dtype, and
    one for all of the same cast. Local.

    Args:
        targets: CuPy's arrays of the present GPU. None overlaps another, nor a source that is not its own.
        sources: arrays of the shapes of the targets, of any dtype.

    Casts are those of numpy's ``casting="unsafe"``. As there, a float that no integer of the target is near becomes any
    number. Arrays that are not contiguous, and dtypes that are not numpy's, are left to CuPy.

    Raises:
        TransportUnavailable: nothing can be compiled here.
    """
    same: Facts = []
    casts: defaultdict[str, Facts] = defaultdict(list)
    # The type of arrays is numpy's, which knows no data.ptr: that is CuPy's, which has no types to check.
    for target, source in zip(targets, sources, strict=True):
        dtype, wanted = source.dtype, target.dtype
        if not (target.flags.c_contiguous and source.flags.c_contiguous):
            target[...] = source
        elif wanted == dtype:
            same.append((source.data.ptr, target.data.ptr, target.nbytes))  # type: ignore[attr-defined]
        elif cast := _cast(dtype, wanted):
            casts[cast].append((source.data.ptr, target.data.ptr, target.size))  # type: ignore[attr-defined]
        else:
            target[...] = source
    if same:
        _launch("copy_bytes", same, PART)
    for cast, facts in casts.items():
        _launch(cast, facts, CAST_PART)


def exceeding(arrays: Sequence[Array], flags: Array, bound: float) -> None:
    """Set to 1 the flag of each array that has an element which is no number, or larger in size than ``bound``; on the
    present stream, by one launch for all arrays of a dtype. Local.

    Args:
        arrays: CuPy's arrays of the present GPU, of any of numpy's floats, or bfloat16.
        flags: as many bytes (uint8), contiguous.
        bound: it is rounded to float32 unless arrays are float64.

    Raises:
        TransportUnavailable: nothing can be compiled here.
    """
    checks: defaultdict[str, Facts] = defaultdict(list)
    # A copy that was let go of before its launch would be given to the next one.
    whole = [array if array.flags.c_contiguous else array.copy() for array in arrays]
    first: Any = flags.data
    for place, array in enumerate(whole):
        data: Any = array.data
        checks[f"exceeding<{array.dtype.name}_kind>"].append((data.ptr, first.ptr + place, array.size))
    for check, some in checks.items():
        _launch(check, some, CAST_PART, bound)


def prepare(dtype: np.dtype[Any], wanted: np.dtype[Any]) -> None:
    """Compile what copies arrays of one dtype to such of another, or load it. Local."""
    if dtype == wanted:
        kernel("copies.cu", "copy_bytes")
    elif cast := _cast(dtype, wanted):
        kernel("copies.cu", cast)


@cache
def _cast(dtype: np.dtype[Any], wanted: np.dtype[Any]) -> str:
    """Return the name of the kernel for a cast, or nothing where there is none."""
    if dtype.name in _CAST and wanted.name in _CAST:
        return f"cast<{dtype.name}_kind, {wanted.name}_kind>"
    return ""


class _Arguments(threading.local):
    """Memory for the arguments of a launch, each thread's own: a launch copies them."""

    def __init__(self) -> None:
        self.pairs = np.zeros(1, PAIRS)
        columns = self.pairs.view(np.int64)[: 4 * MOST].reshape(4, MOST)
        self.facts, self.ends = columns[:3], columns[3]
        self.count, self.bound = self.pairs["count"], self.pairs["bound"]


_arguments = _Arguments()


def _launch(expression: str, facts: Facts, part: int, bound: float = 0.0) -> None:
    run, arguments = kernel("copies.cu", expression), _arguments
    for low in range(0, len(facts), MOST):
        some = facts[low : low + MOST]
        count = len(some)
        pairs, ends = arguments.facts[:, :count], arguments.ends[:count]
        pairs[:] = np.array(some, np.int64).T
        np.add(pairs[2], part - 1, out=ends)
        np.floor_divide(ends, part, out=ends)
        blocks = int(np.add.accumulate(ends, out=ends)[-1])
        if blocks:
            arguments.count[0], arguments.bound[0] = count, bound
            run((blocks,), (THREADS,), (arguments.pairs,))
