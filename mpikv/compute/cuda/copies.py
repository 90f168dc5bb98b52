"""Copies many arrays of a GPU by one launch, with casts; checks many arrays by one launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from ...protocols import Array
from .loading import gpu_pointer, kernel
from .parts import Facts, launch_parts, new_facts

PART, CAST_PART = 1 << 15, 1 << 12
"""The part of a pair per block: in bytes for a copy, in elements for a cast."""

_CAST = frozenset(
    [
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    ]
)
"""The dtypes with a cast kernel to each other."""


def copy(targets: Sequence[Array], sources: Sequence[Array]) -> None:
    """Queue a copy of each source to its target, on the current stream, without a wait. Local.

    One launch copies all contiguous pairs of equal dtypes, and one all pairs with the same cast.

    Args:
        targets: CuPy's arrays of the current GPU. No target may overlap another target or another's source.
        sources: arrays of the shapes of the targets, of any dtype.

    Casts are those of numpy's ``casting="unsafe"``: a float out of range of the target's integers becomes an undefined
    number. CuPy copies arrays with gaps, and dtypes that numpy lacks.

    Raises:
        TransportUnavailable: the kernels cannot be compiled here.
    """
    same: Facts = []
    casts = new_facts()
    # Array is typed as numpy's, which lacks data.ptr; CuPy's has it, but no types.
    for target, source in zip(targets, sources, strict=True):
        dtype, wanted = source.dtype, target.dtype
        if not (target.flags.c_contiguous and source.flags.c_contiguous):
            target[...] = source
        elif wanted == dtype:
            same.append((source.data.ptr, target.data.ptr, target.nbytes))  # type: ignore[attr-defined]
        elif cast := _cast_kernel_name(dtype, wanted):
            casts[cast].append((source.data.ptr, target.data.ptr, target.size))  # type: ignore[attr-defined]
        else:
            target[...] = source
    if same:
        launch_parts("copies.cu", {"copy_bytes": same}, PART)
    launch_parts("copies.cu", casts, CAST_PART)


def flag_exceeding(arrays: Sequence[Array], flags: Array, bound: float) -> None:
    """Set to 1 the flag of each array that has NaN, or a magnitude above ``bound``; other flags stay. Queued. Local.

    It runs on the current stream, with one launch for all arrays of a dtype.

    Args:
        arrays: CuPy's arrays of the current GPU, of any float dtype of numpy, or bfloat16.
        flags: a contiguous uint8 array, one per array.
        bound: rounded to float32, unless arrays are float64.

    Raises:
        TransportUnavailable: the kernels cannot be compiled here.
    """
    checks = new_facts()
    # Keep all copies until the launches are queued: the memory of a freed one would serve the next copy.
    whole = [array if array.flags.c_contiguous else array.copy() for array in arrays]
    for flag, array in enumerate(whole, gpu_pointer(flags)):
        checks[f"exceeding<{array.dtype.name}_kind>"].append((gpu_pointer(array), flag, array.size))
    launch_parts("copies.cu", checks, CAST_PART, bound)


def prepare(dtype: np.dtype[Any], wanted: np.dtype[Any]) -> None:
    """Compile or load the kernel that copies one dtype to another, if there is one, for the current GPU. Local."""
    if dtype == wanted:
        kernel("copies.cu", "copy_bytes")
    elif cast := _cast_kernel_name(dtype, wanted):
        kernel("copies.cu", cast)


@cache
def _cast_kernel_name(dtype: np.dtype[Any], wanted: np.dtype[Any]) -> str:
    """Return the name of the kernel for a cast; empty if there is none. Local."""
    return f"cast<{dtype.name}_kind, {wanted.name}_kind>" if dtype.name in _CAST and wanted.name in _CAST else ""
